"""Settings that come too late, each in a process of which it is true."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.slow

SCRIPT = """
import json, os, random, sys
import numpy as np
import torch
from det_callbacks import SettingsError, enforce_determinism
from det_callbacks.settings import check_settings, enforce, settings_in_force, DeterminismSettings

OTHERS = {"seed": 3, "deterministic_algorithms": "error", "cudnn_benchmark": True, "num_threads": 1,
          "nccl_proto": "LL", "float32_matmul_precision": "medium"}

def state():
    return [repr(random.getstate()), repr(np.random.get_state()), torch.get_rng_state().tolist(),
            torch.get_deterministic_debug_mode(), torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic,
            torch.get_num_threads(), torch.get_num_interop_threads(), torch.get_float32_matmul_precision(),
            dict(os.environ)]

def outcome(**settings):
    before = state()
    try:
        enforced = enforce_determinism({**OTHERS, **settings})
    except SettingsError as error:
        return {"message": str(error), "exit_code": error.exit_code, "is_unchanged": state() == before}
    in_force = settings_in_force()
    left = [problem.name for problem in check_settings(enforced.settings)]
    enforced.restore()
    after = state()
    return {"message": None, "in_force": in_force, "left": left,
            "is_unchanged": [a == b for a, b in zip(before, after)]}

def interop():
    first = outcome(num_interop_threads=5)
    return {"first": first, "now": torch.get_num_interop_threads(), "second": outcome(num_interop_threads=7),
            "same": outcome(num_interop_threads=5)}

found = {}
for case in sys.argv[1:]:
    found[case] = interop() if case == "interop" else outcome(**json.loads(case))
print(json.dumps(found))
"""

START = {
    "python_hash_seed": (11, "PYTHONHASHSEED", "11"),
    "mkl_cbwr": ("COMPATIBLE", "MKL_CBWR", "COMPATIBLE"),
    "aten_cpu_capability": ("default", "ATEN_CPU_CAPABILITY", "default"),
}


def run(tmp_path: Path, *cases: str, **variables: str) -> dict[str, Any]:
    """Start the script anew, with what it reads at start set or not."""
    (tmp_path / "train.py").write_text(SCRIPT)
    foreign = {*(name for _, name, _ in START.values()), "CUBLAS_WORKSPACE_CONFIG", "NCCL_PROTO"}
    environment = {name: value for name, value in os.environ.items() if name not in foreign}
    done = subprocess.run(
        [sys.executable, "-W", "error", "train.py", *cases],
        cwd=tmp_path,
        env={**environment, **variables},
        capture_output=True,
        text=True,
        check=False,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def as_case(**settings: Any) -> str:
    return json.dumps(settings)


@pytest.fixture(scope="module")
def late(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """One process that was started without any of them."""
    cases = [as_case(**{name: value}) for name, (value, _, _) in START.items()]
    every = as_case(**{name: value for name, (value, _, _) in START.items()})
    return run(tmp_path_factory.mktemp("late"), *cases, every, "interop")


@pytest.mark.parametrize("name", START)
def test_what_only_a_start_sets_is_refused_with_the_command_line(late: dict[str, Any], name: str) -> None:
    value, variable, text = START[name]
    case = as_case(**{name: value})
    found = late[case]
    assert found["exit_code"] == 2
    assert found["message"].startswith(f"{name}={value!r} comes too late: {variable} is read when the process starts")
    assert f"Nothing was changed. Start the program with {variable}={text} set:\n" in found["message"]
    command = found["message"].splitlines()[-1]
    assert command.startswith(f"    {variable}={text} {sys.executable} -W error train.py ")
    assert found["is_unchanged"] is True


def test_all_that_come_too_late_are_in_one_command_line(late: dict[str, Any]) -> None:
    found = late[as_case(**{name: value for name, (value, _, _) in START.items()})]
    words = found["message"].splitlines()[-1].split()
    assert set(words[:3]) == {f"{variable}={text}" for _, variable, text in START.values()}
    assert words[3:7] == [sys.executable, "-W", "error", "train.py"]
    assert all(f"{name}=" in found["message"] for name in START)
    assert found["is_unchanged"] is True


def test_the_command_line_works(late: dict[str, Any], tmp_path: Path) -> None:
    """The same settings, in a process that was started as the message says."""
    every = as_case(**{name: value for name, (value, _, _) in START.items()})
    other = as_case(python_hash_seed=12)
    found = run(tmp_path, every, other, **{variable: text for _, variable, text in START.values()})
    accepted = found[every]
    assert accepted["message"] is None
    assert {name: accepted["in_force"][name] for name in START} == {
        name: value for name, (value, _, _) in START.items()
    }
    assert accepted["left"] == []
    assert all(accepted["is_unchanged"])
    assert "PYTHONHASHSEED is read when the process starts, and 11 was in force then" in found[other]["message"]
    assert found[other]["is_unchanged"] is True


def test_interop_threads_can_be_set_once_and_stay(late: dict[str, Any]) -> None:
    found = late["interop"]
    assert found["first"]["message"] is None
    assert found["first"]["in_force"]["num_interop_threads"] == 5
    assert found["first"]["is_unchanged"].count(False) == 1, "nothing but the interop threads stays"
    assert found["now"] == 5
    assert found["second"]["message"].startswith("num_interop_threads=7 comes too late: the pool of 5 threads has been")
    assert found["second"]["exit_code"] == 2
    assert found["second"]["is_unchanged"] is True
    assert found["same"]["message"] is None, "what is in force is not too late"
