"""What a run keeps of how its script was started, where ``det-callbacks record`` has started it."""

from pathlib import Path
from typing import Any

import pytest
from checking import Run
from trainers import LIGHTNING_ADVICE

from det_callbacks import compare_runs
from det_callbacks.runs.store import Run as StoredRun

pytestmark = LIGHTNING_ADVICE

HYDRA = """
import sys
import hydra
import lightning.pytorch as pl
from checked_app import train

@hydra.main(version_base="1.3", config_path="conf", config_name="config")
def main(config):
    pl.seed_everything(config.seed, verbose=False)
    config.seed = 99  # what became of it later
    train()

sys.argv.remove("--own")  # the script's own, and Hydra gets the rest
main()
"""
CONFIG = """
seed: 1
model: {lr: 0.1, name: "net_${seed}"}
logger: {api_key: abc, dir: "${hydra:runtime.output_dir}/logs"}
hydra: {run: {dir: "out/${now:%H-%M-%S-%f}"}}
"""


def facts(run: str, *names: str) -> dict[str, Any]:
    found = StoredRun.open(Path(run)).manifest.environment
    return {name: entry.value for name, entry in found.items() if name.startswith(names)}


@pytest.fixture
def project(run_command: Run) -> Run:
    source = (
        "import sys\n"
        f"sys.path.append({str(Path(__file__).parent)!r})\n"
        "sys.argv, own = sys.argv[:1], sys.argv\n"
    )
    own = f"{source}import checked_app\nsys.argv = own\n"
    Path("with_hydra.py").write_text(own + HYDRA)
    Path("conf").mkdir()
    Path("conf/config.yaml").write_text(CONFIG)
    return run_command


def test_a_hydra_script_keeps_its_configuration_and_its_overrides(project):
    words = ["model.lr=0.2", "+logger.hub_token=abc", "--own"]
    done = project("record", "run", "--level", "state", script="with_hydra.py", faults=words)
    assert done.status == 0, done.errors
    assert facts("run", "process.", "config.") == {
        "process.argv": ["with_hydra.py", "model.lr=0.2", "+logger.hub_token=<withheld>"],
        "config.seed": 1,
        "config.model.lr": 0.2,
        "config.model.name": "net_1",
        "config.logger.api_key": "<withheld>",
        "config.logger.hub_token": "<withheld>",
        "config.logger.dir": "<run><place>",
    }
    assert (
        project("verify", "run", "--level", "state", script="with_hydra.py", faults=words).status
        == 0
    )
    words[0] = "model.lr=0.3"
    assert (
        project("record", "other", "--level", "state", script="with_hydra.py", faults=words).status
        == 0
    )
    differing = {
        one.name: (one.reference, one.current) for one in compare_runs("run", "other").environment
    }
    words_of = [
        ["with_hydra.py", f"model.lr={lr}", "+logger.hub_token=<withheld>"] for lr in (0.2, 0.3)
    ]
    assert differing == {"config.model.lr": (0.2, 0.3), "process.argv": (*words_of,)}


def test_any_script_keeps_its_words(project):
    done = project(
        "record",
        "run",
        "--level",
        "state",
        script="train.py",
        faults=["planted", "--password", "abc"],
    )
    assert done.status == 0
    assert facts("run", "process.") == {
        "process.argv": ["train.py", "planted", "--password", "<withheld>"]
    }
