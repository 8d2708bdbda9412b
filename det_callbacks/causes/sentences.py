"""What a verdict says of sites, steps and settings."""

from collections.abc import Collection, Mapping, Sequence

import numpy as np

from det_callbacks.causes.graph import Graph
from det_callbacks.compare.differences import RowDifference, Start
from det_callbacks.runs.evidence import BATCH_START
from det_callbacks.runs.program import (
    AT_END,
    PASSED,
    TensorLayout,
    describe_tensor,
    in_module,
    reads_expanded,
)
from det_callbacks.runs.source_text import place_and_function
from det_callbacks.text import listed
from det_callbacks.verdict import Divergence, EnvironmentDifference

_UNPROVEN: Mapping[Start, str] = {
    "inside a region": "it ran inside a compiled region, which the recorder cannot see into",
    "written since": (
        "the op that wrote it matches, but an unseen write (a view, NumPy, a raw kernel) changed "
        "it since"
    ),
    "other arguments": "the two runs kept digests of different arguments of it",
    "unread batch": "Python may have read a part of the batch that the recorder could not inspect",
    "passed on": (
        "a shape or a number that Python can read differs earlier, and Python may have passed it on"
    ),
    "drawn": (
        "Python's or NumPy's generator moved differently in this step, and what it gave may decide "
        "this"
    ),
    "race": "the step read it before it waited for the collective, which is a race",
    "collective": (
        "what this rank sent matches, and the difference came from another rank or the collective "
        "itself"
    ),
    "graph replay": "a CUDA graph may have written it, which the recorder cannot see",
    "not recorded": "the op that wrote it was not recorded",
    "region parameters": (
        "the parameters that the compiled region reads have no digest at this level"
    ),
    "unseen writer": (
        "the recorder did not see what wrote its inputs (NumPy, a raw kernel, torch.empty)"
    ),
    "unchecked": (
        "its inputs match, but they were not checked for unseen writes (NumPy, a raw kernel)"
    ),
}
_VERBS = {
    "region_input": "received",
    "graph_output": "has",
    "sent": "received",
    "delivered": "delivered",
}


def describe(difference: RowDifference) -> str:
    """Return "forward: aten.mul.Tensor in net produced different bits; its inputs match,
    so ...".
    """
    divergence = difference.divergence
    return (
        f"{divergence.phase}: {site_text(divergence)} {_how_it_differs(difference)}; "
        f"{_where_it_starts(difference)}"
    )


def _where_it_starts(difference: RowDifference) -> str:
    divergence = difference.divergence
    if divergence.is_origin is False:
        return "one of its inputs differs"
    if divergence.is_origin is None:
        return (
            f"{_UNPROVEN[difference.start]}, so the verdict cannot say where the difference starts"
        )
    if difference.site.is_region:
        return "the inputs of the compiled region match, so the difference starts inside it"
    if difference.is_rewired:
        return (
            "it reads different tensors than in the reference, and those match, so the difference "
            "starts here"
        )
    return "its inputs match, so the difference starts here"


def _how_it_differs(difference: RowDifference) -> str:
    divergence = difference.divergence
    if divergence.kind == "argument" and difference.arguments is not None:
        shown = [
            f"{name}: {reference} -> {current}"
            for name, (reference, current) in difference.arguments.items()
        ]
        if divergence.op.startswith("aten.bernoulli") and "p" in difference.arguments:
            shown.append("a dropout keeps an element with probability p")
        called = f"was called with different arguments ({listed(shown, '; ')})"
        return (
            called
            if difference.layouts is None
            else f"{called} and produced {both_layouts(difference.layouts)}"
        )
    if divergence.kind == "structure" and difference.site.role == "graph":
        return "differs, because of a recompilation, a graph break or different code"
    if divergence.kind == "structure" and difference.layouts is not None:
        if (broadcast := _how_broadcast(difference)) is not None:
            return broadcast
        if reads_another_part(difference.layouts):
            return f"read a different part of its input: {both_layouts(difference.layouts)}"
        return f"produced {what_differs(difference.layouts)}: {both_layouts(difference.layouts)}"
    if divergence.kind in ("missing", "extra"):
        return f"{'ran' if divergence.op else 'is'} only in the {side_of(divergence)}"
    verb = "produced" if divergence.op else "has"
    if difference.choices is not None:
        reference, current = difference.choices
        verb = f"ran with another configuration ({reference} -> {current}) and {verb}"
    return (
        f"{_VERBS.get(difference.site.role, verb) if divergence.kind == 'content' else verb} "
        "different bits"
    )


def _how_broadcast(difference: RowDifference) -> str | None:
    """Return which shapes only one run broadcast to a larger one, or None."""
    is_expanded = [
        layout is not None and reads_expanded(layout) for layout in difference.layouts or ()
    ]
    if is_expanded not in ([True, False], [False, True]):
        return None
    side = is_expanded.index(True)
    shapes = difference.shapes_read[side]
    try:
        together = np.broadcast_shapes(*shapes)
    except ValueError:  # they are not all of them broadcast
        return None
    if len(shapes) < 2 or together in shapes:
        return None
    run = ("reference", "current run")[side]
    return (
        f"broadcast {listed(str([*shape]) for shape in shapes)} to {[*together]} in the {run} only"
    )


def site_text(divergence: Divergence) -> str:
    """Return the name of a site with its module and its line."""
    source = source_text(divergence.source)
    if not divergence.op:
        name, module = divergence.name or "a tensor", divergence.module
        module = {"?": "an unknown module"}.get(module, module)
        owner = f" of {module}" if module and not name.startswith(f"{module}.") else ""
        return f"{name}{owner}{source}"
    output = f", output {divergence.output}," if divergence.output else ""
    name = f" on {divergence.name}" if divergence.name else ""
    number = number_text(divergence.occurrence)
    module = in_module(divergence.module, divergence.op)
    return f"{divergence.op}{number}{name}{module}{source}{output}"


def source_text(lines: Sequence[str]) -> str:
    """Return " (train.py:41, forward)"; "" if no line is known."""
    line, function = place_and_function(lines[0]) if lines else ("", "")
    if not line:
        return f" ({function})" if function else ""
    return f" ({line}, {function})"


def number_text(index: int) -> str:
    """Return " #2" for the third call of an op, "" for the first."""
    return f" #{index}" if index else ""


def side_of(divergence: Divergence) -> str:
    """Return which run has a site or a step."""
    return "reference" if divergence.kind == "missing" else "current run"


def source_name(difference: RowDifference) -> str:
    """Return the name of a tensor that entered a step, or where it was read."""
    divergence = difference.divergence
    if divergence.name is None:
        where = in_module(divergence.module, divergence.op)
        return f"a tensor read{where}{source_text(divergence.source)}"
    is_generator_of_an_op = difference.site.part == PASSED
    line = f" at {divergence.source[0]}" if divergence.source and is_generator_of_an_op else ""
    return f"{divergence.name}{line}"


Layouts = tuple[TensorLayout | None, TensorLayout | None]


def reads_another_part(layouts: Layouts) -> bool:
    """Return whether two layouts differ only in which elements are read."""
    reference, current = layouts
    if (
        reference is None
        or current is None
        or (reference.dtype, reference.shape) != (current.dtype, current.shape)
    ):
        return False
    is_part = any(one.part_read is not None for one in (reference, current))
    return reference.detail != current.detail and is_part


def what_differs(layouts: Layouts) -> str:
    """Return "a different shape", "a different shape and dtype", "different strides"."""
    reference, current = layouts
    if reference is None or current is None:
        return "a different layout"
    parts = ["shape"] * (reference.shape != current.shape) + ["dtype"] * (
        reference.dtype != current.dtype
    )
    if parts:
        return f"a different {' and '.join(parts)}"
    return "different strides" if reference.stride != current.stride else "a different layout"


def both_layouts(layouts: Layouts) -> str:
    """Return "float32 [2] in the reference, float64 [2] in the current run", or the strides or
    elements that differ.
    """
    reference, current = layouts
    shown = ["no tensor" if one is None else describe_tensor(one) for one in layouts]
    if (
        reference is not None
        and current is not None
        and (reference.dtype, reference.shape) == (current.dtype, current.shape)
    ):
        shown = [
            f"{describe_tensor(one)} with strides {list(one.stride)}"
            for one in (reference, current)
        ]
        if reads_another_part(layouts):
            shown = [one.part_read or "in order from element 0" for one in (reference, current)]
    return f"{shown[0]} in the reference, {shown[1]} in the current run"


_SUBJECTS = {
    # phase -> subject of a sentence, and a part of it
    "restored": ("the restored state", "part of the restored state"),
    "state": ("the initial state", "part of the initial state"),
    "data": ("the batch", "part of the batch"),
    "rng": ("the generator state", "a generator"),
    "input": ("a tensor that no recorded op produced", ""),
}
SUBJECT: Mapping[str, str] = {phase: subject for phase, (subject, _) in _SUBJECTS.items()}


def place(graph: Graph) -> str:
    """Return "Step 7 of rank 1, the first after resuming"."""
    difference = graph.difference
    of_rank = f" of rank {difference.rank}" if graph.shows_rank else ""
    resumed = ", the first after resuming" if graph.is_resumed else ""
    return f"Step {difference.step}{of_segment(difference.segment)}{of_rank}{resumed}"


def of_segment(segment: int) -> str:
    """Return " of segment 1"; "" for the first fit."""
    return f" of segment {segment}" if segment else ""


def explain_first(graph: Graph) -> str:
    """Return what differs first in a step, and the first origin after that."""
    first, origin = graph.first, graph.origin
    is_entered = first.start == "outside"
    what = _explain_sources(graph) if is_entered else f"{place(graph)}, {describe(first)}"
    if origin is None or origin.row == first.row:
        return what
    return f"{what}; {'in addition, ' if is_entered else 'an origin is '}{describe(origin)}"


def _explain_sources(graph: Graph) -> str:
    phase = graph.sources[0].divergence.phase
    named = [
        one for one in graph.sources if one.divergence.phase == phase and one.site.role != "samples"
    ]
    others = [one.divergence.phase for one in graph.sources if one.divergence.phase != phase]
    what = how_it_entered(phase, named or graph.sources[:1], graph)
    if phase == "input":
        what += _who_produced(graph)
        return f"{place(graph)}: {what}{also_differ(others)}"
    if graph.first.site.part == AT_END:
        cause = "everything before it in the step matches"
    elif phase == "rng" and _is_set_in_step(graph):
        has_drawn = any(site.op for site in graph.difference.sites_read(graph.first.row))
        draw = "a later draw" if has_drawn else "the first draw"
        cause = (
            f"code in the step changed it before {draw}, without a recorded op (such as "
            "torch.manual_seed)"
        )
    else:
        cause = "the step started with this difference, so no op caused it"
    return f"{place(graph)}: {what}{also_differ(others)}; {cause}"


def _who_produced(graph: Graph) -> str:
    if not graph.difference.current.program.leaves_out_ops:
        return ""
    return ", but an op that was not recorded (modules, phases, other threads) may have produced it"


def how_it_entered(phase: str, sources: Sequence[RowDifference], graph: Graph) -> str:
    """Return how the sources of one phase differ, with their names:
    "the batch differs (batch[0])".
    """
    subject, part = _SUBJECTS[phase]
    in_order = sorted(sources, key=lambda one: one.divergence.name is None)
    kinds = {one.divergence.kind for one in sources}
    in_one = [one for one in in_order if one.divergence.kind in ("missing", "extra")]
    in_both = [one for one in in_order if one not in in_one]
    names = list(dict.fromkeys(map(source_name, in_both or in_order)))
    layouts = next((one.layouts for one in sources if one.layouts is not None), None)
    shown = listed(names)
    of_model = [name for name in names if name not in graph.further]
    if phase == "state" and of_model and graph.num_initial > 1:
        shown = f"{shown}: {len(of_model)} of {graph.num_initial} tensors"
    if phase == "data" and graph.has_equal_samples:
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
    if in_one:
        sides = {side_of(one.divergence) for one in in_one}
        only = f"only in the {sides.pop()}" if len(sides) == 1 else "in one run only"
        shown += f"; {only}: {listed(dict.fromkeys(map(source_name, in_one)))}"
    return f"{subject} differs ({shown})"


def _how_inputs_differ(
    kinds: Collection[str], layouts: Layouts | None, side: str, *, is_one: bool
) -> str:
    has, exist, differ = ("has", "exists", "differs") if is_one else ("have", "exist", "differ")
    how = differ
    if "structure" in kinds and layouts is not None:
        how = f"{has} {what_differs(layouts)}, {both_layouts(layouts)}"
    elif kinds == {"missing", "extra"}:
        how = f"{exist} in one run only"
    elif kinds in ({"missing"}, {"extra"}):
        how = f"{exist} only in the {side}"
    return f"{how}; no recorded op produced {'it' if is_one else 'them'}"


def also_differ(phases: Sequence[str]) -> str:
    """Return what else the step started with that differs, as a clause."""
    subjects = [SUBJECT[phase] for phase in dict.fromkeys(phases)]
    if not subjects:
        return ""
    if len(subjects) == 1:
        return f", and {subjects[0]} also differs"
    return f", and {', '.join(subjects[:-1])} and {subjects[-1]} also differ"


def _is_set_in_step(graph: Graph) -> bool:
    """Return whether a generator that an op draws from matched when the step started."""
    has_other_start = {one.name for one in graph.evidence.generators if one.has_other_start}
    if graph.first.site.of in has_other_start:
        return False  # it was unused until then, and its state was not compared
    if graph.first.site.role == "generator" and graph.difference.sites_read(graph.first.row):
        return True  # an earlier state in the step matches
    names = {source.divergence.name for source in graph.sources if source.divergence.phase == "rng"}
    start = graph.difference.step, BATCH_START
    return any(
        change.name in names and change.equal_at == start for change in graph.evidence.generators
    )


def both_values(entries: Sequence[EnvironmentDifference]) -> str:
    """Return "settings.seed (0 in the reference, 1 in the current run)" for
    entries of the environment.
    """
    return listed(
        f"{one.name} ({one.reference} in the reference, {one.current} in the current run)"
        for one in entries
    )


def explained_by(name: str, values: tuple[object, object], sentence: str) -> str:
    """Return a sentence on a setting that differs, then ``sentence``,
    on the first difference that it explains.
    """
    return f"{values_text(name, *values)}, which explains the first difference. {sentence}"


def values_text(name: str, reference: object, current: object) -> str:
    return f"{name} is {reference} in the reference and {current} in the current run"
