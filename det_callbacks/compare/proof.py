"""The chain of evidence behind a cause, one line a finding."""

from collections.abc import Sequence

from det_callbacks.compare.evidence import Evidence, GeneratorChange
from det_callbacks.compare.step import StepDifference
from det_callbacks.compare.wording import source_name
from det_callbacks.verdict import EnvironmentDifference

MAX_LINES = 20

_AFTER: dict[str, tuple[str, tuple[str, ...]]] = {
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


def what_ran(change: GeneratorChange, evidence: Evidence) -> str:
    """Return what ran between the last point where a generator was equal and the first where it was not."""
    ran: list[str] = []
    for point in change.points:
        what, hooks = _AFTER.get(point, ("", ()))
        if what:
            ran.append(what)
        ran.extend(f"{hook} of {evidence.hooks[hook]}" for hook in hooks if hook in evidence.hooks)
    return ", ".join(dict.fromkeys(ran)) or "something that no point encloses"


def show_change(change: GeneratorChange, evidence: Evidence | None) -> str:
    """Return how a generator came to differ, as one sentence without its final stop."""
    seeds = change.seeds
    if change.equal_at is None:
        is_start = change.differs_at[0] == 0
        how = (
            f"in another state {'from the start of the fit on' if is_start else _place(change.differs_at) + ' already'}"
        )
        if seeds is not None and seeds[0] != seeds[1]:
            how += f": seeded with {seeds[0]} in the reference, {seeds[1]} now"
        elif seeds is not None:
            how += f": seeded with {seeds[0]} in both, and drawn from a different number of times before it"
        return f"{change.name} was {how}"
    text = f"{change.name}: equal {_place(change.equal_at)}, different {_place(change.differs_at)}"
    if seeds is not None and seeds[0] != seeds[1]:
        text += f", seeded anew in between ({seeds[0]} in the reference, {seeds[1]} now)"
    elif seeds is not None:
        text += ", by another number of draws from the same seed"
    if evidence is not None:
        text += f"; in between ran: {what_ran(change, evidence)}"
    for points, side in ((change.only_reference, "the reference"), (change.only_current, "the current run")):
        if points:
            text += f"; only in {side}: {', '.join(points)}"
    return text


def _place(place: tuple[int, str]) -> str:
    step, point = place
    if point in ("batch start", "after forward", "after backward", "batch end"):
        return f"at the {point} of step {step}" if point.startswith("batch") else f"{point} of step {step}"
    shown = point if point.startswith(("before ", "after ")) else f"at {point}"
    return f"{shown} (ahead of step {step})"


def evidence_lines(
    difference: StepDifference,
    evidence: Evidence | None,
    environment: Sequence[EnvironmentDifference],
    *,
    is_first: bool = False,
    batch_of: int | None = None,
) -> tuple[str, ...]:
    """Return what led to a cause, in the order of time: weights, data, generators, choices."""
    lines: list[str] = []
    initial = initial_sources(difference)
    if is_first and difference.num_initial:
        lines.append(
            f"initial state: {len(initial)} of {difference.num_initial} tensors differ"
            + (f", first {initial[0]}" if initial else "")
        )
    lines.extend(_batch_lines(difference, evidence, batch_of))
    if evidence is not None:
        lines.extend(show_change(change, evidence) for change in evidence.generators)
    lines.extend(
        f"choice {entry.name}: {entry.reference} in the reference, {entry.current} now"
        for entry in environment
        if not entry.is_machine and entry.changes_bits
    )
    return tuple(lines[:MAX_LINES])


def initial_sources(difference: StepDifference) -> list[str]:
    """Return the names of the tensors of the initial state that differ."""
    found = (item for item in difference.findings if item.is_source and item.divergence.phase == "state")
    return list(dict.fromkeys(source_name(finding) for finding in found))


def _batch_lines(difference: StepDifference, evidence: Evidence | None, batch_of: int | None) -> list[str]:
    tensors = [item for item in difference.findings if item.is_source and item.divergence.phase == "data"]
    if not tensors:
        return []
    names = dict.fromkeys(source_name(item) for item in tensors if item.role != "samples")
    lines = [f"batch: other bits in {', '.join(list(names)[:3]) or 'its samples'}"]
    if batch_of is not None:
        lines.append(f"batch: it is the reference's of step {batch_of}")
    if evidence is None:
        return lines
    batch = evidence.batch
    said = {
        "same": "the sampler drew the same indices in the same order",
        "reordered": "the sampler drew the same indices in another order",
        "other": "the sampler drew other indices",
    }
    if batch.indices is not None:
        lines.append(f"batch: {said[batch.indices]}")
    if batch.is_loaded_alike is not None:
        lines.append(f"batch: what left the loader {'agrees' if batch.is_loaded_alike else 'differs'}")
    if batch.found_at is not None:
        lines.append(f"batch: its samples are in the reference, one of them at step {batch.found_at}")
    elif batch.was_searched:
        lines.append("batch: its samples are nowhere in what the reference recorded")
    if batch.first_index is not None:
        loader, position, ours, theirs = batch.first_index
        lines.append(f"batch: first other sample: {loader} [{position}] drew {ours} in the reference, {theirs} now")
    lines.extend(
        f"loader: {name} is {ours} in the reference, {theirs} now" for name, (ours, theirs) in batch.settings.items()
    )
    return lines
