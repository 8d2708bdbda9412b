"""What the ranks of a run found, each in its own steps, becomes one verdict: the same on all of them."""

from collections.abc import Iterable

from det_callbacks.compare.rank_findings import RankFindings
from det_callbacks.compare.verdict_builder import VerdictBuilder
from det_callbacks.verdict import Verdict


def verdict_of_ranks(found: Iterable[RankFindings], *, world_size: int, reference: str, current: str) -> Verdict:
    """Return the verdict on several ranks: what ``compare_runs`` says of them, as far as it knows the same.

    Which rank started a difference is told where all ranks are there.

    Args:
        found: of each rank, in any order.
        world_size: number of ranks.
        reference: name of the reference, as the verdict shows it.
        current: name of the current run.

    Raises:
        NothingComparedError: no rank compared anything.
        ValueError: a rank is there twice.
    """
    builder = VerdictBuilder(reference, current)
    builder.set_world_size(world_size)
    for one in sorted(found, key=lambda one: one.rank):
        builder.add_findings(one)
    return builder.finish()
