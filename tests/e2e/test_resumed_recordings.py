"""A resumed recording adds an attempt to its reference, and has to agree with the steps that are there."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from fits import Steady
from judged import require_one_verdict
from resuming import BATCHES, Checkpoints, Stateful, fit
from trainers import LIGHTNING_ADVICE

from det_callbacks import (
    DeterminismCallback,
    DivergenceError,
    NothingComparedError,
    SelectionError,
    cli,
    compare_runs,
    observe_non_deterministic,
)
from det_callbacks.runs.store import Run

pytestmark = LIGHTNING_ADVICE


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two epochs with a checkpoint in the middle, of a loader that goes on in the middle of an epoch."""
    folder = tmp_path_factory.mktemp("recorded")
    fit(DeterminismCallback(folder / "run", mode="record"), Checkpoints(folder, 2, 4, 6), loader=Stateful())
    return folder


@pytest.fixture
def run(recorded: Path, tmp_path: Path) -> Path:
    """The same, to be changed."""
    copied = tmp_path / "run"
    for path in (recorded / "run").rglob("*"):
        if path.is_file():
            (copied / path.relative_to(recorded / "run")).parent.mkdir(parents=True, exist_ok=True)
            (copied / path.relative_to(recorded / "run")).write_bytes(path.read_bytes())
    return copied


def files_of(path: Path) -> dict[str, bytes]:
    return {str(file.relative_to(path)): file.read_bytes() for file in path.rglob("*") if file.is_file()}


def changed(checkpoint: Path, folder: Path, change: Callable[[dict[str, Any]], object]) -> Path:
    """Return a checkpoint in which something was changed."""
    content = torch.load(checkpoint, weights_only=True)
    change(content)
    torch.save(content, folder / "changed.ckpt")
    return folder / "changed.ckpt"


def flip_momentum(content: dict[str, Any]) -> None:
    content["optimizer_states"][0]["state"][0]["exp_avg"][0, 0] += 1e-3


def flip_weight(content: dict[str, Any]) -> None:
    content["state_dict"]["last.weight"][1, 2] += 1e-3


def flip_buffer(content: dict[str, Any]) -> None:
    content["state_dict"]["norm.running_mean"][3] += 1e-3


def forget_optimizer(content: dict[str, Any]) -> None:
    content["optimizer_states"][0]["state"].clear()


@pytest.mark.parametrize("after", [2, 4, 6])
def test_steps_that_agree_are_not_written_twice(after: int, recorded: Path, run: Path, capsys: Any) -> None:
    whole = compare_runs(recorded / "run", run)
    callback = DeterminismCallback(run, mode="record")
    fit(callback, ckpt_path=recorded / f"{after}.ckpt", loader=Stateful(), max_epochs=3)
    resumed = Run.open(run)
    assert resumed.is_complete
    assert resumed.resumed_steps == {(0, after)}
    assert resumed.rank(0).steps(0).tolist() == list(range(3 * BATCHES))
    attempt = run / "rank-00000" / "attempt-001.arrows"
    assert resumed.rank(0).stream_of(0, 2 * BATCHES) == attempt
    assert resumed.rank(0).stream_of(0, 2 * BATCHES - 1) != attempt
    line = f"{2 * BATCHES - after} steps there already, and equal; recorded {BATCHES} new steps"
    assert line in capsys.readouterr().out
    assert callback.verdict is None
    # the steps before are what they were, and all of it is one training
    assert compare_runs(recorded / "run", run, steps="common").counts == whole.counts
    callback = DeterminismCallback(run, current=run.parent / "current")
    fit(callback, loader=Stateful(), max_epochs=3)
    assert callback.verdict is not None
    assert callback.verdict.counts.steps_compared == 3 * BATCHES


def test_a_resumed_run_that_stops_earlier_adds_nothing(recorded: Path, run: Path, capsys: Any) -> None:
    fit(DeterminismCallback(run, mode="record"), ckpt_path=recorded / "2.ckpt", loader=Stateful(), max_steps=6)
    assert "4 steps there already, and equal; recorded 0 new steps" in capsys.readouterr().out
    assert compare_runs(recorded / "run", run).counts.steps_compared == 2 * BATCHES
    assert Run.open(run).is_complete


@pytest.mark.parametrize(
    ("change", "names"),
    [
        (flip_momentum, ["exp_avg of first.weight"]),
        (flip_weight, ["last.weight"]),
        (flip_buffer, ["norm.running_mean"]),
        (forget_optimizer, ["exp_avg of first.weight", "did not come out of the checkpoint"]),
    ],
)
@pytest.mark.parametrize("mode", ["record", "verify"])
def test_what_the_checkpoint_did_not_bring_back_is_named(
    change: Any, names: list[str], mode: Any, recorded: Path, run: Path, tmp_path: Path, capsys: Any
) -> None:
    before = files_of(run)
    checkpoint = changed(recorded / "6.ckpt", tmp_path, change)
    callback = DeterminismCallback(run, mode=mode, current=tmp_path / "current" if mode == "verify" else None)
    with pytest.raises(DivergenceError) as caught:
        fit(callback, ckpt_path=checkpoint, loader=Stateful(), max_epochs=3)
    assert caught.value.exit_code == 1
    assert caught.value.verdict is callback.verdict
    assert callback.verdict is not None
    assert callback.verdict.cause == "checkpoint"
    assert callback.verdict.explanation.startswith("Step 6, the first after resuming: ")
    for name in names:
        assert name in callback.verdict.explanation
    if mode == "verify":
        require_one_verdict(callback.verdict, run, tmp_path / "current")
        return
    said = str(caught.value)
    assert "The run keeps its steps and is as it was before" in said
    assert "overwrite=True" in said
    # nothing of the attempt is left (run.json is written anew, with the same content)
    assert files_of(run) == before
    assert compare_runs(recorded / "run", run).verdict == "match"
    capsys.readouterr()
    assert cli.main(["show", str(run)]) == 0
    again = DeterminismCallback(run, current=tmp_path / "again")
    fit(again, loader=Stateful())
    assert again.verdict is not None
    assert again.verdict.verdict == "match"


@pytest.mark.parametrize(("mode", "level"), [("record", "state"), ("verify", "module")])
@pytest.mark.parametrize(
    ("change", "name"),
    [
        (flip_momentum, "exp_avg of first.weight"),
        (flip_weight, "last.weight"),
        (flip_buffer, "norm.running_mean"),
        (forget_optimizer, "exp_avg of first.weight"),
    ],
)
def test_levels_that_do_not_record_what_is_read_name_it_too(
    change: Any, name: str, level: Any, mode: Any, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    fit(DeterminismCallback(run, mode="record", level=level), Checkpoints(tmp_path, 2), loader=Stateful(), max_epochs=1)
    checkpoint = changed(tmp_path / "2.ckpt", tmp_path, change)
    callback = DeterminismCallback(run, mode=mode, level=level, current=tmp_path / "c" if mode == "verify" else None)
    with pytest.raises(DivergenceError) as caught:
        fit(callback, ckpt_path=checkpoint, loader=Stateful(), max_epochs=1)
    assert callback.verdict is not None
    assert callback.verdict.cause == "checkpoint"
    assert name in callback.verdict.explanation
    assert "is not what the reference ended step 1 with" in str(caught.value)


def test_a_later_step_that_differs_takes_back_new_ones_too(recorded: Path, tmp_path: Path) -> None:
    """A run with a gap: steps 0 and 1, and 4 to 7; resumed with step 2 it fills the gap, and must meet step 4."""
    run = tmp_path / "run"
    fit(DeterminismCallback(run, mode="record"), loader=Stateful(), max_steps=2)
    fit(DeterminismCallback(run, mode="record"), ckpt_path=recorded / "4.ckpt", loader=Stateful())
    assert Run.open(run).rank(0).steps(0).tolist() == [0, 1, 4, 5, 6, 7]
    before = files_of(run)

    class Other(Steady):
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            if self.trainer.fit_loop.epoch_loop.total_batch_idx == 5:
                self.last.bias.data[0] += 1

    callback = DeterminismCallback(run, mode="record")
    with pytest.raises(DivergenceError, match=r"1 step before it agreed.*2 new steps of this attempt went with it"):
        fit(callback, model=Other, ckpt_path=recorded / "2.ckpt", loader=Stateful())
    assert callback.verdict is not None
    assert callback.verdict.cause != "checkpoint"
    assert files_of(run) == before

    fit(DeterminismCallback(run, mode="record"), ckpt_path=recorded / "2.ckpt", loader=Stateful())
    resumed, whole = Run.open(run).rank(0), Run.open(recorded / "run").rank(0)
    assert resumed.steps(0).tolist() == list(range(2 * BATCHES))
    assert [resumed.chain(0, step) for step in range(8)] == [whole.chain(0, step) for step in range(8)]


def test_the_callback_can_resume_again_after_it_disagreed(recorded: Path, run: Path, tmp_path: Path) -> None:
    callback = DeterminismCallback(run, mode="record")
    with pytest.raises(DivergenceError):
        fit(callback, ckpt_path=changed(recorded / "4.ckpt", tmp_path, flip_weight), loader=Stateful())
    fit(callback, ckpt_path=recorded / "4.ckpt", loader=Stateful(), max_epochs=3)
    assert Run.open(run).rank(0).steps(0).tolist() == list(range(3 * BATCHES))


def test_evidence_comes_in_order(recorded: Path, tmp_path: Path) -> None:
    """The checkpoint's state first, then the batch, then the generators."""

    class Backwards(Stateful):
        def __iter__(self) -> Any:
            return ((inputs.flip(0), labels.flip(0)) for inputs, labels in super().__iter__())

    class OtherSeed(Steady):
        def on_train_start(self) -> None:
            torch.manual_seed(5)

    def cause(change: Any = None, loader: Any = Stateful, model: Any = Steady) -> str:
        checkpoint = recorded / "4.ckpt"
        if change is not None:
            checkpoint = changed(checkpoint, tmp_path, change)
        number = len(list(tmp_path.glob("current-*")))
        callback = DeterminismCallback(recorded / "run", current=tmp_path / f"current-{number}", resume="plain")
        with pytest.raises(DivergenceError) as caught:
            fit(callback, model=model, ckpt_path=checkpoint, loader=loader())
        assert "the first after resuming" in str(caught.value)
        assert callback.verdict is not None
        return str(callback.verdict.cause)

    assert cause(flip_weight, Backwards, OtherSeed) == "checkpoint"
    assert cause(flip_momentum, Backwards, OtherSeed) == "checkpoint"
    assert cause(None, Backwards, OtherSeed) == "data_order"
    assert cause(None, Stateful, OtherSeed) == "rng"


def test_other_replay_patterns_are_refused(recorded: Path, run: Path) -> None:
    before = files_of(run)
    callback = DeterminismCallback(run, mode="record", replay=("aten.addmm.default",))
    with pytest.raises(SelectionError, match="replay="):
        fit(callback, ckpt_path=recorded / "4.ckpt", loader=Stateful())
    assert files_of(run) == before


class Unseeded(Steady):
    """Noise that nobody seeds, saved when it is recorded."""

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        generator = torch.Generator()
        generator.seed()
        hidden = torch.relu(self.norm(self.first(inputs)))
        noise = torch.empty_like(hidden).uniform_(generator=generator)
        return self.last(hidden + observe_non_deterministic("noise", noise))


def test_what_was_saved_is_put_back_in_steps_that_are_there(tmp_path: Path) -> None:
    run = tmp_path / "run"
    fit(
        DeterminismCallback(run, mode="record", level="module"),
        Checkpoints(tmp_path, 2),
        model=Unseeded,
        loader=Stateful(),
        max_epochs=1,
    )
    saved = files_of(run)
    fit(
        DeterminismCallback(run, mode="record", level="module"),
        model=Unseeded,
        ckpt_path=tmp_path / "2.ckpt",
        loader=Stateful(),
    )
    assert Run.open(run).rank(0).steps(0).tolist() == list(range(2 * BATCHES))
    now = files_of(run)
    assert all(now[name] == content for name, content in saved.items() if "replay" in name)
    callback = DeterminismCallback(run, current=tmp_path / "current")
    fit(callback, model=Unseeded, loader=Stateful())
    assert callback.verdict is not None
    assert callback.verdict.verdict == "match"


def test_a_resume_that_has_nothing_to_train_leaves_the_run_as_it_was(recorded: Path, run: Path) -> None:
    before = files_of(run)
    with pytest.raises(NothingComparedError):
        fit(DeterminismCallback(run, mode="record"), ckpt_path=recorded / "4.ckpt", loader=Stateful(), max_steps=4)
    assert files_of(run) == before


def test_where_steps_are_left_out_the_checkpoint_is_not_accused(tmp_path: Path) -> None:
    class OtherSeed(Steady):
        def on_train_start(self) -> None:
            torch.manual_seed(5)

    run = tmp_path / "run"
    fit(DeterminismCallback(run, mode="record", every_n_steps=3), Checkpoints(tmp_path, 4), loader=Stateful())
    callback = DeterminismCallback(run, mode="record", every_n_steps=3, resume="plain")
    with pytest.raises(DivergenceError) as caught:
        fit(callback, model=OtherSeed, ckpt_path=tmp_path / "4.ckpt", loader=Stateful())
    assert "the first after resuming" not in str(caught.value)
    assert Run.open(run).rank(0).steps(0).tolist() == [0, 3, 6]


class Failing(pl.Callback):
    def __init__(self, step: int) -> None:
        self.step = step

    def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.fit_loop.epoch_loop.total_batch_idx == self.step:
            raise RuntimeError("stop")


def test_an_exception_in_a_resumed_attempt_keeps_what_was_there(recorded: Path, run: Path, capsys: Any) -> None:
    before = files_of(run)
    options: dict[str, Any] = {"loader": Stateful(), "max_epochs": 3}
    with pytest.raises(RuntimeError, match="stop"):
        fit(DeterminismCallback(run, mode="record"), Failing(6), ckpt_path=recorded / "4.ckpt", **options)
    assert "after 2 steps that" in capsys.readouterr().out
    assert files_of(run) == before

    # one that has added a step is incomplete until it is gone on with
    with pytest.raises(RuntimeError, match="stop"):
        fit(DeterminismCallback(run, mode="record"), Failing(9), ckpt_path=recorded / "6.ckpt", **options)
    assert not Run.open(run).is_complete
    assert Run.open(run).rank(0).steps(0).tolist() == list(range(2 * BATCHES + 1))
    fit(DeterminismCallback(run, mode="record"), ckpt_path=recorded / "4.ckpt", **options)
    assert Run.open(run).is_complete
    assert compare_runs(recorded / "run", run, steps="common").verdict == "match"


class Annealed(Steady):
    """Keeps a number that no checkpoint of Lightning's has."""

    factor = 1.0

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return super().forward(inputs) * self.factor

    def on_train_batch_end(self, *_: Any) -> None:
        self.factor *= 0.9


def test_a_number_that_a_resume_lost_is_said_to_be_looked_for(tmp_path: Path) -> None:
    fit(DeterminismCallback(tmp_path / "run", mode="record"), Checkpoints(tmp_path), model=Annealed)
    callback = DeterminismCallback(tmp_path / "run", current=tmp_path / "current")
    with pytest.raises(DivergenceError):
        fit(callback, model=Annealed, ckpt_path=tmp_path / f"{BATCHES}.ckpt")
    verdict = callback.verdict
    assert verdict is not None
    first = verdict.first_divergence
    assert first is not None
    assert (first.step, first.kind, first.is_origin, verdict.cause) == (BATCHES, "argument", True, "forward")
    assert "a Python value that the checkpoint does not hold" in verdict.explanation
    require_one_verdict(verdict, tmp_path / "run", tmp_path / "current")
