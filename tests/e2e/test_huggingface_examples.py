"""The examples for Hugging Face's Trainer run; needs ``pip install 'det_callbacks[hf]'`` (nox -s hf)."""

import doctest
import re
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers", reason="transformers is not installed: pip install 'det_callbacks[hf]'")

from test_huggingface import Fit, Net, pytestmark, samples
from transformers import Trainer

from det_callbacks.huggingface import DeterminismCallback
from det_callbacks.runs.store import Run

__all__ = ["pytestmark"]


def test_the_example_of_the_docs_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    page = (Path(__file__).parents[2] / "docs" / "how-to" / "huggingface.md").read_text()
    names: dict[str, Any] = {"model": Net(), "train_dataset": samples()}
    for example in re.findall(r"(?s)```python\n(.*?)```", page):
        exec(example, names)
    assert len(Run.open("refs/run1").rank(0).steps(0)) == 8


def test_the_example_of_the_docstring_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = {"DeterminismCallback": DeterminismCallback, "Trainer": Trainer, "model": Net(), "data": samples()}
    names["args"] = Fit(tmp_path, logging_steps=100).trainer.args
    (test, *_) = doctest.DocTestFinder(recurse=False).find(DeterminismCallback, globs=names)
    said: list[str] = []
    result = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS).run(test, out=said.append)
    assert (result.failed, result.attempted) == (0, 2), "".join(said)
