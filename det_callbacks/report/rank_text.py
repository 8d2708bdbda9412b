"""What a process says when another one of its run ended."""


def ended_text(*, rank: int, world_size: int, step: int, other: int, how: str, reason: str, other_step: int) -> str:
    """Return what happened to another process, and what that means for this one.

    Args:
        rank: of this process.
        world_size: of the run.
        step: the one that this process is at; -1 before the first.
        other: rank of the process that ended.
        how: "raised" or "gone".
        reason: what it said.
        other_step: the last one that it is known to have begun; -1 where none is.
    """
    where = f"at step {other_step}" if other_step >= 0 else "at a step that is not known"
    what = f"is gone, {where}: {reason}" if how == "gone" else f"ended {where}: {reason}"
    here = f"at step {step}" if step >= 0 else "before its first step"
    return (
        f"det_callbacks: rank {other} of {world_size} {what.rstrip('.')}. Rank {rank}, {here}, ends too, since it "
        f"would wait for rank {other} in the next collective. What it recorded or compared so far is kept, marked as "
        f"incomplete. Look at what rank {other} printed; then start all ranks again."
    )
