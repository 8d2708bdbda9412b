"""One writer a folder: processes that write, are killed or fork, and what the next one finds."""

import errno
import os
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path
from unittest.mock import Mock

import pytest
from stored_runs import OneOf, append, create, everything_in, join, record, resume

from det_callbacks.errors import CoverageWarning, RunExistsError, RunInUseError, WriteError
from det_callbacks.runs import lock as lock_module
from det_callbacks.runs.lock import FolderLock
from det_callbacks.runs.metrics import Metric, Reading
from det_callbacks.runs.store import Run

READING = Reading(
    where="trainer.test",
    number=0,
    step=1,
    epoch=0,
    metrics={"loss": Metric(dtype="float32", shape=(), digest="00", value="0.0")},
)


def in_another_process(body: Callable[[], object]) -> int:
    reading, writing = os.pipe()
    process = os.fork()
    if not process:
        try:
            kept = body()  # a writer that is dropped gives its folder back
            os.write(writing, b".")
            time.sleep(60)
            del kept
        finally:
            os._exit(1)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        assert pipe.read(1) == b".", "the other process failed"
    return process


def kill(process: int) -> None:
    os.kill(process, signal.SIGKILL)
    os.waitpid(process, 0)


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_second_recording_is_refused_and_names_the_first_until_that_is_killed(
    overwrite, tmp_path
):
    path = record(tmp_path / "run", range(4)) if overwrite else tmp_path / "run"
    before = everything_in(path) if overwrite else None
    other = in_another_process(lambda: append(create(path, overwrite=overwrite), [0, 1], seed=1))
    try:
        for act in (
            lambda: create(path, overwrite=overwrite),
            lambda: create(path),
            lambda: create(path, peers=OneOf(0, 2), overwrite=True),
            lambda: create(path, purpose="verify"),
            lambda: resume(path),
        ):
            with pytest.raises(
                RunInUseError, match=rf"is being written by process {other} on .*, since 20"
            ) as caught:
                act()
            assert (caught.value.exit_code, caught.value.path) == (2, str(path))
        assert "Nothing was changed there. Wait until it ends, or " in str(caught.value)
        assert before is None or everything_in(path) == before
    finally:
        kill(other)
    append(create(path, overwrite=True), [0, 1, 2], seed=2, complete=True)
    assert Run.open(path).rank(0).num_steps == 3
    assert not {".lock", ".replacement"} & {file.name for file in path.iterdir()}


def test_one_attempt_goes_on_after_another_and_never_two_at_once(tmp_path):
    path = record(tmp_path / "run", range(2), complete=False)
    other = in_another_process(lambda: append(resume(path), [2]))
    with pytest.raises(RunInUseError, match=f"process {other} on"):
        resume(path)
    kill(other)
    append(resume(path), [3], complete=True)
    run = Run.open(path)
    assert (run.rank(0).steps(0).tolist(), len(run.manifest.attempts)) == ([0, 1, 2, 3], 3)


def test_ranks_share_what_rank_0_holds_and_it_ends_with_rank_0(tmp_path):
    lead = create(tmp_path / "run", peers=OneOf(0, 2))
    other = join(tmp_path / "run", 1)
    append(other, [0], complete=True)
    with pytest.raises(RunInUseError):
        create(tmp_path / "run", overwrite=True)
    append(lead, [0], complete=True)
    create(tmp_path / "run", overwrite=True).discard()
    assert Run.open(tmp_path / "run").ranks == [0, 1]


def test_a_fork_neither_frees_a_folder_nor_keeps_it(tmp_path):
    """As workers of a loader do, and a killed child of one that was forked,
    with all that it has inherited.
    """
    path = tmp_path / "run"
    writer = append(create(path), [0])
    for body in (writer.release, lambda: writer._lock.acquire(instead="")):
        process = os.fork()
        if not process:
            try:
                body()
                os._exit(0)
            except RunInUseError:
                os._exit(7)
            finally:
                os._exit(1)
        _, status = os.waitpid(process, 0)
        assert os.waitstatus_to_exitcode(status) == (0 if body == writer.release else 7)
        with pytest.raises(RunInUseError):
            create(path)
    other = in_another_process(lambda: None)
    writer.close(complete=True)
    create(path, overwrite=True).discard()
    kill(other)


def test_a_run_that_was_replaced_or_continued_after_its_close_is_not_gone_on_with(tmp_path):
    for change in (lambda path: create(path, overwrite=True), resume):
        path = tmp_path / change.__name__
        writer = append(create(path), [0, 1], complete=True)
        writer.put_reading(READING)
        append(change(path), [2], complete=True)
        before = everything_in(path)
        for act in (writer.start_segment, lambda writer=writer: writer.put_reading(READING)):
            with pytest.raises(
                RunExistsError,
                match=r"Another process has replaced or continued .*, which this one was writing",
            ):
                act()
        assert everything_in(path) == before
        append(resume(path), [3], complete=True)


def test_a_file_that_was_removed_while_it_was_waited_for_is_no_lock(tmp_path, monkeypatch):
    first, second, third = (FolderLock(tmp_path) for _ in range(3))
    first.acquire(instead="wait")
    real = lock_module.fcntl.flock

    def release_first(file: int, how: int) -> None:
        monkeypatch.setattr(lock_module.fcntl, "flock", real)
        first.release()
        real(file, how)

    monkeypatch.setattr(lock_module.fcntl, "flock", release_first)
    second.acquire(instead="wait")
    with pytest.raises(RunInUseError, match=r"Wait until it ends, or wait\."):
        third.acquire(instead="wait")
    second.release()
    second.release()
    assert list(tmp_path.iterdir()) == []


def test_a_file_system_without_locks_is_said(tmp_path, monkeypatch):
    no_locks = Mock(side_effect=OSError(errno.ENOLCK, "No locks available"))
    monkeypatch.setattr(
        lock_module, "fcntl", Mock(wraps=lock_module.fcntl, flock=no_locks, LOCK_EX=2, LOCK_NB=4)
    )
    lock = FolderLock(tmp_path)
    with pytest.warns(CoverageWarning, match="has no locks, so a second writer goes unnoticed"):
        lock.acquire(instead="wait")
    lock.release()


def test_a_lock_that_fails_is_one_of_our_errors_and_holds_nothing(tmp_path, monkeypatch):
    for name, error in (
        ("flock", OSError(errno.EIO, "Input/output error")),
        ("unlink", OSError(errno.EROFS, "?")),
    ):
        lock = FolderLock(tmp_path)
        with monkeypatch.context() as patch:
            if name == "flock":
                broken = Mock(
                    wraps=lock_module.fcntl, flock=Mock(side_effect=error), LOCK_EX=2, LOCK_NB=4
                )
                patch.setattr(lock_module, "fcntl", broken)
            else:
                patch.setattr(Path, "unlink", Mock(side_effect=error))
            with (
                pytest.raises(WriteError, match=re.escape(error.strerror)),
                lock.hold(instead="wait"),
            ):
                assert name == "unlink"
        assert not lock.is_held
        with FolderLock(tmp_path).hold(instead="wait"):
            pass


@pytest.mark.filterwarnings("ignore:.*has no locks")
def test_without_locks_the_writer_that_lost_its_files_does_not_end_well(tmp_path, monkeypatch):
    no_locks = Mock(side_effect=OSError(errno.ENOSYS, "Function not implemented"))
    monkeypatch.setattr(
        lock_module, "fcntl", Mock(wraps=lock_module.fcntl, flock=no_locks, LOCK_EX=2, LOCK_NB=4)
    )
    path = record(tmp_path / "run", range(4))
    for is_first in (True, False):
        one, other = (create(path, overwrite=True) for _ in range(2))
        append(other, [0, 1], complete=True)
        if is_first:
            assert Run.open(path).manifest.run_id == other.manifest.run_id
        with pytest.raises((RunExistsError, WriteError)):
            append(one, [0], complete=True)
        one._close_files(complete=False)
        one.release()
        assert Run.open(path).manifest.run_id == other.manifest.run_id
        assert Run.open(path).is_complete
    first, second = (create(tmp_path / "current", purpose="verify") for _ in range(2))
    second.close(complete=True)
    with pytest.raises(RunExistsError, match="which this one was writing"):
        first.close(complete=True)
    for writer in (first, second):
        writer.release()
