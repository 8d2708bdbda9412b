"""The status of a process that an error of another one ended."""

import sys

import pytest

from det_callbacks.report import leaving


@pytest.fixture
def ended(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    statuses: list[int] = []
    monkeypatch.setattr(leaving, "end_process", statuses.append)
    monkeypatch.setattr(leaving.atexit, "register", lambda _: None)
    return statuses


@pytest.mark.parametrize(("is_caught", "statuses"), [(False, [3]), (True, [])])
def test_only_an_error_that_nobody_caught_decides(
    is_caught: bool, statuses: list[int], ended: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    error = RuntimeError("Connection closed by peer")
    leaving.set_status_of(error, 3)
    assert leaving.status_of(error) == 3
    monkeypatch.setattr(sys, "last_value", None if is_caught else error, raising=False)
    leaving._end_uncaught()
    assert ended == statuses


def test_another_error_leaves_the_status_alone(ended: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    assert leaving.status_of(None) is None
    monkeypatch.setattr(sys, "last_value", ValueError("another one"), raising=False)
    leaving._end_uncaught()
    assert ended == []


def test_a_forked_child_has_its_own_end(ended: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    error = RuntimeError()
    leaving.set_status_of(error, 2)
    monkeypatch.setattr(sys, "last_value", error, raising=False)
    monkeypatch.setattr(leaving, "_registered_in", -1)
    leaving._end_uncaught()
    assert ended == []
