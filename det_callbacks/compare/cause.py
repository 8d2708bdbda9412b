"""Why a step differs: the earliest evidence, and one sentence that a person can act on."""

from collections.abc import Sequence

from det_callbacks.compare.step import Finding, StepDifference
from det_callbacks.trace.deliveries import IN_FLIGHT
from det_callbacks.trace.program import TensorLayout
from det_callbacks.verdict import Cause, Divergence, EnvironmentDifference

MAX_NAMED = 3
"""Sources, arguments and choices that a sentence names; the others are counted."""

_COLLECTIVES = ("c10d.", "_c10d_functional.", "c10d_functional.")
_COLLECTIVE_VERBS = {"sent": "was given", "delivered": "delivered"}
_PHASE_CAUSES: dict[str, Cause] = {
    "forward": "forward",
    "backward": "backward",
    "gradient": "backward",
    "optimizer": "optimizer",
}
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


def find_cause(
    difference: StepDifference,
    environment: Sequence[EnvironmentDifference],
    *,
    is_first: bool = False,
    is_resumed: bool = False,
    unrestored: Sequence[str] = (),
    batch_of: int | None = None,
) -> Cause:
    """Return the cause of a differing step, from the earliest evidence there is.

    In this order: the state at the start, the batch, the generators, a tensor from outside the trace, a structure that
    differs in nothing else, the phase of the first origin, a determinism setting, the phase of what differs first.
    After a checkpoint was restored, the state at the start is what came from it, and generators that differ come before
    a batch of other samples: it was drawn by them.

    Args:
        difference: of the first step that differs.
        environment: how the environments differ.
        is_first: whether it is the first step of its fit, where a parameter that differs was initialised differently.
        is_resumed: whether one of the runs had just been resumed from a checkpoint.
        unrestored: restored state that is not what the reference ended the step before with.
        batch_of: the step at which the reference had the batch that differs here; None where it never had it.
    """
    if is_resumed and (difference.restored or unrestored):
        return "checkpoint"
    sources = [finding for finding in difference.findings if finding.is_source]
    phases = {finding.divergence.phase for finding in sources}
    if "state" in phases:
        return "initial_weights"
    if "data" in phases:
        tensors = [item for item in sources if item.divergence.phase == "data" and item.role != "samples"]
        if batch_of is not None or (tensors and all(finding.has_equal_samples for finding in tensors)):
            return "data_order"
        # a generator that the checkpoint did not bring back draws other samples, and augments them otherwise
        return "rng" if is_resumed and "rng" in phases else "data_content"
    if "rng" in phases:
        return "rng"
    if sources:
        return "initial_weights" if is_first and _is_model_state(sources[0].divergence) else "unknown"
    if not difference.kinds & {"content", "argument"}:
        return "structure"
    for finding in difference.findings:
        if finding.divergence.is_origin:
            return _cause_of_phase(finding.divergence)
    if any(is_setting(entry) for entry in environment):
        return "settings"
    first = difference.findings[0]
    if first.role == "delivered":
        return "unknown"  # the other ranks know more: see det_callbacks.compare.collectives
    if first.role == "named" and first.divergence.phase == "state":
        return "optimizer"  # everything recorded before it agrees, the gradients among it
    return _cause_of_phase(first.divergence)


def is_setting(difference: EnvironmentDifference) -> bool:
    """Return whether a difference of the environments is one of determinism settings, which are choices."""
    return not difference.is_machine and difference.name.startswith("settings.")


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
            names = ", ".join(unrestored[:MAX_NAMED]) + _and_more(len(unrestored))
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


def describe(finding: Finding) -> str:
    """Return what differs at a site, and why it starts there or not."""
    divergence = finding.divergence
    what = f"{_site(divergence)} {_what_differs(finding)}"
    if divergence.is_origin:
        if divergence.kind in ("missing", "extra"):
            return f"{what}, and what it reads agrees, so it starts here"
        if finding.is_rewired:
            return f"{what}; it reads other tensors than in the reference, and those agree, so it starts here"
        return f"{what}; the inputs agree, so it starts here"
    if divergence.is_origin is False:
        return f"{what}; the difference came in through what it reads"
    if finding.arguments is not None and not finding.arguments.is_known:
        reason = "the two runs kept digests of other arguments of it"
    elif finding.arguments is not None:
        reason = "a number read back from a tensor before differs too, and Python may have passed it on"
    elif finding.role == "delivered" and _is_in_flight(finding):
        reason = "it was read before anybody had waited for the collective, which is a race"
    elif finding.role == "delivered":
        reason = "what this rank put in agrees, and it came from another rank or from the collective itself"
    elif divergence.op:
        reason = "something that the trace did not see wrote what it reads"
    else:
        reason = "what wrote it was not recorded"
    return f"{what}; {reason}, so where it starts cannot be proven"


def show_choices(environment: Sequence[EnvironmentDifference]) -> str:
    """Return the differing choices that can change bits in words, "" when there are none."""
    choices = [entry for entry in environment if not entry.is_machine and entry.changes_bits]
    choices.sort(key=lambda entry: not is_setting(entry))
    return _listed(choices)


def show_machine(environment: Sequence[EnvironmentDifference]) -> str:
    """Return the differing machine facts that can change bits in words, "" when there are none."""
    return _listed([entry for entry in environment if entry.is_machine and entry.changes_bits])


def _listed(entries: Sequence[EnvironmentDifference]) -> str:
    shown = [f"{entry.name}: {entry.reference} in the reference, {entry.current} now" for entry in entries[:MAX_NAMED]]
    return "; ".join(shown) + _and_more(len(entries))


def _explain_restored(difference: StepDifference) -> str:
    known = list(dict.fromkeys(_source_name(finding) for finding in difference.restored))
    names = ", ".join(known[:MAX_NAMED]) + _and_more(len(known))
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
    known = list(dict.fromkeys(_source_name(finding) for finding in alike))
    names = ", ".join(known[:MAX_NAMED]) + _and_more(len(known))
    layouts = next((finding.layouts for finding in alike if finding.divergence.kind == "structure"), None)
    if phase == "data" and all(finding.has_equal_samples for finding in alike):
        what = "holds the same samples in another order"
    elif phase == "data" and batch_of is not None:
        what = f"is the one that the reference had at step {batch_of}"
    elif layouts is not None:
        what = f"has another structure: {_layouts(layouts)}"
    elif alike[0].divergence.kind in ("missing", "extra"):
        what = f"is only in the {_side(alike[0].divergence)}"
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


def _source_name(finding: Finding) -> str:
    divergence = finding.divergence
    if divergence.name:
        return divergence.name
    return f"of {_module(divergence.module)}{_source(divergence)}"


def _is_in_flight(finding: Finding) -> bool:
    return any(entry is not None and entry.detail == IN_FLIGHT for entry in finding.layouts or ())


def _what_differs(finding: Finding) -> str:
    divergence = finding.divergence
    if finding.role in _COLLECTIVE_VERBS and divergence.kind == "content":
        return f"{_COLLECTIVE_VERBS[finding.role]} other bits"
    if divergence.kind == "argument" and finding.arguments is not None:
        values = list(finding.arguments.values.items())
        shown = "; ".join(f"{name}: {ours} -> {theirs}" for name, (ours, theirs) in values[:MAX_NAMED])
        layouts = f" and gave {_layouts(finding.layouts)}" if finding.layouts else ""
        return f"was called with other arguments ({shown}{_and_more(len(values))}){layouts}"
    if divergence.kind == "structure" and finding.layouts is not None:
        return f"gave another structure: {_layouts(finding.layouts)}"
    if divergence.kind in ("missing", "extra"):
        return f"is only in the {_side(divergence)}"
    return "gave other bits" if divergence.op else "holds other bits"


def _site(divergence: Divergence) -> str:
    if not divergence.op:
        owner = f" of {_module(divergence.module)}" if divergence.module else ""
        return f"{divergence.name or 'a tensor'}{owner}{_source(divergence)}"
    number = f" (number {divergence.occurrence + 1} there)" if divergence.occurrence else ""
    output = f", output {divergence.output}," if divergence.output else ""
    name = f" on {divergence.name}" if divergence.name else ""
    return f"{divergence.op}{number}{name} in {_module(divergence.module)}{_source(divergence)}{output}"


def _source(divergence: Divergence) -> str:
    return f" at {divergence.source[0]}" if divergence.source else ""


def _module(module: str) -> str:
    return {"": "no module", "?": "a module that cannot be told"}.get(module, module)


def _layouts(layouts: tuple[TensorLayout | None, TensorLayout | None]) -> str:
    ours, theirs = layouts
    is_detailed = ours is not None and theirs is not None and (ours.dtype, ours.shape) == (theirs.dtype, theirs.shape)
    return f"{_layout(ours, is_detailed)} in the reference, {_layout(theirs, is_detailed)} now"


def _layout(layout: TensorLayout | None, is_detailed: bool) -> str:
    if layout is None:
        return "no tensor"
    detail = f" with strides {list(layout.stride)}" if is_detailed else ""
    return f"{layout.dtype} {list(layout.shape)}{detail}{' ' + layout.detail if layout.detail else ''}"


def _side(divergence: Divergence) -> str:
    return "reference" if divergence.kind == "missing" else "current run"


def _and_more(count: int) -> str:
    return f" and {count - MAX_NAMED} more" if count > MAX_NAMED else ""


def _is_model_state(divergence: Divergence) -> bool:
    return divergence.name is not None and " of " not in divergence.name


def _cause_of_phase(divergence: Divergence) -> Cause:
    if divergence.op.startswith(_COLLECTIVES):
        return "collective"
    return _PHASE_CAUSES.get(divergence.phase, "unknown")
