"""Which steps a verification compared. It keeps those that differ; that the others are equal stands here.

    rank-00000/compared.json    [{"segment": 0, "compared": [[0, 99]], "differing": [[12, 12], [40, 99]], "whole": []}]

A range is of steps of the reference, both ends included; ``whole`` are the steps that one run lacks. It is
written where something differed on any rank.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from det_callbacks.compare.whole_steps import WholeSteps
from det_callbacks.runs.files import damaged, rank_folder, read_json, replace_atomically

COMPARED_FILE = "compared.json"

Ranges = tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparedSteps:
    """The steps of one fit of one rank that a verification compared.

    Attributes:
        segment: fit.
        compared: ranges of steps that the reference has, too.
        differing: those of them that differ.
        whole: steps that only one run has.
    """

    segment: int
    compared: Ranges
    differing: Ranges
    whole: tuple[WholeSteps, ...] = ()

    def is_equal(self, step: int) -> bool:
        """Return whether a step of the reference was compared and found equal."""
        return _holds(self.compared, step) and not _holds(self.differing, step)

    def differs(self, step: int) -> bool:
        """Return whether a step of the reference was compared and found to differ."""
        return _holds(self.differing, step)

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON form."""
        return {
            "segment": self.segment,
            "compared": [list(span) for span in self.compared],
            "differing": [list(span) for span in self.differing],
            "whole": [asdict(whole) for whole in self.whole],
        }


def ranges_of(steps: Iterable[int], known: Sequence[int]) -> Ranges:
    """Return steps as ranges of what is known: two that follow each other there are one range.

    Args:
        steps: some of ``known``, in any order.
        known: steps of the reference, ascending.
    """
    wanted = frozenset(steps)
    found: list[tuple[int, int]] = []
    is_open = False
    for step in known:
        if step not in wanted:
            is_open = False
        elif is_open:
            found[-1] = (found[-1][0], step)
        else:
            found.append((step, step))
            is_open = True
    return tuple(found)


def write_compared(folder: Path, rank: int, steps: Sequence[ComparedSteps]) -> None:
    """Write what a rank compared into the folder of a verification, atomically."""
    content = json.dumps([one.to_dict() for one in steps]).encode()
    replace_atomically(folder / rank_folder(rank) / COMPARED_FILE, content)


def read_compared(folder: Path, rank: int) -> Mapping[int, ComparedSteps]:
    """Return what a rank compared, by fit; {} where that is not known.

    Raises:
        ReferenceFormatError: the file is damaged.
    """
    path = folder / rank_folder(rank) / COMPARED_FILE
    try:
        return {
            int(row["segment"]): ComparedSteps(
                segment=int(row["segment"]),
                compared=_ranges(row["compared"]),
                differing=_ranges(row["differing"]),
                whole=tuple(WholeSteps(**whole) for whole in row["whole"]),
            )
            for row in (read_json(path, list[dict[str, Any]]) if path.exists() else ())
        }
    except (KeyError, TypeError, ValueError) as error:
        raise damaged(path, f"it is no list of compared steps ({error!r})") from error


def _ranges(rows: Any) -> Ranges:
    return tuple((int(first), int(last)) for first, last in rows)


def _holds(ranges: Ranges, step: int) -> bool:
    return any(first <= step <= last for first, last in ranges)
