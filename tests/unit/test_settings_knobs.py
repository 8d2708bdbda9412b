"""Each setting by itself: wrong values, and that it is in force, put back, and in force in decorated calls only."""

import os
from collections.abc import Callable
from dataclasses import fields
from typing import Any

import pytest
import torch
import torch._inductor.config as inductor
from process_state import NOTHING, process_state, sdpa

from det_callbacks.errors import SettingsError
from det_callbacks.settings import (
    SETTINGS,
    DeterminismSettings,
    check_settings,
    enforce,
    enforce_determinism,
    settings_in_force,
)

pytestmark = pytest.mark.usefixtures("same_process_afterwards")

matmul: Any = torch.backends.cuda.matmul


def variable(name: str, text: str) -> Callable[[], bool]:
    return lambda: os.environ.get(name) == text


# From there every setting is another one than below, so that "in force" cannot be true by accident.
ELSEWHERE: dict[str, Any] = {
    "seed": 99,
    "deterministic_algorithms": "disabled",
    "fill_uninitialized_memory": True,
    "cublas_workspace_config": ":4096:8",
    "cudnn_benchmark": False,
    "cudnn_deterministic": False,
    "cudnn_allow_tf32": True,
    "float32_matmul_precision": "highest",
    "fp16_reduced_precision_reduction": True,
    "bf16_reduced_precision_reduction": True,
    "sdpa_backends": ("math", "flash", "mem_efficient", "cudnn"),
    "inductor_deterministic": False,
    "inductor_max_autotune": False,
    "nccl_algo": "Ring",
    "nccl_proto": "Simple",
    "nccl_min_nchannels": 1,
    "nccl_max_nchannels": 8,
    "num_threads": 2,
    "flash_attention_deterministic": False,
    "nvte_allow_nondeterministic_algo": True,
}

CASES = [
    ("seed", 0, lambda: torch.initial_seed() == 0 and os.environ["PL_GLOBAL_SEED"] == "0"),
    ("deterministic_algorithms", "error", lambda: torch.get_deterministic_debug_mode() == 2),
    ("deterministic_algorithms", "warn", lambda: torch.get_deterministic_debug_mode() == 1),
    ("fill_uninitialized_memory", False, lambda: not torch.utils.deterministic.fill_uninitialized_memory),
    ("cublas_workspace_config", ":16:8", variable("CUBLAS_WORKSPACE_CONFIG", ":16:8")),
    ("cudnn_benchmark", True, lambda: torch.backends.cudnn.benchmark),
    ("cudnn_deterministic", True, lambda: torch.backends.cudnn.deterministic),
    ("cudnn_allow_tf32", False, lambda: not torch.backends.cudnn.allow_tf32),
    ("float32_matmul_precision", "medium", lambda: torch.get_float32_matmul_precision() == "medium"),
    ("fp16_reduced_precision_reduction", False, lambda: not matmul.allow_fp16_reduced_precision_reduction),
    ("bf16_reduced_precision_reduction", False, lambda: not matmul.allow_bf16_reduced_precision_reduction),
    ("sdpa_backends", ("math",), lambda: sdpa() == (True, False, False, False)),
    ("sdpa_backends", ("math", "cudnn"), lambda: sdpa() == (True, False, False, True)),
    ("inductor_deterministic", True, lambda: inductor.deterministic),
    ("inductor_max_autotune", True, lambda: inductor.max_autotune),
    ("nccl_algo", "Tree", variable("NCCL_ALGO", "Tree")),
    ("nccl_proto", "LL", variable("NCCL_PROTO", "LL")),
    ("nccl_min_nchannels", 2, variable("NCCL_MIN_NCHANNELS", "2")),
    ("nccl_max_nchannels", 4, variable("NCCL_MAX_NCHANNELS", "4")),
    ("num_threads", 1, lambda: torch.get_num_threads() == 1),
    ("flash_attention_deterministic", True, variable("FLASH_ATTENTION_DETERMINISTIC", "1")),
    ("nvte_allow_nondeterministic_algo", False, variable("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "0")),
]

# In a process of their own (tests/e2e/test_late_settings.py), or with a Trainer (`allow`).
ELSEWHERE_TESTED = {"allow", "num_interop_threads", "mkl_cbwr", "aten_cpu_capability", "python_hash_seed"}


def only(name: str, value: Any) -> DeterminismSettings:
    return DeterminismSettings(**{**NOTHING, name: value})


def raise_when_in_force(name: str, value: Any, in_force: Callable[[], bool]) -> None:
    assert in_force()
    assert settings_in_force()[name] == value
    assert check_settings(only(name, value)) == ()
    raise KeyError


def test_every_setting_is_tested() -> None:
    names = {field.name for field in fields(DeterminismSettings)}
    assert {name for name, _, _ in CASES} | ELSEWHERE_TESTED == names == {*SETTINGS, "allow"}
    assert {name for name, setting in SETTINGS.items() if not setting.is_restorable} == ELSEWHERE_TESTED - {"allow"}
    assert {field.name: field.default for field in fields(DeterminismSettings)} == {
        **{name: setting.default for name, setting in SETTINGS.items()},
        "allow": (),
    }


@pytest.mark.parametrize(("name", "value", "in_force"), CASES)
def test_it_is_set_found_in_force_and_restored_after_an_exception(
    name: str, value: Any, in_force: Callable[[], bool]
) -> None:
    with enforce_determinism(ELSEWHERE):
        before = process_state()
        assert not in_force()
        (problem,) = check_settings(only(name, value))
        assert (problem.name, problem.wanted, problem.in_force) == (name, value, ELSEWHERE[name])
        with pytest.raises(KeyError), enforce_determinism(only(name, value)):
            raise_when_in_force(name, value, in_force)
        assert process_state() == before


# wrong values


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
        ("allow", "aten.put_.default", "a list of texts"),
        ("allow", 1, "a list of texts"),
        ("allow", [1], "a list of texts"),
        ("fill_uninitialized_memory", "yes", "True, False"),
        ("cublas_workspace_config", "4096", "':4096:8', ':16:8'"),
        ("cublas_workspace_config", ":4096:2", "':4096:8', ':16:8'"),
        ("cudnn_benchmark", 1, "True, False"),
        ("cudnn_deterministic", "true", "True, False"),
        ("cudnn_allow_tf32", 0, "True, False"),
        ("float32_matmul_precision", "low", "'highest', 'high', 'medium'"),
        ("fp16_reduced_precision_reduction", "no", "True, False"),
        ("bf16_reduced_precision_reduction", (True, True), "True, False"),
        ("sdpa_backends", "math", "a list of texts"),
        ("sdpa_backends", (), "'math', 'flash', 'mem_efficient', 'cudnn'"),
        ("sdpa_backends", ("math", "fast"), "'math', 'flash', 'mem_efficient', 'cudnn'"),
        ("inductor_deterministic", 1, "True, False"),
        ("inductor_max_autotune", "on", "True, False"),
        ("nccl_algo", "", "such as 'Ring'"),
        ("nccl_algo", 1, "such as 'Ring'"),
        ("nccl_proto", " ", "such as 'Ring'"),
        ("nccl_min_nchannels", 0, "from 1"),
        ("nccl_max_nchannels", "4", "an integer"),
        ("num_threads", 0, "from 1"),
        ("num_threads", 2.0, "an integer"),
        ("num_interop_threads", 0, "from 1"),
        ("mkl_cbwr", "avx2", "'AUTO', 'COMPATIBLE'"),
        ("mkl_cbwr", "AVX2,STRCT", "'AVX2,STRICT'"),
        ("mkl_cbwr", 1, "'AUTO', 'COMPATIBLE'"),
        ("aten_cpu_capability", "AVX2", "'default', 'avx2', 'avx512'"),
        ("python_hash_seed", "random", "0 to 4294967295"),
        ("python_hash_seed", 4294967296, "0 to 4294967295"),
        ("flash_attention_deterministic", 1, "True, False"),
        ("nvte_allow_nondeterministic_algo", "0", "True, False"),
    ],
)
def test_a_wrong_value_is_refused_by_name_with_the_allowed_ones(name: str, value: Any, told: str) -> None:
    before = process_state()
    with pytest.raises(SettingsError) as refused:
        enforce_determinism({name: value})
    assert f"{name}={value!r}" in str(refused.value)
    assert told in str(refused.value)
    assert refused.value.exit_code == 2
    assert process_state() == before


@pytest.mark.parametrize("pattern", ["kthvalue", "decoder:", "train/aten.put_.default"])
def test_a_pattern_that_can_mean_nothing_is_refused(pattern: str) -> None:
    with pytest.raises(SettingsError, match="The op pattern") as refused:
        DeterminismSettings(allow=("aten.put_.default", pattern))
    assert repr(pattern) in str(refused.value)


@pytest.mark.parametrize(
    ("name", "value", "stored"),
    [
        ("allow", ["backward/decoder.*:aten.put_.*"], ("backward/decoder.*:aten.put_.*",)),
        ("sdpa_backends", ["flash", "math", "flash"], ("math", "flash")),
        ("mkl_cbwr", "AVX2,STRICT", "AVX2,STRICT"),
        ("seed", 4294967295, 4294967295),
    ],
)
def test_a_value_has_one_form(name: str, value: Any, stored: Any) -> None:
    settings = DeterminismSettings.from_mapping({name: value})
    assert getattr(settings, name) == stored
    assert hash(settings) == hash(DeterminismSettings(**{name: stored}))


def test_more_channels_at_least_than_at_most_are_refused() -> None:
    with pytest.raises(SettingsError, match="nccl_min_nchannels=4 is more than nccl_max_nchannels=2"):
        DeterminismSettings(nccl_min_nchannels=4, nccl_max_nchannels=2)
    DeterminismSettings(nccl_min_nchannels=2, nccl_max_nchannels=2)


def test_what_the_machine_cannot_do_is_not_answered_with_a_restart(monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = "avx2" if torch.backends.cpu.get_cpu_capability() != "AVX2" else "default"
    monkeypatch.setattr(enforce, "start_environment", lambda: {"ATEN_CPU_CAPABILITY": wanted})
    with pytest.raises(SettingsError, match=rf"ATEN_CPU_CAPABILITY={wanted} was set when the process started"):
        enforce_determinism(DeterminismSettings(aten_cpu_capability=wanted))
