"""The guards of conftest.py: what a test leaves behind is seen, named and put back."""

import os
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import guards
import pytest
import torch
import torch.distributed as dist
from forks import fork_process
from torch import nn
from torch.nn.modules.module import register_module_forward_hook
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

TESTS = Path(__file__).parents[1]


def change_variables() -> None:
    os.environ["LEAKED_BY_A_TEST"] = os.environ["CHANGED_BY_A_TEST"] = "after"
    del os.environ["REMOVED_BY_A_TEST"]


LEAKS: dict[str, Callable[[], Any]] = {
    "dispatch modes": lambda: TorchDispatchMode().__enter__(),
    "function modes": lambda: TorchFunctionMode().__enter__(),
    "module hooks": lambda: register_module_forward_hook(lambda *_: None, always_call=True),
    "optimizer hooks": lambda: register_optimizer_step_pre_hook(lambda *_: None),
    "deterministic algorithms": lambda: torch.use_deterministic_algorithms(True, warn_only=True),
    "fill_uninitialized_memory": lambda: setattr(
        torch.utils.deterministic, "fill_uninitialized_memory", False
    ),
    "cudnn.enabled": lambda: setattr(torch.backends.cudnn, "enabled", False),
    "cudnn.benchmark": lambda: setattr(torch.backends.cudnn, "benchmark", True),
    "cudnn.deterministic": lambda: setattr(torch.backends.cudnn, "deterministic", True),
    "matmul precision": lambda: torch.set_float32_matmul_precision("medium"),
    "default dtype": lambda: torch.set_default_dtype(torch.float64),
    "number of threads": lambda: torch.set_num_threads(torch.get_num_threads() + 1),
    "grad mode": lambda: torch.set_grad_enabled(False),
    "anomaly mode": lambda: torch.autograd.set_detect_anomaly(True),
    "process group": lambda: dist.init_process_group(
        "gloo", store=dist.HashStore(), rank=0, world_size=1
    ),
    "environment variables": change_variables,
    "warning filters": lambda: warnings.simplefilter("ignore", ResourceWarning),
    "what compiles a graph": lambda: setattr(guards.OutputGraph, "call_user_compiler", print),
    "stance of the compiler": lambda: torch.compiler.set_stance("force_eager"),
    "working directory": lambda: os.chdir("/"),
}


@pytest.mark.filterwarnings("ignore:Anomaly Detection has been enabled")  # one of the leaks
def test_every_leak_is_named_and_put_back(tmp_path, monkeypatch):
    monkeypatch.setenv("CHANGED_BY_A_TEST", "before")
    monkeypatch.setenv("REMOVED_BY_A_TEST", "before")
    things = guards.watched_things(tmp_path)
    assert {*LEAKS, "files in the root"} == set(things)
    before = guards.read_all(things)
    for name, leak in LEAKS.items():
        leak()
        lines = guards.put_back_leaks(things, before)
        assert [line.partition(":")[0] for line in lines] == [name]
        assert guards.put_back_leaks(things, before) == []
        if name == "environment variables":
            assert "CHANGED_BY_A_TEST was 'before' and is 'after'" in lines[0]
            assert "REMOVED_BY_A_TEST was 'before' and is None" in lines[0]
    nn.Linear(1, 1).register_forward_hook(lambda *_: None)
    assert guards.put_back_leaks(things, before) == [], "a hook of one model is no leak"
    (tmp_path / "lightning_logs").mkdir()
    (line,) = guards.put_back_leaks(things, before)
    assert "lightning_logs" in line
    assert (tmp_path / "lightning_logs").is_dir(), "it may be someone's work"


def test_the_fixture_fails_the_test_that_leaks_and_no_other_and_seeds_each_alike(tmp_path):
    for name in ("conftest.py", "guards.py"):
        (tmp_path / name).write_text((TESTS / name).read_text())
    (tmp_path / "test_leaks.py").write_text(
        "import os, random\n"
        "import numpy, torch\n"
        "drawn = set()\n"
        "def draw():\n"
        "    drawn.add((random.random(), numpy.random.rand(), torch.rand(()).item()))\n"
        "def test_leaks():\n"
        "    draw()\n"
        "    os.environ['LEAKED_BY_A_TEST'] = '1'\n"
        "def test_does_not():\n"
        "    draw()\n"
        "    assert 'LEAKED_BY_A_TEST' not in os.environ\n"
        "    assert len(drawn) == 1\n"
    )
    options = ["-rA", "-n0", "-p", "no:cacheprovider", str(tmp_path)]
    (tmp_path / "run.py").write_text(f"import sys, pytest\nsys.exit(int(pytest.main({options})))\n")
    with (tmp_path / "said").open("wb") as said:
        words = [sys.executable, str(tmp_path / "run.py")]
        assert fork_process(words, variables=os.environ, folder=tmp_path, output=said.fileno()) == 1
    text = (tmp_path / "said").read_text()
    assert "LEAKED_BY_A_TEST was None and is '1'" in text
    assert "ERROR test_leaks.py::test_leaks" in text
    assert "2 passed, 1 error" in text
