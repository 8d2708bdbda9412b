"""Settings that a callback is given are in force when training begins, or it does not begin."""

from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from fits import Classifier, RaiseAt, Samples, StopError
from lightning.pytorch.callbacks import LambdaCallback
from torch.utils.data import DataLoader
from trainers import quiet_trainer

from det_callbacks import (
    DeterminismCallback,
    DeterminismSettings,
    SettingsError,
    enforce_determinism,
)
from det_callbacks.runs.store import Run
from det_callbacks.settings import settings_in_force

SETTINGS = DeterminismSettings(seed=0)


@pytest.fixture(autouse=True)
def _puts_back_what_a_trainer_sets() -> Iterator[None]:
    with enforce_determinism(
        DeterminismSettings(deterministic_algorithms=None, cublas_workspace_config=None)
    ):
        yield


def fit(folder: Path, model: Any, settings: Any = SETTINGS) -> None:
    callback = DeterminismCallback(folder, mode="record", settings=settings)
    quiet_trainer(callback).fit(model, DataLoader(Samples(), batch_size=8))


def refused(folder: Path, model: Classifier) -> str:
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(SettingsError) as caught:
        fit(folder, model)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert not folder.exists()
    return str(caught.value)


def test_a_seed_after_the_model_is_refused_with_names_and_fine_before_it(tmp_path):
    early = Classifier()
    names = [name for name, _ in early.named_parameters()]
    with enforce_determinism(SETTINGS):
        torch.manual_seed(5)
        message = refused(tmp_path / "run", early)
        assert message.startswith(
            "seed=0 is not in force: the seed of torch is 5 and should be 0. If the program"
        )
        torch.manual_seed(0)
        message = refused(tmp_path / "run", early)
        assert (
            f"{len(names)} of the model's {len(names)} parameters ({', '.join(names[:3])}, ...)"
            in message
        )
        assert "Seed before you build the model, with " in message
        late = Classifier()
        late.last = early.last
        assert "(last.weight, last.bias) were already initialised" in refused(
            tmp_path / "run", late
        )
        pl.seed_everything(0, workers=False, verbose=False)
        message = refused(tmp_path / "run", Classifier())
        assert "not in force: PL_SEED_WORKERS is 0 and should be 1. " in message
        pl.seed_everything(0, workers=True, verbose=False)
        # without a seed in the settings the age of the model does not matter
        fit(tmp_path / "unseeded", early, settings=DeterminismSettings())
        late = Classifier()
        fit(tmp_path / "run", late)
        recorded = Run.open(tmp_path / "run")
        assert (recorded.rank(0).num_steps, recorded.manifest.settings["seed"]) == (4, 0)


TEMPLATE = {"deterministic": False, "benchmark": True}  # as lightning-hydra-template passes it
CUDNN = {"deterministic_algorithms": "error", "cudnn_deterministic": True, "cudnn_benchmark": False}
OTHERS = {"deterministic_algorithms": "warn", "cublas_workspace_config": ":16:8", "num_threads": 1}


@pytest.mark.parametrize(
    ("options", "wanted"), [(TEMPLATE, CUDNN), ({"deterministic": True}, OTHERS)]
)
@pytest.mark.parametrize("stops_at", ["", "on_fit_start", "on_train_batch_end"])
def test_what_can_still_be_set_is_set_for_the_training_and_put_back_after_it(
    stops_at, options, wanted, tmp_path
):
    def but_the_seed() -> dict[str, Any]:
        return {**settings_in_force(), "seed": None}

    in_force: list[dict[str, Any]] = []
    others = [LambdaCallback(on_train_batch_start=lambda *_: in_force.append(settings_in_force()))]
    others += [RaiseAt(stops_at, StopError(), call=1)] if stops_at else []
    callback = DeterminismCallback(tmp_path / "run", mode="record", settings=wanted)
    trainer = quiet_trainer(callback, *others, **options)
    before = but_the_seed()
    assert before != {**before, **wanted}
    with pytest.raises(StopError) if stops_at else nullcontext():
        trainer.fit(Classifier(), DataLoader(Samples(), batch_size=8))
    assert but_the_seed() == before
    if stops_at != "on_fit_start":
        for found in (in_force[-1], Run.open(tmp_path / "run").manifest.settings):
            assert {name: found[name] for name in wanted} == wanted


def test_generators_go_on_after_the_training_as_they_would_without_settings(tmp_path):
    drawn = []
    for settings in (None, {"num_threads": torch.get_num_threads()}):
        with enforce_determinism({"seed": 1}):
            fit(tmp_path / f"run-{len(drawn)}", Classifier(), settings=settings)
            drawn.append(torch.rand(()).item())
    assert drawn[0] == drawn[1]
