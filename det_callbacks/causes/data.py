"""Batches that differ: what the sampler drew, what the loader returned, and what changed it."""

from collections.abc import Iterator, Mapping
from typing import Literal

from det_callbacks.causes.generators import (
    advise_draws,
    consumed,
    moved_before,
    restore_generators,
    show_change,
)
from det_callbacks.causes.graph import Explanation, Graph, Node, Walk
from det_callbacks.causes.sentences import source_name, values_text
from det_callbacks.causes.settings import dtype_setting, setting_node
from det_callbacks.compare.evidence import SampleSource
from det_callbacks.text import capitalised, count, listed

DataChange = Literal[
    "transformed",  # the loader's output matches
    "reordered",  # the same samples in a different order
    "other data set",  # of a different length
    "other list",  # the same indices, with samples of another step
    "other samples",  # the same indices, with samples that the reference never had
    "drawn",  # different indices, or samples of another step
    "other",  # unknown
]
"""How a batch differs."""

_OTHER_CONTENT = ("transformed", "other data set", "other samples", "other")
_TODO: Mapping[DataChange, str] = {
    "transformed": (
        "Check what the model gets that no loader gave, and what changes the batch between the "
        "loader and the model"
    ),
    "reordered": "Check the sampler, the shuffle's seed and the order of the files",
    "drawn": "Check the sampler (its weights, what it sorts by) and the loader's settings",
    "other data set": "Use the same data set, because its length differs",
    "other list": "Sort the files or samples that the data set lists",
    "other samples": (
        "Check transforms, augmentation, worker seeds, decoding, the data set's generators "
        "(numpy.random.default_rng()), the data itself (files, labels), and code that changes the "
        "loaded batch in place"
    ),
    "other": (
        "Check the samples of the data set, its transforms, and code that changes the loaded batch"
    ),
}
_CALLED = (
    "No DataLoader gave the batch: it is what the model was first called with. The recorded "
    "generators match, so check which call comes first, what is kept from earlier steps, and what "
    "was not recorded (a separate generator without a seed, the order of a set, a file)"
)
_HOOKS = " (on_before_batch_transfer and on_after_batch_transfer)"
_SHUFFLE = (
    "What shuffles the data (a generator, a seed, set_epoch) has to be restored to what it was "
    "when the epoch began"
)
_EPOCH = {"epoch end", "epoch start"}
_TORCH_CPU = "torch.cpu"  # torch's generator of the process
_DREW = {
    "same": "the same indices in the same order",
    "reordered": "the same indices in a different order",
    "cut": "the same indices, for batches of a different size",
    "other": "different indices",
}


# what a batch read


def batch_reads(graph: Graph, node: Node) -> Iterator[Node]:
    batch = graph.evidence.batch
    if (of_dtype := dtype_setting(graph)) is not None:
        yield from setting_node(of_dtype, node.step)
    elif (end := epoch_in_one_run(graph, node.step)) is not None:
        yield end
    elif batch.loader_matches:
        yield _outside(node, "code that changes the batch", "between the loader and the step")
    elif batch.indices is not None or graph.loader_settings:
        # otherwise something may have changed it after that
        is_other = batch.loader_matches is False or batch.indices not in (None, "same")
        yield Node(
            kind="loaded", name=_loader_of(graph), step=node.step, moment="data", is_proven=is_other
        )
    else:
        yield from moved_before(graph)
        yield _outside(node, "the source of the batch", "data", is_proven=False)


def loaded_reads(graph: Graph, node: Node) -> Iterator[Node]:
    batch = graph.evidence.batch
    if batch.indices not in (None, "same"):
        _, _, reference, current = batch.first_index or ("", 0, None, None)
        yield Node(
            kind="indices",
            name=node.name,
            step=node.step,
            moment="data",
            values=(reference, current),
        )
        return
    yield from indices_read(graph, node)
    yield _outside(node, "the samples of the data set", "data", is_proven=False)


def indices_read(graph: Graph, node: Node) -> Iterator[Node]:
    for (loader, setting), values in graph.loader_settings.items():
        yield Node(kind="option", name=f"{setting} of {loader}", step=node.step, values=values)
    yield from moved_before(graph)


def epoch_in_one_run(graph: Graph, step: int) -> Node | None:
    """Return the end of an epoch that only one run had before the step, or None."""
    for change in filter(graph.is_before_step, graph.evidence.generators):
        for side, points in (
            ("the reference", change.only_reference),
            ("the current run", change.only_current),
        ):
            if not _EPOCH.isdisjoint(points):
                return Node(
                    kind="boundary",
                    name=f"the end of an epoch, only in {side}",
                    step=step,
                    moment="epoch end",
                )
    return None


def _outside(node: Node, name: str, moment: str, *, is_proven: bool = True) -> Node:
    return Node(kind="outside", name=name, step=node.step, moment=moment, is_proven=is_proven)


def _loader_of(graph: Graph) -> str:
    first, settings = graph.evidence.batch.first_index, graph.loader_settings
    if first is not None:
        return first[0]
    return next((loader for loader, _ in settings), "the loader")


# what to say


def another_epoch(graph: Graph, walk: Walk) -> Explanation | None:
    """Only one run ended an epoch before the step, so the batches or the generators differ.

    Causes: data_order

    Example:
        Step 5: the batch differs (batch[0] and batch[1]), and the generator state also differs; the
        step started with this difference, so no op caused it. Only one run ended an epoch before
        this step. The sampler drew different indices, so compare limit_train_batches,
        overfit_batches, drop_last and the length of the data set. Settings differ:
        trainer.limit_train_batches (1.0 in the reference, 5 in the current run).
    """
    if walk.root.change is not None:
        return None
    todo = "Compare limit_train_batches, overfit_batches, drop_last and the length of the data set"
    advice = f"Only one run ended an epoch before this step. {advise_on_batch(graph, todo)}"
    return Explanation(cause="data_order", advice=advice)


def drawn_before_data(graph: Graph, walk: Walk) -> Explanation | None:
    """The batch differs because something drew from a generator before the sampler did,
    or a resume did not restore it.

    Causes: rng, data_order

    Example:
        Step 6: the batch differs (batch[0] and batch[1]), and the generator state also differs; the
        step started with this difference, so no op caused it. DrawsAtEpochEnd.on_train_epoch_end
        draws from the generator torch.cpu: give it a separate generator, or restore the state of
        torch.cpu afterwards; if it draws in the reference only, compare why.
    """
    change = consumed(graph)
    if change is not None and graph.is_before_step(change):
        return Explanation(cause="rng", advice=advise_draws(graph))
    if not graph.is_resumed or "rng" not in graph.source_phases:
        return None
    # a generator that was not restored shuffles differently, or draws and
    # augments different samples
    advice = restore_generators(graph) if change is None else advise_draws(graph)
    if graph.has_equal_samples:
        return (
            Explanation(cause="data_order", advice=advice)
            if _is_shuffle_unrestored(graph)
            else None
        )
    batch = graph.evidence.batch
    has_place = batch.source is not None and batch.source.has_all and batch.has_loader
    return None if has_place else Explanation(cause="rng", advice=advice)


def _is_shuffle_unrestored(graph: Graph) -> bool:
    """Return whether a resume did not restore the generator of the shuffle,
    which both runs seeded equally.
    """
    unrestored = (
        one for one in graph.evidence.generators if one.equal_at is None and not one.is_reseeded
    )
    batch = graph.evidence.batch
    is_other_shuffle = batch.is_process_shuffle and batch.indices != "same"
    return is_other_shuffle and any(change.name == _TORCH_CPU for change in unrestored)


def batch(graph: Graph, walk: Walk) -> Explanation:
    """The batch differs: the batch size, the samples or their order.

    Causes: settings, data_order, data_content

    Example:
        Step 0: the batch differs (batch[0] and batch[1]); the step started with this difference, so
        no op caused it. The sampler drew the same indices in the same order, so sort the files or
        samples that the data set lists.
    """
    if any(setting == "batch_size" for _, setting in graph.loader_settings):
        return Explanation(
            cause="settings", advice=advise_on_batch(graph, "Use the reference's batch size")
        )
    is_other_content = _data_change(graph) in _OTHER_CONTENT
    return Explanation(
        cause="data_content" if is_other_content else "data_order", advice=_advise(graph)
    )


def _data_change(graph: Graph) -> DataChange:
    batch = graph.evidence.batch
    if batch.loader_matches is True:
        return "transformed"
    if graph.has_equal_samples or batch.indices == "reordered":
        return "reordered"
    if any(setting == "length of the data set" for _, setting in graph.loader_settings):
        return "other data set"
    if batch.indices == "same":
        return "other samples" if batch.source is None else "other list"
    return "other" if batch.indices is None and batch.source is None else "drawn"


def _advise(graph: Graph) -> str:
    batch, how = graph.evidence.batch, _data_change(graph)
    changes = [*filter(graph.is_before_step, graph.evidence.generators)]
    source = batch.source
    if graph.is_resumed and source is not None and source.has_all:
        place = _place_in_data(source, has_loader=batch.has_loader)
        return f"It holds the samples of step {source.step} of the reference{place}"
    if graph.is_resumed and how == "drawn" and batch.has_loader:
        of_stream = ". The state of a stream may lack what waits in its shuffle buffer" * (
            batch.indices is None
        )
        return advise_on_batch(graph, f"Restore the position in the data. {_SHUFFLE}{of_stream}")
    if how in ("drawn", "other") and not (batch.has_loader or changes):
        return _CALLED
    source = batch.source
    if how == "drawn" and source and source.has_all and not (source.is_other_epoch or changes):
        todo = "check what leaves out or repeats a step (a condition, continue), and the sampler"
        return f"It holds the samples of step {source.step} of the reference, so {todo}"
    if how in ("other samples", "other") and changes:
        shown = listed(f"the generator {change.name}" for change in changes)
        why = capitalised(show_change(changes[0], graph.evidence))
        return f"{why}. Seed what the samples are made with: {shown}"
    idle = [change.name for change in graph.evidence.idle] if graph.is_first_seen else []
    # the first batch was loaded before the first step
    if how in ("other samples", "other") and idle and batch.has_loader:
        may = (
            f"the states of {listed(idle)} differed when the fit started, so seed them if the "
            "samples use them"
        )
        return f"{advise_on_batch(graph, _TODO[how])}; {may}"
    is_other_shuffle = how == "drawn" and batch.indices == "other" and not graph.loader_settings
    change = next(iter(changes), None)
    if change is None or not is_other_shuffle:
        is_hooked = how == "transformed" and graph.framework == "lightning"
        return advise_on_batch(graph, _TODO[how] + _HOOKS * is_hooked)
    why = capitalised(show_change(change, graph.evidence))
    return f"{why}. Give the shuffle the same seed, and draw the same numbers before it"


def _place_in_data(source: SampleSource, *, has_loader: bool) -> str:
    """Return what the place of a batch that a resumed run got says, and what to do,
    after "of the reference".
    """
    own, place = source.batch_place, source.place
    if not has_loader:
        return ", and no DataLoader gave it: restore what it is drawn with, before it is drawn"
    if source.is_other_epoch and place == own:
        return f", at this place in epoch {source.epoch}, so the order was not restored. {_SHUFFLE}"
    if source.is_other_epoch:
        first = "the first of" if place == 0 else f"at place {place} of"
        return (
            f", {first} epoch {source.epoch}. Skip the {count(own, 'trained batch')} of the epoch. "
            f"{_SHUFFLE}"
        )
    if place == 0:
        which = "it" if own == 1 else f"the {own} trained batches"
        return f", the first of the epoch, so the loader started again: skip {which}"
    if place < own:
        which = (
            "the last trained batch was"
            if own - place == 1
            else f"the last {own - place} trained batches were"
        )
        return f", so {which} loaded again: skip {own} batches of the epoch"
    number = place - own
    return (
        f", so {count(number, 'batch')} too many {'was' if number == 1 else 'were'} skipped: skip "
        f"{own} of the epoch"
    )


def batch_lines(graph: Graph) -> list[str]:
    tensors = [item for item in graph.sources if item.divergence.phase == "data"]
    if not tensors:
        return []
    in_both = [item for item in tensors if item.divergence.kind not in ("missing", "extra")]
    names = [source_name(item) for item in in_both if item.site.role != "samples"]
    bits = [f"different bits in {listed(names) or 'its samples'}"] * bool(in_both)
    facts = [*bits, *_of_batch(graph)]
    return [*(f"batch: {one}" for one in facts), *(f"loader: {one}" for one in _of_loader(graph))]


def advise_on_batch(graph: Graph, todo: str) -> str:
    """Return the settings of the loader that differ, or the first fact on the batch,
    and then what to do.
    """
    of_batch = _of_batch(graph) if graph.has_other_data else []
    reasons = _of_loader(graph) or [capitalised(one) for one in of_batch[:1]]
    if not reasons:
        return todo
    return f"{listed(reasons, '; ')}, so {todo[:1].lower()}{todo[1:]}"


def _of_loader(graph: Graph) -> list[str]:
    settings = graph.loader_settings
    return [
        values_text(f"{setting} of {loader}", *values)
        for (loader, setting), values in settings.items()
    ]


def _of_batch(graph: Graph) -> list[str]:
    batch, facts = graph.evidence.batch, list[str]()
    if batch.indices is not None:
        facts.append(f"the sampler drew {_DREW[batch.indices]}")
    if batch.loader_matches is not None:
        facts.append(
            "the loader's output matches" if batch.loader_matches else "the loader's output differs"
        )
    if batch.source is not None:
        which = "all of its samples are" if batch.source.has_all else "one of its samples is"
        facts.append(f"{which} at step {batch.source.step} of the reference")
    elif batch.was_searched and batch.indices != "cut":
        same = (
            f"{batch.num_same} of {batch.num_samples} recorded samples match this step of the "
            "reference"
        )
        facts.append(same if batch.num_same else "the reference recorded none of its samples")
    if batch.first_index is not None and batch.indices != "cut":
        loader, position, reference, current = batch.first_index
        both = f"{reference} in the reference, {current} in the current run"
        facts.append(f"first different sample: the sampler of {loader} drew at [{position}] {both}")
    return facts
