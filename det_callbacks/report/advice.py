"""What can be done about a difference, and what led to its cause: sentences and lines of evidence."""

from collections.abc import Callable, Mapping

from det_callbacks.compare.cause import DataChange, Facts, Judgement
from det_callbacks.compare.evidence import Evidence, GeneratorChange
from det_callbacks.report.sentences import MAX_NAMED, show_differences, source_name

MAX_LINES = 20
"""Lines of evidence."""

# what can be done


def advise(facts: Facts, judgement: Judgement) -> str:
    """Return a sentence that a person can act on, without its final stop; "" where there is nothing to add."""
    return _ADVICE.get(judgement.rule, _advise_lost_value)(facts)


def _advise_initial(facts: Facts) -> str:
    share, seeded = _share(facts), facts.other_seed
    if facts.has_few_weights:
        return (
            f"Look at how {facts.initial_sources[0]} is initialised or loaded: {share}, so the seed was the same and "
            "the code, or the weights that were loaded, are not"
        )
    if seeded is not None and seeded.seeds is not None:
        return (
            f"Set the same seed before the model is built: {share}, and {seeded.name} was seeded with "
            f"{seeded.seeds[0]} in the reference and with {seeded.seeds[1]} now"
        )
    also = [name for phase, name in (("data", "data"), ("rng", "generators")) if phase in facts.source_phases]
    rest = f"and so do {' and '.join(also)}" if also else "while data and generators agree"
    return f"Set the seed before the model is built, and load the same weights: {share}, {rest}"


def _share(facts: Facts) -> str:
    num, total = len(facts.initial_sources), facts.difference.num_initial
    if num >= total:
        return "the only initial tensor differs" if total == 1 else f"all {total} initial tensors differ"
    if num == facts.num_random:
        what = "initial tensor that holds" if num == 1 else f"{num} initial tensors that hold"
        return f"{'the only' if num == 1 else 'all'} {what} more than one value differ{'s' if num == 1 else ''}"
    return f"{num} of {total} initial tensors differ"


def _advise_batch_size(facts: Facts) -> str:
    alike = "the sampler drew the same samples, and they" if facts.batch.indices == "cut" else "the samples"
    return f"Give the loader the same batch size: {alike} are cut into other batches{_settings(facts)}"


def _advise_batch(facts: Facts) -> str:
    found_at = facts.batch.found_at
    texts: Mapping[DataChange, str] = {
        "transformed": "Look at on_before_batch_transfer and on_after_batch_transfer: what left the loader agrees, and "
        "what they made of it does not",
        "reordered": "Look at the sampler, the shuffle's seed and the sorting of files: the batch has the same samples "
        "in another order",
        "other data set": "The data set is another one",
        "listed otherwise": "Sort what the data set lists: the sampler drew the same indices, and the samples behind "
        f"them are others, which the reference had at step {found_at}",
        "made otherwise": "Look at transforms, augmentation, worker seeds and decoding: the sampler drew the same "
        "samples, and their content differs",
        "other": "None of its samples is in what the reference recorded: they are others, or were made otherwise"
        if facts.batch.was_searched
        else "",
        "drawn": _advise_drawn(facts),
    }
    change = facts.data_change
    return texts.get(change, "") + (_settings(facts) if change not in ("transformed", "other step") else "")


def _advise_drawn(facts: Facts) -> str:
    if facts.batch.indices != "other":
        return (
            "Look at the order in which the data come: samples of this batch are in the reference at step "
            f"{facts.batch.found_at}"
        )
    if any(name.startswith(("num_workers", "sampler")) for name in facts.batch.settings):
        return "The loader is set otherwise, so the sampler drew other samples"
    change = next(filter(facts.is_before_step, facts.generators), None)
    if change is None:
        return (
            "Look at the sampler itself (its weights, what it sorts by): it drew other samples, and no generator that "
            "is known differs"
        )
    return f"Give the shuffle the same seed: the sampler drew other samples; {show_change(change, facts.evidence)}"


def _advise_generator(facts: Facts) -> str:
    change, evidence = facts.consumed, facts.evidence
    if change is None or evidence is None:
        if not facts.generators:
            return ""
        text = show_change(facts.generators[0], evidence)
        if facts.generators[0].equal_at is None and facts.generators[0].seeds is None:
            text += ": seed Python, NumPy and torch alike before the model is built (DeterminismSettings(seed=...))"
        return text
    for points, side in ((change.only_reference, "the reference"), (change.only_current, "the current run")):
        if any(point in ("before validation", "epoch end", "epoch start") for point in points):
            return (
                f"{', '.join(points)}: only in {side}, and something there drew from {change.name}. Look at "
                "val_check_interval, limit_train_batches, drop_last and the length of the data"
            )
    ran = _what_ran(change, evidence)
    return f"Keep {ran} from drawing from {change.name}: give it a generator of its own, or put the state back after it"


def _advise_graph(facts: Facts) -> str:
    step = facts.difference.step
    return (
        "torch.compile compiled another graph here. Start both runs in fresh processes, since what was compiled before "
        "decides as well (a resumed run knows no earlier batch sizes: drop_last or dynamic=True keep to one graph); "
        f'see why with TORCH_LOGS=recompiles,graph_breaks; or record step {step} of both with compiled="eager" '
        f"(only_steps=[{step}]) to see which op is another"
    )


def _advise_written(facts: Facts) -> str:
    if not any(found.role == "left" for found in facts.difference.findings):
        return ""
    return (
        f"An op inside a CUDA graph runs where nobody sees it: record step {facts.difference.step} of both without "
        "CUDA graphs (call the function itself instead of its replay, or compile without reduce-overhead) to see which "
        "op it is"
    )


def _advise_lost_value(facts: Facts) -> str:
    """Say what a resume may have lost where all that a checkpoint restores agrees, and no choice explains it."""
    if not facts.is_resumed or facts.choices:
        return ""
    sources, kind = facts.sources, (facts.origin or facts.first).divergence.kind
    is_outside = bool(sources) and all(one.role == "input" and one.divergence.name is None for one in sources)
    if not is_outside and (sources or kind not in ("argument", "missing", "extra")):
        return ""
    return (
        "All that a checkpoint restores agrees: look for a Python value that the checkpoint does not hold (an "
        "attribute, a counter, the state of an environment), and keep it there with on_save_checkpoint and "
        "on_load_checkpoint, or in a buffer"
    )


def _settings(facts: Facts) -> str:
    shown = [f"{name}: {ours} in the reference, {theirs} now" for name, (ours, theirs) in facts.batch.settings.items()]
    return f" ({'; '.join(shown[:MAX_NAMED])})" if shown else ""


_ADVICE: Mapping[str, Callable[[Facts], str]] = {
    "restored state": lambda facts: "",
    "initial state": _advise_initial,
    "another epoch": lambda facts: (
        "Look at limit_train_batches, overfit_batches, drop_last and the length of the data: an epoch ended in one run "
        f"only{_settings(facts)}"
    ),
    "generator before the data": lambda facts: _advise_generator(facts) if facts.consumed is not None else "",
    "batch size": _advise_batch_size,
    "batch": _advise_batch,
    "generator": _advise_generator,
    "choice": lambda facts: "",
    "compiled graph": _advise_graph,
    "written elsewhere": _advise_written,
}

# what led to a cause

_AFTER: Mapping[str, tuple[str, tuple[str, ...]]] = {
    # point -> (what runs after it, the hooks of callbacks and module that are called there)
    "fit start": ("the set-up of the data", ("on_train_start",)),
    "before the sanity check": (
        "the sanity check",
        ("on_sanity_check_start", "on_validation_start", "on_validation_batch_end", "on_validation_epoch_end"),
    ),
    "after the sanity check": ("", ("on_sanity_check_end", "on_train_start")),
    "epoch start": ("", ("on_train_epoch_start",)),
    "before the loader starts": ("the start of the loader's iterators", ()),
    "before a batch is drawn": ("the drawing of the batch", ()),
    "batch start": ("the forward pass", ("on_train_batch_start",)),
    "after forward": ("the backward pass", ("on_before_backward",)),
    "after backward": ("the optimizer", ("on_after_backward", "on_before_optimizer_step", "on_before_zero_grad")),
    "batch end": ("", ("on_train_batch_end",)),
    "before validation": (
        "validation",
        (
            "on_validation_start",
            "on_validation_epoch_start",
            "on_validation_batch_start",
            "on_validation_batch_end",
            "on_validation_epoch_end",
        ),
    ),
    "after validation": ("", ("on_validation_end",)),
    "epoch end": ("", ("on_train_epoch_end",)),
}


def evidence_lines(facts: Facts) -> tuple[str, ...]:
    """Return what led to a cause, one line a finding, in the order of time: weights, data, generators, choices."""
    difference, initial, lines = facts.difference, facts.initial_sources, list[str]()
    if facts.is_first and difference.num_initial:
        first = f", first {initial[0]}" if initial else ""
        lines.append(f"initial state: {len(initial)} of {difference.num_initial} tensors differ{first}")
    lines += _batch_lines(facts)
    lines += [show_change(change, facts.evidence) for change in facts.generators]
    lines += [f"choice {show_differences([entry])}" for entry in facts.choices]
    lines = lines[:MAX_LINES]
    return (
        (*lines, f"the evidence of generators and data could not be used: {facts.unread}")
        if facts.unread
        else (*lines,)
    )


def _batch_lines(facts: Facts) -> list[str]:
    tensors = [item for item in facts.sources if item.divergence.phase == "data"]
    if not tensors:
        return []
    names = dict.fromkeys(source_name(item) for item in tensors if item.role != "samples")
    lines = [f"batch: other bits in {', '.join(list(names)[:MAX_NAMED]) or 'its samples'}"]
    if facts.batch_of is not None:
        lines.append(f"batch: it is the reference's of step {facts.batch_of}")
    if facts.evidence is None:
        return lines
    batch = facts.evidence.batch
    drew = {
        "same": "the same indices in the same order",
        "reordered": "the same indices in another order",
        "cut": "the same indices, which are cut into batches of another size",
        "other": "other indices",
    }
    if batch.indices is not None:
        lines.append(f"batch: the sampler drew {drew[batch.indices]}")
    if batch.is_loaded_alike is not None:
        lines.append(f"batch: what left the loader {'agrees' if batch.is_loaded_alike else 'differs'}")
    if batch.found_at is not None:
        lines.append(f"batch: its samples are in the reference, one of them at step {batch.found_at}")
    elif batch.was_searched and batch.indices != "cut":
        lines.append("batch: its samples are nowhere in what the reference recorded")
    if batch.first_index is not None and batch.indices != "cut":
        loader, position, ours, theirs = batch.first_index
        lines.append(f"batch: first other sample: {loader} [{position}] drew {ours} in the reference, {theirs} now")
    return lines + [
        f"loader: {name} is {ours} in the reference, {theirs} now" for name, (ours, theirs) in batch.settings.items()
    ]


def show_change(change: GeneratorChange, evidence: Evidence | None) -> str:
    """Return how a generator came to differ, as one sentence without its final stop."""
    seeds = change.seeds
    if change.equal_at is None:
        is_start = change.differs_at[0] == 0
        since = "from the start of the fit on" if is_start else f"{_moment(change.differs_at)} already"
        how = f"in another state {since}"
        if seeds is not None and change.is_reseeded:
            how += f": seeded with {seeds[0]} in the reference, {seeds[1]} now"
        elif seeds is not None:
            how += f": seeded with {seeds[0]} in both, and drawn from a different number of times before it"
        return f"{change.name} was {how}"
    text = f"{change.name}: equal {_moment(change.equal_at)}, different {_moment(change.differs_at)}"
    if seeds is not None and change.is_reseeded:
        text += f", seeded anew in between ({seeds[0]} in the reference, {seeds[1]} now)"
    elif seeds is not None:
        text += ", by another number of draws from the same seed"
    if evidence is not None:
        text += f"; in between ran: {_what_ran(change, evidence)}"
    for points, side in ((change.only_reference, "the reference"), (change.only_current, "the current run")):
        if points:
            text += f"; only in {side}: {', '.join(points)}"
    return text


def _what_ran(change: GeneratorChange, evidence: Evidence) -> str:
    """Return what ran between the last point where a generator was equal and the first where it was not."""
    ran: list[str] = []
    for point in change.points:
        what, hooks = _AFTER.get(point, ("", ()))
        ran += [what] if what else []
        ran += [f"{hook} of {evidence.hooks[hook]}" for hook in hooks if hook in evidence.hooks]
    return ", ".join(dict.fromkeys(ran)) or "something that no point encloses"


def _moment(place: tuple[int, str]) -> str:
    step, point = place
    if point in ("batch start", "after forward", "after backward", "batch end"):
        return f"at the {point} of step {step}" if point.startswith("batch") else f"{point} of step {step}"
    shown = point if point.startswith(("before ", "after ")) else f"at {point}"
    return f"{shown} (ahead of step {step})"
