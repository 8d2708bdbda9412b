"""One folder for all processes of a run: rank 0 makes it, and the others have to see it."""

import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from stored_runs import append, create

from det_callbacks.errors import RankError, RunExistsError
from det_callbacks.runs.manifest import read_manifest
from det_callbacks.runs.store import Run


class Thread:
    """One of several processes, played by a thread."""

    def __init__(self, rank: int, barrier: threading.Barrier, told: list[Any]) -> None:
        self.rank = rank
        self.world_size = barrier.parties
        self._barrier = barrier
        self._told = told

    def agree(self, action: Callable[[], Any], *, task: str) -> list[Any]:
        try:
            self._told[self.rank] = (True, action())
        except Exception as error:  # what is raised is what is tested
            self._told[self.rank] = (False, error)
        self._barrier.wait(10)
        told = list(self._told)
        self._barrier.wait(10)
        for is_fine, value in told:
            if not is_fine:
                raise value
        return json.loads(json.dumps([value if isinstance(value, list | str) else None for _, value in told]))

    def do(self, action: Callable[[], Any], *, task: str) -> Any:
        outcome: list[Any] = []
        self.agree(lambda: outcome.append(action()), task=task)
        return outcome[0]


def on_threads(world_size: int, body: Callable[[Thread], Any]) -> list[Any]:
    barrier, told = threading.Barrier(world_size), [None] * world_size
    said: list[Any] = [None] * world_size

    def run(rank: int) -> None:
        try:
            said[rank] = body(Thread(rank, barrier, told))
        except Exception as error:  # what is raised is what is tested
            said[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(world_size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return said


def write(folders: list[Path], peers: Thread, **options: Any) -> Path:
    writer = create(folders[peers.rank], peers=peers, **options)
    append(writer, range(3), seed=peers.rank)
    writer.close(complete=True)
    return writer.path


def test_one_process_writes_what_all_share(tmp_path: Path) -> None:
    folders = [tmp_path / "run"] * 4
    assert on_threads(4, lambda peers: write(folders, peers)) == folders
    run = Run.open(folders[0])
    assert (run.ranks, run.is_complete) == ([0, 1, 2, 3], True)
    assert not list(folders[0].glob(".*"))


def test_what_is_there_stays_and_every_rank_hears_of_it(tmp_path: Path) -> None:
    folders = [tmp_path / "run"] * 2
    on_threads(2, lambda peers: write(folders, peers))
    before = read_manifest(folders[0])
    said = on_threads(2, lambda peers: write(folders, peers))
    assert all(isinstance(error, RunExistsError) for error in said)
    assert read_manifest(folders[0]) == before
    assert on_threads(2, lambda peers: write(folders, peers, overwrite=True)) == folders
    assert Run.open(folders[0]).run_id != before.run_id


def test_nodes_that_do_not_share_the_folder_are_refused(tmp_path: Path) -> None:
    folders = [tmp_path / name / "run" for name in ("one", "one", "two")]
    said = on_threads(3, lambda peers: write(folders, peers))
    assert all(isinstance(error, RankError) and error.rank == 2 for error in said)
    assert "does not see the folder" in str(said[0])
    assert "system that the nodes share" in str(said[0])
    assert not folders[2].exists()
