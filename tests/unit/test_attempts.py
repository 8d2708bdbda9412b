"""Attempts of a run: one that is taken back, and where one was resumed."""

from pathlib import Path

import pytest
from stored_runs import append, create, everything_in, record, resume

from det_callbacks.errors import ReferenceFormatError
from det_callbacks.runs.files import read_manifest, write_manifest
from det_callbacks.runs.store import Run


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A run of four steps."""
    return record(tmp_path / "run", range(4))


@pytest.mark.parametrize("is_complete", [True, False])
def test_an_attempt_is_taken_back(tmp_path: Path, is_complete: bool) -> None:
    path = record(tmp_path / "run", range(4), complete=is_complete)
    before = everything_in(path)
    writer = resume(path)
    writer.note_resumed(2)
    append(writer, [2, 3, 4])
    assert Run.open(path).resumed_steps == {(0, 2)}
    writer.discard_attempt()
    assert everything_in(path) == before
    assert Run.open(path).is_complete == is_complete
    assert [file.name for file in (path / "rank-00000").iterdir()] == ["attempt-000.arrows"]
    again = resume(path)
    append(again, [4])
    again.close(complete=True)
    assert Run.open(path).rank(0).steps(0).tolist() == [0, 1, 2, 3, 4]


def test_the_only_attempt_is_not_taken_back(tmp_path: Path) -> None:
    writer = create(tmp_path / "run")
    with pytest.raises(ValueError, match="one attempt only"):
        writer.discard_attempt()
    writer.close(complete=True)


@pytest.mark.parametrize("entries", [5, [5], [{"segment": 0}], [{"segment": 0, "step": "2"}]])
def test_where_it_was_resumed_is_checked(entries: object, path: Path) -> None:
    manifest = read_manifest(path)
    del manifest["digest"]
    manifest["attempts"][0]["resumed_from"] = entries
    write_manifest(path, manifest)
    with pytest.raises(ReferenceFormatError, match=r"run\.json is damaged"):
        Run.open(path)
