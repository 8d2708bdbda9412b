"""What differs at a site, in words."""

from collections.abc import Sequence

from det_callbacks.compare.step import Finding
from det_callbacks.runs.program import IN_FLIGHT, REGION, TensorLayout
from det_callbacks.verdict import Counts, Coverage, Divergence, EnvironmentDifference

MAX_NAMED = 3
"""Sources, arguments and choices that a sentence names; the others are counted."""

_COLLECTIVE_VERBS = {"sent": "was given", "delivered": "delivered"}


def describe(finding: Finding) -> str:
    """Return what differs at a site, and why it starts there or not."""
    divergence = finding.divergence
    what = f"{_site(divergence)} {_what_differs(finding)}"
    if divergence.is_origin:
        if divergence.kind in ("missing", "extra"):
            return f"{what}, and what it reads agrees, so it starts here"
        if finding.role == "graph":
            return f"{what}; what goes into it agrees, so it starts here"
        if divergence.op.startswith(REGION):
            return f"{what}; what went into the compiled region agrees, so it starts inside"
        if finding.is_rewired:
            return f"{what}; it reads other tensors than in the reference, and those agree, so it starts here"
        return f"{what}; the inputs agree, so it starts here"
    if divergence.is_origin is False:
        return f"{what}; the difference came in through what it reads"
    if finding.arguments is not None and not finding.arguments.is_known:
        reason = "the two runs kept digests of other arguments of it"
    elif finding.is_passed_on and finding.unread:
        reason = f"the batch holds a {finding.unread}, which cannot be looked into, and Python may have read it"
    elif finding.is_passed_on:
        reason = "a shape, or a number that Python could read, differs before it, and Python may have passed that on"
    elif finding.role == "delivered" and _is_in_flight(finding):
        reason = "it was read before anybody had waited for the collective, which is a race"
    elif finding.role == "delivered":
        reason = "what this rank put in agrees, and it came from another rank or from the collective itself"
    elif finding.role == "left":
        reason = "a CUDA graph, of which nothing is seen inside, may have written it"
    elif finding.role == "entering":
        reason = "something that the trace did not see wrote what goes into the compiled region"
    elif divergence.op.startswith(REGION):
        reason = "the parameters that the compiled region reads have no digest at this level"
    elif finding.is_inside_region:
        return f"{what}; it ran inside a compiled region, of which only the whole can be told to be the origin"
    elif divergence.op:
        reason = "something that the trace did not see wrote what it reads"
    elif finding.is_written_unseen:
        reason = (
            "what wrote it agrees, so something that the trace did not see (NumPy, a raw kernel) has changed it since"
        )
        return f"{what}; {reason}"
    else:
        reason = "what wrote it was not recorded"
    return f"{what}; {reason}, so where it starts cannot be proven"


def explain_match(counts: Counts, coverage: Coverage) -> str:
    """Return how much agrees, "" where nothing was compared."""
    found = []
    if counts.sites_compared:
        found.append(f"all {count(counts.sites_compared, 'site')} of {count(counts.steps_compared, 'step')}")
    if coverage.metrics:
        found.append(("all " if not found else "") + count(coverage.metrics, "metric"))
    if not found:
        return ""
    ranks = f" of {coverage.ranks} ranks" if coverage.ranks > 1 else ""
    text = " and ".join(found)
    return f"{text[0].upper()}{text[1:]}{ranks} agree, bit for bit"


def count(number: int, noun: str) -> str:
    """Return "1 step", "1234 steps"."""
    return f"{number} {noun}" + ("" if number == 1 else "s")


def is_setting(difference: EnvironmentDifference) -> bool:
    """Return whether a difference of the environments is one of determinism settings, which are choices."""
    return not difference.is_machine and difference.name.startswith("settings.")


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
    return "; ".join(shown) + and_more(len(entries))


def source_name(finding: Finding) -> str:
    """Return the name of what entered a step, or where it was read."""
    divergence = finding.divergence
    if divergence.name:
        return divergence.name
    return f"of {_module(divergence.module)}{_source(divergence)}"


def _is_in_flight(finding: Finding) -> bool:
    return any(entry is not None and entry.detail == IN_FLIGHT for entry in finding.layouts or ())


def _what_differs(finding: Finding) -> str:
    divergence = finding.divergence
    if finding.role == "graph" and divergence.kind == "structure":
        return "is another graph, by a recompilation, a graph break or other code"
    if finding.role == "inside" and divergence.kind == "content":
        return "gave other bits inside"
    if finding.role == "entering" and divergence.kind == "content":
        return "is given other bits"
    if finding.role == "left" and divergence.kind == "content":
        return "holds other bits"
    if finding.role in _COLLECTIVE_VERBS and divergence.kind == "content":
        return f"{_COLLECTIVE_VERBS[finding.role]} other bits"
    if divergence.kind == "argument" and finding.arguments is not None:
        values = list(finding.arguments.values.items())
        shown = "; ".join(f"{name}: {ours} -> {theirs}" for name, (ours, theirs) in values[:MAX_NAMED])
        layouts = f" and gave {show_layouts(finding.layouts)}" if finding.layouts else ""
        return f"was called with other arguments ({shown}{and_more(len(values))}){layouts}"
    if divergence.kind == "structure" and finding.layouts is not None:
        return f"gave another structure: {show_layouts(finding.layouts)}"
    if divergence.kind in ("missing", "extra"):
        return f"is only in the {side_of(divergence)}"
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


def show_layouts(layouts: tuple[TensorLayout | None, TensorLayout | None]) -> str:
    """Return the layouts of a site in both runs in words."""
    ours, theirs = layouts
    is_detailed = ours is not None and theirs is not None and (ours.dtype, ours.shape) == (theirs.dtype, theirs.shape)
    return f"{_layout(ours, is_detailed)} in the reference, {_layout(theirs, is_detailed)} now"


def _layout(layout: TensorLayout | None, is_detailed: bool) -> str:
    if layout is None:
        return "no tensor"
    detail = f" with strides {list(layout.stride)}" if is_detailed else ""
    return f"{layout.dtype} {list(layout.shape)}{detail}{' ' + layout.detail if layout.detail else ''}"


def side_of(divergence: Divergence) -> str:
    """Return which run has a site that the other has not."""
    return "reference" if divergence.kind == "missing" else "current run"


def and_more(count: int) -> str:
    """Return how many more there are than a sentence names, "" when none."""
    return f" and {count - MAX_NAMED} more" if count > MAX_NAMED else ""
