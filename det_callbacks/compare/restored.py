"""What a resumed run starts with, beside what the reference ended the step before with."""

from collections.abc import Mapping

from det_callbacks.compare.origin import num_leading_sites
from det_callbacks.runs.program import StepView


def find_unrestored(before: StepView, state: Mapping[str, int]) -> tuple[str, ...]:
    """Return the names of parameters, buffers and optimizer state that differ, or that only one side has.

    Levels below "op" do not record what a step reads, so that only this tells state that came out of a checkpoint with
    other bits from a step that computed something else. Something between the two steps may have changed it too.

    Args:
        before: the reference's step before the one that the run resumes with.
        state: name -> digest, or the 64 bits of a number, as the resumed run finds them.
    """
    first = num_leading_sites(before.program)
    left = {
        site.name: int(digest)
        for site, digest in zip(before.program.sites[first:], before.record.digests[first:], strict=True)
        if site.phase == "state" and site.role == "named" and site.name is not None
    }
    changed = [name for name, bits in state.items() if left.get(name) != bits]
    # beside the state the step recorded what training_step returned; state of an optimizer is of a parameter
    missing = [name for name in left if name not in state and " of " in name and name.rpartition(" of ")[2] in state]
    return (*changed, *missing)
