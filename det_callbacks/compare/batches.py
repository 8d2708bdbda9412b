"""Whether a batch that differs is another step's: then it is the order of the data that differs."""

from collections.abc import Mapping

import numpy as np

from det_callbacks.runs.store import Run

MAX_STEPS = 2_000
"""Steps that are searched, the nearest ones; some 100 microseconds each."""


def find_batch(run: Run, rank: int, segment: int, step: int, wanted: Mapping[str, int]) -> int | None:
    """Return the step of a run, other than this one, whose batch holds the wanted tensors; None if there is none.

    Args:
        run: that is searched.
        rank: of the process.
        segment: fit.
        step: where the run had another batch.
        wanted: name in the batch -> digest.
    """
    if not wanted:
        return None
    places: dict[int, list[int] | None] = {}
    digests = np.array(list(wanted.values()), dtype=np.uint64)
    steps = [int(other) for other in run.rank(rank).steps(segment) if other != step]
    for other in sorted(steps, key=lambda number: abs(number - step))[:MAX_STEPS]:
        record = run.rank(rank).read(segment, other)
        if record.program_id not in places:
            found = {
                site.name: position
                for position, site in enumerate(run.program(record.program_id).sites)
                if site.phase == "data" and site.role != "samples" and site.name in wanted
            }
            places[record.program_id] = [found[name] for name in wanted] if len(found) == len(wanted) else None
        positions = places[record.program_id]
        if positions is not None and np.array_equal(record.digests[positions], digests):
            return other
    return None
