"""What is refused before any training, and references that cannot be used: one clear message, never a match.

And the number of workers that the environment asks for.
"""

import json
import os
import re
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
from det_callbacks.callback.evidence import set_workers
from det_callbacks.replaced_in_lightning import PLACES, ReplacedInLightning
from det_callbacks.runs.store import Run
from det_callbacks.variables import NUM_WORKERS

pytestmark = LIGHTNING_ADVICE


class Counted(pl.LightningModule):
    """Counts the training and validation steps that it is asked for."""

    num_calls = 0

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 1))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        self.num_calls += 1
        return self.net(batch[0]).square().mean()

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.num_calls += 1

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def fit(callback: DeterminismCallback, model: Counted | None = None, data: Any = None) -> None:
    torch.manual_seed(5)
    loader = DataLoader(TensorDataset(torch.arange(48.0).view(12, 4)), batch_size=4)
    quiet_trainer(callback).fit(model or Counted(), *([loader, loader] if data is None else [data]))


def refused_before_training(callback: DeterminismCallback, data: Any = None) -> DetCallbacksError:
    """Return what a fit is refused with, before its first training or validation step."""
    model = Counted()
    with pytest.raises(DetCallbacksError) as caught:
        fit(callback, model, data)
    assert model.num_calls == 0
    assert "_load_combined_loader_states" not in vars(model.trainer.fit_loop)
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


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"mode": "on"}, "mode must be one of record, verify, audit, disabled; got 'on'."),
        ({"steps": "some"}, "steps must be one of all, common; got 'some'."),
        ({"on_divergence": "stop"}, "on_divergence must be one of raise, collect, warn; got 'stop'."),
        ({"level": "ops"}, "level must be one of op, module, state; got 'ops'."),
        ({"phases": "forward"}, "phases must be a list of strings; got the string 'forward': write"),
        ({"modules": []}, "modules must hold at least one pattern"),
        ({"every_n_steps": 0}, "every_n_steps must be a whole number from 1 on; got 0."),
        ({"reference": None}, "reference must be the path of a folder; got None."),
        ({"current": ""}, "current must be the path of a folder, or None; got ''."),
        ({"overwrite": "yes"}, "overwrite must be True or False; got 'yes'."),
        ({"log_metrics": 1}, "log_metrics must be True or False"),
    ],
)
def test_a_wrong_argument_is_refused_at_construction(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(SelectionError, match=message) as caught:
        DeterminismCallback(**{"reference": "somewhere", **arguments})
    assert caught.value.exit_code == 2
    assert isinstance(caught.value, ValueError)
    with pytest.raises(SettingsError, match="sead"):
        DeterminismCallback("somewhere", settings={"sead": 1})


def test_a_pattern_that_matches_no_module(tmp_path: Path) -> None:
    error = refused_before_training(DeterminismCallback(tmp_path / "new", mode="record", modules=["net.0", "nett.*"]))
    assert str(error) == (
        "The pattern 'nett.*' in modules matches no module of the model. Its modules are: '', 'net', 'net.0', "
        "'net.1', 'net.2'."
    )
    assert not (tmp_path / "new").exists()


WORKERS = {
    "num_workers": 1,
    "persistent_workers": True,
    "prefetch_factor": 3,
    "timeout": 30,
    "multiprocessing_context": "fork",
}


@pytest.mark.parametrize(("options", "number"), [({}, 2), (WORKERS, 0), (WORKERS, 2)])
def test_a_loader_gets_its_workers_with_what_goes_with_them(options: dict[str, Any], number: int) -> None:
    loader: Any = DataLoader(TensorDataset(torch.arange(8.0)), batch_size=4, **options)
    assert set_workers([[1, 2], loader], number)
    kind = "_MultiProcessingDataLoaderIter" if number else "_SingleProcessDataLoaderIter"
    assert type(iter(loader)).__name__ == kind
    for _ in range(2):
        assert [batch.tolist() for (batch,) in loader] == [[0, 1, 2, 3], [4, 5, 6, 7]]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("2", "DET_CALLBACKS_NUM_WORKERS=2, but the training has no torch DataLoader"),
        ("-1", "from 0 on; got '-1'"),
    ],
)
def test_workers_that_cannot_be_had(text: str, message: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(NUM_WORKERS, text)
    error = refused_before_training(DeterminismCallback(tmp_path / "run", mode="record"), [[torch.ones(2, 4)]])
    assert isinstance(error, SettingsError)
    assert message in str(error)


@pytest.fixture(scope="module")
def other_selection(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("selected") / "run"
    fit(DeterminismCallback(folder, mode="record", level="state", every_n_steps=2))
    return folder


@pytest.mark.parametrize(
    ("given", "is_taken"),
    [
        ({"level": "state", "every_n_steps": 2}, True),
        ({"modules": ["*"], "phases": ["optimizer", "forward", "backward"], "replay": [], "keep_tensors": []}, True),
        ({"level": "op"}, False),  # also where it is the default of a recording
        ({"level": "state", "every_n_steps": 1}, False),
        ({"compiled": "eager"}, False),
        ({"keep_tensors": ["aten.mm.default"]}, False),
    ],
    ids=str,
)
def test_what_is_given_may_be_the_references(
    given: dict[str, Any], is_taken: bool, other_selection: Path, tmp_path: Path
) -> None:
    callback = DeterminismCallback(other_selection, current=tmp_path / "current", **given)
    if is_taken:
        fit(callback)
        assert callback.verdict is not None
        assert callback.verdict.verdict == "match"
        assert (callback.selection.level, callback.selection.every_n_steps) == ("state", 2)
    else:
        error = refused_before_training(callback)
        assert "Leave that out to take over the reference's" in str(error)
        assert f"{list(given)[-1]}=" in str(error)


def test_what_is_replaced_in_lightning_stands_in_the_registry() -> None:
    """Nothing else sets attributes of objects that are not ours."""
    package = Path(cli.__file__).parents[1]
    sets = re.compile(r"\bsetattr\(|\bvars\([^)]*\)\[[^]]*\] =|\.__class__ = |__dict__\[[^]]*\] =")
    found = {
        str(path.relative_to(package)): len(lines)
        for path in sorted([*package.glob("callback/*.py"), *package.glob("checkpoint/*.py")])
        if (lines := sets.findall(path.read_text()))
    }
    assert found == {"checkpoint/draws.py": 2}  # the class of a loader, which has several followers
    assert len(PLACES) < 15
    with pytest.raises(AssertionError, match="stands in the registry"):
        ReplacedInLightning().put(nn.Linear(1, 1), "forward", lambda one: one)


def test_recording_over_a_run(reference: Path) -> None:
    error = refused_before_training(DeterminismCallback(reference, mode="record"))
    assert isinstance(error, RunExistsError)
    assert Run.open(reference).is_complete
    fit(DeterminismCallback(reference, mode="record", overwrite=True))
    assert Run.open(reference).is_complete


def test_where_a_verification_writes(
    reference: Path, recorded: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for current in (reference, recorded):
        assert isinstance(refused_before_training(DeterminismCallback(recorded, current=current)), RunExistsError)
        assert Run.open(current).is_complete
    monkeypatch.chdir(tmp_path)
    for number in range(2):  # a folder of its own, or the one that is given, again
        fit(DeterminismCallback(recorded))
        verdict = json.loads((tmp_path / "determinism" / f"verify-{number:03d}" / "verdict.json").read_text())
        assert verdict["verdict"] == "match"
        fit(DeterminismCallback(recorded, current=tmp_path / "current"))
    error = refused_before_training(DeterminismCallback(tmp_path / "current", current=tmp_path / "other"))
    assert isinstance(error, ReferenceFormatError)
    assert "a verification wrote it" in str(error)


def shorten(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 60)


def rewrite(path: Path) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), "format_version": 99}))


MANIFEST, STREAM = "run.json", "rank-00000/attempt-000.arrows"
# what happens to which file of the run, and what is then said of it
UNUSABLE: dict[str, tuple[str, Callable[[Path], object], str]] = {
    "missing": ("", shutil.rmtree, "There is no run at"),
    "another format version": (
        MANIFEST,
        rewrite,
        "has format_version 99, and this version of det_callbacks reads 1",
    ),
    "no steps": (STREAM, Path.unlink, "missing"),
    "half a step": (STREAM, shorten, "1 is the last whole step"),
}


@pytest.mark.parametrize("case", UNUSABLE)
def test_an_unusable_reference_is_an_error_that_names_the_file(
    case: str, reference: Path, recorded: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, damage, message = UNUSABLE[case]
    damage(reference / file)
    for steps in ("all", "common"):
        callback = DeterminismCallback(reference, current=tmp_path / "current", steps=steps)
        if steps == "common" and case == "half a step":
            fit(callback)
            assert callback.verdict is not None
            assert (callback.verdict.verdict, callback.verdict.counts.steps_compared) == ("match", 2)
            return
        error = refused_before_training(callback)
        assert isinstance(error, ReferenceFormatError if file else ReferenceNotFoundError)
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
        content = bytearray(path.read_bytes())
        content[300] ^= 1
        path.write_bytes(content)
    callback = DeterminismCallback(reference, current=tmp_path / "current")
    with pytest.raises(ReferenceFormatError, match="damaged") as caught:
        fit(callback)
    assert Path(caught.value.path).parent == reference / part
    assert caught.value.path in str(caught.value)
    assert callback.verdict is None
    assert not (tmp_path / "current" / "verdict.json").exists()
    for pair in ((reference, recorded), (recorded, reference)):
        assert cli.main(["diff", *map(str, pair)]) == 2
        assert caught.value.path in capsys.readouterr().err
