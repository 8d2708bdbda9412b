"""What is refused before any training, and references that cannot be used: one clear message, never a match.

And the number of workers that the environment asks for.
"""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from fits import Classifier, Fit, RaiseAt, StopError, Validated, assert_nothing_left
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from trainers import LIGHTNING_ADVICE

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


def refused_before_training(callback: DeterminismCallback, data: Any = None) -> DetCallbacksError:
    """Return what a fit is refused with, before its first training or validation step."""
    too_late = RaiseAt("on_sanity_check_start", StopError("too late"), call=1)
    fit = Fit(callback, too_late, model=Classifier if data else Validated)
    with pytest.raises(DetCallbacksError) as caught:
        fit.trainer.fit(fit.model, data or fit.loader)
    assert_nothing_left(fit, callback)
    assert (fit.trainer.global_step, callback.verdict, caught.value.exit_code) == (0, None, 2)
    return caught.value


@pytest.fixture
def damageable(reference: Path, tmp_path: Path) -> Path:
    """A copy of a reference."""
    return Path(shutil.copytree(reference, tmp_path / "reference"))


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
        ({"current": ""}, "current must be the path of a folder; got ''."),
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


@pytest.mark.parametrize("number", [0, 2])
def test_a_loader_gets_its_workers_with_what_goes_with_them(number: int) -> None:
    options: dict[str, Any] = {"num_workers": 1, "persistent_workers": True, "prefetch_factor": 3, "timeout": 30}
    data = TensorDataset(torch.arange(8.0))
    for loader in (DataLoader(data, 4, **options, multiprocessing_context="fork"), DataLoader(data, 4)):
        set_workers([[1, 2], loader], str(number))
        kind = "_MultiProcessingDataLoaderIter" if number else "_SingleProcessDataLoaderIter"
        assert type(iter(loader)).__name__ == kind
        for _ in range(2):
            assert [batch.tolist() for (batch,) in loader] == [[0, 1, 2, 3], [4, 5, 6, 7]]


NO_MODULE = (
    "The pattern 'nett.*' in modules matches no module of the model. "
    "Its modules are: '', 'first', 'norm', 'drop', 'last'."
)
NO_LOADER = "DET_CALLBACKS_NUM_WORKERS=2, but the training has no torch DataLoader"


def test_what_cannot_be_had_of_a_training_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for modules, workers, message in (
        (["norm", "nett.*"], "0", NO_MODULE),
        (["*"], "2", NO_LOADER),
        (["*"], "-1", "DET_CALLBACKS_NUM_WORKERS=-1, but"),
    ):
        monkeypatch.setenv(NUM_WORKERS, workers)
        callback = DeterminismCallback(tmp_path / "run", mode="record", modules=modules)
        error = refused_before_training(callback, None if workers == "0" else [[torch.ones(2, 4)]])
        assert isinstance(error, SelectionError if workers == "0" else SettingsError)
        assert message in str(error)
        assert not (tmp_path / "run" / "run.json").exists()


def test_what_is_given_may_be_the_references(tmp_path: Path) -> None:
    reference = tmp_path / "run"
    Fit(DeterminismCallback(reference, mode="record", level="state", every_n_steps=2)).run()
    taken: list[dict[str, Any]] = [
        {"level": "state", "every_n_steps": 2},
        {"modules": ["*"], "phases": ["optimizer", "forward", "backward"], "replay": [], "keep_tensors": []},
    ]
    for number, given in enumerate(taken):
        callback = DeterminismCallback(reference, current=tmp_path / str(number), **given)
        Fit(callback).run()
        selection = callback.selection
        assert (callback.verdict.verdict, selection.level, selection.every_n_steps) == ("match", "state", 2)
    # also where it is the default of a recording
    others = {"level": "op", "every_n_steps": 1, "compiled": "eager", "keep_tensors": ["aten.mm.default"]}
    for name, value in others.items():
        error = refused_before_training(DeterminismCallback(reference, current=tmp_path / "current", **{name: value}))
        assert "Leave that out to take over the reference's" in str(error)
        assert f"{name}=" in str(error)


def test_what_is_replaced_in_lightning_stands_in_the_registry() -> None:
    """Nothing else sets attributes of objects that are not ours, but for the class of a loader with many followers."""
    package = Path(cli.__file__).parents[1]
    sets = re.compile(r"\bsetattr\(|\bvars\([^)]*\)\[[^]]*\] =|\.__class__ = |__dict__\[[^]]*\] =")
    files = [*package.glob("callback/*.py"), *package.glob("checkpoint/*.py")]
    found = {path.name: number for path in files if (number := len(sets.findall(path.read_text())))}
    assert (found, len(PLACES) < 15) == ({"loaders.py": 2}, True)
    with pytest.raises(AssertionError, match="stands in the registry"):
        ReplacedInLightning().put(nn.Linear(1, 1), "forward", lambda one: one)


def test_no_run_is_written_over(
    reference: Path, damageable: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for run, arguments in (
        (damageable, {"reference": damageable, "mode": "record"}),
        (damageable, {"reference": reference, "current": damageable}),
        (reference, {"reference": reference, "current": reference}),
    ):
        assert isinstance(refused_before_training(DeterminismCallback(**arguments)), RunExistsError)
        assert Run.open(run).is_complete
    monkeypatch.chdir(tmp_path)
    for number in range(2):  # a folder of its own, or the one that is given, again
        Fit(DeterminismCallback(reference)).run()
        verdict = json.loads((tmp_path / "determinism" / f"verify-{number:03d}" / "verdict.json").read_text())
        assert verdict["verdict"] == "match"
        Fit(DeterminismCallback(reference, current=tmp_path / "current")).run()
    error = refused_before_training(DeterminismCallback(tmp_path / "current", current=tmp_path / "other"))
    assert isinstance(error, ReferenceFormatError)
    assert "a verification wrote it" in str(error)


def rewrite(path: Path) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), "format_version": 99}))


# what happens to which file of the run, and what is then said of it
UNUSABLE: dict[str, tuple[Callable[[Path], object], str]] = {
    "": (shutil.rmtree, "There is no run at"),
    "run.json": (rewrite, "has format_version 99, and this version of det_callbacks reads 1"),
    "rank-00000/attempt-000.arrows": (Path.unlink, "damaged"),
}


@pytest.mark.parametrize("file", UNUSABLE)
def test_an_unusable_reference_is_an_error_that_names_the_file(file: str, damageable: Path, tmp_path: Path) -> None:
    damage, message = UNUSABLE[file]
    damage(damageable / file)
    for steps in ("all", "common"):
        error = refused_before_training(DeterminismCallback(damageable, current=tmp_path / "current", steps=steps))
        assert isinstance(error, ReferenceFormatError if file else ReferenceNotFoundError)
        assert message in str(error)
        assert str(damageable / file) in str(error)
        assert not (tmp_path / "current").exists()


@pytest.mark.parametrize("part", ["programs", "layouts"])
def test_a_damaged_program_is_an_error_also_where_the_steps_agree(part: str, damageable: Path, tmp_path: Path) -> None:
    for path in (damageable / part).iterdir():
        content = bytearray(path.read_bytes())
        content[300] ^= 1
        path.write_bytes(content)
    callback = DeterminismCallback(damageable, current=tmp_path / "current")
    with pytest.raises(ReferenceFormatError, match="damaged") as caught:
        Fit(callback).run()
    assert Path(caught.value.path).parent == damageable / part
    assert caught.value.path in str(caught.value)
    assert (callback.verdict, (tmp_path / "current" / "verdict.json").exists()) == (None, False)
