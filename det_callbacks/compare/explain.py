"""What differs in a step, in one sentence: where it starts, with what, and why there."""

from collections.abc import Sequence

from det_callbacks.compare.step import StepDifference
from det_callbacks.compare.wording import MAX_NAMED, and_more, describe, show_layouts, side_of, source_name

_CHECKPOINT_ADVICE = (
    "no op is to blame. Compare the checkpoint with the one that was saved there, and look at what changes this state "
    "between loading it and the step"
)
_SOURCES = {
    "state": "the initial state",
    "data": "the batch",
    "rng": "the state of the generator",
    "input": "an input from outside the trace,",
}


def explain_step(
    difference: StepDifference,
    *,
    show_rank: bool,
    is_resumed: bool = False,
    unrestored: Sequence[str] = (),
    batch_of: int | None = None,
) -> str:
    """Return one sentence on a differing step, without its final stop: where it starts, with what, and why there."""
    first = difference.findings[0]
    place = f"Step {difference.step}" + (f" of rank {difference.rank}" if show_rank else "")
    if is_resumed:
        place += ", the first after resuming"
        if difference.restored:
            return f"{place}: {_explain_restored(difference)}"
        if unrestored:
            names = ", ".join(unrestored[:MAX_NAMED]) + and_more(len(unrestored))
            return (
                f"{place}: {names} is not what the reference ended step {difference.step - 1} with"
                f"{_also_differing(difference)}; {_CHECKPOINT_ADVICE}"
            )
    if first.is_source:
        return f"{place}: {_explain_sources(difference, batch_of)}"
    text = f"{place}, {first.divergence.phase}: {describe(first)}"
    origin = next((finding for finding in difference.findings if finding.divergence.is_origin), None)
    if origin is not None and origin is not first:
        text += f"; an origin is {origin.divergence.phase}: {describe(origin)}"
    return text


def _explain_restored(difference: StepDifference) -> str:
    known = list(dict.fromkeys(source_name(finding) for finding in difference.restored))
    names = ", ".join(known[:MAX_NAMED]) + and_more(len(known))
    kinds = {finding.divergence.kind for finding in difference.restored}
    what = "came out of the checkpoint with other bits"
    if kinds == {"missing"}:
        what = "did not come out of the checkpoint"
    elif kinds == {"extra"}:
        what = "came out of the checkpoint, and the reference has no such state there"
    return f"{names} {what}{_also_differing(difference)}; {_CHECKPOINT_ADVICE}"


def _also_differing(difference: StepDifference) -> str:
    others = dict.fromkeys(
        finding.divergence.phase
        for finding in difference.findings
        if finding.is_source and finding.divergence.phase in ("data", "rng")
    )
    return f" ({' and '.join(_SOURCES[other] for other in others)} differs too)" if others else ""


def _explain_sources(difference: StepDifference, batch_of: int | None) -> str:
    sources = [finding for finding in difference.findings if finding.is_source]
    phase = sources[0].divergence.phase
    alike = [finding for finding in sources if finding.divergence.phase == phase and finding.role != "samples"]
    alike = alike or [sources[0]]
    known = list(dict.fromkeys(source_name(finding) for finding in alike))
    names = ", ".join(known[:MAX_NAMED]) + and_more(len(known))
    layouts = next((finding.layouts for finding in alike if finding.divergence.kind == "structure"), None)
    if phase == "data" and all(finding.has_equal_samples for finding in alike):
        what = "holds the same samples in another order"
    elif phase == "data" and batch_of is not None:
        what = f"is the one that the reference had at step {batch_of}"
    elif layouts is not None:
        what = f"has another structure: {show_layouts(layouts)}"
    elif alike[0].divergence.kind in ("missing", "extra"):
        what = f"is only in the {side_of(alike[0].divergence)}"
    else:
        what = "differs"
    if phase == "state" and difference.num_initial > 1:
        share = (
            f"all {len(known)}" if len(known) >= difference.num_initial else f"{len(known)} of {difference.num_initial}"
        )
        what += f" ({share} tensors)"
    others = dict.fromkeys(finding.divergence.phase for finding in sources if finding.divergence.phase != phase)
    also = f" ({' and '.join(_SOURCES[other] for other in others)} differs too)" if others else ""
    text = f"{_SOURCES[phase]} {names} {what}{also}; the difference came in through it, and no op is to blame"
    origin = next((finding for finding in difference.findings if finding.divergence.is_origin), None)
    if origin is not None:
        text += f" for it; besides, {origin.divergence.phase}: {describe(origin)}"
    return text
