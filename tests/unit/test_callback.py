"""What is refused before any training, and references that cannot be used: one clear message, never a match."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from trainers import LIGHTNING_ADVICE, quiet_trainer

from det_callbacks import (
    DetCallbacksError,
    DeterminismCallback,
    ReferenceFormatError,
    ReferenceNotFoundError,
    RunExistsError,
    SelectionError,
    SettingsError,
    cli,
)
from det_callbacks.errors import NothingComparedError
from det_callbacks.runs.store import Run

pytestmark = LIGHTNING_ADVICE


class Counted(pl.LightningModule):
    """Counts the training and validation steps that it is asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 1))
        self.num_calls = 0

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        self.num_calls += 1
        return self.net(batch[0]).square().mean()

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.num_calls += 1

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def fit(callback: DeterminismCallback, model: Counted | None = None) -> Counted:
    torch.manual_seed(5)
    model = model or Counted()
    loader = DataLoader(TensorDataset(torch.arange(48.0).view(12, 4)), batch_size=4)
    quiet_trainer(callback).fit(model, loader, loader)
    return model


def refused_before_training(callback: DeterminismCallback) -> DetCallbacksError:
    """Return what a fit is refused with, before its first training or validation step."""
    model = Counted()
    with pytest.raises(DetCallbacksError) as caught:
        fit(callback, model)
    assert model.num_calls == 0
    assert callback.verdict is None
    assert caught.value.exit_code == 2
    return caught.value


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("recorded") / "run"
    fit(DeterminismCallback(folder, mode="record"))
    return folder


@pytest.fixture
def reference(recorded: Path, tmp_path: Path) -> Path:
    """A copy that a test may damage."""
    return Path(shutil.copytree(recorded, tmp_path / "reference"))


# arguments


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"mode": "on"}, "mode must be one of record, verify, audit, disabled; got 'on'."),
        ({"mode": True}, "mode must be one of record, verify, audit, disabled; got True."),
        ({"mode": ["record"]}, r"mode must be one of record, verify, audit, disabled; got \['record'\]."),
        ({"steps": "some"}, "steps must be one of all, common; got 'some'."),
        ({"on_divergence": "stop"}, "on_divergence must be one of raise, collect, warn; got 'stop'."),
        ({"level": "ops"}, "level must be one of op, module, state; got 'ops'."),
        ({"phases": ["forwards"]}, r"phases must be chosen among forward, backward, optimizer; got \['forwards'\]."),
        ({"phases": []}, r"phases must be chosen among forward, backward, optimizer; got \[\]."),
        ({"phases": "forward"}, "phases must be a list of strings; got the string 'forward': write"),
        ({"modules": "net"}, "modules must be a list of strings; got the string 'net': write"),
        ({"modules": []}, "modules must hold at least one pattern"),
        ({"modules": [1]}, r"modules must be a list of strings; got \[1\]."),
        ({"every_n_steps": 0}, "every_n_steps must be a whole number from 1 on; got 0."),
        ({"every_n_steps": 1.5}, "every_n_steps must be a whole number from 1 on; got 1.5."),
        ({"every_n_steps": True}, "every_n_steps must be a whole number from 1 on; got True."),
        ({"reference": ""}, "reference must be the path of a folder; got ''."),
        ({"reference": None}, "reference must be the path of a folder; got None."),
        ({"current": ""}, "current must be the path of a folder, or None; got ''."),
        ({"current": 3}, "current must be the path of a folder, or None; got 3."),
        ({"overwrite": "yes"}, "overwrite must be True or False; got 'yes'."),
    ],
)
def test_a_wrong_argument_is_refused_at_construction(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(SelectionError, match=message) as caught:
        DeterminismCallback(**{"reference": "somewhere", **arguments})
    assert caught.value.exit_code == 2
    assert isinstance(caught.value, ValueError)


def test_a_wrong_setting_is_refused_at_construction() -> None:
    with pytest.raises(SettingsError, match="sead"):
        DeterminismCallback("somewhere", settings={"sead": 1})


@pytest.mark.parametrize("mode", ["record", "verify"])
def test_a_pattern_that_matches_no_module(mode: Any, recorded: Path, tmp_path: Path) -> None:
    folder = tmp_path / "new" if mode == "record" else recorded
    error = refused_before_training(DeterminismCallback(folder, mode=mode, modules=["net.0", "nett.*"]))
    if mode == "record":
        assert str(error) == (
            "The pattern 'nett.*' in modules matches no module of the model. Its modules are: '', 'net', 'net.0', "
            "'net.1', 'net.2'."
        )
    else:
        assert "was recorded with modules=['*'], and this run asks for modules=['net.0', 'nett.*']. " in str(error)
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    ("given", "is_taken"),
    [
        ({}, True),
        ({"level": "state"}, True),
        ({"every_n_steps": 2}, True),
        ({"modules": ["*"], "phases": ["optimizer", "forward", "backward"], "replay": [], "keep_tensors": []}, True),
        ({"level": "op"}, False),  # also where it is the default of a recording
        ({"every_n_steps": 1}, False),
        ({"only_steps": [0]}, False),
        ({"compiled": "eager"}, False),
        ({"keep_tensors": ["aten.mm.default"]}, False),
        ({"level": "module"}, False),
        ({"level": "state", "every_n_steps": 3}, False),
        ({"modules": ["net"]}, False),
    ],
    ids=str,
)
def test_what_is_given_may_be_the_references(given: dict[str, Any], is_taken: bool, tmp_path: Path) -> None:
    fit(DeterminismCallback(tmp_path / "run", mode="record", level="state", every_n_steps=2))
    callback = DeterminismCallback(tmp_path / "run", current=tmp_path / "current", **given)
    if is_taken:
        fit(callback)
        assert callback.verdict is not None
        assert callback.verdict.verdict == "match"
        assert (callback.selection.level, callback.selection.every_n_steps) == ("state", 2)
    else:
        error = refused_before_training(callback)
        assert "Leave that out to take over the reference's" in str(error)
        assert f"{list(given)[-1]}=" in str(error)


def test_recording_over_a_run(reference: Path) -> None:
    before = sorted((path, path.stat().st_mtime_ns) for path in reference.rglob("*"))
    error = refused_before_training(DeterminismCallback(reference, mode="record"))
    assert isinstance(error, RunExistsError)
    assert isinstance(error, FileExistsError)
    assert error.path == str(reference)
    assert "holds a run already" in str(error)
    assert "overwrite=True" in str(error)
    assert sorted((path, path.stat().st_mtime_ns) for path in reference.rglob("*")) == before
    fit(DeterminismCallback(reference, mode="record", overwrite=True))
    assert Run.open(reference).is_complete


@pytest.mark.parametrize("mode", ["record", "verify"])
def test_a_reference_that_is_a_file(mode: Any, tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("mine")
    error = refused_before_training(DeterminismCallback(path, mode=mode))
    assert str(error).startswith(f"{path} is a file")
    assert "a run is a folder" in str(error)
    assert path.read_text() == "mine"


def test_a_current_folder_that_holds_a_recording(reference: Path, recorded: Path) -> None:
    error = refused_before_training(DeterminismCallback(recorded, current=reference))
    assert isinstance(error, RunExistsError)
    assert Run.open(reference).is_complete
    error = refused_before_training(DeterminismCallback(recorded, current=recorded))
    assert isinstance(error, RunExistsError)


def test_a_current_folder_of_a_verification_is_used_again(recorded: Path, tmp_path: Path) -> None:
    for _ in range(2):
        callback = DeterminismCallback(recorded, current=tmp_path / "current")
        fit(callback)
        assert callback.verdict is not None
        assert callback.verdict.verdict == "match"


def test_each_verification_gets_a_folder_of_its_own(
    recorded: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for number in range(2):
        fit(DeterminismCallback(recorded))
        verdict = json.loads((tmp_path / "determinism" / f"verify-{number:03d}" / "verdict.json").read_text())
        assert verdict["verdict"] == "match"


def test_what_a_verification_kept_is_no_reference(recorded: Path, tmp_path: Path) -> None:
    fit(DeterminismCallback(recorded, current=tmp_path / "current"))
    error = refused_before_training(DeterminismCallback(tmp_path / "current", current=tmp_path / "other"))
    assert isinstance(error, ReferenceFormatError)
    assert "a verification wrote it" in str(error)


def test_a_run_that_selects_no_step_is_an_error(tmp_path: Path) -> None:
    model = Counted()

    class FromOneOn(DeterminismCallback):
        def on_train_batch_start(self, *arguments: Any) -> None:
            """Begin no step."""

    with pytest.raises(NothingComparedError, match="Nothing was recorded"):
        fit(FromOneOn(tmp_path / "run", mode="record"), model)
    assert not Run.open(tmp_path / "run").is_complete


# references


def rewrite(path: Path, **entries: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **entries}))


def only(folder: Path) -> Path:
    (path,) = folder.iterdir()
    return path


def shorten(path: Path, *, to: int) -> None:
    size = path.stat().st_size
    os.truncate(path, to if to >= 0 else size + to)


STREAM = "rank-00000/attempt-000.arrows"
Damage = Callable[[Path], object]
UNUSABLE: dict[str, tuple[Damage, type[DetCallbacksError], str, str]] = {
    "missing": (shutil.rmtree, ReferenceNotFoundError, "", "There is no run at"),
    "an empty folder": (lambda run: (shutil.rmtree(run), run.mkdir()), ReferenceNotFoundError, "", "is not a run"),
    "another format version": (
        lambda run: rewrite(run / "run.json", format_version=99),
        ReferenceFormatError,
        "run.json",
        "has format_version 99, and this version of det_callbacks reads 1",
    ),
    "a changed run.json": (
        lambda run: rewrite(run / "run.json", selection={"level": "op"}),
        ReferenceFormatError,
        "run.json",
        "not what its digest says",
    ),
    "no steps": (lambda run: (run / STREAM).unlink(), ReferenceFormatError, STREAM, "missing"),
    "no end": (
        lambda run: shorten(run / STREAM, to=-8),
        ReferenceFormatError,
        STREAM,
        "2 is the last whole step",
    ),
    "half a step": (
        lambda run: shorten(run / STREAM, to=-60),
        ReferenceFormatError,
        STREAM,
        "1 is the last whole step",
    ),
}


def flipped(content: bytes, at: int) -> bytes:
    changed = bytearray(content)
    changed[at] ^= 1
    return bytes(changed)


@pytest.mark.parametrize("steps", ["all", "common"])
@pytest.mark.parametrize("case", UNUSABLE)
def test_an_unusable_reference_is_an_error_that_names_the_file(
    case: str, steps: Any, reference: Path, recorded: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    damage, kind, file, message = UNUSABLE[case]
    damage(reference)
    if steps == "common" and case in ("no end", "half a step"):
        callback = DeterminismCallback(reference, current=tmp_path / "current", steps="common")
        fit(callback)
        assert callback.verdict is not None
        assert callback.verdict.verdict == "match"
        assert callback.verdict.counts.steps_compared == (2 if case == "half a step" else 3)
        return
    error = refused_before_training(DeterminismCallback(reference, current=tmp_path / "current", steps=steps))
    assert isinstance(error, kind)
    assert message in str(error)
    assert str(reference / file) in str(error)
    assert not (tmp_path / "current").exists()
    assert cli.main(["diff", str(reference), str(recorded), "--steps", steps]) == 2
    assert str(reference / file) in capsys.readouterr().err


@pytest.mark.parametrize("part", ["programs", "layouts"])
def test_a_damaged_program_is_an_error_also_where_the_steps_agree(
    part: str, reference: Path, recorded: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for path in (reference / part).iterdir():
        path.write_bytes(flipped(path.read_bytes(), 300))
    callback = DeterminismCallback(reference, current=tmp_path / "current")
    with pytest.raises(ReferenceFormatError, match="damaged") as caught:
        fit(callback)
    assert Path(caught.value.path).parent == reference / part
    assert callback.verdict is None
    assert not (tmp_path / "current" / "verdict.json").exists()
    assert cli.main(["diff", str(reference), str(recorded)]) == 2
    assert caught.value.path in capsys.readouterr().err
