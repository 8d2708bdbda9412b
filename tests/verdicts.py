"""Verdicts of each kind."""

from dataclasses import replace

from det_callbacks.verdict import Counts, Coverage, Divergence, EnvironmentDifference, Verdict

DIVERGENCE = Divergence(
    rank=0,
    step=3,
    phase="forward",
    module="net.head",
    op="aten.addmm.default",
    kind="content",
    source=("train.py:4 in forward",),
    shape=(8, 10),
    dtype="float32",
    reference_digest="0" * 16,
    current_digest="1" * 16,
    is_origin=True,
)
MATCH = Verdict(
    verdict="match",
    reference="reference",
    current="current",
    first_divergence=None,
    origins=(),
    cause=None,
    explanation="All agree.",
    counts=Counts(steps_compared=4, sites_compared=12, sites_differing=0),
    coverage=Coverage(ranks=1, steps=(0, 3)),
)
DIVERGED = replace(
    MATCH,
    verdict="diverged",
    first_divergence=DIVERGENCE,
    origins=(DIVERGENCE,),
    cause="forward",
    explanation="No.",
)


def differing(name: str, *, is_machine: bool = True) -> EnvironmentDifference:
    return EnvironmentDifference(
        name=name, reference=2, current=1, changes_bits=True, is_machine=is_machine
    )


THREADS = differing("torch.num_threads")
NOT_COMPARABLE = replace(DIVERGED, verdict="not_comparable", environment=(THREADS,))
