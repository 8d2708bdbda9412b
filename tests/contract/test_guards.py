"""The guards of conftest.py: what a test leaves behind is seen, named and put back."""

import os
import random
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import guards
import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

TESTS = Path(__file__).parents[1]
WATCHED = guards.watched_things()


def initialize_process_group() -> None:
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)


LEAKS: dict[str, Callable[[], Any]] = {
    "dispatch modes": lambda: TorchDispatchMode().__enter__(),
    "function modes": lambda: TorchFunctionMode().__enter__(),
    "module hooks": lambda: register_module_forward_hook(lambda *_: None, always_call=True),
    "optimizer hooks": lambda: register_optimizer_step_pre_hook(lambda *_: None),
    "deterministic algorithms": lambda: torch.use_deterministic_algorithms(True, warn_only=True),
    "fill_uninitialized_memory": lambda: setattr(torch.utils.deterministic, "fill_uninitialized_memory", False),
    "cudnn.enabled": lambda: setattr(torch.backends.cudnn, "enabled", False),
    "cudnn.benchmark": lambda: setattr(torch.backends.cudnn, "benchmark", True),
    "cudnn.deterministic": lambda: setattr(torch.backends.cudnn, "deterministic", True),
    "matmul precision": lambda: torch.set_float32_matmul_precision("medium"),
    "default dtype": lambda: torch.set_default_dtype(torch.float64),
    "number of threads": lambda: torch.set_num_threads(torch.get_num_threads() + 1),
    "grad mode": lambda: torch.set_grad_enabled(False),
    "anomaly mode": lambda: torch.autograd.set_detect_anomaly(True),
    "process group": initialize_process_group,
    "environment variables": lambda: os.environ.__setitem__("LEAKED_BY_A_TEST", "1"),
    "warning filters": lambda: warnings.simplefilter("ignore", ResourceWarning),
    "what compiles a graph": lambda: setattr(guards.OutputGraph, "call_user_compiler", print),
    "stance of the compiler": lambda: torch.compiler.set_stance("force_eager"),
}


@pytest.mark.filterwarnings("ignore:Anomaly Detection has been enabled")  # one of the leaks
@pytest.mark.parametrize("name", LEAKS)
def test_a_leak_is_named_and_put_back(name: str) -> None:
    before = guards.read_all(WATCHED)
    LEAKS[name]()
    leaks = guards.put_back_leaks(WATCHED, before)
    assert [leak.partition(":")[0] for leak in leaks] == [name]
    assert guards.put_back_leaks(WATCHED, before) == []


def test_a_variable_that_was_changed_or_removed_comes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CHANGED_BY_A_TEST", "before")
    monkeypatch.setenv("REMOVED_BY_A_TEST", "before")
    before = guards.read_all(WATCHED)
    os.environ["CHANGED_BY_A_TEST"] = "after"
    del os.environ["REMOVED_BY_A_TEST"]
    (leak,) = guards.put_back_leaks(WATCHED, before)
    assert "CHANGED_BY_A_TEST was 'before' and is 'after'" in leak
    assert "REMOVED_BY_A_TEST was 'before' and is None" in leak
    assert os.environ["CHANGED_BY_A_TEST"] == os.environ["REMOVED_BY_A_TEST"] == "before"


def test_a_file_in_the_root_is_named_and_left_alone(tmp_path: Path) -> None:
    things = guards.watched_things(tmp_path)
    before = guards.read_all(things)
    (tmp_path / "lightning_logs").mkdir()
    (leak,) = guards.put_back_leaks(things, before)
    assert "lightning_logs" in leak
    assert (tmp_path / "lightning_logs").is_dir()


def test_another_working_directory_is_put_back(tmp_path: Path) -> None:
    before = guards.read_all(WATCHED)
    os.chdir(tmp_path)
    (leak,) = guards.put_back_leaks(WATCHED, before)
    assert leak.startswith("working directory")
    assert Path.cwd() != tmp_path


def test_everything_watched_has_a_leak_here() -> None:
    assert {*LEAKS, "working directory", "files in the root"} == set(WATCHED)


@pytest.mark.parametrize("turn", range(2))
def test_seeds_are_the_same_in_each_test(turn: int) -> None:
    drawn = random.random(), float(np.random.random()), float(torch.rand(()))
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
    assert drawn == (random.random(), float(np.random.random()), float(torch.rand(()))), f"in turn {turn}"


@pytest.mark.slow
def test_the_fixture_fails_the_test_that_leaks_and_no_other(tmp_path: Path) -> None:
    for name in ("conftest.py", "guards.py"):
        (tmp_path / name).write_text((TESTS / name).read_text())
    (tmp_path / "test_leaks.py").write_text(
        "import os\n"
        "def test_leaks():\n    os.environ['LEAKED_BY_A_TEST'] = '1'\n"
        "def test_does_not():\n    assert 'LEAKED_BY_A_TEST' not in os.environ\n"
    )
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-rA", "-p", "no:cacheprovider", str(tmp_path)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 1
    assert "LEAKED_BY_A_TEST was None and is '1'" in done.stdout
    assert "ERROR test_leaks.py::test_leaks" in done.stdout
    assert "2 passed, 1 error" in done.stdout


def test_a_model_with_its_own_hooks_is_no_leak() -> None:
    before = guards.read_all(WATCHED)
    nn.Linear(1, 1).register_forward_hook(lambda *_: None)
    assert guards.put_back_leaks(WATCHED, before) == []
