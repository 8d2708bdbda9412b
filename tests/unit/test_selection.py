"""Which steps a run records, and how that is kept in run.json."""

import pytest

from det_callbacks.errors import SelectionError
from det_callbacks.runs.selection import Selection


def test_only_the_named_steps_are_selected() -> None:
    selection = Selection(only_steps=(7, 3, 7))
    assert [step for step in range(10) if selection.selects_step(step)] == [3, 7]
    assert not selection.is_every_step
    assert selection.shown_steps == "only_steps=[3, 7]"


def test_every_step_is_selected_by_default() -> None:
    assert Selection().is_every_step
    assert not Selection(every_n_steps=2).is_every_step
    assert [step for step in range(5) if Selection(every_n_steps=2).selects_step(step)] == [0, 2, 4]


@pytest.mark.parametrize("only_steps", [None, (812,), (0, 1, 5)])
def test_a_selection_is_what_it_was_after_run_json(only_steps: tuple[int, ...] | None) -> None:
    selection = Selection(level="state", only_steps=only_steps)
    assert Selection.from_dict(selection.to_dict()) == selection


def test_a_run_that_records_all_steps_says_nothing_of_numbers() -> None:
    # its run.json is that of a run from before there was a choice, so that one can go on with the other
    assert "only_steps" not in Selection().to_dict()
    assert Selection(only_steps=[4]).to_dict()["only_steps"] == [4]


@pytest.mark.parametrize("only_steps", [(), (-1,), (1.0,), (True,), "812", 812, ("812",)])
def test_what_is_no_list_of_steps_is_refused(only_steps: object) -> None:
    with pytest.raises(SelectionError, match=r"only_steps must be numbers of steps, from 0, such as \[812\]"):
        Selection(only_steps=only_steps)


def test_two_choices_of_steps_are_refused() -> None:
    with pytest.raises(SelectionError, match=r"only_steps=\[4\] and every_n_steps=2 both choose"):
        Selection(only_steps=(4,), every_n_steps=2)
