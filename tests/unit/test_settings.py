import os
import random
from typing import Any

import numpy as np
import pytest
import torch
from lightning.fabric.utilities.seed import seed_everything
from omegaconf import OmegaConf
from process_state import NOTHING, process_state
from torch import nn

from det_callbacks.errors import SettingsError
from det_callbacks.settings import (
    DeterminismSettings,
    SettingProblem,
    check_settings,
    enforce_determinism,
    settings_in_force,
)
from det_callbacks.settings import enforce as settings_module
from det_callbacks.settings.check import require_seed

pytestmark = pytest.mark.usefixtures("same_process_afterwards")


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


@pytest.mark.parametrize(
    ("settings", "line"),
    [
        ({"nccl_algo": "Ring"}, "NCCL_ALGO=Ring set"),
        ({"nccl_proto": "LL"}, "NCCL_PROTO=LL set"),
        ({"nccl_min_nchannels": 2, "nccl_max_nchannels": 4}, "NCCL_MIN_NCHANNELS=2 and NCCL_MAX_NCHANNELS=4 set"),
    ],
)
def test_nccl_variables_after_a_communicator_are_refused_and_nothing_applied(
    settings: dict[str, Any], line: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = process_state()
    backend = "gloo"
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_backend", lambda: backend)
    with enforce_determinism({"seed": 1, **settings}):
        assert check_settings(DeterminismSettings(**settings, **NOTHING)) == (), "gloo reads none of them"
        backend = "cpu:gloo,cuda:nccl"
        with enforce_determinism(settings):
            pass  # in force already
    assert process_state() == before
    with pytest.raises(SettingsError, match="an NCCL process group exists, and NCCL has read NCCL_") as refused:
        enforce_determinism({"seed": 1, **settings})
    assert f"Nothing was changed. Start the program with {line}:\n    NCCL_" in str(refused.value)
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


def test_weights_older_than_the_seed_are_named_until_the_seed_is_taken_back() -> None:
    early = nn.Linear(2, 2, device="meta")
    with enforce_determinism({"seed": 1}):
        with enforce_determinism({"seed": 2}):
            pass
        with pytest.raises(
            SettingsError, match=r"2 of the model's 2 parameters \(weight, bias\) existed when it was set"
        ):
            require_seed(1, early)
        require_seed(1, nn.Linear(2, 2))
    with pytest.raises(SettingsError, match="seed=1 comes too late: the model is there, and the seed should be 1"):
        require_seed(1, early)
