"""Ops, gradients and tensors of a step that differ, although nothing before
the step explains it.
"""

from collections import Counter
from collections.abc import Mapping, Sequence

from det_callbacks.causes.frameworks import SAVE_VALUE, of_framework
from det_callbacks.causes.graph import Explanation, Graph, Walk
from det_callbacks.causes.sentences import place, side_of
from det_callbacks.causes.settings import explaining_setting
from det_callbacks.causes.states import bits_at
from det_callbacks.compare.differences import RowDifference
from det_callbacks.runs.program import Program, Site
from det_callbacks.text import count, listed
from det_callbacks.verdict import Cause

_OF_PHASE: Mapping[str, Cause] = {
    "forward": "forward",
    "backward": "backward",
    "gradient": "backward",
    "optimizer": "optimizer",
}


_CHECK_CALLS = "Check what calls optimizer.step(): a condition or a gradient scaler may skip it"
_SORT = (
    "They are the reference's in a different order, so sort what is iterated over: a set (whose "
    "order depends on PYTHONHASHSEED), or the files of a folder"
)
_LOST_VALUE = (
    "Everything recorded that the checkpoint restores matches, so a Python value that it does not "
    "hold may differ"
)
_FROM_OUTSIDE = (
    "Check the code outside the step that computes it (labels, a loss scale, noise), and seed it "
    "if it is random"
)


def other_gradients(graph: Graph, walk: Walk) -> Explanation | None:
    """An optimizer got gradients more often in one run, for different parameters,
    or in a different order.

    Causes: optimizer

    Example:
        Step 7: the optimizer got 3 gradients in the reference and 2 in the current run; only one
        run has grad of head.bias. Pass the optimizer the same parameters in the same order: check
        where the script builds the optimizer, and requires_grad.
    """
    first = graph.first.divergence
    if first.phase != "gradient" or first.op or first.kind not in ("missing", "extra"):
        return None
    if explaining_setting(graph) is not None:
        return None  # an optimizer with other options may take gradients more often
    what_and_advice = _other_updates(graph) or _other_parameters(graph)
    if what_and_advice is None:
        return None
    what, advice = what_and_advice
    return Explanation(cause="optimizer", text=f"{place(graph)}: {what}", advice=advice)


def other_number_of_batches(graph: Graph, walk: Walk) -> Explanation | None:
    """A step that an update ends has more batches in one run, or more forward passes, each with
    its backward pass.

    Causes: optimizer

    Example:
        Step 7: the reference updates the parameters after batch 1 of the step, and the current run
        only after batch 2. Check what calls optimizer.step(): a condition or a gradient scaler may
        skip it.
    """
    difference, kind = graph.difference, graph.first.divergence.kind
    programs = difference.reference.program, difference.current.program
    what = "batch"
    numbers = [max((site.batch for site in one.sites), default=0) for one in programs]
    if numbers[0] == numbers[1] and _has_passes_in_place_of_update(graph):
        what, numbers = "backward pass", [len(_losses(one)) for one in programs]
    is_same = numbers[0] == numbers[1] or kind not in ("missing", "extra")
    if is_same or explaining_setting(graph) is not None:
        return None
    runs = ("reference", "current run")
    first = int(numbers[1] < numbers[0])
    return Explanation(
        cause="optimizer",
        text=(
            f"{place(graph)}: the {runs[first]} updates the parameters after {what} "
            f"{numbers[first]} of the step, and the {runs[1 - first]} only after {what} "
            f"{numbers[1 - first]}"
        ),
        advice=_CHECK_CALLS,
    )


def _losses(program: Program) -> list[int]:
    """Return the positions of the losses, each of which begins a backward pass."""
    return [
        at for at, site in enumerate(program.sites) if site.phase == "forward" and _is_loss(site)
    ]


def _is_loss(site: Site) -> bool:
    return site.role == "named" and site.name == "loss" and not site.op


def _has_passes_in_place_of_update(graph: Graph) -> bool:
    """Return whether all that one run computes before its update matches, and the other run then
    has another forward pass and its backward pass.
    """
    program, position = graph.difference.side(graph.first.row)
    reference, current = graph.difference.reference.program, graph.difference.current.program
    other = reference if program is current else current
    earlier, later = _losses(other), _losses(program)
    before = [at for at in later if at < position]
    if not earlier or len(before) != len(earlier) or len(later) == len(earlier):
        return False
    if any(site.phase == "optimizer" for site in program.sites[:position]):
        return False  # both runs have updated parameters before
    between = program.sites[position : later[len(earlier)]]
    return any(site.op and site.phase == "forward" for site in between)


def _other_updates(graph: Graph) -> tuple[str, str] | None:
    """Return what differs, and what to do, if an optimizer got gradients more often in one run."""
    reference, current = _updates(graph)
    if not (reference and current) or Counter(reference) == Counter(current):
        return None
    if len(graph.evidence.optimizers) == 1:
        times = (
            f"{count(len(reference), 'time')} in the reference and {count(len(current), 'time')} "
            "in the current run"
        )
        return f"the optimizer got its gradients {times}", _CHECK_CALLS
    for longer, shorter, updated, idle in (
        (reference, current, "reference", "current run"),
        (current, reference, "current run", "reference"),
    ):
        skipped = [number for number in dict.fromkeys(longer) if number not in shorter]
        if skipped and [number for number in longer if number in shorter] == shorter:
            who = listed(f"optimizer {number}" for number in skipped)
            what = f"{who} updated nothing in the {idle}, and got gradients in the {updated}"
            return what, _CHECK_CALLS
    order = f"{', '.join(reference)} in the reference and {', '.join(current)} in the current run"
    return f"the optimizers got their gradients in the order {order}", _CHECK_CALLS


def _other_parameters(graph: Graph) -> tuple[str, str] | None:
    reference, current = graph.gradients
    in_one_run = sorted({*reference} ^ {*current})
    if in_one_run and not (reference and current):
        updated, idle = ("reference", "current run") if reference else ("current run", "reference")
        num_gradients = count(len({*reference, *current}), "gradient")
        return (
            (
                f"the optimizer updated nothing in the {idle}, and got {num_gradients} in the "
                f"{updated}"
            ),
            _CHECK_CALLS,
        )
    if in_one_run:
        counts = (
            f"{len({*reference})} gradients in the reference and {len({*current})} in the current "
            "run"
        )
        advice = (
            "Pass the optimizer the same parameters in the same order: check where the script "
            "builds the optimizer, and requires_grad"
        )
        return f"the optimizer got {counts}; only one run has {listed(in_one_run)}", advice
    if len(reference) == len(current):
        advice = (
            "Pass the optimizer the same parameters in the same order, and step several optimizers "
            "in the same order"
        )
        return "the optimizer got the same gradients in a different order", advice
    return None


def outside_input(graph: Graph, walk: Walk) -> Explanation | None:
    """A tensor differs, and no recorded op produced it.

    Causes: initial_weights, forward, backward, optimizer, structure, unknown

    Example:
        Step 7: a tensor read in net.noise differs; no recorded op produced it. Check the code
        outside the step that computes it (labels, a loss scale, noise), and seed it if it is
        random.
    """
    if _has_reordered_inputs(graph):
        return Explanation(cause="structure", advice=_SORT)
    cause = _cause_of_input(graph)
    return None if cause is None else Explanation(cause=cause, advice=advise_lost_value(graph))


def _cause_of_input(graph: Graph) -> Cause | None:
    if not graph.sources:
        return None
    source = graph.sources[0]
    name = source.divergence.name
    if name is None:
        return "unknown"
    if source.site.subject == "further":
        return None  # in the first step a setting explains it, or it is initial state
    if _is_of_parameter(source):
        return "unknown" if source.site.subject == "gradient" else "optimizer"
    if graph.is_first_seen and not graph.is_after_gap:
        return "initial_weights"
    return _OF_PHASE.get(graph.difference.first_reader(source.row), "unknown")


def structure(graph: Graph, walk: Walk) -> Explanation | None:
    """Only shapes, dtypes, layouts or the ops differ; tensors that both runs have are equal.

    Causes: structure

    Example:
        Step 7, forward: aten.slice_copy.Tensor in net (train.py:12, forward) produced a different
        shape: float32 [8, 4] in the reference, float32 [8, 3] in the current run; its inputs match,
        so the difference starts here.
    """
    if not {"content", "argument"}.isdisjoint(graph.difference.kinds.values()):
        return None
    advice = _advise_on_one_run(graph) or advise_lost_value(graph)
    return Explanation(cause="structure", advice=advice)


def first_difference(graph: Graph, walk: Walk) -> Explanation:
    """Nothing earlier explains it: the cause is the phase of the origin,
    or of the first difference if that is unknown.

    Causes: forward, backward, optimizer, collective, unknown

    Example:
        Step 7, forward: aten.mul.Tensor #5 in net.chain (train.py:45, forward) produced different
        bits; its inputs match, so the difference starts here.
    """
    advice = _advise_on_one_run(graph) or advise_lost_value(graph)
    return Explanation(cause=cause_of_first(graph), advice=advice)


def _advise_on_one_run(graph: Graph) -> str:
    """Return what to check if the first difference is a draw, an op of the backward pass, or what a
    draw may decide, and only one run has it; "" for any other.
    """
    first = graph.first.divergence
    if first.kind not in ("missing", "extra") or not first.op:
        return ""
    side = side_of(first)
    if graph.draws(graph.first.row):
        return (
            f"Only the {side} draws in {first.module or 'this model'}: compare its train() or "
            "eval() mode, and the arguments of its dropout"
        )
    if graph.first.start == "drawn":
        return (
            f"Only the {side} runs this line: compare the condition that decides it, and how often "
            "the code before it draws"
        )
    is_sum = first.phase == "backward" and first.op.startswith("aten.add")
    if is_sum and graph.first.site.subject == "gradient":
        return (
            f"The {side} adds to a gradient that the parameter already had: check where the "
            "gradients are cleared (zero_grad), and how often backward() runs"
        )
    if first.phase == "gradient":
        return (
            f"Only the {side} runs this between backward() and the update: compare the line, and "
            "whether the parameters have gradients there (the order of backward() and zero_grad())"
        )
    if first.phase == "backward" and not graph.first.site.recomputed:
        return (
            f"The forward pass before it matches, so more of it needs gradients in the {side}: "
            "check detach(), requires_grad, torch.no_grad() and hooks of tensors"
        )
    return ""


def cause_of_first(graph: Graph) -> Cause:
    """Return the phase of the origin, or of the first difference if there is no origin."""
    first = graph.first
    if graph.origin is None and first.site.role in ("delivered", "graph_output"):
        return "unknown"  # the other ranks know more of a collective: ``compare/ranks.py``
    if graph.origin is None and first.site.role == "named" and first.divergence.phase == "state":
        return _cause_of_state_left(graph)
    leading = graph.leading
    if leading.site.is_collective:
        return "collective"
    if graph.starts_backward or _is_between_passes(graph):
        return "backward"
    if leading.divergence.op and leading.divergence.kind in ("missing", "extra"):
        return _OF_PHASE.get(leading.divergence.phase, "structure")
    return _OF_PHASE.get(leading.divergence.phase, "unknown")


def _cause_of_state_left(graph: Graph) -> Cause:
    """Return the cause of state that only differs after the step:
    the optimizer owns what has a gradient.
    """
    reference, current = graph.gradients
    gradients = {*reference, *current}
    if _is_of_parameter(graph.first) or f"grad of {graph.first.divergence.name}" in gradients:
        return "optimizer"
    return "forward" if gradients else "unknown"


def _is_between_passes(graph: Graph) -> bool:
    """Return whether the origin, or the first difference, ran between a forward
    pass and its backward pass.
    """
    program, position = graph.difference.side(graph.leading.row)
    if program.sites[position].phase != "other":
        return False
    before = (site.phase for site in reversed(program.sites[:position]) if site.op)
    after = (site.phase for site in program.sites[position:] if site.op)  # the loss has a row there
    passes = [
        next((phase for phase in phases if phase in _OF_PHASE), None) for phases in (before, after)
    ]
    return passes == ["forward", "backward"]


def _is_of_parameter(difference: RowDifference) -> bool:
    """Return whether a tensor is a gradient or a state of a parameter."""
    return difference.site.subject in ("gradient", "state")


def advise_lost_value(graph: Graph) -> str:
    """Return advice on a value that a resume lost or that no recorded op produced;
    "" if a setting differs.
    """
    if graph.choices or not _may_be_python_value(graph):
        return ""
    if graph.is_resumed:
        return f"{_LOST_VALUE}: {of_framework(SAVE_VALUE, graph.framework)}"
    return _FROM_OUTSIDE if graph.first.start == "outside" else ""


def _may_be_python_value(graph: Graph) -> bool:
    if not graph.sources:
        return graph.leading.divergence.kind in ("argument", "missing", "extra")
    are_unnamed = all(
        one.site.role == "input" and one.divergence.name is None for one in graph.sources
    )
    return are_unnamed and not graph.difference.current.program.leaves_out_ops


def _has_reordered_inputs(graph: Graph) -> bool:
    """Return whether the unnamed tensors that differ are the reference's in a different order."""
    pairs = [
        graph.difference.pairs[one.row] for one in graph.sources if one.divergence.name is None
    ]
    if len(pairs) < 2 or len(pairs) < len(graph.sources) or min(map(min, pairs)) < 0:
        return False
    of_reference, of_current = zip(*pairs, strict=True)
    reference = Counter(bits_at(graph.difference.reference, position) for position in of_reference)
    return reference == Counter(
        bits_at(graph.difference.current, position) for position in of_current
    )


def _updates(graph: Graph) -> list[list[str]]:
    """Return the numbers of the optimizers that got gradients, in order,
    in the reference and in the current run.

    Both lists are empty unless each gradient is known to belong to one optimizer.
    """
    optimizers = graph.evidence.optimizers
    trained = [name for names in optimizers.values() for name in names]
    owners = {f"grad of {name}": number for number, names in optimizers.items() for name in names}
    if len(owners) < len(trained) or not owners.keys() >= {
        name for names in graph.gradients for name in names
    }:
        return [[], []]
    return [_updates_of(names, owners) for names in graph.gradients]


def _updates_of(gradients: Sequence[str], owners: Mapping[str, str]) -> list[str]:
    """Return the owner of each run of gradients; an update has a gradient once."""
    updates, names = list[str](), set[str]()
    for name in gradients:
        if not updates or owners[name] != updates[-1] or name in names:
            updates.append(owners[name])
            names.clear()
        names.add(name)
    return updates
