"""A weight, buffer, gradient or optimizer state differs, and no recorded op wrote the difference.

Example:
    Step 4: something that the recorder does not see (NumPy, a raw kernel, a callback between
    steps) changed net.5.bias between the end of step 3 and the first read in step 4;
    WritesAfterBatch.on_train_batch_end ran in between. Check the code that runs at that point.
    If the write is intended, do it inside a step with torch ops, which the recorder sees.
"""

from collections.abc import Iterable, Iterator

from det_callbacks.causes.phrases.generators import users_of, what_ran
from det_callbacks.causes.phrases.sites import site_text
from det_callbacks.causes.phrases.steps import also_differ, place
from det_callbacks.causes.rule import Answer, Causes
from det_callbacks.compare.facts import Facts
from det_callbacks.runs.evidence import AFTER, BATCH_END, BATCH_START, BEFORE, DRAWING, LOADER
from det_callbacks.runs.program import GRAPH, REGION, Site
from det_callbacks.text import listed

CAUSES: Causes = ("external_write",)

_OPAQUE_ROLES = ("graph", "region_input", "graph_output")
_OF_DATA = (LOADER, DRAWING)  # writes no weights
_NUMBERS = ("int", "float", "bool")
_UNSEEN = "something that the recorder does not see (NumPy, a raw kernel"


def find(facts: Facts) -> Answer | None:
    explanation = _between_steps(facts) or _in_step(facts) or _before_an_op(facts)
    if not explanation:
        return None
    return Answer(
        cause="external_write",
        explanation=f"{place(facts)}{explanation}",
        advice="Check the code that runs at that point. If the write is intended, do it inside a step with torch ops, "
        "which the recorder sees",
    )


def _between_steps(facts: Facts) -> str:
    names, step = _changed_between_steps(facts), facts.difference.step
    if not names:
        return ""
    until = f"step {step}" if facts.further else f"the first read in step {step}"
    when = f"between the end of step {step - 1} and {until}" if step else f"before {until}"
    others = [phase for phase in facts.source_phases if phase not in ("input", "state")]
    return (
        f": {_UNSEEN}, a callback between steps) changed {listed(names)} {when}"
        f"{_ran_between_steps(facts)}{also_differ(others)}"
    )


def _changed_between_steps(facts: Facts) -> list[str]:
    """Return the names of tensors whose bits at the start of a step differ from those that the previous step left.

    The list is empty if a checkpoint, an unrecorded step or an op without a digest may have written them.
    """
    if facts.is_first_seen or facts.is_after_gap or facts.is_resumed:
        return []
    if facts.further:
        return facts.further
    if not facts.sources or not _sees_all_ops(facts, before=facts.sources[0].row):
        return []
    first = facts.sources[0]
    if first.role != "input" or first.divergence.name is None:
        return []
    names = (one.divergence.name for one in facts.sources if one.role == "input")
    return list(dict.fromkeys(name for name in names if name is not None))


def _in_step(facts: Facts) -> str:
    first = facts.first.divergence
    if not _is_changed_in_step(facts):
        return ""
    return f": {_UNSEEN}) changed {first.name} during the step{_ran_in_step(first.phase, facts)}"


def _is_changed_in_step(facts: Facts) -> bool:
    """Return whether the first difference is a named tensor that changed after its last recorded writer.

    If no recorded op wrote it in this step, it matched when the step began.
    """
    first = facts.first
    if first.start == "written since":
        return first.divergence.phase in ("state", "gradient")
    if first.start != "not recorded" or first.role != "named" or first.divergence.kind != "content":
        return False
    is_tensor = first.divergence.phase == "state" and first.divergence.dtype not in _NUMBERS
    read = facts.difference.sites_read(first.row)
    return is_tensor and bool(read) and _sees_all_ops(facts, before=first.row) and all(map(_is_found, read))


def _before_an_op(facts: Facts) -> str:
    names, first = _changed_inputs(facts), facts.first.divergence
    if not names:
        return ""
    return (
        f", {first.phase}: {site_text(first)} produced different bits; {_UNSEEN}) changed "
        f"{listed(names, ' or ')}, which it reads, earlier in the step"
    )


def _changed_inputs(facts: Facts) -> list[str]:
    """Return the tensors that an op read, one of which an unseen write changed after its last writer.

    The list is empty if none of them is a weight, a gradient or other state.
    """
    row, difference = facts.first.row, facts.difference
    _, position = difference.pairs[row]
    is_known = position in difference.current.unseen_writes and not facts.evidence.unread
    if facts.first.start != "unseen writer" or not is_known:
        return []
    if facts.normed_gradient is not None:
        return [facts.normed_gradient]
    read = difference.sites_read(row)
    if not any(site.name is not None and _is_found(site) for site in read):
        return []
    return list(dict.fromkeys(name for name in map(_shown_input, read) if name))


def _shown_input(site: Site) -> str:
    """Return the name of a tensor that an op read, or of the op that made it.

    It is "" for a number, a generator, and what the backward pass made: no code of the user runs before it is read.
    """
    is_tensor = site.role in ("input", "named", "output", "delivered", "graph_output")
    if not is_tensor or (site.op and site.phase == "backward"):
        return ""
    return site.name or (f"the output of {site.op}" if site.op else "a tensor without a name")


def _is_found(site: Site) -> bool:
    """Return whether a site is a tensor of the state as the step found it."""
    return not site.op and (site.role == "input" or (site.role == "named" and site.phase == "state"))


def _sees_all_ops(facts: Facts, *, before: int) -> bool:
    """Return whether the step digests the outputs of all ops, and no op before a row was opaque."""
    program, position = facts.difference.side(before)
    programs = facts.difference.reference.program, facts.difference.current.program
    if any(one.leaves_out_ops or GRAPH in one.ops_skipped for one in programs):
        return False
    has_ops = any(site.role == "output" for one in programs for site in one.sites)
    return has_ops and not any(_is_opaque(site) for site in program.sites[:position])


def _is_opaque(site: Site) -> bool:
    return site.role in _OPAQUE_ROLES or site.op.startswith(REGION)


def _ran_between_steps(facts: Facts) -> str:
    evidence, step = facts.evidence, facts.difference.step
    moments = [(step - 1, BATCH_END), (step, BATCH_START)]
    if any(moment not in evidence.moments for moment in moments):
        return ""
    begin, end = map(evidence.moments.index, moments)
    points = [point for _, point in evidence.moments[begin : end + 1] if point not in _OF_DATA]
    return _ran_there([*what_ran(points, evidence), *users_of("on_train_batch_start", evidence, AFTER)], "in between")


def _ran_in_step(phase: str, facts: Facts) -> str:
    def hooks() -> Iterator[str]:
        yield from users_of("on_after_backward", facts.evidence, BEFORE, AFTER)
        yield from users_of("on_before_optimizer_step", facts.evidence, BEFORE, AFTER)
        if phase == "state":
            yield from users_of("on_train_batch_end", facts.evidence, BEFORE)

    return _ran_there(hooks(), "after the recorded ops that wrote it")


def _ran_there(ran: Iterable[str], when: str) -> str:
    known = list(dict.fromkeys(ran))
    return f"; {listed(known, limit=len(known))} ran {when}" if known else ""
