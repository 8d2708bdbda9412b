"""Trainings that have nowhere to write, or no room left: status 2, one sentence, no verdict."""

import errno
import os
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import pytest
from fits import Fit, StopError, assert_nothing_left
from trainers import LIGHTNING_ADVICE

from det_callbacks import DeterminismCallback, WriteError
from det_callbacks.compare.record import VERDICT_FILE
from det_callbacks.runs import files
from det_callbacks.runs.manifest import EnvironmentEntry
from det_callbacks.runs.store import Run
from det_callbacks.training import session

pytestmark = LIGHTNING_ADVICE


@pytest.fixture
def fill_disk(monkeypatch: Any) -> Callable[[int], None]:
    def fill(after: int) -> None:
        left = iter(range(after))

        def have_room(*_: Any) -> None:
            if next(left, None) is None:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        real, fsync = files.AppendedFile.write, os.fsync

        def write(file: files.AppendedFile, content: bytes) -> int:
            with files.writing(file._path):
                have_room()
            return real(file, content)

        def sync(number: int) -> None:
            have_room()
            fsync(number)

        monkeypatch.setattr(files.AppendedFile, "write", write)
        monkeypatch.setattr(os, "fsync", sync)

    return fill


@pytest.mark.parametrize("mode", ["record", "verify", "audit"])
def test_a_file_in_the_way_is_named_with_the_argument(mode, reference, tmp_path):
    (tmp_path / "file").write_text("theirs")
    place = tmp_path / "file" / "run"
    folders = {"record": (place, None), "verify": (reference, place), "audit": (None, place)}
    run, current = folders[mode]
    fit = Fit(callback := DeterminismCallback(run, mode=mode, current=current))
    with pytest.raises(WriteError) as caught:
        fit.run()
    argument = "reference of Det" if mode == "record" else "current of Det"
    assert f"{tmp_path / 'file'} is a file; " in str(caught.value)
    assert argument in str(caught.value)
    assert (caught.value.exit_code, callback.verdict, (tmp_path / "file").read_text()) == (
        2,
        None,
        "theirs",
    )
    assert_nothing_left(fit, callback)


@pytest.mark.parametrize("is_importing", [False, True])
@pytest.mark.parametrize("after", [0, 1, 5, 9, 14])
def test_a_recording_whose_disk_fills_is_one_sentence_and_incomplete(
    after, is_importing, fill_disk, tmp_path, capsys, monkeypatch
):
    """Wherever it fills: at the start, in a step, in what explains it, or at the end, where
    run.json names the packages that the program imported.
    """
    if is_importing:
        package = EnvironmentEntry(value="1.0", is_machine=False, changes_bits=False)
        monkeypatch.setattr(session, "packages_since", lambda _: {"a_package.version": package})
    fit = Fit(callback := DeterminismCallback(tmp_path / "run", mode="record"))
    fill_disk(after)
    with pytest.raises(
        WriteError, match=r"No space left on device; free some space, or .*RUN"
    ) as caught:
        fit.run()
    assert caught.value.__cause__ is None, "it would bury the sentence"
    assert "recorded" not in capsys.readouterr().out
    assert_nothing_left(fit, callback)
    if (tmp_path / "run/run.json").exists():
        assert not Run.open(tmp_path / "run").is_complete


@pytest.mark.parametrize(
    ("fault", "after"), [*((False, n) for n in range(5)), *((True, n) for n in range(9))]
)
def test_a_verification_whose_disk_fills_has_no_verdict(
    fault, after, fill_disk, reference, tmp_path
):
    fit = Fit(callback := DeterminismCallback(reference, current=tmp_path / "current"))
    if fault:
        fit.model.first.weight.data += 1
    fill_disk(after)
    with pytest.raises(WriteError, match=r"No space left on device; free some space") as caught:
        fit.run()
    assert (caught.value.exit_code, callback.verdict) == (2, None)
    assert not (tmp_path / "current" / VERDICT_FILE).exists()
    assert_nothing_left(fit, callback)


def test_a_full_disk_takes_no_other_exception_s_place(fill_disk, reference, tmp_path, capsys):
    callback = DeterminismCallback(reference, current=tmp_path / "current")

    class Fills(pl.Callback):
        def on_train_batch_end(self, *args: Any, **options: Any) -> None:
            fill_disk(0)
            raise StopError("the training's own")

    fit = Fit(callback, Fills())
    with pytest.raises(StopError, match="the training's own"):
        fit.run()
    assert "No space left on device" in capsys.readouterr().out
    assert not (tmp_path / "current" / VERDICT_FILE).exists()
