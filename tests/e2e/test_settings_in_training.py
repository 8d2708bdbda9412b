"""Settings that a callback is given are in force when training begins, or it does not begin."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from styles import Classifier, Samples
from torch.utils.data import DataLoader
from trainers import quiet_trainer

from det_callbacks import DeterminismCallback, DeterminismSettings, SettingsError, enforce_determinism
from det_callbacks.runs.store import Run

SETTINGS = DeterminismSettings(seed=0)


class Counted(Classifier):
    def __init__(self) -> None:
        super().__init__()
        self.num_calls = 0

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.num_calls += 1
        return super().training_step(batch, batch_idx)


@pytest.fixture(autouse=True)
def _puts_back_what_a_trainer_sets() -> Iterator[None]:
    with enforce_determinism(DeterminismSettings(deterministic_algorithms=None, cublas_workspace_config=None)):
        yield


def fit(folder: Path, model: pl.LightningModule, settings: Any = SETTINGS, **options: Any) -> None:
    callback = DeterminismCallback(folder, mode="record", settings=settings)
    quiet_trainer(callback, **options).fit(model, DataLoader(Samples(), batch_size=8))


def refused(folder: Path, model: Counted, **options: Any) -> str:
    """Return what a fit is refused with: no step is trained, and nothing written."""
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(SettingsError) as caught:
        fit(folder, model, **options)
    assert caught.value.exit_code == 2
    assert model.num_calls == 0
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert not folder.exists()
    return str(caught.value)


def test_a_seed_after_the_model_is_refused_with_names_and_fine_before_it(tmp_path: Path) -> None:
    early = Counted()
    names = [name for name, _ in early.named_parameters()]
    with enforce_determinism(SETTINGS):
        message = refused(tmp_path / "run", early)
        assert f"{len(names)} of the model's {len(names)} parameters ({', '.join(names[:3])}, ...)" in message
        assert "Call det_callbacks.enforce_determinism(settings) before the model is built." in message
        late = Counted()
        fit(tmp_path / "run", late)
        assert late.num_calls > 0
        assert Run.open(tmp_path / "run").manifest.settings["seed"] == 0


def test_one_early_parameter_is_enough(tmp_path: Path) -> None:
    head = torch.nn.Linear(4, 2)
    with enforce_determinism({"seed": 4}):
        model = Counted()
        model.head = head
        message = refused(tmp_path / "run", model, settings={"seed": 4})
        assert "2 of the model's" in message
        assert "(head.weight, head.bias) existed when it was set" in message


def test_without_a_seed_in_the_settings_the_age_of_the_model_does_not_matter(tmp_path: Path) -> None:
    model = Counted()
    with enforce_determinism(SETTINGS):
        fit(tmp_path / "run", model, settings=DeterminismSettings())
    assert model.num_calls > 0


@pytest.mark.parametrize(
    ("options", "settings", "told"),
    [
        (
            {"deterministic": False},
            {},
            "deterministic_algorithms should be 'error' and is 'disabled' (as Trainer(deterministic=False) leaves it)",
        ),
        (
            {"deterministic": "warn"},
            {},
            "deterministic_algorithms should be 'error' and is 'warn' (as Trainer(deterministic=\"warn\") leaves it)",
        ),
        (
            {"deterministic": True},
            {"deterministic_algorithms": "warn"},
            "deterministic_algorithms should be 'warn' and is 'error' (as Trainer(deterministic=True) leaves it)",
        ),
        (
            {"deterministic": True},
            {"cublas_workspace_config": ":16:8"},
            "cublas_workspace_config should be ':16:8' and is ':4096:8' (as Trainer(deterministic=True) leaves it)",
        ),
        (
            {"benchmark": True},
            {},
            "cudnn_benchmark should be False and is True (as Trainer(benchmark=True) leaves it)",
        ),
        (
            {"deterministic": True},
            {"cudnn_benchmark": True},
            "cudnn_benchmark should be True and is False (as Trainer(benchmark=False) leaves it)",
        ),
    ],
)
def test_an_argument_of_the_trainer_that_overwrites_a_setting_is_named(
    options: dict[str, Any], settings: dict[str, Any], told: str, tmp_path: Path
) -> None:
    wanted = DeterminismSettings(seed=0, **settings)
    with enforce_determinism(wanted):
        message = refused(tmp_path / "run", Counted(), settings=wanted, **options)
    assert message.startswith("Determinism settings are not in force: ")
    assert told in message
    assert message.count("should be") == 1, "only what differs"
    assert message.endswith("Those arguments of the Trainer overwrite what is in force: leave them out.")


@pytest.mark.parametrize("options", [{}, {"deterministic": True}, {"benchmark": False}])
def test_arguments_that_ask_for_the_same_are_fine(options: dict[str, Any], tmp_path: Path) -> None:
    with enforce_determinism(SETTINGS):
        model = Counted()
        fit(tmp_path / "run", model, **options)
    assert model.num_calls > 0


@pytest.mark.parametrize(
    ("undo", "told"),
    [
        (lambda: torch.set_num_threads(2), "num_threads should be 1 and is 2."),
        (lambda: torch.manual_seed(5), "seed should be 0 and is 5."),
    ],
)
def test_what_the_trainer_does_not_touch_is_not_said_to_be_its_fault(
    undo: Callable[[], object], told: str, tmp_path: Path
) -> None:
    wanted = DeterminismSettings(seed=0, num_threads=1)
    with enforce_determinism(wanted):
        model = Counted()
        undo()
        message = refused(tmp_path / "run", model, settings=wanted)
    assert told in message
    assert "Trainer" not in message
