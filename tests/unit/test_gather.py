"""Nodes without a shared file system: each has its folder, and the folders are joined."""

import json
import shutil
import socket
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from stored_runs import append, create, digests_of, everything_in

from det_callbacks.cli import main
from det_callbacks.errors import RankError, ReferenceFormatError, RunExistsError
from det_callbacks.trace.gather import gather_runs
from det_callbacks.trace.peers import take_seats
from det_callbacks.trace.run_files import read_manifest, stream_path, write_manifest
from det_callbacks.trace.store import Run


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


@pytest.fixture
def hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads are named after the host that they play."""
    monkeypatch.setattr(socket, "gethostname", lambda: threading.current_thread().name)


def write_node(folders: list[Path], peers: Thread, **options: Any) -> Path:
    threading.current_thread().name = folders[peers.rank].parent.name
    writer = create(folders[peers.rank], peers=peers, **options)
    append(writer, range(3), seed=peers.rank)
    writer.close(complete=True)
    return writer.path


@pytest.fixture
def nodes(tmp_path: Path, hosts: None) -> list[Path]:
    """Four ranks on two nodes."""
    folders = [tmp_path / name / "run" for name in ("one", "one", "two", "two")]
    said = on_threads(4, lambda peers: write_node(folders, peers))
    assert said == folders
    return [folders[0], folders[2]]


def test_each_node_has_a_folder_that_says_what_it_holds(nodes: list[Path]) -> None:
    one, two = map(Run.open, nodes)
    assert (one.run_id, one.world_size) == (two.run_id, 4)
    assert ([*one.ranks], [*two.ranks]) == ([0, 1], [2, 3])
    assert "holds 2 of 4 ranks, from rank 2 on" in str(two.incomplete_reason)
    assert Run.open(nodes[1], ranks=(3,)).is_complete
    assert not list(nodes[0].glob(".*"))
    assert not list(nodes[1].glob(".*"))


def test_on_a_shared_folder_one_process_leads(tmp_path: Path, hosts: None) -> None:
    folders = [tmp_path / "one" / "run"] * 4
    assert on_threads(4, lambda peers: write_node(folders, peers)) == folders
    run = Run.open(folders[0])
    assert (run.ranks, run.is_complete, "ranks" in run.manifest) == ([0, 1, 2, 3], True, False)


def test_what_is_there_stays_and_every_rank_hears_of_it(nodes: list[Path]) -> None:
    before = [read_manifest(node) for node in nodes]
    folders = [nodes[0], nodes[0], nodes[1], nodes[1]]
    said = on_threads(4, lambda peers: write_node(folders, peers))
    assert all(isinstance(error, RunExistsError) for error in said)
    assert [read_manifest(node) for node in nodes] == before
    assert on_threads(4, lambda peers: write_node(folders, peers, overwrite=True)) == folders
    assert Run.open(nodes[1]).run_id != before[1]["run_id"]


def test_a_rank_that_sees_no_folder_of_its_node_is_an_error(tmp_path: Path, hosts: None) -> None:
    def seat(peers: Thread) -> Any:
        threading.current_thread().name = "same" if peers.rank else "first"
        return take_seats(tmp_path / str(peers.rank) / "run", peers)

    said = on_threads(3, seat)
    assert all(isinstance(error, RankError) for error in said)
    assert "Rank 2 does not see the folder" in str(said[2])


def test_folders_are_joined(nodes: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    parts = [everything_in(node)["steps"] for node in nodes]
    assert main(["gather", *map(str, reversed(nodes)), "--to", str(tmp_path / "whole")]) == 0
    assert "joined 2 folders with 4 ranks" in capsys.readouterr().out
    run = Run.open(tmp_path / "whole")
    assert (run.ranks, run.is_complete, "ranks" in run.manifest) == ([0, 1, 2, 3], True, False)
    assert everything_in(tmp_path / "whole")["steps"] == parts[0] | parts[1]


def change(folder: Path, **entries: Any) -> None:
    write_manifest(folder, {**read_manifest(folder), **entries})


@pytest.mark.parametrize(
    ("entries", "complaint"),
    [
        ({"world_size": 8}, "do not belong together: world_size is 4 in one and 8 in the other"),
        ({"selection": {"level": "state"}}, "do not belong together: selection is"),
    ],
)
def test_what_does_not_belong_together_is_refused(
    entries: dict[str, Any], complaint: str, nodes: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    change(nodes[1], **entries)
    assert main(["gather", *map(str, nodes), "--to", str(tmp_path / "whole")]) == 2
    assert complaint in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["one", "two"]


def test_another_run_a_rank_twice_and_a_rank_missing_are_refused(nodes: list[Path], tmp_path: Path) -> None:
    with pytest.raises(ReferenceFormatError, match="both hold rank 0"):
        gather_runs([nodes[0], nodes[0], nodes[1]], tmp_path / "whole")
    with pytest.raises(ReferenceFormatError, match=r"No folder holds rank 2, 3 of 4\."):
        gather_runs([nodes[0]], tmp_path / "whole")
    shutil.copytree(nodes[1], tmp_path / "other")
    folders = [nodes[0], nodes[0], nodes[1], nodes[1]]
    on_threads(4, lambda peers: write_node(folders, peers, overwrite=True))
    with pytest.raises(ReferenceFormatError, match="run_id is"):
        gather_runs([nodes[0], tmp_path / "other"], tmp_path / "whole")
    assert not (tmp_path / "whole").exists()


def test_nothing_is_overwritten_and_a_damaged_stream_leaves_nothing(nodes: list[Path], tmp_path: Path) -> None:
    (tmp_path / "whole").mkdir()
    with pytest.raises(RunExistsError, match="is there already"):
        gather_runs(nodes, tmp_path / "whole")
    stream = stream_path(nodes[1], 3, 0, 0)
    digests = digests_of(1, seed=3).tobytes()
    assert digests in stream.read_bytes()
    stream.write_bytes(stream.read_bytes().replace(digests, digests[::-1]))
    with pytest.raises(ReferenceFormatError, match="rank-00003"):
        gather_runs(nodes, tmp_path / "new")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["one", "two", "whole"]
