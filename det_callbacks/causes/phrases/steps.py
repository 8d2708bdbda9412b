"""The place of a step, and the differences that it started with."""

from collections.abc import Collection, Mapping, Sequence

from det_callbacks.causes.phrases.sites import Layouts, both_layouts, describe, side_of, source_name, what_differs
from det_callbacks.compare.differences import Finding
from det_callbacks.compare.facts import Facts
from det_callbacks.runs.program import AFTER_STEP
from det_callbacks.text import listed

_SUBJECTS = {
    # phase -> subject of a sentence, and a part of it
    "restored": ("the restored state", "part of the restored state"),
    "state": ("the initial state", "part of the initial state"),
    "data": ("the batch", "part of the batch"),
    "rng": ("the generator state", "a generator"),
    "input": ("a tensor that no recorded op produced", ""),
}
SUBJECT: Mapping[str, str] = {phase: subject for phase, (subject, _) in _SUBJECTS.items()}


def place(facts: Facts) -> str:
    """Return "Step 7 of rank 1, the first after resuming"."""
    difference = facts.difference
    of_rank = f" of rank {difference.rank}" if facts.shows_rank else ""
    resumed = ", the first after resuming" if facts.is_resumed else ""
    return f"Step {difference.step}{of_segment(difference.segment)}{of_rank}{resumed}"


def of_segment(segment: int) -> str:
    """Return " of segment 1"; "" for the first fit."""
    return f" of segment {segment}" if segment else ""


def explain_first(facts: Facts) -> str:
    """Return what differs first in a step, and the first origin after that."""
    first, origin = facts.first, facts.origin
    is_entered = first.start == "outside"
    what = _explain_sources(facts) if is_entered else f"{place(facts)}, {describe(first)}"
    if origin is None or origin.row == first.row:
        return what
    return f"{what}; {'in addition, ' if is_entered else 'an origin is '}{describe(origin)}"


def _explain_sources(facts: Facts) -> str:
    phase = facts.sources[0].divergence.phase
    named = [one for one in facts.sources if one.divergence.phase == phase and one.role != "samples"]
    others = [one.divergence.phase for one in facts.sources if one.divergence.phase != phase]
    what = how_it_entered(phase, named or facts.sources[:1], facts)
    if phase == "input":
        what += _who_produced(facts)
        return f"{place(facts)}: {what}{also_differ(others)}"
    if (facts.first.divergence.name or "").endswith(AFTER_STEP):
        cause = "everything before it in the step matches"
    elif phase == "rng" and facts.is_set_in_step:
        has_drawn = any(site.op for site in facts.difference.sites_read(facts.first.row))
        draw = "a later draw" if has_drawn else "the first draw"
        cause = f"code in the step changed it before {draw}, without a recorded op (such as torch.manual_seed)"
    else:
        cause = "the step started with this difference, so no op caused it"
    return f"{place(facts)}: {what}{also_differ(others)}; {cause}"


def _who_produced(facts: Facts) -> str:
    if not facts.difference.current.program.leaves_out_ops:
        return ""
    return ", but an op that was not recorded (modules, phases, other threads) may have produced it"


def how_it_entered(phase: str, found: Sequence[Finding], facts: Facts) -> str:
    """Return how the sources of one phase differ, with their names: "the batch differs (batch[0])"."""
    subject, part = _SUBJECTS[phase]
    in_order = sorted(found, key=lambda one: one.divergence.name is None)
    names = list(dict.fromkeys(map(source_name, in_order)))
    kinds = {one.divergence.kind for one in found}
    layouts = next((one.layouts for one in found if one.layouts is not None), None)
    shown = listed(names)
    of_model = [name for name in names if name not in facts.further]
    if phase == "state" and of_model and facts.num_initial > 1:
        shown = f"{shown}: {len(of_model)} of {facts.num_initial} tensors"
    if phase == "data" and facts.has_equal_samples:
        return f"{subject} holds the same samples in a different order ({shown})"
    if phase == "input":
        side = side_of(in_order[0].divergence)
        return f"{shown} {_how_inputs_differ(kinds, layouts, side, is_one=len(names) == 1)}"
    if "structure" in kinds and layouts is not None:
        return f"{subject} has {what_differs(layouts)} ({shown}): {both_layouts(layouts)}"
    if kinds == {"missing", "extra"}:
        return f"{part} exists in one run only ({shown})"
    if kinds in ({"missing"}, {"extra"}):
        return f"{part} exists only in the {side_of(in_order[0].divergence)} ({shown})"
    return f"{subject} differs ({shown})"


def _how_inputs_differ(kinds: Collection[str], layouts: Layouts | None, side: str, *, is_one: bool) -> str:
    has, exist, differ = ("has", "exists", "differs") if is_one else ("have", "exist", "differ")
    how = differ
    if "structure" in kinds and layouts is not None:
        how = f"{has} {what_differs(layouts)}, {both_layouts(layouts)}"
    elif kinds == {"missing", "extra"}:
        how = f"{exist} in one run only"
    elif kinds in ({"missing"}, {"extra"}):
        how = f"{exist} only in the {side}"
    return f"{how}; no recorded op produced {'it' if is_one else 'them'}"


def show_exchanged(exchanged: Mapping[str, str]) -> str:
    """Return which tensors have the reference's bits of which other ones."""
    return listed(f"{name} has the reference's bits of {other}" for name, other in exchanged.items())


def also_differ(phases: Sequence[str]) -> str:
    """Return what else the step started with that differs, as a clause."""
    subjects = [SUBJECT[phase] for phase in dict.fromkeys(phases)]
    if not subjects:
        return ""
    if len(subjects) == 1:
        return f", and {subjects[0]} also differs"
    return f", and {', '.join(subjects[:-1])} and {subjects[-1]} also differ"
