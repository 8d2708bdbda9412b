"""Whether a batch that differs is another step's: then it is the order of the data that differs."""

import numpy as np

from det_callbacks.compare.step import StepDifference
from det_callbacks.runs.store import Run

MAX_STEPS = 2_000
"""Steps that are searched, the nearest ones; some 100 microseconds each."""


def find_batch(reference: Run, difference: StepDifference) -> int | None:
    """Return the step of the reference, other than this one, that had the batch of a step; None if there is none."""
    wanted = {
        str(finding.divergence.name): int(finding.divergence.current_digest, 16)
        for finding in difference.findings
        if finding.divergence.phase == "data" and finding.role != "samples" and finding.divergence.current_digest
    }
    if not wanted:
        return None
    run, step, segment = reference.rank(difference.rank), difference.step, difference.segment
    places: dict[int, list[int] | None] = {}
    digests = np.array(list(wanted.values()), dtype=np.uint64)
    steps = [int(other) for other in run.steps(segment) if other != step]
    for other in sorted(steps, key=lambda number: abs(number - step))[:MAX_STEPS]:
        record = run.read(segment, other)
        if record.program_id not in places:
            found = {
                site.name: position
                for position, site in enumerate(reference.program(record.program_id).sites)
                if site.phase == "data" and site.role != "samples" and site.name in wanted
            }
            places[record.program_id] = [found[name] for name in wanted] if len(found) == len(wanted) else None
        positions = places[record.program_id]
        if positions is not None and np.array_equal(record.digests[positions], digests):
            return other
    return None
