"""From two recordings at level state to the step, and from the step recorded again to the op."""

import json
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_fits import RESUMING
from fits import Fit, Steady, StopError
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from stored_runs import OneOf, join
from torch import Tensor, library
from torch.nn.functional import cross_entropy

from det_callbacks import DeterminismCallback, DivergenceError, NothingComparedError, SelectionError, cli
from det_callbacks.bisect import bisect_runs
from det_callbacks.checkpoint.nearest import FoundCheckpoint, nearest_checkpoint
from det_callbacks.compare.first_step import RankStep
from det_callbacks.errors import ReferenceFormatError
from det_callbacks.trace.program import StepRecord
from det_callbacks.trace.store import RankRun, Run
from det_callbacks.trace.writer import RunWriter

pytestmark = RESUMING

Command = Callable[..., tuple[int, str, str]]
FAULT = 14  # of 20 steps; a checkpoint is saved right after it, and after step 9
EPOCHS = 5


@library.custom_op("bisected::double", mutates_args=())
def double(values: Tensor, is_wrong: bool) -> Tensor:
    """A kernel that goes wrong in one element when it is told to, which no argument of the op shows."""
    result = values.numpy() * 2
    if Kernel.is_wrong:
        result.flat[0] += 1
    return torch.from_numpy(result)


@double.register_fake
def _(values: Tensor, is_wrong: bool) -> Tensor:
    return torch.empty_like(values)


double.register_autograd(lambda ctx, gradient: (gradient * 2, None))


class Kernel:
    is_wrong = False


class Faulty(Steady):
    """Goes wrong in one step, if any."""

    fault: int | None = None

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        inputs, labels = batch
        Kernel.is_wrong = self.trainer.fit_loop.epoch_loop.total_batch_idx == self.fault
        return cross_entropy(self.last(double(torch.relu(self.first(inputs)), False)), labels)


def faulty(fault: int | None) -> Callable[[], Faulty]:
    def make() -> Faulty:
        model = Faulty()
        model.fault = fault
        return model

    return make


def record(folder: Path, *others: Callback, fault: int | None = None, epochs: int = EPOCHS, **options: Any) -> Path:
    callback = DeterminismCallback(folder, mode="record", **{"level": "state", **options})
    Fit(callback, *others, model=faulty(fault), max_epochs=epochs, enable_checkpointing=bool(others)).run()
    return folder


def saving(folder: Path) -> ModelCheckpoint:
    return ModelCheckpoint(folder, every_n_train_steps=5, save_top_k=-1, filename="{step}")


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    record(folder / "good", saving(folder / "kept" / "good"))
    record(folder / "bad", saving(folder / "kept" / "bad"), fault=FAULT)
    record(folder / "again")
    record(folder / "short", epochs=3)
    record(folder / "bad5", fault=FAULT, every_n_steps=5)
    record(folder / "good5", every_n_steps=5)
    return folder


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str]) -> Command:
    def run(*arguments: object) -> tuple[int, str, str]:
        capsys.readouterr()
        status = cli.main([str(argument) for argument in arguments])
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    return run


# the step


def test_the_step_and_nothing_but_it_is_read(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[int] = []
    original = RankRun.read

    def count(rank: RankRun, segment: int, step: int) -> StepRecord:
        read.append(step)
        return original(rank, segment, step)

    monkeypatch.setattr(RankRun, "read", count)
    found = bisect_runs(runs / "good", runs / "bad").found
    assert read
    assert set(read) == {FAULT}
    assert found.ranks == (RankStep(segment=0, step=FAULT, rank=0, last_equal=FAULT - 1),)
    assert (found.num_equal, found.exit_code) == (FAULT, 1)
    assert found.verdict is not None
    assert found.verdict.first_divergence is not None
    assert found.verdict.first_divergence.step == FAULT


def test_the_text_names_the_step_and_what_to_do(runs: Path, command: Command) -> None:
    status, out, err = command("bisect", runs / "good", runs / "bad", "--checkpoints", runs / "kept")
    assert (status, err) == (1, "")
    lines = out.splitlines()
    assert lines[0] == f"STEP {FAULT} IS THE FIRST THAT DIFFERS"
    assert lines[1] == f"All up to step {FAULT - 1} agree, by their chains."
    assert f"Record step {FAULT} at level op, on both sides:" in lines
    assert f"  then       det-callbacks diff {runs}/good-step-14 {runs}/bad-step-14" in lines
    assert f'DeterminismCallback("{runs}/bad-step-14", mode="record", level="op", only_steps=[14])' in out
    # the last that was saved before: after step 9
    for name in ("good", "bad"):
        assert f"resumed from {runs}/kept/{name}/step=10.ckpt, of step 9: trainer.fit(ckpt_path=...)" in out


def test_a_damaged_checkpoint_is_not_advised(runs: Path, tmp_path: Path) -> None:
    kept = shutil.copytree(runs / "kept", tmp_path / "kept")
    for number in (10, 15):
        (kept / "bad" / f"step={number}.ckpt.digests.json").write_text("{")
    found = [rerun.checkpoint for rerun in bisect_runs(runs / "good", runs / "bad", checkpoints=[kept]).reruns]
    # beside the runs there are the whole ones
    assert [checkpoint and checkpoint.step for checkpoint in found] == [9, 9]
    run_id = Run.open(runs / "bad").run_id
    assert nearest_checkpoint(run_id, before=FAULT, folders=[kept]) == FoundCheckpoint(
        path=str(kept / "bad" / "step=5.ckpt"), step=4
    )
    assert nearest_checkpoint(run_id, before=4, folders=[kept]) is None


def test_what_it_says_to_record_names_the_op(runs: Path, command: Command, tmp_path: Path) -> None:
    """One side from the start and one from its checkpoint, one step each: the kernel is found."""
    bisection = bisect_runs(runs / "good", runs / "bad", checkpoints=[runs])
    for rerun, fault, name in zip(bisection.reruns, (None, FAULT), ("good", "bad"), strict=True):
        assert rerun.checkpoint is not None
        callback = DeterminismCallback(tmp_path / name, mode="record", **rerun.arguments)
        options = {"max_epochs": EPOCHS, "enable_checkpointing": True, "default_root_dir": tmp_path}
        ckpt_path = None if fault is None else rerun.checkpoint.path
        Fit(callback, model=faulty(fault), **options).run(ckpt_path=ckpt_path)
        assert Run.open(tmp_path / name).rank(0).steps(0).tolist() == [FAULT]
    status, out, _ = command("diff", tmp_path / "good", tmp_path / "bad", "--json")
    verdict = json.loads(out)
    assert status == 1
    assert [origin["op"] for origin in verdict["origins"]] == ["bisected.double.default"]
    assert (verdict["first_divergence"]["step"], verdict["first_divergence"]["is_origin"]) == (FAULT, True)
    # and by how much it differs is all that is left to be recorded
    assert [rerun.arguments for rerun in bisect_runs(tmp_path / "good", tmp_path / "bad").reruns] == [
        {"level": "op", "only_steps": [FAULT], "keep_tensors": ["forward/:bisected.double.default"]}
    ] * 2


def test_a_verification_is_as_good_as_a_recording(runs: Path, tmp_path: Path) -> None:
    callback = DeterminismCallback(runs / "good", current=tmp_path / "current")
    with pytest.raises(DivergenceError):
        Fit(callback, model=faulty(FAULT), max_epochs=EPOCHS).run()
    found = bisect_runs(runs / "good", tmp_path / "current").found
    assert found.ranks == bisect_runs(runs / "good", runs / "bad").found.ranks
    assert found.num_equal == FAULT


def test_steps_that_were_left_out_are_suspects_too(runs: Path, command: Command) -> None:
    bisection = bisect_runs(runs / "good5", runs / "bad5")
    assert bisection.found.ranks[0].step == 15
    assert bisection.steps == range(11, 16)
    assert bisection.reruns[0].arguments == {"level": "op", "only_steps": list(range(11, 16))}
    assert bisection.reruns[0].folder.endswith("good5-step-11-15")
    status, out, _ = command("bisect", runs / "good5", runs / "bad5")
    assert status == 1
    assert "The difference begins in one of steps 11 to 15. Record these at level op, on both sides:" in out


def test_many_suspects_are_recorded_at_level_state_first(tmp_path: Path) -> None:
    for name, fault in (("good", None), ("bad", 3)):
        record(tmp_path / name, fault=fault, every_n_steps=16)
    bisection = bisect_runs(tmp_path / "good", tmp_path / "bad")
    assert (bisection.steps, bisection.level) == (range(1, 17), "state")
    assert bisection.reruns[0].arguments == {"level": "state"}
    assert bisection.then is not None
    assert bisection.then.startswith("det-callbacks bisect ")


def test_runs_that_hold_every_op_are_recorded_again_for_the_numbers_only(tmp_path: Path, command: Command) -> None:
    for name, fault in (("good", None), ("bad", 2)):
        record(tmp_path / name, fault=fault, epochs=1, level="op")
    status, out, _ = command("bisect", tmp_path / "good", tmp_path / "bad")
    assert status == 1
    assert f"The runs hold the op that differs:\n  det-callbacks diff {tmp_path}/good {tmp_path}/bad\n" in out
    bisection = bisect_runs(tmp_path / "good", tmp_path / "bad")
    assert [rerun.folder for rerun in bisection.reruns] == [
        f"{tmp_path}/{name}-step-2-kept" for name in ("good", "bad")
    ]
    for rerun, fault in zip(bisection.reruns, (None, 2), strict=True):
        callback = DeterminismCallback(rerun.folder, mode="record", **rerun.arguments)
        Fit(callback, model=faulty(fault), max_epochs=1).run()
    again = bisect_runs(*(rerun.folder for rerun in bisection.reruns))
    assert again.reruns == ()
    assert again.found.verdict is not None
    (origin,) = again.found.verdict.origins
    assert origin.numbers is not None
    assert [tensor.num_differing for tensor in origin.numbers.output] == [1]
    _, out, _ = command("bisect", *(rerun.folder for rerun in bisection.reruns))
    assert out.splitlines()[-1] == f"  {bisection.then}"
    assert "DeterminismCallback" not in out


# no difference


def test_runs_that_agree_have_no_such_step(runs: Path, command: Command) -> None:
    status, out, _ = command("bisect", runs / "good", runs / "again")
    assert status == 0
    assert out.splitlines()[0] == "NO STEP DIFFERS"
    assert "agree at 20 steps of all ranks, by their chains." in out


def test_the_end_of_the_shorter_run_is_said(runs: Path, command: Command) -> None:
    status, out, _ = command("bisect", runs / "bad", runs / "short")
    assert status == 0
    assert "agree at 12 steps of all ranks, by their chains, up to step 11, where the shorter one ends" in out
    assert f"What {runs}/bad did after that, the other does not tell." in out
    assert bisect_runs(runs / "short", runs / "bad").found.longer == str(runs / "bad")


# what cannot be told


def test_other_steps_are_no_agreement(runs: Path) -> None:
    with pytest.raises(SelectionError, match="after 1 that are the same, the first has step 1 and the second step 5"):
        bisect_runs(runs / "good", runs / "bad5")


def test_another_level_is_refused(runs: Path, tmp_path: Path) -> None:
    record(tmp_path / "op", epochs=1, level="op")
    with pytest.raises(SelectionError, match="did not record the same: level"):
        bisect_runs(runs / "good", tmp_path / "op")


def test_a_verification_that_was_stopped_proves_nothing(runs: Path, tmp_path: Path) -> None:
    class Stop(Callback):
        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            if trainer.fit_loop.epoch_loop.total_batch_idx == 4:
                raise StopError

    stopped = Fit(
        DeterminismCallback(runs / "good", current=tmp_path / "current"),
        Stop(),
        model=faulty(None),
        max_epochs=EPOCHS,
    )
    with pytest.raises(StopError):
        stopped.run()
    with pytest.raises(NothingComparedError, match="is no proof that the runs agree"):
        bisect_runs(runs / "good", tmp_path / "current")
    with pytest.raises(ReferenceFormatError, match="is no reference"):
        bisect_runs(tmp_path / "current", runs / "good")


def test_a_machine_that_can_have_done_it_is_not_comparable(
    runs: Path, tmp_path: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MKL_CBWR", "COMPATIBLE")
    record(tmp_path / "elsewhere", fault=2, epochs=1)
    status, out, _ = command("bisect", runs / "good", tmp_path / "elsewhere", "--json")
    content = json.loads(out)
    assert (status, content["verdict"], content["first"]["step"]) == (3, "not_comparable", 2)
    status, out, _ = command("bisect", runs / "good", tmp_path / "elsewhere")
    assert "The machine differs, and can have changed the bits: env.MKL_CBWR." in out


def test_another_number_of_processes_is_not_comparable(runs: Path, tmp_path: Path, command: Command) -> None:
    manifest = {key: Run.open(runs / "good").manifest[key] for key in ("selection", "settings", "environment")}
    RunWriter.create(tmp_path / "two", manifest=manifest, peers=OneOf(0, 2)).close(complete=True)
    join(tmp_path / "two", 1).close(complete=True)
    status, out, _ = command("bisect", runs / "good", tmp_path / "two")
    assert status == 3
    assert out.startswith("NOT COMPARABLE\nThe reference ran on 1 process and this run on 2")


# the commands

APP = """
import hydra
import lightning.pytorch as pl
import torch
from hydra.utils import instantiate
from lightning.pytorch.callbacks import ModelCheckpoint

from test_bisect import faulty
from styles import Samples


@hydra.main(version_base="1.3", config_path="conf", config_name="config")
def main(config):
    saving = ModelCheckpoint(config.checkpoints, every_n_train_steps=5, save_top_k=-1, filename="{step}")
    callbacks = [saving, *instantiate(config.callbacks).values()]
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "accelerator": "cpu"}
    trainer = pl.Trainer(max_epochs=config.epochs, callbacks=callbacks, **quiet)
    loader = torch.utils.data.DataLoader(Samples(), batch_size=8, generator=torch.Generator())
    trainer.fit(faulty(config.fault)(), loader, ckpt_path=config.ckpt_path)


main()
"""

APP_CONFIG = """
epochs: 8
fault: null
ckpt_path: null
checkpoints: kept
callbacks: {}
logger: {}
hydra:
  searchpath: ['pkg://det_callbacks.conf']
  output_subdir: null
  run: {dir: out}
  job_logging: {root: {handlers: []}}
"""


@pytest.mark.slow
def test_the_printed_commands_lead_from_two_recordings_to_the_op(
    tmp_path: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With real processes, in an application whose command line holds a secret."""
    (tmp_path / "conf").mkdir()
    (tmp_path / "conf" / "config.yaml").write_text(APP_CONFIG)
    (tmp_path / "train.py").write_text(APP)
    here = Path(__file__).parent
    env = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([*map(str, (here, here.parent)), os.environ.get("PYTHONPATH", "")]),
    }
    monkeypatch.chdir(tmp_path)

    def train(words: list[str]) -> None:
        line = [sys.executable, "-W", "ignore", *words[1:]]
        done = subprocess.run(line, env=env, capture_output=True, text=True, check=False, timeout=240)
        assert done.returncode == 0, done.stdout + done.stderr

    secret = "+logger.api_key=hunter2"
    for name, fault in (("good", "null"), ("bad", "21")):
        own = ["+determinism=record", f"determinism.reference=refs/{name}", "determinism.level=state"]
        settings = ["determinism.settings.seed=5", secret, f"checkpoints=kept/{name}"]
        train(["python", "train.py", f"fault={fault}", *settings, *own])
    assert not [path for path in tmp_path.rglob("run.json") if b"hunter2" in path.read_bytes()]
    status, out, _ = command("bisect", "refs/good", "refs/bad")
    lines = [line.strip() for line in out.splitlines()]
    assert (status, lines[0]) == (1, "STEP 21 IS THE FIRST THAT DIFFERS")
    reruns = [line.split(maxsplit=1)[1] for line in lines if line.startswith(("reference", "current"))]
    assert reruns == [
        f"python train.py fault={fault} determinism.settings.seed=5 "
        f"'+logger.api_key=<withheld>' checkpoints=kept/{name} +determinism=record "
        f"determinism.reference=refs/{name}-step-21 determinism.level=op 'determinism.only_steps=[21]'"
        for name, fault in (("good", "null"), ("bad", "21"))
    ]
    assert "(<place> and <withheld> stand for what no run keeps: put it in again)" in lines
    assert "resumed from kept/good/step=20.ckpt, of step 19: trainer.fit(ckpt_path=...)" in lines
    for rerun, name in zip(reruns, ("good", "bad"), strict=True):
        resume = [f"ckpt_path='kept/{name}/step=20.ckpt'"]
        words = [word for word in shlex.split(rerun) if not word.startswith("+logger")]
        train([*words, *(resume if name == "bad" else [])])
    (then,) = [line.removeprefix("then").strip() for line in lines if line.startswith("then")]
    status, out, _ = command(*shlex.split(then)[1:], "--json")
    verdict = json.loads(out)
    assert (status, verdict["first_divergence"]["step"]) == (1, 21)
    assert [origin["op"] for origin in verdict["origins"]] == ["bisected.double.default"]
