"""The presets as a user has them: from a wheel, and from an editable install."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

CONFIG = """
hydra:
  searchpath: ['pkg://det_callbacks.conf']
  output_subdir: null
"""
VERIFY = ("+determinism=verify", "determinism.reference=refs/run1")


@pytest.mark.slow
def test_the_presets_come_with_a_wheel(tmp_path: Path) -> None:
    root = Path(__file__).parents[2]
    source, site, elsewhere = tmp_path / "source", tmp_path / "site", tmp_path / "elsewhere"
    for name in ("det_callbacks", "conf"):
        shutil.copytree(root / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(root / "pyproject.toml", source)
    for name in ("README.md", "LICENSE"):  # pyproject names them; what they say does not matter here
        (source / name).touch()
    (elsewhere / "conf").mkdir(parents=True)
    (elsewhere / "conf" / "config.yaml").write_text(CONFIG)
    (elsewhere / "train.py").write_text(
        "import hydra, sys\n"
        "@hydra.main(version_base='1.3', config_path='conf', config_name='config')\n"
        "def main(config): pass\n"
        "import det_callbacks.conf; sys.stderr.write(det_callbacks.conf.__file__)\n"
        "main()\n"
    )
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "--quiet", "--no-deps"]
    pip += ["--no-build-isolation", "--no-index", "--target", str(site), str(source)]
    subprocess.run(pip, check=True, timeout=120)
    for package in ([str(site)], []):  # from the wheel, then from the editable install that the tests run on
        done = subprocess.run(
            [sys.executable, "train.py", *VERIFY, "determinism.settings.seed=5", "--cfg", "job"],
            cwd=elsewhere,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(package)},
            capture_output=True,
            text=True,
            check=False,
            timeout=120,
        )
        assert done.returncode == 0, done.stderr
        assert done.stderr.startswith(str(site if package else root))
        assert "mode: verify" in done.stdout
        assert "seed: 5" in done.stdout
