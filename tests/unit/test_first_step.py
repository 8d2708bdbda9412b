"""The first step that differs, of several ranks and fits."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
from stored_runs import OneOf, append, join

from det_callbacks.bisect import bisect_runs
from det_callbacks.compare.first_step import RankStep
from det_callbacks.environment import capture_environment
from det_callbacks.trace.selection import Selection
from det_callbacks.trace.writer import RunWriter

Differing = Mapping[int, int]
"""Rank -> the step from which on it differs."""


def write(path: Path, differing: Differing, *, fits: Sequence[int] = (8,), num_ranks: int = 2) -> Path:
    """Write a run of so many steps in its fits; ranks differ in the last one."""
    manifest = {"selection": Selection().to_dict(), "environment": capture_environment().to_dict()}
    writers = [RunWriter.create(path, manifest=manifest, peers=OneOf(0, num_ranks))]
    writers += [join(path, rank) for rank in range(1, num_ranks)]
    for number, num_steps in enumerate(fits):
        for rank, writer in enumerate(writers):
            if number:
                writer.start_segment()
            start = differing.get(rank, num_steps) if number == len(fits) - 1 else num_steps
            append(writer, range(start), seed=rank)
            append(writer, range(start, num_steps), seed=rank + 100)
    for writer in writers:
        writer.close(complete=True)
    return path


@pytest.mark.parametrize(
    ("differing", "expected"),
    [
        ({0: 5, 1: 3}, [(3, 1), (5, 0)]),
        ({0: 4, 1: 4}, [(4, 0), (4, 1)]),
        ({1: 0}, [(0, 1)]),
        ({0: 7}, [(7, 0)]),
    ],
)
def test_ranks_come_in_the_order_of_their_steps(
    tmp_path: Path, differing: Differing, expected: list[tuple[int, int]]
) -> None:
    bisection = bisect_runs(write(tmp_path / "a", {}), write(tmp_path / "b", differing))
    assert [(one.step, one.rank) for one in bisection.found.ranks] == expected
    assert bisection.found.ranks[0].last_equal == (expected[0][0] - 1 if expected[0][0] else None)
    assert bisection.exit_code == 1


def test_a_second_fit_comes_after_all_of_the_first(tmp_path: Path) -> None:
    runs = write(tmp_path / "a", {}, fits=(6, 4)), write(tmp_path / "b", {1: 2}, fits=(6, 4))
    found = bisect_runs(*runs).found
    assert found.ranks == (RankStep(segment=1, step=2, rank=1, last_equal=1),)


def test_the_steps_of_all_ranks_agree_or_none(tmp_path: Path) -> None:
    found = bisect_runs(write(tmp_path / "a", {}), write(tmp_path / "b", {})).found
    assert (found.ranks, found.num_equal, found.exit_code) == ((), 16, 0)
