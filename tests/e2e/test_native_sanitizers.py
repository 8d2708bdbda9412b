"""The native recorder reads and writes no memory but its own: its tests, with
the address and the undefined behaviour sanitizer.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1] / "unit" / "test_native.py"
# Those with HashMode alone: cuDNN, whose version a run names, aborts under the sanitizers.
SELECTED = "records_what_python_records or another_thread or after_an_exception or outlives"
SANITIZERS = ("address", "undefined")

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Variables with which the native recorder is built, and loaded, with the sanitizers."""
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("there is no g++")
    libraries = [
        subprocess.check_output([compiler, f"-print-file-name={name}"], text=True).strip()
        for name in ("libasan.so", "libubsan.so")
    ]
    if not all(map(os.path.isabs, libraries)):
        pytest.skip("g++ has no sanitizers here")
    folder = tmp_path_factory.mktemp("sanitizers")
    wrapper = folder / "g++"
    flags = f"-fsanitize={','.join(SANITIZERS)} -fno-sanitize-recover=undefined -g"
    wrapper.write_text(f'#!/bin/sh\nexec {compiler} {flags} "$@"\n')
    wrapper.chmod(0o755)
    return {
        **os.environ,
        "CXX": str(wrapper),
        "XDG_CACHE_HOME": str(folder),
        "LD_PRELOAD": " ".join(libraries),
        # Python and torch never free some memory; a small quarantine keeps the memory small
        "ASAN_OPTIONS": "detect_leaks=0:verify_asan_link_order=0:quarantine_size_mb=8",
        "PYTHONMALLOC": "malloc",  # so that the address sanitizer sees each object of Python's
    }


def test_the_recording_tests_pass_with_sanitizers(environment: dict[str, str]) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", SELECTED]
    done = subprocess.run(
        [*command, str(TESTS)], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert " skipped" not in done.stdout
    (library,) = Path(environment["XDG_CACHE_HOME"], "det_callbacks").glob("*.so")
    assert b"__asan_report" in library.read_bytes()


def test_the_sanitizer_sees_a_read_beyond_a_buffer(environment: dict[str, str]) -> None:
    code = """
import torch
from det_callbacks.native import build

memory = torch.zeros(4096, dtype=torch.uint8)
build._loaded().det_digest(memory.data_ptr(), 5000)
"""
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False
    )
    assert "heap-buffer-overflow" in done.stderr, done.stderr[-3000:]
