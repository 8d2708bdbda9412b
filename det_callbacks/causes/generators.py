"""Generators that differ: where that began, what ran since, and what to do."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

from det_callbacks.causes.frameworks import RESTORED_BY, of_framework
from det_callbacks.causes.graph import Explanation, Graph, Node, Walk
from det_callbacks.compare.evidence import Evidence, GeneratorChange
from det_callbacks.runs.evidence import (
    AFTER,
    AFTER_BACKWARD,
    AFTER_FORWARD,
    BATCH_END,
    BATCH_START,
    BEFORE,
    DRAWING,
    LOADER,
)
from det_callbacks.text import capitalised, listed

_OF_ANOTHER_MODEL = (
    "Only the current run has a dropout there, of a model outside the recorded one: compare its "
    "train() or eval() mode"
)
_VALIDATION = (
    "on_validation_epoch_start on_validation_batch_start on_validation_batch_end "
    "on_validation_epoch_end"
)


class _Interval(NamedTuple):
    """What is between a point at which generators are read and the next one."""

    # our hook that reads them: callbacks listed after ours are called after it, the others before
    read_in: str = ""
    runs: str = ""
    hooks: str = ""  # called there


_AFTER: Mapping[str, _Interval] = {
    "fit start": _Interval(runs="the set-up of the data", hooks="on_train_start"),
    "before the sanity check": _Interval(
        "on_sanity_check_start", "the sanity check", f"on_validation_start {_VALIDATION}"
    ),
    "after the sanity check": _Interval("on_sanity_check_end", hooks="on_train_start"),
    "epoch start": _Interval("on_train_epoch_start"),
    LOADER: _Interval(runs="the start of the loader's iterators"),
    DRAWING: _Interval(runs="the loading of the batch, and code between it and the step"),
    BATCH_START: _Interval("on_train_batch_start", "the forward pass", "on_before_zero_grad"),
    AFTER_FORWARD: _Interval("on_before_backward", "the backward pass"),
    AFTER_BACKWARD: _Interval(
        "on_after_backward", "code after the backward pass", "on_before_optimizer_step"
    ),
    BATCH_END: _Interval("on_train_batch_end"),
    "before validation": _Interval("on_validation_start", "validation", _VALIDATION),
    "after validation": _Interval("on_validation_end"),
    "epoch end": _Interval("on_train_epoch_end"),
}
_WITHIN_STEP = (BATCH_START, AFTER_FORWARD, AFTER_BACKWARD, BATCH_END)


# what a generator read


def moved_within(graph: Graph) -> Iterator[Node]:
    """Yield the generators that moved differently within the step;
    which op drew from them was not recorded.
    """
    step = graph.difference.step
    of_row = {row: graph.difference.site(row).of for row in graph.drawn_within}
    changes = {change.name: change for change in graph.evidence.generators}
    for name in of_row.values():
        yield (
            generator_node(changes[name], is_proven=False)
            if name in changes
            else _unknown(name, step)
        )
    for name, change in changes.items():
        if name not in of_row.values() and change.equal_at == (step, BATCH_START):
            yield generator_node(change, is_proven=False)


def _unknown(name: str, step: int) -> Node:
    return Node(kind="generator", name=name, step=step, is_proven=False)


def moved_before(graph: Graph) -> Iterator[Node]:
    """Yield the generators that differed when the batch was drawn;
    that it was drawn from them is not recorded.
    """
    for change in graph.evidence.generators:
        if graph.is_before_step(change):
            yield generator_node(change, is_proven=False)


def checkpoint(graph: Graph) -> Node:
    step = graph.difference.step
    return Node(kind="checkpoint", name="the resume", step=step, moment="resume", is_proven=False)


def generator_node(change: GeneratorChange, *, is_proven: bool) -> Node:
    step, point = change.differs_at
    return Node(
        kind="generator",
        name=change.name,
        step=step,
        moment=point,
        change=change,
        is_proven=is_proven,
    )


def reseeded(graph: Graph) -> Iterator[Node]:
    """Yield the seeds that differ, of generators that what ran before the fit
    may have drawn from.
    """
    for change in graph.evidence.other_starts:
        if change.is_reseeded:
            yield _seed(change, is_proven=False)


def change_reads(graph: Graph, change: GeneratorChange) -> Iterator[Node]:
    """Yield the seed, or what ran since the generator last matched."""
    if change.is_reseeded:
        yield _seed(change)
    elif graph.is_resumed and change.equal_at is None:
        yield checkpoint(graph)
    elif change.equal_at is None or change.has_other_start:
        name = (
            f"draws from {change.name}"
            if change.seeds is not None
            else f"another state of {change.name}"
        )
        yield Node(kind="outside", name=name, step=graph.difference.step, moment="before the fit")
    else:
        ran = listed(
            dict.fromkeys(what_ran((*change.points, change.differs_at[1]), graph.evidence))
        )
        sides = {"the reference": change.only_reference, "the current run": change.only_current}
        only = listed(
            (f"only in {side}: {', '.join(points)}" for side, points in sides.items() if points),
            "; ",
        )
        step, point = change.equal_at
        yield Node(
            kind="boundary",
            name=ran or "code outside the training's hooks",
            step=step,
            moment=f"{point}{f'; {only}' if only else ''}",
            change=change,
        )


def _seed(change: GeneratorChange, *, is_proven: bool = True) -> Node:
    reference, current = change.seeds or (None, None)
    return Node(
        kind="setting",
        name=f"seed of {change.name}",
        step=change.differs_at[0],
        values=(str(reference), str(current)),
        change=change,
        is_proven=is_proven,
    )


# what to say


def generator(graph: Graph, walk: Walk) -> Explanation:
    """The state of a generator differs first, or only the current run has
    an op that draws from one.

    Causes: rng

    Example:
        Step 3: the generator state differs (torch.cpu); the step started with this difference, so
        no op caused it. Validation draws from the generator torch.cpu: give it a separate
        generator, or restore the state of torch.cpu afterwards; if it draws in the reference only,
        compare why.
    """
    return Explanation(cause="rng", advice=advise_draws(graph))


def advise_draws(graph: Graph) -> str:
    drawn, changes = consumed(graph), graph.evidence.generators
    was_before_fit = any(change.equal_at is None or LOADER in change.points for change in changes)
    if graph.is_resumed and was_before_fit and "rng" in graph.source_phases:
        return restore_generators(graph)
    if draws_in_one_run(graph):
        module = graph.first.divergence.module
        if module in ("", "?"):
            is_dropout = any(word in graph.first.divergence.op for word in ("dropout", "bernoulli"))
            return (
                _OF_ANOTHER_MODEL
                if is_dropout
                else "Remove the draw, or record the reference again"
            )
        return (
            f"Only the current run draws in {module}: compare its train() or eval() mode, and the "
            "arguments of its dropout"
        )
    if drawn is not None:
        return keep_from_drawing(drawn, graph.evidence)
    if not changes:
        return "Seed this generator, and save its state in checkpoints"
    first = changes[0]
    what = show_change(first, graph.evidence)
    if first in graph.evidence.other_starts and first.seeds is None:
        return f"{capitalised(what)}, so seed Python, NumPy and torch before you build the model"
    return capitalised(what)


def restore_generators(graph: Graph) -> str:
    return (
        "The resume did not restore the generators to what they were here. What restores one: "
        f"{of_framework(RESTORED_BY['generators'], graph.framework)}"
    )


def draws_in_one_run(graph: Graph) -> bool:
    """Return whether the first difference is an op that only the current run has,
    and that draws.
    """
    first = graph.first.divergence
    return first.kind == "extra" and bool(first.op) and graph.draws(graph.first.row)


def drawn_in_one_run(graph: Graph, walk: Walk) -> Explanation | None:
    """Only the current run has an op there that draws from a generator.

    Causes: rng

    Example:
        Step 7, forward: aten.native_dropout.default in net.drop ran only in the current run; its
        inputs match, so the difference starts here. Only the current run draws in net.drop: compare
        its train() or eval() mode, and the arguments of its dropout.
    """
    return Explanation(cause="rng", advice=advise_draws(graph)) if draws_in_one_run(graph) else None


def consumed(graph: Graph) -> GeneratorChange | None:
    """Return the generator from which something other than the data drew in only one run."""
    since = (
        one for one in graph.evidence.generators if one.equal_at is not None and not one.is_reseeded
    )
    others = (
        one for one in since if one.points[0] not in (LOADER, DRAWING) and not one.has_other_start
    )
    return next(others, None)


def show_change(change: GeneratorChange, evidence: Evidence) -> str:
    """Return why a generator differs, without a final stop."""
    why = _why_it_differs(change)
    if change.equal_at is None:
        if change.differs_at[0] == 0:
            return show_start(change)
        return f"the generator {change.name} already differs {_moment(change.differs_at)}{why}"
    if change.has_other_start:
        use = (
            f"the fit had not drawn from it {_moment(change.equal_at)}, but had "
            f"{_moment(change.differs_at)}"
        )
        return f"{show_start(change)}; {use}; what ran in between: {_shown(change, evidence)}"
    matches = f"matches {_moment(change.equal_at)} and differs {_moment(change.differs_at)}"
    text = f"the generator {change.name} {matches}{why}"
    sides = {"the reference": change.only_reference, "the current run": change.only_current}
    only = (f"; only in {side}: {', '.join(points)}" for side, points in sides.items() if points)
    return f"{text}; what ran in between: {_shown(change, evidence)}{''.join(only)}"


def show_idle(change: GeneratorChange) -> str:
    """Say that a generator started in a different state and stayed in it."""
    return f"{show_start(change)}, and no recorded step has drawn from it yet"


def show_start(change: GeneratorChange) -> str:
    """Say that a generator started in a different state."""
    if change.is_reseeded:
        return f"the generator {change.name} was {_seeded(change)}"
    return (
        f"the generator {change.name} had a different state when the fit "
        f"started{_why_it_differs(change)}"
    )


def _why_it_differs(change: GeneratorChange) -> str:
    if change.seeds is None:
        return ""
    return (
        f": {_seeded(change)}"
        if change.is_reseeded
        else ": a different number of draws from the same seed"
    )


def _seeded(change: GeneratorChange) -> str:
    reference, current = change.seeds or ("?", "?")
    return f"seeded with {reference} in the reference and {current} in the current run"


def keep_from_drawing(change: GeneratorChange, evidence: Evidence) -> str:
    """Return what to do if only one run draws from a generator; states do not tell which."""
    ran = capitalised(_shown(change, evidence, " or "))
    todo = f"give it a separate generator, or restore the state of {change.name} afterwards"
    other = "if it draws in the reference only, compare why"
    return f"{ran} draws from the generator {change.name}: {todo}; {other}"


def _shown(change: GeneratorChange, evidence: Evidence, separator: str = ", ") -> str:
    ran = what_ran((*change.points, change.differs_at[1]), evidence)
    return (
        separator.join(dict.fromkeys(ran))
        or f"code outside {'all hooks' if evidence.hooks else 'the steps'}"
    )


def what_ran(points: Sequence[str], evidence: Evidence) -> Iterator[str]:
    """Yield what ran between these points: parts of the training, and the hooks of callbacks."""
    for point, end in pairwise(points):
        interval = _AFTER.get(point, _Interval())
        yield from users_of(interval.read_in, evidence, AFTER)
        if interval.runs:
            yield interval.runs
        for hook in interval.hooks.split():
            yield from users_of(hook, evidence, BEFORE, AFTER)
        yield from users_of(_AFTER.get(end, _Interval()).read_in, evidence, BEFORE)


def users_of(hook: str, evidence: Evidence, *orders: str) -> Iterator[str]:
    """Yield "A.on_train_start", "B.on_train_start" for the callbacks with a hook,
    called before or after ours.
    """
    for order in orders:
        names = evidence.hooks.get((hook, order), "")
        yield from (f"{name}.{hook}" for name in names.split(", ") if name)


def _moment(place: tuple[int, str]) -> str:
    step, point = place
    at = "" if point.startswith(("before ", "after ")) else "at the "
    where = f"of step {step}" if point in _WITHIN_STEP else f"(ahead of step {step})"
    return f"{at}{point} {where}"
