"""Settings that are read when a process starts: too late in this one, in force in one that was started with them."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from process_state import process_state

from det_callbacks import SettingsError, enforce_determinism
from det_callbacks.settings import enforce

OTHERS = {"seed": 3, "deterministic_algorithms": "error", "num_threads": 1, "float32_matmul_precision": "medium"}
WANTED = {"python_hash_seed": 11, "mkl_cbwr": "COMPATIBLE", "aten_cpu_capability": "default"}
VARIABLES = {"PYTHONHASHSEED": "11", "MKL_CBWR": "COMPATIBLE", "ATEN_CPU_CAPABILITY": "default"}

SCRIPT = """
import json, sys
from det_callbacks import SettingsError, enforce_determinism
from det_callbacks.settings import settings_in_force
from process_state import process_state

before = process_state()
with enforce_determinism(json.loads(sys.argv[1])):
    print(json.dumps(settings_in_force()))
assert process_state() == before
try:
    enforce_determinism({"python_hash_seed": 12})
except SettingsError as error:
    print(error)
"""


def test_what_comes_too_late_says_how_to_start_and_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(enforce, "start_environment", dict)
    before = process_state()
    with pytest.raises(SettingsError) as refused:
        enforce_determinism({**OTHERS, **WANTED})
    assert process_state() == before
    for (name, value), variable in zip(WANTED.items(), VARIABLES, strict=True):
        words = f"{name}={value!r} comes too late: {variable} is read when the process starts"
        assert words in str(refused.value)
    words = str(refused.value).splitlines()[-1].split()
    assert set(words[:3]) == {f"{variable}={text}" for variable, text in VARIABLES.items()}
    assert words[3:5] == sys.orig_argv[:2]


@pytest.mark.slow
def test_what_a_process_was_started_with_is_in_force(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    done = subprocess.run(
        [sys.executable, "-W", "error", "train.py", json.dumps({**OTHERS, **WANTED})],
        cwd=tmp_path,
        env={**os.environ, **VARIABLES, "PYTHONPATH": str(Path(__file__).parents[1])},
        capture_output=True,
        text=True,
        check=False,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    in_force, message = done.stdout.split("\n", 1)
    assert {**OTHERS, **WANTED}.items() <= json.loads(in_force).items()
    assert "PYTHONHASHSEED is read when the process starts, and 11 was in force then" in message
