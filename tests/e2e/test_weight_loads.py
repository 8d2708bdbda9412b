"""Weights that are loaded after the callback was set up: noted with their line, shown, and named where they matter."""

import copy
import io
import json
import pickle
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from fits import Fit, RaiseAt, Steady, StopError
from resuming import BATCHES, STYLES, Checkpoints, fit
from torch import nn
from trainers import LIGHTNING_ADVICE

from det_callbacks import DeterminismCallback, DivergenceError, ReferenceFormatError, cli, compare_runs
from det_callbacks.trace.store import Run

pytestmark = LIGHTNING_ADVICE


class Loads(pl.Callback):
    """Loads weights into a part of the module, at the hook and as often as a test says."""

    def __init__(self, hook: str, *, change: float = 0.0) -> None:
        self.hook = hook
        self.change = change

        def load(trainer: pl.Trainer, module: Any, *_: Any) -> None:
            weights = {name: value + change for name, value in module.last.state_dict().items()}
            module.last.load_state_dict(weights)

        setattr(self, hook, load)


def has_hooks(module: nn.Module) -> bool:
    return any(part._load_state_dict_post_hooks for part in module.modules())


def test_a_load_before_the_first_step_is_noted_and_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fitting = fit(DeterminismCallback(tmp_path / "run", mode="record"), Loads("on_fit_start"))
    assert not has_hooks(fitting.model)
    (load,) = Run.open(tmp_path / "run").weight_loads(0)
    assert (load.module, load.first_step, load.num_calls, load.is_restore) == ("last", None, 1, False)
    assert "test_weight_loads.py:" in load.source
    assert load.source.endswith(" in load")
    capsys.readouterr()
    assert cli.main(["show", str(tmp_path / "run")]) == 0
    shown = capsys.readouterr().out
    assert f"weights loaded after setup: into last at {load.source} before the first step, 1 call, attempt 0" in shown
    assert cli.main(["show", str(tmp_path / "run"), "--json"]) == 0
    (entry,) = json.loads(capsys.readouterr().out)["weight_loads"]
    assert entry == load.to_dict()


def test_a_load_in_training_is_noted_once_with_its_number(tmp_path: Path) -> None:
    fit(DeterminismCallback(tmp_path / "run", mode="record"), Loads("on_train_batch_end"))
    (load,) = Run.open(tmp_path / "run").weight_loads(0)
    assert (load.first_step, load.num_calls) == (0, 2 * BATCHES)


def test_what_lightning_restores_is_no_surprise(tmp_path: Path) -> None:
    fit(None, Checkpoints(tmp_path / "saved"), max_epochs=1)
    resumed = tmp_path / "resumed"
    fit(DeterminismCallback(resumed, mode="record"), ckpt_path=tmp_path / "saved" / f"{BATCHES}.ckpt")
    (load,) = Run.open(resumed).weight_loads(0)
    assert load.is_restore
    assert (load.module, load.first_step) == ("", None)
    assert "load_model_state_dict" in load.source


def test_no_load_leaves_no_file(tmp_path: Path) -> None:
    fit(DeterminismCallback(tmp_path / "run", mode="record"))
    assert not list(tmp_path.rglob("weight_loads.json"))
    assert Run.open(tmp_path / "run").weight_loads(0) == ()


def test_a_divergence_of_the_weights_names_the_load(tmp_path: Path) -> None:
    fit(DeterminismCallback(tmp_path / "reference", mode="record"))
    callback = DeterminismCallback(tmp_path / "reference", current=tmp_path / "current")
    with pytest.raises(DivergenceError) as caught:
        fit(callback, Loads("on_fit_start", change=1.0))
    assert callback.verdict is not None
    assert callback.verdict.cause == "initial_weights"
    said = str(caught.value)
    assert "the initial state last.weight, last.bias differs (2 of 9 tensors)" in said
    assert "the reference loaded none, and the current run weights into last at " in said
    # the same from the disk, the other way round
    fit(DeterminismCallback(tmp_path / "other", mode="record"), Loads("on_fit_start", change=1.0))
    verdict = compare_runs(tmp_path / "other", tmp_path / "reference")
    assert verdict.cause == "initial_weights"
    assert "the reference loaded weights into last at " in verdict.explanation
    assert "and the current run none" in verdict.explanation


def test_a_load_that_changes_nothing_is_not_accused(tmp_path: Path) -> None:
    fit(DeterminismCallback(tmp_path / "reference", mode="record"))
    callback = DeterminismCallback(tmp_path / "reference", current=tmp_path / "current")
    fit(callback, Loads("on_fit_start"))
    assert callback.verdict is not None
    assert callback.verdict.verdict == "match"


@pytest.mark.parametrize("hook", ["on_fit_start", "on_train_batch_start", "on_train_epoch_end", "on_train_end"])
def test_no_hook_stays_when_the_fit_fails(hook: str, tmp_path: Path) -> None:
    callback = DeterminismCallback(tmp_path / "run", mode="record")
    fitting = Fit(callback, RaiseAt(hook, StopError(hook), call=1), model=Steady)
    with pytest.raises(StopError):
        fitting.run()
    assert not has_hooks(fitting.model)


class Copies(pl.Callback):
    """Copies and pickles the module in the middle of the training."""

    def on_train_batch_end(self, trainer: pl.Trainer, module: Any, *_: Any) -> None:
        assert has_hooks(module)
        self.copied = copy.deepcopy(module.last)
        self.pickled = pickle.dumps(module.last)
        saved = io.BytesIO()
        torch.save(module.last, saved)
        self.saved = saved.getvalue()


def test_copies_of_the_module_work_and_tell_nobody(tmp_path: Path) -> None:
    copies = Copies()
    fit(DeterminismCallback(tmp_path / "run", mode="record"), copies)
    loaded = torch.load(io.BytesIO(copies.saved), weights_only=False)
    for module in (copies.copied, pickle.loads(copies.pickled), loaded):
        module.load_state_dict(module.state_dict())
    assert Run.open(tmp_path / "run").weight_loads(0) == ()
    assert b"det_callbacks" not in copies.pickled + copies.saved


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # Dynamo reads it
def test_a_compiled_part_is_named_by_the_module_it_was_called_on(tmp_path: Path) -> None:
    class Compiled(Steady):
        def __init__(self) -> None:
            super().__init__()
            self.last = torch.compile(self.last, backend="eager")

    callback = DeterminismCallback(tmp_path / "run", mode="record", level="state")  # others have global hooks open
    fitting = fit(callback, Loads("on_train_batch_end"), model=Compiled)
    (load,) = Run.open(tmp_path / "run").weight_loads(0)
    assert (load.module, load.num_calls) == ("last", 2 * BATCHES)
    assert not has_hooks(fitting.model)


def test_a_damaged_list_is_an_error_that_names_it(tmp_path: Path) -> None:
    fit(DeterminismCallback(tmp_path / "run", mode="record"), Loads("on_fit_start"))
    (path,) = tmp_path.rglob("weight_loads.json")
    for content in ("[", "{}", '[{"module": "last"}]', path.read_text().replace('"last"', "7")):
        path.write_text(content)
        with pytest.raises(ReferenceFormatError, match=r"weight_loads\.json is damaged"):
            Run.open(tmp_path / "run").weight_loads(0)


def test_ema_copies_the_module_and_is_not_noted(tmp_path: Path) -> None:
    model, options, others = STYLES["ema"]
    fitting = fit(DeterminismCallback(tmp_path / "run", mode="record"), *others(), model=model, **options)
    assert Run.open(tmp_path / "run").weight_loads(0) == ()
    assert not has_hooks(fitting.model)
