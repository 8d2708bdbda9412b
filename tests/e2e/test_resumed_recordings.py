"""A resumed recording adds an attempt to its reference, and has to agree with
the steps that are there.
"""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from fits import Fit, RaiseAt, Steady, StopError
from resumes import RESUMING, SaveAfter

from det_callbacks import DeterminismCallback, compare_runs, observe_non_deterministic
from det_callbacks.errors import DivergenceError, ReferenceFormatError, SelectionError
from det_callbacks.runs.store import Run

pytestmark = RESUMING

BATCHES = 4
"""Steps of an epoch."""


def fit(
    *callbacks: pl.Callback, ckpt_path: Any = None, model: Any = Steady, **options: Any
) -> None:
    Fit(*callbacks, model=model, **{"max_epochs": 2, **options}).run(
        ckpt_path=ckpt_path and str(ckpt_path)
    )


def recording(run: Path, **options: Any) -> DeterminismCallback:
    return DeterminismCallback(run, mode="record", **options)


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: Any) -> Path:
    folder = tmp_path_factory.mktemp("recorded")
    fit(recording(folder / "run"), SaveAfter(folder, 2, 4, 6))
    return folder


@pytest.fixture
def run(recorded: Path, tmp_path: Path) -> Path:
    """The same, to be changed."""
    shutil.copytree(recorded / "run", tmp_path / "run")
    return tmp_path / "run"


def files_of(path: Path) -> dict[str, bytes]:
    return {
        str(file.relative_to(path)): file.read_bytes() for file in path.rglob("*") if file.is_file()
    }


def steps_of(path: Path) -> list[int]:
    steps: list[int] = Run.open(path).rank(0).steps(0).tolist()
    return steps


def test_steps_that_agree_are_not_written_twice(recorded, run, capsys):
    with pytest.raises(SelectionError, match="replay="):  # another selection cannot be gone on with
        fit(recording(run, replay=("aten.addmm.default",)), ckpt_path=recorded / "4.ckpt")
    # one that stops earlier adds nothing
    fit(recording(run), ckpt_path=recorded / "2.ckpt", max_steps=6)
    assert "4 steps match those already recorded; recorded 0 new steps" in capsys.readouterr().out
    callback = recording(run)
    fit(
        callback,
        SaveAfter(run.parent, 3 * BATCHES, at="train_epoch_end"),
        ckpt_path=recorded / "6.ckpt",
        max_epochs=3,
    )
    resumed = Run.open(run)
    assert (resumed.is_complete, callback.verdict) == (True, None)
    assert steps_of(run) == list(range(3 * BATCHES))
    earlier, attempt = (
        resumed.rank(0).file_of(0, step).path for step in (2 * BATCHES - 1, 2 * BATCHES)
    )
    assert earlier != attempt
    assert (
        f"2 steps match those already recorded; recorded {BATCHES} new steps"
        in capsys.readouterr().out
    )
    # the steps before are what they were, and all of it is one training
    assert compare_runs(recorded / "run", run, steps="common").counts.steps_compared == 2 * BATCHES
    fit(recording(run), ckpt_path=run.parent / f"{3 * BATCHES}.ckpt", max_epochs=4)
    assert f"det_callbacks: recorded {BATCHES} new steps" in capsys.readouterr().out
    callback = DeterminismCallback(run, current=run.parent / "current")
    fit(callback, max_epochs=4)
    assert (callback.verdict.verdict, callback.verdict.counts.steps_compared) == (
        "match",
        4 * BATCHES,
    )


MOMENTUM, LACKS = "exp_avg of first.weight", "exists only in the reference"


def change_momentum(content: dict[str, Any]) -> None:
    content["optimizer_states"][0]["state"][0]["exp_avg"][0, 0] += 1e-3


# of levels that do not record what is read
IS_NOT = "differs from the reference's state at the end of step 3"
KEPT = "The recorded run is unchanged"
LOADED = "Compare what was loaded with what was saved"
CHANGES: list[tuple[Callable[[Any], object], str, dict[str, Any], str, str]] = [
    (change_momentum, "record", {}, MOMENTUM, KEPT),
    (change_momentum, "verify", {"level": "state"}, MOMENTUM, IS_NOT),
    (
        lambda one: one["state_dict"]["last.weight"][1, 2].add_(1e-3),
        "verify",
        {},
        "last.weight",
        LOADED,
    ),
    (
        lambda one: one["state_dict"]["first.bias"].add_(1),
        "verify",
        {"modules": ["last"]},
        "first.bias",
        IS_NOT,
    ),
    (lambda one: one["optimizer_states"][0]["state"].clear(), "verify", {}, MOMENTUM, LACKS),
]


@pytest.mark.parametrize(("change", "mode", "options", "name", "said"), CHANGES)
def test_what_the_checkpoint_did_not_bring_back_is_named(
    change, mode, options, name, said, recorded, run, tmp_path
):
    if options:
        fit(recording(run, **options, overwrite=True))
    before = files_of(run)
    content = torch.load(recorded / "4.ckpt", weights_only=True)
    change(content)
    torch.save(content, tmp_path / "changed.ckpt")  # without digests beside it
    current = tmp_path / "current" if mode == "verify" else None
    callback = DeterminismCallback(run, mode=mode, current=current, **options)
    with pytest.raises(DivergenceError) as caught:
        fit(callback, ckpt_path=tmp_path / "changed.ckpt")
    assert (caught.value.exit_code, caught.value.verdict) == (1, callback.verdict)
    assert callback.verdict.cause == "checkpoint"
    assert callback.verdict.explanation.startswith("Step 4, the first after resuming: ")
    assert name in (text := " ".join(str(caught.value).split()))
    assert said in text
    # nothing of the attempt is left (run.json is written anew, with the same content)
    if mode == "record":
        assert files_of(run) == before


class Other(Steady):
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if self.trainer.fit_loop.epoch_loop.total_batch_idx == 5:
            self.last.bias.data[0] += 1


def test_a_later_step_that_differs_takes_back_new_ones_too(recorded, tmp_path):
    """A run with a gap: steps 0 and 1, and 4 to 7; resumed with step 2 it fills the gap,
    and must meet step 4.
    """
    run = tmp_path / "run"
    fit(recording(run), max_steps=2)
    fit(recording(run), ckpt_path=recorded / "4.ckpt")
    assert steps_of(run) == [0, 1, 4, 5, 6, 7]
    before = files_of(run)
    callback = recording(run)
    with pytest.raises(
        DivergenceError, match=r"1 step before it matched.*without the 2 new steps of this attempt"
    ):
        fit(callback, model=Other, ckpt_path=recorded / "2.ckpt")
    assert callback.verdict.cause != "checkpoint"
    assert files_of(run) == before
    fit(callback, ckpt_path=recorded / "2.ckpt")  # the callback can resume again after it disagreed
    resumed, whole = Run.open(run).rank(0), Run.open(recorded / "run").rank(0)
    assert steps_of(run) == list(range(2 * BATCHES))
    assert [resumed.chain(0, step) for step in range(8)] == [
        whole.chain(0, step) for step in range(8)
    ]


class Unseeded(Steady):
    """Noise that nobody seeds, saved when it is recorded."""

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        generator = torch.Generator()
        generator.seed()
        hidden = torch.relu(self.norm(self.first(inputs)))
        noise = torch.empty_like(hidden).uniform_(generator=generator)
        return self.last(hidden + observe_non_deterministic("noise", noise))


def test_what_was_saved_is_put_back_in_steps_that_are_there(tmp_path):
    run = tmp_path / "run"
    fit(recording(run, level="module"), SaveAfter(tmp_path, 2), model=Unseeded, max_epochs=1)
    saved = {name: content for name, content in files_of(run).items() if "replay" in name}
    fit(recording(run, level="module"), model=Unseeded, ckpt_path=tmp_path / "2.ckpt")
    assert steps_of(run) == list(range(2 * BATCHES))
    assert saved.items() <= files_of(run).items()
    callback = DeterminismCallback(run, current=tmp_path / "current")
    fit(callback, model=Unseeded)
    assert callback.verdict.verdict == "match"


def test_where_steps_are_left_out_the_checkpoint_is_not_accused(tmp_path):
    run = tmp_path / "run"
    fit(recording(run, every_n_steps=3), SaveAfter(tmp_path, 4))
    with pytest.raises(DivergenceError) as caught:
        fit(
            recording(run, every_n_steps=3, resume="plain"),
            model=Other,
            ckpt_path=tmp_path / "4.ckpt",
        )
    assert "the first after resuming" not in str(caught.value)
    assert steps_of(run) == [0, 3, 6]


def test_an_exception_in_a_resumed_attempt_keeps_what_was_there(recorded, run, capsys, monkeypatch):
    before = files_of(run)
    at_step_6, at_step_9 = (
        RaiseAt("on_train_batch_start", StopError("stop"), call=call) for call in (3, 4)
    )
    with monkeypatch.context() as killed:
        # what a kill leaves is in nobody's way
        killed.setattr(shutil, "rmtree", lambda *_, **__: None)
        with pytest.raises(StopError):
            fit(recording(run), at_step_6, ckpt_path=recorded / "4.ckpt", max_epochs=3)
    assert "before its first new step" in capsys.readouterr().out
    assert {
        name: content for name, content in files_of(run).items() if ".disagreement" not in name
    } == before
    assert (run / ".disagreement").exists()

    # one that has added a step is incomplete until it is gone on with
    with pytest.raises(StopError):
        fit(recording(run), at_step_9, ckpt_path=recorded / "6.ckpt", max_epochs=3)
    assert not Run.open(run).is_complete
    assert steps_of(run) == list(range(2 * BATCHES + 1))
    current = run.parent / "current"
    with pytest.raises(
        ReferenceFormatError,
        match=(
            r"is incomplete: .*8 is the last whole step\. Continue the recording .*Lightning: "
            r"ckpt_path"
        ),
    ):
        fit(DeterminismCallback(run, current=current), max_epochs=3)
    callback = DeterminismCallback(run, current=current, steps="common")
    fit(callback, max_epochs=3)
    assert (callback.verdict.verdict, callback.verdict.coverage.steps) == ("match", (0, 8))
    fit(recording(run), ckpt_path=recorded / "6.ckpt", max_epochs=3)
    assert Run.open(run).is_complete
    assert not (run / ".disagreement").exists()
    assert compare_runs(recorded / "run", run, steps="common").verdict == "match"
