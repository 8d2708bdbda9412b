"""The strategies and launchers of several processes: what is recorded is verified."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import ranks_program
from processes import run_ranks

from det_callbacks.runs.store import Run

PROGRAM = Path(ranks_program.__file__)

pytestmark = pytest.mark.ddp


def start_forked(mode: str, folder: Path, name: str, world_size: int = 2) -> None:
    ended = run_ranks(lambda rank: ranks_program.run(mode, folder, name), folder / mode, world_size=world_size)
    assert [one.exit_code for one in ended] == [0] * world_size, ended


def assert_match(folder: Path, world_size: int = 2) -> Run:
    verdict = json.loads((folder / "current" / "verdict.json").read_text())
    assert verdict["verdict"] == "match"
    assert verdict["coverage"]["ranks"] == world_size
    run = Run.open(folder / "run")
    assert run.is_complete
    assert len(run.ranks) == world_size
    assert all(run.rank(rank).num_steps >= 4 for rank in run.ranks)
    return run


@pytest.mark.parametrize(("name", "world_size"), [("fsdp2", 2), pytest.param("mesh", 4, marks=pytest.mark.slow)])
def test_sharded_parameters_are_recorded_by_their_shards(name: str, world_size: int, tmp_path: Path) -> None:
    for mode in ("record", "verify"):
        start_forked(mode, tmp_path, name, world_size)
    run = assert_match(tmp_path, world_size)
    views = [run.view(rank, 0, 3) for rank in run.ranks]
    sites = enumerate(views[0].program.sites)
    (site,) = [place for place, site in sites if (site.phase, site.name) == ("state", "first.weight")]
    assert len({int(view.record.digests[site]) for view in views}) > 1  # each has a shard of its own


LAUNCHERS = {
    "subprocesses": [sys.executable, str(PROGRAM)],
    "torchrun": [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone", str(PROGRAM)],
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("launcher", "name"), [("subprocesses", "ddp"), ("torchrun", "ddp"), ("subprocesses", "ddp_spawn")]
)
def test_launchers(launcher: str, name: str, tmp_path: Path) -> None:
    started, forked = ("verify", "record") if name == "ddp_spawn" else ("record", "verify")

    def start() -> None:
        command = [*LAUNCHERS[launcher], started, str(tmp_path), name]
        done = subprocess.run(command, capture_output=True, text=True, timeout=150, check=False, cwd=tmp_path)
        assert done.returncode == 0, done.stdout + done.stderr

    if started == "record":
        start()
    start_forked(forked, tmp_path, "ddp")
    if started == "verify":
        start()
    assert_match(tmp_path)
