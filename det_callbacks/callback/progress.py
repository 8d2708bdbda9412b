"""How far a run is, on one process, as loggers and progress bars are told."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """What was recorded or verified so far.

    Attributes:
        num_steps: recorded (those that a resumed recording found there and equal, too), or compared.
        num_sites: of those steps.
        num_differing: sites that differ, and steps that only one run has.
        num_bytes: saved for replay, or put back.
        chain: after the last step; None before the first, and once something differed.
    """

    num_steps: int
    num_sites: int
    num_differing: int
    num_bytes: int
    chain: int | None
