"""What can be done about a difference, by the rule that found its cause, and what led to that cause."""

from collections.abc import Callable, Mapping, Sequence

from det_callbacks.compare.cause import DataChange, Facts, earlier_choice
from det_callbacks.compare.evidence import Evidence, GeneratorChange
from det_callbacks.compare.metrics import GENERATOR, MetricDifference
from det_callbacks.report.console import at_most, listed
from det_callbacks.report.sentences import show_differences, source_name
from det_callbacks.runs.evidence import AFTER, BEFORE
from det_callbacks.verdict import EnvironmentDifference

MAX_LINES = 20  # of evidence


def advise(facts: Facts, rule: str) -> str:
    """Return a sentence that a person can act on, without its final stop; "" where there is nothing to add."""
    text = ADVICE[rule]
    return text(facts) if callable(text) else text.format(step=facts.difference.step)


def _advise_initial(facts: Facts) -> str:
    if any(one.divergence.kind != "content" and one.divergence.phase == "state" for one in facts.sources):
        return "Build the same model: some of its tensors have another name, shape or dtype, or are in one run only"
    initial = facts.initial_sources
    if 2 * len(initial) <= facts.num_random or facts.num_random < 2:
        text = "the code, the weights that were loaded, or what was drawn before (seed first) is not the same"
        return f"Look at how {initial[0]} is initialised or loaded: {text}"
    seeded = (one for one in facts.evidence.other_starts if one.is_reseeded)
    known = [show_change(one, facts.evidence) for one in seeded]
    return f"Set the same seed before the model is built{f': {known[0]}' if known else ', or load the same weights'}"


_OF_BATCH: Mapping[DataChange, str] = {
    "transformed": "Look at on_before_batch_transfer and on_after_batch_transfer",
    "reordered": "Look at the sampler, the shuffle's seed and the sorting of files",
    "drawn": "Look at the sampler (its weights, what it sorts by) and at the loader's settings",
    "other data set": "The data set is another one",
    "listed otherwise": "Sort what the data set lists",
    "made otherwise": "Look at transforms, augmentation, worker seeds, decoding, generators of the data set's own "
    "(numpy.random.default_rng()), and the data itself (files, labels)",
    "other": "Look at what the data set holds, and at its transforms",
}


def _advise_batch(facts: Facts) -> str:
    batch, change = facts.evidence.batch, next(filter(facts.is_before_step, facts.evidence.generators), None)
    if facts.data_change != "drawn" or batch.settings or batch.indices != "other" or change is None:
        return _because(_OF_BATCH[facts.data_change], facts)
    return f"Give the shuffle the same seed, and draw the same before it: {show_change(change, facts.evidence)}"


def _because(todo: str, facts: Facts) -> str:
    """Return what to do, with the setting of a loader, or else what is known of the batch, that says so."""
    known = [line.partition(": ")[2] for line in _batch_lines(facts)[1:]]
    reasons = known[-len(facts.evidence.batch.settings) :] if facts.evidence.batch.settings else known[:1]
    return f"{todo}: {listed(reasons, '; ')}" if reasons else todo


def _advise_generator(facts: Facts) -> str:
    change, changes = facts.consumed, facts.evidence.generators
    is_old = any(one.equal_at is None or "before the loader starts" in one.points for one in changes)
    if facts.is_resumed and is_old and "rng" in facts.source_phases:
        return _UNRESTORED
    if change is None:
        todo = ": seed Python, NumPy and torch alike before the model is built"
        if not changes:
            return "Seed it, and let checkpoints keep its state"
        is_unseeded = changes[0] in facts.evidence.other_starts and changes[0].seeds is None
        return show_change(changes[0], facts.evidence) + todo * is_unseeded
    ran = _what_ran(change, facts.evidence)
    return f"Keep {ran} from drawing from {change.name}: give it a generator of its own, or put the state back after it"


def _advise_unrecorded(facts: Facts) -> str:
    what = "This state differs since" if facts.sources else "It may have begun"
    return _begun_before(what, facts.difference.step, facts.choices)


def _begun_before(what: str, step: int, choices: Sequence[EnvironmentDifference]) -> str:
    one = earlier_choice(choices)
    known = f"a choice explains it, {show_differences([one])}" if one else "record them too to see where it starts"
    return f"{what} before step {step}, and steps before it were not recorded: {known}"


def _advise_scripted(modules: Sequence[str]) -> str:
    names = listed(name or "the LightningModule" for name in modules)
    return (
        f"TorchScript runs in {names}, and what ran before in the process decides which ops its executor runs. Start "
        "both runs in fresh processes, and run it as often before the fit"
    )


def _advise_lost_value(facts: Facts) -> str:
    """Say what a resume may have lost where all that a checkpoint restores agrees, and no choice explains it."""
    is_lost = (facts.origin or facts.first).divergence.kind in ("argument", "missing", "extra")
    if facts.sources:
        is_lost = all(one.role == "input" and one.divergence.name is None for one in facts.sources)
        is_lost &= "unselected" not in facts.difference.current.program.ops_skipped
    if not is_lost or not facts.is_resumed or facts.choices:
        return _FROM_OUTSIDE if is_lost and facts.first.start == "outside" and not facts.choices else ""
    return (
        "All that a checkpoint restores agrees: look for a Python value that the checkpoint does not hold, and keep it "
        "there with on_save_checkpoint and on_load_checkpoint, or in a buffer"
    )


_OTHER_EPOCHS = "An epoch ended in one run only: look at limit_train_batches, overfit_batches, drop_last and the data"
_FROM_OUTSIDE = "Seed what makes it, record it, or name it there: observe_non_deterministic (docs/how-to/replay.md)"
_UNRESTORED = 'Resume with resume="exact" from a checkpoint saved with the callback: Lightning restores no generator'

ADVICE: Mapping[str, str | Callable[[Facts], str]] = {
    # every rule of compare/cause.py -> what to do; "" where the explanation begins with the choice
    "dtype": "",
    "restored state": "Compare the checkpoint with the one that was saved there, and look at what changes this state "
    "before the step. A buffer with persistent=False is in no checkpoint: keep it there with on_save_checkpoint",
    "initial state": _advise_initial,
    "another epoch": lambda facts: _because(_OTHER_EPOCHS, facts),
    "generator before the data": lambda facts: _advise_generator(facts) if facts.consumed else _UNRESTORED,
    "batch size": lambda facts: _because("Give the loader the same batch size", facts),
    "batch": _advise_batch,
    "generator": _advise_generator,
    "steps that were not recorded": _advise_unrecorded,
    "input from outside": _advise_lost_value,
    "choice": "",
    "other gradients": "Give it the same parameters in the same order: look at configure_optimizers and requires_grad",
    "compiled graph": "torch.compile compiled another graph here. Start both runs in fresh processes, since what was "
    "compiled before decides as well (drop_last or dynamic=True keep to one graph); see why with "
    'TORCH_LOGS=recompiles,graph_breaks; or record step {step} of both with compiled="eager" (only_steps=[{step}])',
    "scripted module": lambda facts: _advise_scripted(facts.evidence.scripted),
    "structure": _advise_lost_value,
    "origin": _advise_lost_value,
    "first difference": _advise_lost_value,
}


def advise_metric(metric: MetricDifference) -> str:
    """Return what can be done about a metric that differs; "" where there is nothing to add."""
    found, reading = metric.known_reason[1], metric.readings[1]
    if metric.explaining_choice is not None:
        return ""
    if metric.kind != "content":
        return "Look at where epochs end: limit_train_batches, drop_last, the data" if metric.is_read_in_one else ""
    if found:
        is_drawn = found.startswith(GENERATOR)
        todo = "Seed what it is computed with alike" if is_drawn else "Look at the data that it is computed from"
        return f"{todo}: the {found} differs"
    if metric.is_after_gap:
        return _begun_before("It may have begun", reading.step + 1, metric.choices)
    later = "" if reading.where == "epoch" else ", and only the first batch of each loader is compared"
    todo = f"Look at how it is computed: all that is known of generators and data agrees{later}"
    left_out = f"""modules=["*", "!metric/{metric.name}"] (on the command line: --modules '*,!metric/{metric.name}')"""
    return f"{todo}. What can never repeat, such as a wall clock, is left out: record the run again with {left_out}"


_VALIDATION = "on_validation_epoch_start on_validation_batch_start on_validation_batch_end on_validation_epoch_end"
_AFTER: Mapping[str, tuple[str, str, str]] = {
    # point -> our hook in which it is read (callbacks that stand after ours are called after it, the others before),
    # what runs after it, and the hooks that are called there
    "fit start": ("", "the set-up of the data", "on_train_start"),
    "before the sanity check": ("on_sanity_check_start", "the sanity check", f"on_validation_start {_VALIDATION}"),
    "after the sanity check": ("on_sanity_check_end", "", "on_train_start"),
    "epoch start": ("on_train_epoch_start", "", ""),
    "before the loader starts": ("", "the start of the loader's iterators", ""),
    "before a batch is drawn": ("", "the drawing of the batch", ""),
    "batch start": ("on_train_batch_start", "the forward pass", "on_before_zero_grad"),
    "after forward": ("on_before_backward", "the backward pass", ""),
    "after backward": ("on_after_backward", "the optimizer", "on_before_optimizer_step"),
    "batch end": ("on_train_batch_end", "", ""),
    "before validation": ("on_validation_start", "validation", _VALIDATION),
    "after validation": ("on_validation_end", "", ""),
    "epoch end": ("on_train_epoch_end", "", ""),
}
_DREW = {
    "same": "the same indices in the same order",
    "reordered": "the same indices in another order",
    "cut": "the same indices, which are cut into batches of another size",
    "other": "other indices",
}


def evidence_lines(facts: Facts) -> tuple[str, ...]:
    """Return what led to a cause, one line a finding, in the order of time: weights, data, generators, choices."""
    initial, lines = facts.initial_sources, list[str]()
    if facts.is_first_seen and facts.num_initial:
        which = ", all that hold more than one value" if len(initial) == facts.num_random < facts.num_initial else ""
        lines.append(f"initial state: {len(initial)} of {facts.num_initial} tensors differ{which}")
    lines += [*_batch_lines(facts), *(show_change(one, facts.evidence) for one in facts.evidence.generators)]
    lines += [f"{show_start(one)}, and nothing drew from it" for one in facts.evidence.idle]
    lines += [f"choice {show_differences([entry])}" for entry in facts.choices]
    if facts.evidence.unread:
        lines.insert(0, f"the evidence of generators and data could not be used: {facts.evidence.unread}")
    return tuple(at_most(MAX_LINES, lines))


def _batch_lines(facts: Facts) -> list[str]:
    tensors = [item for item in facts.sources if item.divergence.phase == "data"]
    if not tensors:
        return []
    names, batch = [source_name(item) for item in tensors if item.role != "samples"], facts.evidence.batch
    found = [f"other bits in {listed(names) or 'its samples'}"]
    if batch.indices is not None:
        found.append(f"the sampler drew {_DREW[batch.indices]}")
    if batch.is_loaded_alike is not None:
        found.append(f"what left the loader {'agrees' if batch.is_loaded_alike else 'differs'}")
    if batch.found_at is not None:
        which = "its samples are all" if batch.is_whole else "one of its samples is"
        found.append(f"{which} at step {batch.found_at} of the reference")
    elif batch.was_searched and batch.indices != "cut":
        found.append("its samples are nowhere in what the reference recorded")
    if batch.first_index is not None and batch.indices != "cut":
        loader, position, ours, theirs = batch.first_index
        found.append(f"first other sample: {loader} [{position}] drew {ours} in the reference, {theirs} now")
    settings = (f"{name} is {ours} in the reference, {theirs} now" for name, (ours, theirs) in batch.settings.items())
    return [*(f"batch: {one}" for one in found), *(f"loader: {one}" for one in settings)]


def show_change(change: GeneratorChange, evidence: Evidence) -> str:
    """Return how a generator came to differ, as one sentence without its final stop."""
    if change.equal_at is None:
        if not change.differs_at[0]:
            return show_start(change)
        return f"{change.name} was in another state {_moment(change.differs_at)} already{_why(change)}"
    if change.has_other_start:
        places = f"between {_moment(change.equal_at)} and {_moment(change.differs_at)}"
        return f"{show_start(change)}; it was first drawn from {places}, where this ran: {_what_ran(change, evidence)}"
    text = f"{change.name}: equal {_moment(change.equal_at)}, different {_moment(change.differs_at)}{_why(change)}"
    sides = {"the reference": change.only_reference, "the current run": change.only_current}
    only = (f"; only in {side}: {', '.join(points)}" for side, points in sides.items() if points)
    return f"{text}; in between ran: {_what_ran(change, evidence)}{''.join(only)}"


def show_start(change: GeneratorChange) -> str:
    """Return that a generator began elsewhere, as one sentence without its final stop."""
    return f"{change.name} was in another state from the start of the fit on{_why(change)}"


def _why(change: GeneratorChange) -> str:
    if change.seeds is None:
        return ""
    ours, theirs = change.seeds
    if change.is_reseeded:
        return f", seeded with {ours} in the reference, {theirs} now"
    return ", by another number of draws from the same seed"


def _what_ran(change: GeneratorChange, evidence: Evidence) -> str:
    """Return what ran between the last point where a generator was equal and the first where it was not."""
    ran: list[str] = []

    def add(hook: str, *orders: str) -> None:
        names = [evidence.hooks[key] for order in orders if (key := f"{order} {hook}") in evidence.hooks]
        ran.extend([f"{hook} of {', '.join(names)}"] if names else [])

    ends = (*change.points[1:], change.differs_at[1])
    for point, end in zip(change.points, ends, strict=True):
        read_in, what, hooks = _AFTER.get(point, ("", "", ""))
        add(read_in, AFTER)
        ran += [what] if what else []
        for hook in hooks.split():
            add(hook, BEFORE, AFTER)
        add(_AFTER.get(end, ("", "", ""))[0], BEFORE)
    return ", ".join(dict.fromkeys(ran)) or "something that no point encloses"


def _moment(place: tuple[int, str]) -> str:
    step, point = place
    at = "" if point.startswith(("before ", "after ")) else "at the "
    is_within = point in ("batch start", "after forward", "after backward", "batch end")
    return f"{at}{point} {f'of step {step}' if is_within else f'(ahead of step {step})'}"
