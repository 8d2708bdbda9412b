"""The heat map's rows, columns and states, and which sites are listed."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from det_callbacks.patterns import OpPattern
from det_callbacks.report.html.grid import MAX_COLUMNS, Cells, Grid, Placing, group_modules, phase_rows
from det_callbacks.report.html.listing import _first_of_each
from det_callbacks.runs.program import Program, Site


def test_each_module_has_a_row_as_long_as_they_fit() -> None:
    rows = group_modules(["", "net.0", "net.1", "?"])
    assert rows.labels == ("(outside any module)", "net.0", "net.1", "(module not known)")
    assert rows.of == {"": 0, "net.0": 1, "net.1": 2, "?": 3}
    assert not rows.is_grouped


def test_modules_share_rows_as_deep_as_fits() -> None:
    names = [f"net.{layer}.{part}" for layer in range(4) for part in ("norm", "up", "down")]
    rows = group_modules(["head", *names], limit=5)
    assert rows.labels == ("head", "net.0.*", "net.1.*", "net.2.*", "net.3.*")
    assert rows.of["net.2.down"] == 3
    assert rows.is_grouped
    assert group_modules(["head", *names], limit=4).labels == ("head", "net.*")


def test_modules_that_fit_at_no_depth_are_counted_together() -> None:
    rows = group_modules([f"block{index}" for index in range(9)], limit=4)
    assert rows.labels == ("block0", "block1", "block2", "(other modules)")
    assert [rows.of[f"block{index}"] for index in (2, 3, 8)] == [2, 3, 3]


def test_phases_are_in_the_order_of_a_step() -> None:
    assert phase_rows(["backward", "zzz", "data", "forward"]).labels == ("data", "forward", "backward", "zzz")


def test_a_cell_shows_the_worst_that_is_in_it() -> None:
    cells = Cells.empty(1, 5)
    cells.compared[0] = [0, 3, 3, 3, 3]
    cells.replayed[0] = [0, 0, 1, 1, 1]
    cells.differing[0] = [0, 0, 0, 2, 2]
    cells.starting[0] = [0, 0, 0, 0, 1]
    assert cells.states() == [".mrco"]


def place(program: Program, **options: Any) -> tuple[Placing, Any]:
    modules = group_modules(list(dict.fromkeys(site.module for site in program.sites)))
    run: Any = SimpleNamespace(program=lambda identity: program)
    return Placing(modules, phase_rows(site.phase for site in program.sites), **options), run


def site(**fields: Any) -> Site:
    return Site(**{"phase": "forward", "module": "", "op": "", "occurrence": 0, "output": 0, "role": "named", **fields})


def test_what_was_put_back_is_found_by_pattern_and_by_name() -> None:
    sites = (
        site(op="aten.bernoulli_.float", module="drop", role="output"),
        site(op="aten.bernoulli_.float", module="drop", role="argument"),
        site(op="aten.bernoulli_.float", module="other", role="output"),
        site(name="after_dropout"),
        site(name="loss"),
    )
    placing, run = place(
        Program(sites=sites),
        patterns=(OpPattern.parse("drop:aten.bernoulli_.*"),),
        names=frozenset({"after_dropout"}),
    )
    assert placing.of(run, 1).replayed.tolist() == [True, False, False, True, False]


@pytest.mark.parametrize("num_steps", [1, 7, MAX_COLUMNS, MAX_COLUMNS + 1, 10 * MAX_COLUMNS + 3])
def test_every_step_has_a_column_and_no_map_has_too_many(num_steps: int) -> None:
    placing, _ = place(Program(sites=(site(),)))
    steps = list(range(0, 10 * num_steps, 10))
    grid = Grid(steps, placing)
    assert len(grid.columns) == min(num_steps, MAX_COLUMNS)
    found = [grid.column(step) for step in steps]
    assert found == sorted(found)
    assert all(
        grid.columns[column][0] <= step <= grid.columns[column][1] for step, column in zip(steps, found, strict=True)
    )
    assert set(found) == set(range(len(grid.columns)))


def test_a_fit_without_steps_has_no_column() -> None:
    placing, _ = place(Program(sites=(site(),)))
    assert Grid([], placing).columns == ()


def test_the_first_of_each_group_are_found() -> None:
    groups = np.array([3, 1, 3, 3, 1, 2])
    assert _first_of_each(groups, 1).tolist() == [0, 1, 5]
    assert _first_of_each(groups, 2).tolist() == [0, 1, 2, 4, 5]
    assert _first_of_each(np.array([], dtype=np.int64), 2).tolist() == []
