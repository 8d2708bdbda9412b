"""Several processes record and verify one run together, with each strategy and launcher."""

import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import processes
import pytest
import torch
from fits import Classifier
from html_page import assert_no_receiver_is_an_origin
from judged import require_one_verdict
from lightning.pytorch.strategies import DDPStrategy
from processes import linked, run_ranks, run_training, verdict_in
from torch import Tensor, nn

from det_callbacks.runs.store import Run

pytestmark = pytest.mark.ddp
SLOW = pytest.mark.slow


@pytest.fixture(scope="module")
def at_op(tmp_path_factory: Any) -> Path:
    run_training("record", folder := tmp_path_factory.mktemp("op"))
    return folder


def test_each_rank_records_its_own_steps_and_the_same_training_matches(at_op, tmp_path):
    recording = Run.open(at_op / "run")
    assert (recording.is_complete, recording.ranks) == (True, [0, 1])
    assert [recording.rank(rank).steps(0).tolist() for rank in recording.ranks] == [
        [0, 1, 2, 3]
    ] * 2
    # the root of a broadcast (of batch norm's buffers) puts something in, and the other does not
    views = [recording.view(rank, 0, 2) for rank in recording.ranks]
    assert len(views[0].program) == len(views[1].program) + 1
    assert len({view.record.digests[0] for view in views}) == 2  # each its own batch
    ended = run_training("verify", linked(at_op, tmp_path))
    assert_match(tmp_path)
    assert "match: verified 8 steps of 2 ranks" in ended[0].output
    assert "det_callbacks:" not in ended[1].output


def assert_match(folder: Path, world_size: int = 2, num_steps: int = 4) -> None:
    verdict = verdict_in(folder)
    found = (verdict["verdict"], verdict["coverage"]["ranks"], verdict["counts"]["steps_compared"])
    assert found == ("match", world_size, num_steps * world_size)


REDUCED = "received the difference through c10d.allreduce_.default "
FAULTS: dict[str, tuple[dict[str, Any], str, tuple[str, ...]]] = {
    "data": (
        {"rank": 1, "phase": "data", "step": 2, "is_origin": False},
        "data_content",
        ("it started on rank 1; rank 0 sent", REDUCED, "(ranks 0 and 1 from step 2 on)"),
    ),
    "weights": (
        {"rank": 1, "phase": "state", "step": 2, "name": "last.bias", "is_origin": None},
        "external_write",
        (
            "it started on rank 1; rank 0 sent",
            REDUCED,
            "(rank 1 from step 2 on and rank 0 from step 3 on)",
        ),
    ),
    "rate": (
        {"rank": 1, "phase": "optimizer", "step": 0, "kind": "argument", "is_origin": True},
        "settings",
        (
            (
                "lr of group 0 is 0.01 in the reference and 0.02 in the current run from the first "
                "update on. Step 0 of "
            ),
            "it started on rank 1; rank 0 sent",
            (
                "Check how the script builds the optimizer and its schedulers on rank 1, and what "
                "else sets lr of group 0"
            ),
        ),
    ),
    "collective": (
        {"phase": "forward", "step": 2, "op": "c10d.allreduce_.default", "is_origin": True},
        "collective",
        ("match on all ranks and its outputs differ, so the collective itself is the origin",),
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_who_started_it_is_found_and_diff_says_the_same(fault, at_op, tmp_path):
    place, cause, said = FAULTS[fault]
    ended = run_training("verify", linked(at_op, tmp_path), fault, status=1)
    require_one_verdict(verdict := verdict_in(tmp_path), tmp_path / "run", tmp_path / "current")
    assert (verdict["cause"], verdict["first_divergence"] | place) == (
        cause,
        verdict["first_divergence"],
    )
    assert all(text in verdict["explanation"] for text in said), verdict["explanation"]
    wanted = {
        "collective": {(rank, "c10d.allreduce_.default") for rank in range(2)},
        # of weight decay, and of the update
        "rate": {(1, "aten.mul_.Tensor"), (1, "aten.addcdiv_.default")},
    }
    assert {(origin["rank"], origin["op"]) for origin in verdict["origins"]} == wanted.get(
        fault, set()
    )
    assert all(verdict["explanation"] in " ".join(one.output.split()) for one in ended)
    assert [one.output.count("report.html)") for one in ended] == [1, 0]
    assert [one.output.count("First divergence") for one in ended] == [1, 0]
    assert "DIVERGED (rank 1 of 2; rank 0 prints the whole verdict" in ended[1].output
    assert_no_receiver_is_an_origin(tmp_path / "current", verdict)


def test_several_processes_refuse_the_reference_of_one(tmp_path):
    run_training("record", tmp_path, level="state", world_size=1, batches=8)
    ended = run_training("verify", tmp_path, current=None, default_root_dir=tmp_path, status=3)
    assert all("world size of 1 and this run has 2" in one.output for one in ended)
    verdict = json.loads((tmp_path / "determinism" / "verify-000" / "verdict.json").read_text())
    assert (verdict["verdict"], verdict["counts"]["steps_compared"]) == ("not_comparable", 0)


class PartlyUsed(Classifier):
    """With layers that no step uses; what accumulates their gradients lies in
    another order in each process.

    Half of their parameters have gradients nevertheless, as a generator has
    while its critic is trained.
    """

    def __init__(self) -> None:
        super().__init__()
        self.unused = nn.ModuleList(nn.Linear(3, 3) for _ in range(16))
        parameters = list(self.unused.parameters())
        random.SystemRandom().shuffle(parameters)
        self.accumulators = [
            parameter.expand_as(parameter).grad_fn.next_functions[0][0] for parameter in parameters
        ]

    def on_before_backward(self, loss: Tensor) -> None:
        for parameter in [*self.unused.parameters()][:16]:
            if parameter.grad is None:
                parameter.grad = torch.ones_like(parameter)

    def optimizer_zero_grad(
        self, epoch: int, batch_idx: int, optimizer: torch.optim.Optimizer
    ) -> None:
        optimizer.zero_grad(set_to_none=False)


@SLOW
def test_parameters_that_no_step_uses_are_no_difference(tmp_path):
    strategy = DDPStrategy(find_unused_parameters=True, gradient_as_bucket_view=True)
    for mode in ("record", "verify", "verify"):
        run_training(mode, tmp_path, model=PartlyUsed, strategy=strategy)


class Own(Classifier):
    """Begins with other weights on rank 1, which nobody broadcasts, and with other settings."""

    def __init__(self) -> None:
        super().__init__()
        is_other = os.environ["LOCAL_RANK"] == "1"
        torch.backends.cudnn.benchmark = is_other  # without an effect where there is no GPU
        torch.set_float32_matmul_precision("high" if is_other else "highest")
        torch.nn.init.constant_(self.last.bias, is_other)


def test_ranks_that_do_not_start_alike_do_not_train(tmp_path):
    for one in run_training(
        "record", tmp_path, model=Own, strategy=DDPStrategy(init_sync=False), status=2
    ):
        assert (
            "SettingsError: The 2 processes of this run start differently: settings.float32_m"
            in one.output
        )
        assert 'float32_matmul_precision is "high" on rank 1, but' in one.output
        assert "; weights of last.bias is" in one.output
        assert "cudnn_benchmark" not in one.output
    assert not (tmp_path / "run").exists()


def start_forked(mode: str, folder: Path, name: str, world_size: int = 2) -> None:
    run_ranks(
        lambda _: processes.run_strategy(mode, folder, name),
        folder / mode,
        world_size=world_size,
        status=0,
    )


@pytest.mark.parametrize(
    ("name", "world_size"), [("fsdp2", 2), pytest.param("mesh", 4, marks=SLOW)]
)
def test_sharded_parameters_are_recorded_by_their_shards(name, world_size, tmp_path):
    for mode in ("record", "verify"):
        start_forked(mode, tmp_path, name, world_size)
    # two ranks see each batch of the mesh of four
    assert_match(tmp_path, world_size, 2 * world_size)
    recording = Run.open(tmp_path / "run")
    views = [recording.view(rank, 0, 3) for rank in recording.ranks]
    sites = enumerate(views[0].program.sites)
    (site,) = [
        place for place, site in sites if (site.phase, site.name) == ("state", "first.weight")
    ]
    # each has a shard of its own
    assert len({int(view.record.digests[site]) for view in views}) > 1


TORCHRUN = ("-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone")


@SLOW
@pytest.mark.parametrize(
    ("launcher", "name", "started"),
    [((), "ddp", "record"), (TORCHRUN, "ddp", "record"), ((), "ddp_spawn", "verify")],
)
def test_launchers(launcher, name, started, tmp_path):
    for mode in ("record", "verify"):
        if mode != started:
            start_forked(mode, tmp_path, "ddp")
            continue
        path = os.pathsep.join(map(str, Path(__file__).parents[:2]))
        # torchrun sets 1, Lightning shares the cores out
        num_threads = str(max(1, len(os.sched_getaffinity(0)) // 2))
        env = {"OMP_NUM_THREADS": num_threads, **os.environ, "PYTHONPATH": path}
        command = [sys.executable, *launcher, processes.__file__, mode, str(tmp_path), name]
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=280, check=False, cwd=tmp_path, env=env
        )
        assert done.returncode == 0, done.stdout + done.stderr
    assert_match(tmp_path)
