"""The name of a site, how it differs, and whether the difference starts there."""

from collections.abc import Mapping, Sequence

import numpy as np

from det_callbacks.compare.differences import Finding, Start
from det_callbacks.report.run import describe_tensor
from det_callbacks.runs.program import READS, REGION, TensorLayout, reads_expanded
from det_callbacks.text import listed
from det_callbacks.verdict import Divergence

_UNPROVEN: Mapping[Start, str] = {
    "inside a region": "it ran inside a compiled region, which the recorder cannot see into",
    "written since": "the op that wrote it matches, but an unseen write (a view, NumPy, a raw kernel) changed it since",
    "other arguments": "the two runs kept digests of different arguments of it",
    "unread batch": "Python may have read a part of the batch that the recorder could not inspect",
    "passed on": "a shape or a number that Python can read differs earlier, and Python may have passed it on",
    "race": "the step read it before it waited for the collective, which is a race",
    "collective": "what this rank sent matches, and the difference came from another rank or the collective itself",
    "graph replay": "a CUDA graph may have written it, which the recorder cannot see",
    "not recorded": "the op that wrote it was not recorded",
    "region parameters": "the parameters that the compiled region reads have no digest at this level",
    "unseen writer": "the recorder did not see what wrote its inputs (NumPy, a raw kernel, torch.empty)",
    "unchecked": "its inputs match, but they were not checked for unseen writes (NumPy, a raw kernel)",
}
_VERBS = {"region_input": "received", "graph_output": "has", "sent": "received", "delivered": "delivered"}


def describe(finding: Finding) -> str:
    """Return "forward: aten.mul.Tensor in net produced different bits; its inputs match, so ..."."""
    divergence = finding.divergence
    return f"{divergence.phase}: {site_text(divergence)} {_how_it_differs(finding)}; {_where_it_starts(finding)}"


def _where_it_starts(finding: Finding) -> str:
    divergence = finding.divergence
    if divergence.is_origin is False:
        return "one of its inputs differs"
    if divergence.is_origin is None:
        return f"{_UNPROVEN[finding.start]}, so the verdict cannot say where the difference starts"
    if divergence.op.startswith(REGION):
        return "the inputs of the compiled region match, so the difference starts inside it"
    if finding.is_rewired:
        return "it reads different tensors than in the reference, and those match, so the difference starts here"
    return "its inputs match, so the difference starts here"


def _how_it_differs(finding: Finding) -> str:
    divergence = finding.divergence
    if divergence.kind == "argument" and finding.arguments is not None:
        shown = [f"{name}: {reference} -> {current}" for name, (reference, current) in finding.arguments.items()]
        if divergence.op.startswith("aten.bernoulli") and "p" in finding.arguments:
            shown.append("a dropout keeps an element with probability p")
        called = f"was called with different arguments ({listed(shown, '; ')})"
        return called if finding.layouts is None else f"{called} and produced {both_layouts(finding.layouts)}"
    if divergence.kind == "structure" and finding.role == "graph":
        return "differs, because of a recompilation, a graph break or different code"
    if divergence.kind == "structure" and finding.layouts is not None:
        if (broadcast := _how_broadcast(finding)) is not None:
            return broadcast
        if reads_another_part(finding.layouts):
            return f"read a different part of its input: {both_layouts(finding.layouts)}"
        return f"produced {what_differs(finding.layouts)}: {both_layouts(finding.layouts)}"
    if divergence.kind in ("missing", "extra"):
        return f"{'ran' if divergence.op else 'is'} only in the {side_of(divergence)}"
    verb = "produced" if divergence.op else "has"
    return f"{_VERBS.get(finding.role, verb) if divergence.kind == 'content' else verb} different bits"


def _how_broadcast(finding: Finding) -> str | None:
    """Return which shapes only one run broadcast to a larger one, or None."""
    is_expanded = [layout is not None and reads_expanded(layout) for layout in finding.layouts or ()]
    if is_expanded not in ([True, False], [False, True]):
        return None
    side = is_expanded.index(True)
    shapes = finding.shapes_read[side]
    try:
        together = np.broadcast_shapes(*shapes)
    except ValueError:  # they are not all of them broadcast
        return None
    if len(shapes) < 2 or together in shapes:
        return None
    run = ("reference", "current run")[side]
    return f"broadcast {listed(str([*shape]) for shape in shapes)} to {[*together]} in the {run} only"


def site_text(divergence: Divergence) -> str:
    """Return the name of a site with its module and its line."""
    source = source_text(divergence.source)
    if not divergence.op:
        name, module = divergence.name or "a tensor", divergence.module
        owner = f" of {_module(module)}" if module and not name.startswith(f"{module}.") else ""
        return f"{name}{owner}{source}"
    output = f", output {divergence.output}," if divergence.output else ""
    name = f" on {divergence.name}" if divergence.name else ""
    number = number_text(divergence.occurrence)
    return f"{divergence.op}{number}{name} in {_module(divergence.module)}{source}{output}"


def source_text(lines: Sequence[str]) -> str:
    """Return " (train.py:41, forward)"; "" if no line is known."""
    line, _, function = lines[0].rpartition(" in ") if lines else ("", "", "")
    if not line:
        return f" ({function})" if function else ""
    return f" ({line}, {function})"


def number_text(index: int) -> str:
    """Return " #2" for the third call of an op, "" for the first."""
    return f" #{index}" if index else ""


def side_of(divergence: Divergence) -> str:
    """Return which run has a site or a step."""
    return "reference" if divergence.kind == "missing" else "current run"


def _module(module: str) -> str:
    return {"": "no submodule", "?": "an unknown module"}.get(module, module)


def source_name(finding: Finding) -> str:
    """Return the name of a tensor that entered a step, or where it was read."""
    divergence = finding.divergence
    if divergence.name is None:
        where = f"in {_module(divergence.module)}" if divergence.module else "in no submodule"
        return f"a tensor read {where}{source_text(divergence.source)}"
    is_generator_of_an_op = finding.role == "generator" and divergence.name.startswith("generator ")
    line = f" at {divergence.source[0]}" if divergence.source and is_generator_of_an_op else ""
    return f"{divergence.name}{line}"


Layouts = tuple[TensorLayout | None, TensorLayout | None]


def reads_another_part(layouts: Layouts) -> bool:
    """Return whether two layouts differ only in which elements are read."""
    reference, current = layouts
    if reference is None or current is None or (reference.dtype, reference.shape) != (current.dtype, current.shape):
        return False
    return reference.detail != current.detail and f"{reference.detail}{current.detail}".startswith(READS)


def what_differs(layouts: Layouts) -> str:
    """Return "a different shape", "a different shape and dtype", "different strides"."""
    reference, current = layouts
    if reference is None or current is None:
        return "a different layout"
    parts = ["shape"] * (reference.shape != current.shape) + ["dtype"] * (reference.dtype != current.dtype)
    if parts:
        return f"a different {' and '.join(parts)}"
    return "different strides" if reference.stride != current.stride else "a different layout"


def both_layouts(layouts: Layouts) -> str:
    """Return "float32 [2] in the reference, float64 [2] in the current run", or the strides or elements that differ."""
    reference, current = layouts
    shown = ["no tensor" if one is None else describe_tensor(one) for one in layouts]
    if (
        reference is not None
        and current is not None
        and (reference.dtype, reference.shape) == (current.dtype, current.shape)
    ):
        shown = [f"{describe_tensor(one)} with strides {list(one.stride)}" for one in (reference, current)]
        if reads_another_part(layouts):
            shown = [one.detail.removeprefix(READS) or "in order from element 0" for one in (reference, current)]
    return f"{shown[0]} in the reference, {shown[1]} in the current run"
