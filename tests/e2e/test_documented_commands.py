"""What README and docs tell a user to do, done."""

import re
import subprocess
import sys
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from fits import Classifier, Samples
from readme_commands import ROOT, run_page
from torch import nn
from torch.utils.data import DataLoader
from trainers import quiet_trainer

from det_callbacks import DeterminismCallback, enforce_determinism

QUIET = "enable_progress_bar=False, enable_model_summary=False, logger=False, enable_checkpointing=False"


def python_of(page: str) -> list[str]:
    return re.findall(r"(?s)```python\n(.*?)```", (ROOT / page).read_text())


def test_the_readmes_lines_record_and_verify(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (example,) = python_of("README.md")
    (comparison,) = python_of("docs/how-to/elsewhere.md")
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {"Model": Classifier, "loader": DataLoader(Samples(), batch_size=8)}
    example = example.replace("max_epochs=2", f"max_epochs=2, {QUIET}")
    with enforce_determinism({}):  # puts back what the example leaves in force
        exec(example, names)
        exec(example.replace('mode="record"', 'mode="verify", current="runs/current"'), names)
        assert names["callback"].verdict.verdict == "match"
        exec(example.replace("refs/run1", "refs/run2"), names)
        exec(comparison.replace("runs/current", "refs/run2"), names)
    assert names["verdict"].verdict == "match"


@pytest.mark.slow
def test_the_tutorial_and_the_opening_of_the_readme_tell_the_truth(tmp_path: Path) -> None:
    assert run_page(ROOT / "docs" / "tutorial.md", tmp_path) == 8
    opening = tmp_path / "opening"
    opening.mkdir()
    (opening / "page.md").write_text(re.findall(r"(?s)```console\n.*?```", (ROOT / "README.md").read_text())[0])
    assert run_page(opening / "page.md", opening) == 2


@pytest.mark.slow
def test_the_docs_are_built(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path / "site")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=200)
    assert done.returncode == 0, done.stderr
    page = (tmp_path / "site" / "reference" / "api" / "index.html").read_text()
    assert "on_divergence" in page


EXAMPLES = {  # page -> what its examples have instead of the numbers of a user, and the name of what comes out
    "compare-models": ({"report = compare_compiled": "# ", "report.assert_close()": "report.worst"}, "report"),
    "loggers": (
        {
            '"refs/run1")': '"refs/run2", mode="record")',
            "log_every_n_steps=10": f"log_every_n_steps=1, max_epochs=1, {QUIET.replace('logger=False, ', '')}",
        },
        "Trainer",
    ),
    "observe": ({"    ...\n": "    observe('input', 1)\n"}, "observer"),
    "replay": ({'DeterminismCallback("refs/run1", mode': "dict(mode"}, "mode"),
    "resume": ({"max_epochs=10": f"max_epochs=3, {QUIET}", "700, steps=1000": "2, steps=4"}, "verdict"),
}


@pytest.mark.filterwarnings("ignore::det_callbacks.errors.DivergenceWarning", "ignore:.*dataloader is not resumable")
@pytest.mark.parametrize("page", EXAMPLES)
def test_examples_of_the_how_to_pages_run(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    changes, result = EXAMPLES[page]
    loader, batch = DataLoader(Samples(), batch_size=8), torch.randn(4, 12)
    models = (nn.Sequential(OrderedDict(encoder=nn.Linear(12, 16), head=nn.Linear(16, 2))) for _ in range(2))
    names: dict[str, Any] = dict(zip(("model", "rewritten"), models, strict=True))
    names |= {"inputs": batch, "x": batch, "loader": [batch], "hidden": torch.randn(3, requires_grad=True)}
    names |= {"torch": torch, "racing_pool": torch.relu, "make_model": Classifier, "make_data": lambda: loader}
    names["make_trainer"] = lambda: quiet_trainer(max_epochs=1)
    if page in ("resume", "loggers"):  # these train
        names |= {"model": Classifier(), "loader": loader}
        trainer = quiet_trainer(DeterminismCallback("refs/run1", mode="record"), max_epochs=1)
        trainer.fit(names["model"], loader)
        trainer.save_checkpoint("checkpoints/last.ckpt")
    for example in python_of(f"docs/how-to/{page}.md"):
        for before, after in changes.items():
            example = example.replace(before, after)
        exec(example, names)
    assert getattr(names[result], "verdict", "match") is not None
