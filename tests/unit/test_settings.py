import os
import pickle
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from lightning.fabric.utilities.seed import seed_everything
from omegaconf import OmegaConf

from det_callbacks.errors import SettingsError
from det_callbacks.settings import (
    DeterminismSettings,
    SettingProblem,
    check_settings,
    enforce_determinism,
    settings_in_force,
)
from det_callbacks.settings import enforce as settings_module

NOTHING = {
    "seed": None,
    "deterministic_algorithms": None,
    "cublas_workspace_config": None,
    "cudnn_benchmark": None,
    "cudnn_deterministic": None,
}


def process_state() -> dict[str, Any]:
    """Asked of torch, NumPy, Python and the environment directly, not through the module under test."""
    return {
        "python": random.getstate(),
        "numpy": pickle.dumps(np.random.get_state()),
        "torch": torch.get_rng_state().tolist(),
        "algorithms": (torch.are_deterministic_algorithms_enabled(), torch.get_deterministic_debug_mode()),
        "fill": torch.utils.deterministic.fill_uninitialized_memory,
        "cudnn": (torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic, torch.backends.cudnn.allow_tf32),
        "precision": (
            torch.get_float32_matmul_precision(),
            torch.backends.cuda.matmul.fp32_precision,
            torch.backends.mkldnn.matmul.fp32_precision,
        ),
        "threads": torch.get_num_threads(),
        "dtype": torch.get_default_dtype(),
        "variables": {key: value for key, value in os.environ.items() if key != "PYTEST_CURRENT_TEST"},
    }


@pytest.fixture(autouse=True)
def _same_process_afterwards(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in ("CUBLAS_WORKSPACE_CONFIG", "PL_GLOBAL_SEED", "PL_SEED_WORKERS"):
        monkeypatch.delenv(name, raising=False)
    before = process_state()
    yield
    assert process_state() == before, "a test of settings left something behind"


def raise_when_in_force(name: str, value: Any, in_force: Callable[[], bool]) -> None:
    assert in_force()
    assert settings_in_force()[name] == value
    assert check_settings(DeterminismSettings(**{**NOTHING, name: value})) == ()
    raise KeyError


def draw() -> tuple[float, float, float]:
    return random.random(), float(np.random.random()), float(torch.rand(()))


def test_defaults_enforce_algorithms_and_choose_nothing_else() -> None:
    settings = DeterminismSettings()
    assert settings.seed is None
    assert settings.num_threads is None
    assert settings.float32_matmul_precision is None
    with enforce_determinism(settings):
        assert torch.are_deterministic_algorithms_enabled()
        assert not torch.is_deterministic_algorithms_warn_only_enabled()
        assert not torch.backends.cudnn.benchmark
        assert torch.backends.cudnn.deterministic
        assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
        assert "PL_GLOBAL_SEED" not in os.environ


@pytest.mark.parametrize(
    ("name", "value", "in_force"),
    [
        ("deterministic_algorithms", "error", lambda: torch.get_deterministic_debug_mode() == 2),
        ("deterministic_algorithms", "warn", lambda: torch.get_deterministic_debug_mode() == 1),
        ("deterministic_algorithms", "disabled", lambda: torch.get_deterministic_debug_mode() == 0),
        ("fill_uninitialized_memory", False, lambda: not torch.utils.deterministic.fill_uninitialized_memory),
        ("cublas_workspace_config", ":16:8", lambda: os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":16:8"),
        ("cudnn_benchmark", True, lambda: torch.backends.cudnn.benchmark),
        ("cudnn_deterministic", True, lambda: torch.backends.cudnn.deterministic),
        ("float32_matmul_precision", "medium", lambda: torch.get_float32_matmul_precision() == "medium"),
        ("num_threads", 1, lambda: torch.get_num_threads() == 1),
    ],
)
def test_each_setting_is_set_found_in_force_and_restored_after_an_exception(
    name: str, value: Any, in_force: Callable[[], bool]
) -> None:
    # From a place where every setting is another one, so that "in force" cannot be true by accident.
    elsewhere = {
        "deterministic_algorithms": "warn" if value != "warn" else "error",
        "fill_uninitialized_memory": True,
        "cublas_workspace_config": ":4096:8",
        "cudnn_benchmark": False,
        "cudnn_deterministic": False,
        "num_threads": 2,
    }
    with enforce_determinism(elsewhere):
        before = process_state()
        assert not in_force()
        assert check_settings(DeterminismSettings(**{**NOTHING, name: value})) != ()
        with pytest.raises(KeyError), enforce_determinism({**NOTHING, name: value}):
            raise_when_in_force(name, value, in_force)
        assert process_state() == before


def test_the_task_cannot_leak_what_it_changed_itself() -> None:
    before = process_state()
    with enforce_determinism(DeterminismSettings()):
        draw()
        torch.manual_seed(99)
        torch.set_default_dtype(torch.float64)
        torch.set_float32_matmul_precision("medium")
        torch.backends.cudnn.allow_tf32 = not torch.backends.cudnn.allow_tf32
        os.environ["PL_GLOBAL_SEED"] = "99"
        os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":16:8"
        torch.set_num_threads(1 if torch.get_num_threads() != 1 else 2)
    assert process_state() == before


@pytest.mark.parametrize("seed", [0, 7, 4294967295])
def test_seed_draws_what_lightning_draws(seed: int) -> None:
    with enforce_determinism(DeterminismSettings(seed=seed)):
        ours, variables = draw(), {key: value for key, value in os.environ.items() if key.startswith("PL_")}
    with enforce_determinism(DeterminismSettings()):
        draw()
        seed_everything(seed, workers=True, verbose=False)
        assert draw() == ours
        assert {key: value for key, value in os.environ.items() if key.startswith("PL_")} == variables


def test_another_seed_draws_other_numbers() -> None:
    with enforce_determinism(DeterminismSettings(seed=0)):
        zero = draw()
    with enforce_determinism(DeterminismSettings(seed=1)):
        one = draw()
    assert all(a != b for a, b in zip(zero, one, strict=True))


def test_without_a_seed_the_generators_stay_and_go_back() -> None:
    state = torch.get_rng_state()
    with enforce_determinism(DeterminismSettings()):
        assert torch.equal(torch.get_rng_state(), state)
        first = draw()
    with enforce_determinism(DeterminismSettings()):
        assert draw() == first


def test_applies_when_called_and_restores_once() -> None:
    before = process_state()
    enforced = enforce_determinism(DeterminismSettings(seed=3))
    assert settings_in_force()["seed"] == 3
    enforced.restore()
    assert process_state() == before
    outer = enforce_determinism(DeterminismSettings(seed=4))
    enforced.restore()
    assert settings_in_force()["seed"] == 4, "a second restore must not undo what came later"
    outer.restore()


def test_inductor_flag_that_torch_overwrites_goes_back() -> None:
    import torch._inductor.config as inductor

    before = inductor.deterministic
    inductor.deterministic = True
    try:
        with enforce_determinism({"deterministic_algorithms": "disabled"}):
            assert inductor.deterministic is False
        assert inductor.deterministic is True
    finally:
        inductor.deterministic = before


@pytest.mark.parametrize(
    ("name", "value", "told"),
    [
        ("seed", -1, "0 to 4294967295"),
        ("seed", 4294967296, "0 to 4294967295"),
        ("seed", True, "an integer"),
        ("seed", "7", "an integer"),
        ("deterministic_algorithms", "off", "'disabled'"),
        ("deterministic_algorithms", False, "'disabled'"),
        ("deterministic_algorithms", True, "'error'"),
        ("fill_uninitialized_memory", "yes", "True, False"),
        ("cublas_workspace_config", "4096", "':4096:8', ':16:8'"),
        ("cublas_workspace_config", ":4096:2", "':4096:8', ':16:8'"),
        ("cudnn_benchmark", 1, "True, False"),
        ("cudnn_deterministic", "true", "True, False"),
        ("float32_matmul_precision", "low", "'highest', 'high', 'medium'"),
        ("num_threads", 0, "from 1"),
        ("num_threads", 2.0, "an integer"),
    ],
)
def test_invalid_values_are_refused_by_name_with_the_allowed_ones(name: str, value: Any, told: str) -> None:
    before = process_state()
    with pytest.raises(SettingsError) as refused:
        enforce_determinism({name: value})
    assert f"{name}={value!r}" in str(refused.value)
    assert told in str(refused.value)
    assert refused.value.exit_code == 2
    assert process_state() == before


def test_unknown_names_are_refused_with_the_known_ones() -> None:
    with pytest.raises(SettingsError, match=r"setting sead; the settings are seed, deterministic_algorithms"):
        DeterminismSettings.from_mapping({"sead": 1, "seed": 1})


def test_a_hydra_node_is_a_mapping() -> None:
    node = OmegaConf.create({"seed": 0, "deterministic_algorithms": "warn", "num_threads": None})
    assert DeterminismSettings.from_mapping(node) == DeterminismSettings(seed=0, deterministic_algorithms="warn")


def test_cublas_variable_after_a_cuda_context_is_refused_and_nothing_applied(monkeypatch: pytest.MonkeyPatch) -> None:
    before = process_state()
    monkeypatch.setattr(settings_module, "has_cuda_context", lambda: True)
    with pytest.raises(SettingsError, match=r"too late.*CUBLAS_WORKSPACE_CONFIG=None already.*=:4096:8 set"):
        enforce_determinism(DeterminismSettings(seed=1))
    assert process_state() == before


def test_nothing_stays_half_applied(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(value: str) -> None:
        raise SettingsError(f"no {value}")

    before = process_state()
    monkeypatch.setattr(torch, "set_float32_matmul_precision", refuse)
    # The way back uses the same function, so it is given back before that.
    original = settings_module.EnforcedDeterminism.restore

    def restore(self: settings_module.EnforcedDeterminism) -> None:
        monkeypatch.undo()
        original(self)

    monkeypatch.setattr(settings_module.EnforcedDeterminism, "restore", restore)
    with pytest.raises(SettingsError, match="no medium"):
        enforce_determinism(DeterminismSettings(seed=1, float32_matmul_precision="medium"))
    monkeypatch.undo()
    assert process_state()["cudnn"] == before["cudnn"]
    assert process_state()["algorithms"] == before["algorithms"]
    assert "CUBLAS_WORKSPACE_CONFIG" not in os.environ


def test_check_names_what_is_not_in_force() -> None:
    wanted = DeterminismSettings(seed=5, cudnn_benchmark=False, num_threads=torch.get_num_threads() + 1)
    with enforce_determinism({**NOTHING, "deterministic_algorithms": "disabled", "cudnn_benchmark": True}):
        problems = check_settings(wanted)
        found = {problem.name: (problem.wanted, problem.in_force) for problem in problems}
        assert found["deterministic_algorithms"] == ("error", "disabled")
        assert found["cudnn_benchmark"] == (False, True)
        assert found["cublas_workspace_config"] == (":4096:8", None)
        assert found["num_threads"] == (torch.get_num_threads() + 1, torch.get_num_threads())
        assert found["seed"][0] == 5


def test_a_seed_that_workers_do_not_get_is_a_problem() -> None:
    with enforce_determinism(DeterminismSettings()):
        seed_everything(5, workers=False, verbose=False)
        problems = check_settings(DeterminismSettings(seed=5))
        assert problems == (SettingProblem(name="seed", wanted="PL_SEED_WORKERS=1", in_force="PL_SEED_WORKERS=0"),)


def test_contradicting_precision_interfaces_are_reported_not_hidden() -> None:
    with enforce_determinism(DeterminismSettings()):
        torch.set_float32_matmul_precision("highest")
        torch.backends.mkldnn.matmul.fp32_precision = "bf16"
        assert settings_in_force()["float32_matmul_precision"] == "mixed"
        problems = check_settings(DeterminismSettings(float32_matmul_precision="highest"))
        assert [problem.in_force for problem in problems] == ["mixed"]


def test_an_unseeded_process_has_no_seed() -> None:
    with enforce_determinism(DeterminismSettings()):
        torch.manual_seed(2**40)
        assert settings_in_force()["seed"] is None
        torch.manual_seed(0)
        assert settings_in_force()["seed"] == 0
