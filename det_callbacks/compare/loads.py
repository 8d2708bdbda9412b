"""What loading weights has to do with weights that differ, in words."""

from collections.abc import Sequence

from det_callbacks.trace.weight_loads import WeightLoad

MAX_LOADS = 3
"""Lines of code that a sentence names; the others are counted."""


def explain_loads(reference: Sequence[WeightLoad], current: Sequence[WeightLoad], *, segment: int, step: int) -> str:
    """Return a clause on the weights that either run loaded before a step, to be appended; "" when neither did.

    What Lightning restores from a checkpoint is expected and left out.

    Args:
        reference: the loads of the reference.
        current: those of the current run.
        segment: fit that the step belongs to.
        step: that differs.
    """
    ours, theirs = (
        tuple(
            dict.fromkeys(
                describe_load(load)
                for load in loads
                if not load.is_restore
                and load.segment == segment
                and (load.first_step is None or load.first_step <= step)
            )
        )
        for loads in (reference, current)
    )
    if not ours and not theirs:
        return ""
    if ours == theirs:
        return f"; both runs loaded weights {_listed(ours)}"
    return f"; the reference loaded {_shown(ours)}, and the current run {_shown(theirs)}"


def describe_load(load: WeightLoad) -> str:
    """Return where weights were loaded: "into net at train.py:41 in main before the first step"."""
    when = "before the first step" if load.first_step is None else f"at step {load.first_step}"
    return f"into {load.module or 'the whole module'} at {load.source} {when}"


def _shown(loads: Sequence[str]) -> str:
    return f"weights {_listed(loads)}" if loads else "none"


def _listed(loads: Sequence[str]) -> str:
    more = f" and {len(loads) - MAX_LOADS} more" if len(loads) > MAX_LOADS else ""
    return " and ".join(loads[:MAX_LOADS]) + more
