"""Why the state of a generator differs, what ran in between, and what to do."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise

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
from det_callbacks.text import capitalised

RESUME_EXACTLY = (
    'The resume did not restore the generators: Lightning does not, so resume with resume="exact", from a checkpoint '
    "saved with the callback; your own loop has to save and restore them"
)

_VALIDATION = "on_validation_epoch_start on_validation_batch_start on_validation_batch_end on_validation_epoch_end"
_AFTER: Mapping[str, tuple[str, str, str]] = {
    # point -> our hook in which it is read (callbacks listed after ours are called after it, the others before),
    # what runs after it, and the hooks that are called there
    "fit start": ("", "the set-up of the data", "on_train_start"),
    "before the sanity check": ("on_sanity_check_start", "the sanity check", f"on_validation_start {_VALIDATION}"),
    "after the sanity check": ("on_sanity_check_end", "", "on_train_start"),
    "epoch start": ("on_train_epoch_start", "", ""),
    LOADER: ("", "the start of the loader's iterators", ""),
    DRAWING: ("", "the loading of the batch, and code between it and the step", ""),
    BATCH_START: ("on_train_batch_start", "the forward pass", "on_before_zero_grad"),
    AFTER_FORWARD: ("on_before_backward", "the backward pass", ""),
    AFTER_BACKWARD: ("on_after_backward", "code after the backward pass", "on_before_optimizer_step"),
    BATCH_END: ("on_train_batch_end", "", ""),
    "before validation": ("on_validation_start", "validation", _VALIDATION),
    "after validation": ("on_validation_end", "", ""),
    "epoch end": ("on_train_epoch_end", "", ""),
}
_WITHIN_STEP = (BATCH_START, AFTER_FORWARD, AFTER_BACKWARD, BATCH_END)


def show_change(change: GeneratorChange, evidence: Evidence) -> str:
    """Return why a generator differs, without a final stop."""
    why = _why_it_differs(change)
    if change.equal_at is None:
        if change.differs_at[0] == 0:
            return show_start(change)
        return f"the generator {change.name} already differs {_moment(change.differs_at)}{why}"
    if change.has_other_start:
        use = f"the fit had not drawn from it {_moment(change.equal_at)}, but had {_moment(change.differs_at)}"
        return f"{show_start(change)}; {use}; what ran in between: {_shown(change, evidence)}"
    matches = f"matches {_moment(change.equal_at)} and differs {_moment(change.differs_at)}"
    text = f"the generator {change.name} {matches}{why}"
    sides = {"the reference": change.only_reference, "the current run": change.only_current}
    only = (f"; only in {side}: {', '.join(points)}" for side, points in sides.items() if points)
    return f"{text}; what ran in between: {_shown(change, evidence)}{''.join(only)}"


def show_idle(change: GeneratorChange) -> str:
    """Return that a generator started in a different state and stayed in it."""
    return f"{show_start(change)}, and nothing drew from it"


def show_start(change: GeneratorChange) -> str:
    """Return that a generator started in a different state."""
    if change.is_reseeded:
        return f"the generator {change.name} was {_seeded(change)}"
    return f"the generator {change.name} had a different state when the fit started{_why_it_differs(change)}"


def _why_it_differs(change: GeneratorChange) -> str:
    if change.seeds is None:
        return ""
    return f": {_seeded(change)}" if change.is_reseeded else ": a different number of draws from the same seed"


def _seeded(change: GeneratorChange) -> str:
    reference, current = change.seeds or ("?", "?")
    return f"seeded with {reference} in the reference and {current} in the current run"


def keep_from_drawing(change: GeneratorChange, evidence: Evidence) -> str:
    """Return what to do if only one run draws from a generator."""
    ran = capitalised(_shown(change, evidence, " or "))
    todo = f"give it a separate generator, or restore the state of {change.name} afterwards"
    return f"{ran} draws from the generator {change.name}: {todo}"


def _shown(change: GeneratorChange, evidence: Evidence, separator: str = ", ") -> str:
    ran = what_ran((*change.points, change.differs_at[1]), evidence)
    return separator.join(dict.fromkeys(ran)) or f"code outside {'all hooks' if evidence.hooks else 'the steps'}"


def what_ran(points: Sequence[str], evidence: Evidence) -> Iterator[str]:
    """Yield what ran between these points: parts of the training, and the hooks of callbacks."""
    for point, end in pairwise(points):
        read_in, what, hooks = _AFTER.get(point, ("", "", ""))
        yield from users_of(read_in, evidence, AFTER)
        if what:
            yield what
        for hook in hooks.split():
            yield from users_of(hook, evidence, BEFORE, AFTER)
        read_at_end, _, _ = _AFTER.get(end, ("", "", ""))
        yield from users_of(read_at_end, evidence, BEFORE)


def users_of(hook: str, evidence: Evidence, *orders: str) -> Iterator[str]:
    """Yield "A.on_train_start", "B.on_train_start" for the callbacks with a hook, called before or after ours."""
    for order in orders:
        names = evidence.hooks.get(f"{order} {hook}", "")
        yield from (f"{name}.{hook}" for name in names.split(", ") if name)


def _moment(place: tuple[int, str]) -> str:
    step, point = place
    at = "" if point.startswith(("before ", "after ")) else "at the "
    where = f"of step {step}" if point in _WITHIN_STEP else f"(ahead of step {step})"
    return f"{at}{point} {where}"
