"""``det-callbacks check-checkpoint``: what it says, and what it exits with."""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from fits import Fit

from det_callbacks import DeterminismCallback
from det_callbacks.cli import main


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved")
    fit = Fit(DeterminismCallback(folder / "run", mode="record", level="state"), max_epochs=1).run()
    fit.trainer.save_checkpoint(folder / "x.ckpt")
    return folder


@pytest.fixture
def path(folder: Path, tmp_path: Path) -> str:
    for name in ("x.ckpt", "x.ckpt.digests.json"):
        shutil.copy(folder / name, tmp_path / name)
    shutil.copytree(folder / "x.ckpt.resume", tmp_path / "x.ckpt.resume")
    return str(tmp_path / "x.ckpt")


def check(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    status = main(["check-checkpoint", *arguments])
    captured = capsys.readouterr()
    return status, captured.out + captured.err


def change(path: str, copy: str, **values: Any) -> str:
    checkpoint = torch.load(path, weights_only=True)
    checkpoint["state_dict"].update(values)
    torch.save(checkpoint, copy)
    return copy


def test_one_that_is_what_was_saved(path: str, capsys: pytest.CaptureFixture[str]) -> None:
    status, text = check(capsys, path)
    assert status == 0
    assert f"{path} is what was saved, in the file's bytes and in every entry" in text
    assert "saved after step 3 in epoch 1, run " in text
    assert "state_dict" in text
    status, text = check(capsys, path, "--json")
    content = json.loads(text)
    assert (status, content["equal"], content["entries"], content["save"]["step"]) == (0, True, [], 3)


def test_one_that_is_not(path: str, capsys: pytest.CaptureFixture[str]) -> None:
    change(path, path, **{"last.bias": torch.zeros(3), "norm.bias": torch.zeros(4)})
    status, text = check(capsys, path)
    assert status == 1
    assert "state_dict: last.bias differs (" in text
    assert "state_dict: norm.bias was saved as float32 [16], and is float32 [4]" in text
    assert "entries are what was saved" in text
    status, text = check(capsys, path, "--json")
    assert status == 1
    assert [(entry["path"], entry["kind"]) for entry in json.loads(text)["entries"]] == [
        ("norm.bias", "structure"),
        ("last.bias", "content"),
    ]


def test_what_cannot_be_told_is_status_2(path: str, capsys: pytest.CaptureFixture[str]) -> None:
    os.unlink(f"{path}.digests.json")
    status, text = check(capsys, path)
    assert status == 2
    assert "nothing to compare" in text
    os.truncate(path, 1000)
    assert check(capsys, path, path)[0] == 2
    assert check(capsys, f"{path}.gone")[0] == 2


def test_two_that_differ(path: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bias = torch.load(path, weights_only=True)["state_dict"]["last.bias"]
    bits = bias.view(torch.int32)
    bits[1] += 5
    other = change(path, str(tmp_path / "y.ckpt"), **{"last.bias": bias, "more": bias})
    status, text = check(capsys, path, other)
    assert status == 1
    assert "differ in 2 entries" in text
    assert "1 of 3 elements, by up to 5 ULPs" in text
    assert "only in the second" in text
    status, text = check(capsys, path, other, "--json")
    (bias_entry, _) = json.loads(text)["entries"]
    assert (bias_entry["num_differing"], bias_entry["num_elements"], bias_entry["max_ulps"]) == (1, 3, 5)


def test_two_that_hold_the_same(path: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = tmp_path / "y.ckpt"
    torch.save(torch.load(path, weights_only=True), other, _use_new_zipfile_serialization=False)
    status, text = check(capsys, path, str(other))
    assert status == 0
    assert "hold the same" in text
    assert "the files' bytes differ" in text
