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
import json, sys
import torch
from det_callbacks import SettingsError, enforce_determinism
from det_callbacks.settings import settings_in_force
from process_state import process_state

OTHERS = {"seed": 3, "deterministic_algorithms": "error", "cudnn_benchmark": True, "num_threads": 1,
          "nccl_proto": "LL", "float32_matmul_precision": "medium"}

def outcome(**settings):
    before = process_state()
    try:
        enforced = enforce_determinism({**OTHERS, **settings})
    except SettingsError as error:
        return {"message": str(error), "exit_code": error.exit_code, "is_unchanged": process_state() == before}
    in_force = settings_in_force()
    left = [name for name, value in in_force.items() if getattr(enforced.settings, name) not in (None, value)]
    enforced.restore()
    after = process_state()
    return {"message": None, "in_force": in_force, "left": left,
            "is_unchanged": [value == after[name] for name, value in before.items()]}

found = {}
for case in sys.argv[1:]:
    found[case] = outcome(**json.loads(case))
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
        env={**environment, **variables, "PYTHONPATH": str(Path(__file__).parents[1])},
        capture_output=True,
        text=True,
        check=False,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_what_comes_too_late(tmp_path: Path) -> None:
    """One process that was started without any of them, and one that was started as its messages say."""
    values = {name: value for name, (value, _, _) in START.items()}
    every, other = json.dumps(values), json.dumps({"python_hash_seed": 12})
    found = run(tmp_path, every)[every]
    assert (found["exit_code"], found["is_unchanged"]) == (2, True)
    for name, (value, variable, text) in START.items():
        assert f"{name}={value!r} comes too late: {variable} is read when the process starts" in found["message"]
        assert f"{variable}={text}" in found["message"]
    words = found["message"].splitlines()[-1].split()
    assert set(words[:3]) == {f"{variable}={text}" for _, variable, text in START.values()}
    assert words[3:7] == [sys.executable, "-W", "error", "train.py"]

    again = run(tmp_path, every, other, **{variable: text for _, variable, text in START.values()})
    accepted = again[every]
    assert accepted["message"] is None
    assert {name: accepted["in_force"][name] for name in START} == values
    assert accepted["left"] == []
    assert all(accepted["is_unchanged"])
    assert "PYTHONHASHSEED is read when the process starts, and 11 was in force then" in again[other]["message"]
    assert again[other]["is_unchanged"] is True
