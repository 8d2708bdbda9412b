"""Batches that are not trained on, in the evidence of a run: of validations, sanity checks, tests and predictions.

Each is some rows at a point of its own ("validation batch 3 of loader 1"). Those of a fit belong to the training step
that comes. A ``trainer.test``, ``predict`` or ``validate`` is a segment of the run without steps, which run.json tells
from a fit (``stages`` of an attempt).
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from det_callbacks.trace.evidence import Row

FIT = "fit"
"""The stage of a segment that has steps."""

STAGES = ("sanity check", "validation", "test", "prediction")
"""Where batches come from that are not trained on, in the order in which a fit meets them."""

SAMPLES = "samples of "
"""Begins the name of the row with the order-free digest of a tensor's samples."""

_PATTERN = f"^({'|'.join(STAGES)}) batch ([0-9]+)(?: of loader ([0-9]+))?$"
_POINT = re.compile(_PATTERN)

Batch = Sequence[Row]
"""The rows of one batch; there is at least one."""

Key = tuple[int, int, int, int]
"""Where a batch stands in its segment: the step that follows, number of the stage, loader, number of the batch."""


def point_of(stage: str, batch_idx: int, dataloader_idx: int) -> str:
    """Return the point at which a batch is noted."""
    return f"{stage} batch {batch_idx}" + (f" of loader {dataloader_idx}" if dataloader_idx else "")


def is_batch_point(point: str) -> bool:
    """Return whether rows at a point are of a batch that is not trained on."""
    return _POINT.match(point) is not None


def are_batches(rows: pa.RecordBatch) -> pa.Array:
    """Return which rows are of such a batch, for ``read_evidence``."""
    return pc.match_substring_regex(rows.column("point"), _PATTERN)


def key_of(batch: Batch) -> Key:
    """Return where a batch stands in its segment; ValueError where its point is none of ours."""
    found = _POINT.match(batch[0].point)
    if found is None:
        raise ValueError(f"{batch[0].point!r} is no batch")
    stage, number, loader = found.groups()
    return batch[0].step, STAGES.index(stage), int(loader or 0), int(number)


def stage_of(batch: Batch) -> str:
    """Return which stage a batch is of."""
    return STAGES[key_of(batch)[1]]


def batches_of(rows: Iterable[Row]) -> Iterator[Batch]:
    """Yield rows batch by batch, one in memory at a time."""
    for _, batch in groupby(rows, key=lambda row: (row.step, row.point)):
        yield tuple(batch)


def recorded_stages(manifest: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the stages whose batches a run holds."""
    return tuple(manifest.get("eval_batches", ()))


def stages_of_segments(manifest: Mapping[str, Any]) -> dict[int, str]:
    """Return what each segment of a run is: "fit", "validation", "test" or "prediction"."""
    found: dict[int, str] = {}
    first = 0
    for entry in manifest["attempts"]:
        first = entry.get("first_segment", first)
        stages = entry.get("stages", [FIT] * entry["segments"])
        found.update({first + number: stage for number, stage in enumerate(stages)})
        first += entry["segments"] - 1
    return found


def are_stages(entry: Mapping[str, Any]) -> bool:
    """Return whether what run.json says of the segments of an attempt is sensible."""
    stages, first = entry.get("stages", []), entry.get("first_segment", 0)
    return (
        isinstance(stages, list)
        and ("stages" not in entry or len(stages) == entry["segments"])
        and all(stage in (FIT, *STAGES) for stage in stages)
        and isinstance(first, int)
        and first >= 0
    )
