"""Settings: wrong values, what is in force, what comes too late, and that all of it is put back."""

import os
import random
import re
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import fields
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
import torch._inductor.config as inductor
from guards import NOTHING, process_state, sdpa
from lightning.fabric.utilities.seed import seed_everything
from lightning.pytorch.demos.boring_classes import BoringModel
from trainers import quiet_trainer

from det_callbacks import DeterminismCallback
from det_callbacks.errors import SettingsError
from det_callbacks.settings import (
    SETTINGS,
    DeterminismSettings,
    catalogue,
    enforce,
    enforce_determinism,
    settings_in_force,
    settings_without_effect,
)

pytestmark = pytest.mark.usefixtures("same_process_afterwards")  # fails what is not put back

matmul: Any = torch.backends.cuda.matmul


def variable(name: str, text: str) -> Callable[[], bool]:
    return lambda: os.environ.get(name) == text


# name, another value that is in force before, a value, and whether torch or the
# environment says that it is in force
CASES: list[tuple[str, Any, Any, Callable[[], bool]]] = [
    ("seed", 99, 0, lambda: torch.initial_seed() == 0 and os.environ["PL_GLOBAL_SEED"] == "0"),
    (
        "deterministic_algorithms",
        "disabled",
        "error",
        lambda: torch.get_deterministic_debug_mode() == 2,
    ),
    (
        "deterministic_algorithms",
        "disabled",
        "warn",
        lambda: torch.get_deterministic_debug_mode() == 1,
    ),
    (
        "fill_uninitialized_memory",
        True,
        False,
        lambda: not torch.utils.deterministic.fill_uninitialized_memory,
    ),
    ("cublas_workspace_config", ":4096:8", ":16:8", variable("CUBLAS_WORKSPACE_CONFIG", ":16:8")),
    ("cudnn_benchmark", False, True, lambda: torch.backends.cudnn.benchmark),
    ("cudnn_deterministic", False, True, lambda: torch.backends.cudnn.deterministic),
    ("cudnn_allow_tf32", True, False, lambda: not torch.backends.cudnn.allow_tf32),
    (
        "float32_matmul_precision",
        "highest",
        "medium",
        lambda: torch.get_float32_matmul_precision() == "medium",
    ),
    (
        "fp16_reduced_precision_reduction",
        True,
        False,
        lambda: not matmul.allow_fp16_reduced_precision_reduction,
    ),
    (
        "bf16_reduced_precision_reduction",
        True,
        False,
        lambda: not matmul.allow_bf16_reduced_precision_reduction,
    ),
    (
        "sdpa_backends",
        catalogue.SDPA_BACKENDS,
        ("math", "cudnn"),
        lambda: sdpa() == (True, False, False, True),
    ),
    # what torch overwrites when it sets the algorithms, which are put back first
    ("inductor_deterministic", True, False, lambda: not inductor.deterministic),
    ("inductor_max_autotune", False, True, lambda: inductor.max_autotune),
    ("nccl_algo", "Ring", "Tree", variable("NCCL_ALGO", "Tree")),
    ("nccl_proto", "Simple", "LL", variable("NCCL_PROTO", "LL")),
    ("nccl_min_nchannels", 1, 2, variable("NCCL_MIN_NCHANNELS", "2")),
    ("nccl_max_nchannels", 8, 4, variable("NCCL_MAX_NCHANNELS", "4")),
    ("num_threads", 2, 1, lambda: torch.get_num_threads() == 1),
    ("flash_attention_deterministic", False, True, variable("FLASH_ATTENTION_DETERMINISTIC", "1")),
    (
        "nvte_allow_nondeterministic_algo",
        True,
        False,
        variable("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "0"),
    ),
]

# read when the process starts, and so refused here: setting -> a value,
# and the variable that sets it
AT_START: dict[str, tuple[Any, str]] = {
    "mkl_cbwr": ("COMPATIBLE", "MKL_CBWR=COMPATIBLE"),
    "aten_cpu_capability": ("default", "ATEN_CPU_CAPABILITY=default"),
    "python_hash_seed": (11, "PYTHONHASHSEED=11"),
}


def test_every_setting_is_tested():
    names = {field.name for field in fields(DeterminismSettings)}
    assert {name for name, *_ in CASES} | {*AT_START, "allow"} == names == {*SETTINGS, "allow"}
    assert {name for name, setting in SETTINGS.items() if setting.when == "start"} == {*AT_START}


@pytest.mark.parametrize(("name", "other", "value", "in_force"), CASES)
def test_it_is_set_found_in_force_and_restored_after_an_exception(name, other, value, in_force):
    # "in force" cannot be true by accident
    with enforce_determinism({case[0]: case[1] for case in CASES}):
        before = process_state()
        assert (in_force(), settings_in_force()[name]) == (False, other)
        with suppress(KeyError), enforce_determinism({**NOTHING, name: value}):
            assert (in_force(), settings_in_force()[name]) == (True, value)
            raise KeyError
        assert process_state() == before


def test_a_second_restore_does_nothing():
    enforced = enforce_determinism(DeterminismSettings(seed=3))
    # a task's own doing goes back, too
    os.environ |= {"PL_GLOBAL_SEED": "99", "CUBLAS_WORKSPACE_CONFIG": ":16:8"}
    enforced.restore()
    with enforce_determinism(DeterminismSettings(seed=4)):
        enforced.restore()
        assert settings_in_force()["seed"] == 4


def test_nothing_stays_half_applied():
    def refuse(value: str) -> None:
        patched.undo()  # the way back uses the same function
        raise KeyError(value)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(torch, "set_float32_matmul_precision", refuse)
        with pytest.raises(KeyError, match="medium"):
            enforce_determinism(DeterminismSettings(seed=1, float32_matmul_precision="medium"))


@pytest.mark.parametrize("seed", [0, 4294967295])
def test_a_seed_draws_what_lightning_draws(seed):
    def found() -> tuple[object, ...]:
        drawn = random.random(), float(np.random.random()), float(torch.rand(()))
        return (*drawn, os.environ["PL_GLOBAL_SEED"], os.environ["PL_SEED_WORKERS"])

    with enforce_determinism({"seed": seed}):
        ours = found()
    with enforce_determinism(DeterminismSettings()):
        seed_everything(seed, workers=True, verbose=False)
        assert found() == ours


def test_what_is_no_seed_or_no_precision_is_said():
    with enforce_determinism(DeterminismSettings()):
        torch.manual_seed(2**40)
        torch.set_float32_matmul_precision("highest")
        torch.backends.mkldnn.matmul.fp32_precision = "bf16"
        found = settings_in_force()
        assert (found["seed"], found["float32_matmul_precision"]) == (None, "mixed")


WRONG = {
    "seed": {
        -1: "0 to 4294967295",
        4294967296: "0 to 4294967295",
        True: "an integer",
        "7": "an integer",
    },
    "deterministic_algorithms": {"off": "'disabled'", False: "'disabled'"},
    "allow": {
        "aten.put_.default": "a list of strings",
        1: "a list of strings",
        (1,): "a list of strings",
    },
    "cublas_workspace_config": {"4096": "':4096:8', ':16:8'"},
    "cudnn_benchmark": {1: "True, False", "true": "True, False"},
    "float32_matmul_precision": {"low": "'highest', 'high', 'medium'"},
    "sdpa_backends": {
        "math": "a list of strings",
        (): "'math', 'flash'",
        ("math", "fast"): "'math', 'flash'",
    },
    "nccl_algo": {"": "such as 'Ring'", " ": "such as 'Ring'", 1: "such as 'Ring'"},
    "num_threads": {0: "from 1", 2.0: "an integer"},
    "mkl_cbwr": {"avx2": "'AUTO', 'COMPATIBLE'", "AVX2,STRCT": "'AVX2,STRICT'"},
    "aten_cpu_capability": {"AVX2": "'default', 'avx2', 'avx512'"},
    "python_hash_seed": {"random": "0 to 4294967295"},
}


def test_a_wrong_value_is_refused_by_name_with_the_allowed_ones():
    for name, values in WRONG.items():
        for value, allowed in values.items():
            with pytest.raises(
                SettingsError, match=f"^{name}.*{re.escape(repr(value))}"
            ) as refused:
                enforce_determinism({name: value})
            assert allowed in str(refused.value)
    with pytest.raises(
        SettingsError, match=r"setting sead; the settings are seed, deterministic_algorithms"
    ):
        DeterminismSettings.from_mapping({"sead": 1, "seed": 1})
    with pytest.raises(SettingsError, match="The op pattern 'kthvalue' names no op"):
        DeterminismSettings(allow=("aten.put_.default", "kthvalue"))


def test_what_comes_too_late_is_refused_and_nothing_applied(monkeypatch):
    wanted = {
        "nccl_algo": "Ring",
        "nccl_proto": "LL",
        "nccl_min_nchannels": 2,
        "nccl_max_nchannels": 4,
    }
    backend = "gloo"
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_backend", lambda: backend)
    with enforce_determinism({"seed": 1, **wanted}):  # gloo reads none of them
        backend = "cpu:gloo,cuda:nccl"
        with enforce_determinism(wanted):
            pass  # in force already
    with pytest.raises(
        SettingsError, match="an NCCL process group exists, and NCCL has read NCCL_"
    ) as refused:
        enforce_determinism({"seed": 1, **wanted})
    variables = "NCCL_ALGO=Ring and NCCL_PROTO=LL and NCCL_MIN_NCHANNELS=2 and NCCL_MAX_NCHANNELS=4"
    assert f"Nothing was changed. Start the program with {variables} set:\n    NCCL_" in str(
        refused.value
    )
    monkeypatch.setattr(catalogue, "start_environment", dict)
    with pytest.raises(SettingsError, match="can no longer take effect") as refused:
        enforce_determinism(
            {"seed": 3, "num_threads": 1, **{name: value for name, (value, _) in AT_START.items()}}
        )
    for name, (value, variable) in AT_START.items():
        start = (
            f"{name}={value!r} can no longer take effect: {variable.partition('=')[0]} is read "
            "when the process starts"
        )
        assert start in str(refused.value)
    words = str(refused.value).splitlines()[-1].split()
    assert ({*words[:3]}, words[3:5]) == (
        {variable for _, variable in AT_START.values()},
        sys.orig_argv[:2],
    )
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    with pytest.raises(
        SettingsError, match=r"no longer.*CUBLAS_WORKSPACE_CONFIG=None already.*=:4096:8 set"
    ):
        enforce_determinism(DeterminismSettings(seed=1))


def test_the_backends_of_attention_change_bits_on_a_cpu_too():
    query = torch.randn(1, 2, 64, 32, generator=torch.Generator().manual_seed(0))
    results = []
    for backend in ("flash", "math"):
        with enforce_determinism({"sdpa_backends": [backend], "deterministic_algorithms": None}):
            results.append(torch.nn.functional.scaled_dot_product_attention(query, query, query))
    assert not torch.equal(*results)


def test_settings_that_cannot_act_are_named():
    threads = torch.get_num_threads()
    asked = {
        "deterministic_algorithms": "warn",
        "flash_attention_deterministic": True,
        "cublas_workspace_config": None,
    }
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "is_available", lambda: True)
        patch.setenv("TORCHINDUCTOR_EPILOGUE_FUSION", f"{int(not inductor.epilogue_fusion)}")
        patch.setenv("TORCHINDUCTOR_SHAPE_PADDING", f"{int(inductor.shape_padding)}")
        patch.setenv("OMP_NUM_THREADS", f"{threads + 3}")
        # set before the start: the program may have changed the option since
        patch.setenv("TORCHINDUCTOR_MAX_FUSION_SIZE", "77")
        patch.setattr(enforce, "start_environment", lambda: {"TORCHINDUCTOR_MAX_FUSION_SIZE": "77"})
        patch.delitem(sys.modules, "transformers", raising=False)
        with enforce_determinism(asked):
            found = settings_without_effect()
    reads = "only transformers reads FLASH_ATTENTION_DETERMINISTIC, and it was not imported"
    set_late = "it was set after the start, and"
    wanted, in_force = int(not inductor.epilogue_fusion), inductor.epilogue_fusion
    assert found == [
        f"flash_attention_deterministic=True: {reads}",
        (
            "deterministic_algorithms='warn': on CUDA, attention keeps its nondeterministic "
            "backward pass"
        ),
        f"OMP_NUM_THREADS={threads + 3}: {set_late} torch.get_num_threads() is {threads}",
        (
            f"TORCHINDUCTOR_EPILOGUE_FUSION={wanted}: {set_late} "
            f"torch._inductor.config.epilogue_fusion is {in_force}"
        ),
    ]
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "transformers", ModuleType("transformers"))
        with enforce_determinism({**asked, "deterministic_algorithms": "error"}):
            assert settings_without_effect() == []


def test_a_verdict_names_a_setting_that_could_not_act(tmp_path):
    asked = {"seed": 0, "nvte_allow_nondeterministic_algo": False, "cublas_workspace_config": None}
    for mode, settings in (
        ("record", {**asked, "nvte_allow_nondeterministic_algo": None}),
        ("verify", asked),
    ):
        with enforce_determinism(settings):
            callback = DeterminismCallback(
                tmp_path / "run", mode=mode, current=tmp_path / "current"
            )
            trainer = quiet_trainer(
                callback, default_root_dir=tmp_path, limit_train_batches=1, limit_val_batches=0
            )
            trainer.fit(BoringModel())
    verdict = callback.verdict
    reads = (
        "only transformer_engine reads NVTE_ALLOW_NONDETERMINISTIC_ALGO, and it was not imported"
    )
    text = f"A setting has no effect: nvte_allow_nondeterministic_algo=False: {reads}."
    assert text in verdict.explanation
    assert not any(one.name == "settings without effect" for one in verdict.environment)
