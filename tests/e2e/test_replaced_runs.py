"""A run that is replaced stays until the process of the new one has ended well;
no stale verdict stays anywhere.
"""

import json
import os
import shutil
import signal
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from fits import Fit
from test_followed_loops import fork
from test_injected_faults import matches, train_loop, train_with_lightning
from test_kills import start, wait
from trainers import LIGHTNING_ADVICE

from det_callbacks import (
    DetCallbacksError,
    DeterminismCallback,
    ObserverContext,
    TrainingRun,
    observe,
)
from det_callbacks.cli import check as checks
from det_callbacks.cli import main
from det_callbacks.runs.manifest import read_manifest
from det_callbacks.runs.store import Run
from det_callbacks.training.recording import finish

pytestmark = LIGHTNING_ADVICE

SCRIPT = """
import os, signal, sys, torch
for loop in range(2):
    torch.manual_seed(0)
    net = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(net.parameters(), lr=float(sys.argv[1]))
    for step in range(2):
        if loop and step and "crash" in sys.argv:
            raise ValueError("boom")
        if loop and step and "kill" in sys.argv:
            os.kill(os.getpid(), signal.SIGKILL)
        net(torch.ones(2, 4)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    if "between" in sys.argv:
        os.kill(os.getpid(), signal.SIGKILL)
if "status" in sys.argv:
    sys.exit(3)
"""


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def fail() -> None:
    raise ValueError("boom")


def test_a_process_that_ends_well_replaces_the_run_and_any_other_leaves_it(tmp_path):
    train_loop("record", tmp_path / "earlier")
    train_loop("record", tmp_path / "later", fits=2, other=True)
    shutil.copytree(tmp_path / "earlier", path := tmp_path / "run")

    def overwrite(after: Callable[[], object], fits: int = 2) -> int:
        def body() -> None:
            train_loop("record", path, fits=fits, other=True, overwrite=True)
            assert read_manifest(path).run_id == read_manifest(tmp_path / "earlier").run_id
            os.chdir("/")
            after()

        return wait(start(body, tmp_path))

    for after, fits, status in ((kill, 1, -9), (kill, 2, -9), (fail, 2, 1)):
        assert overwrite(after, fits) == status, (tmp_path / "output.txt").read_text()
        assert matches(tmp_path / "earlier", path)
        assert Run.open(path / ".replacement").is_complete
    assert f"the program failed, so {path} is unchanged" in (tmp_path / "output.txt").read_text()
    assert overwrite(lambda: None) == 0, (tmp_path / "output.txt").read_text()
    assert (
        "where it replaces the earlier run when the program ends"
        in (tmp_path / "output.txt").read_text()
    )
    assert matches(tmp_path / "later", path)
    assert not (path / ".replacement").exists()


@pytest.mark.parametrize("train", [train_loop, train_with_lightning])
def test_the_same_process_finds_the_new_run_and_a_fit_that_fails_later_has_no_say(
    train, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    path = Path("run")  # of the directory at this time
    train("record", path)
    train("record", path, other=True, overwrite=True)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert Run.open(tmp_path / "run").is_complete
    assert not (tmp_path / "run/.replacement").exists()
    train("verify", tmp_path / "run", other=True)
    train("record", tmp_path / "run", overwrite=True)
    assert finish(has_failed=True) is None
    assert finish(has_failed=False) is None
    train("verify", tmp_path / "run", other=True)


def test_a_second_fit_that_fails_leaves_the_earlier_run(tmp_path, capsys):
    train_with_lightning("record", path := tmp_path / "run")
    earlier = read_manifest(path).run_id
    fit = Fit(DeterminismCallback(path, mode="record", overwrite=True)).run()
    fit.model.training_step = fail
    with pytest.raises(TypeError):
        fit.again(epochs=2)
    assert finish(has_failed=False) is None
    assert Run.open(path).manifest.run_id == earlier
    assert f"incomplete, in {path}/.replacement; {path} is unchanged" in capsys.readouterr().out


def test_another_recording_in_between_is_an_error_at_the_end(tmp_path):
    path = tmp_path / "run"
    train_loop("record", path)
    train_loop("record", path, overwrite=True)
    assert (
        wait(start(partial(train_loop, "record", path, other=True, overwrite=True), tmp_path)) == 0
    )
    error = finish(has_failed=False)
    assert isinstance(error, DetCallbacksError)
    assert "Another process has replaced or continued" in str(error)
    assert error.exit_code == 2


def test_the_command_replaces_a_run_only_where_the_script_succeeds(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(checks, "run_process", fork)
    Path("train.py").write_text(SCRIPT)
    script = ["--", sys.executable, "train.py"]
    assert main(["record", "run", *script, "0.1"]) == 0
    earlier = read_manifest(Path("run")).run_id
    for fault in ("crash", "kill", "between", "status"):
        assert main(["record", "run", "--overwrite", *script, "0.2", fault]) == 2
        assert read_manifest(Path("run")).run_id == earlier, fault
        assert not Path("run/.complete").exists()
    assert main(["verify", "run", *script, "0.1"]) == 0
    assert main(["record", "run", "--overwrite", *script, "0.2"]) == 0
    assert not Path("run/.replacement").exists()
    assert main(["verify", "run", *script, "0.2"]) == 0
    assert main(["record", "run", "--overwrite", "--", "true"]) == 2


def observe_once(reference: Path | None, place: Path) -> None:
    with ObserverContext(place.parent, place.name, reference=reference):
        observe("x", torch.ones(2))


def audit(reference: Path, current: Path) -> None:
    train_loop("audit", None, current=current)


def verify_with(train: Callable[..., None], reference: Path, current: Path) -> None:
    train("verify", reference, current=current)


VERIFIES: dict[str, Callable[[Path, Path], None]] = {
    "loop": partial(verify_with, train_loop),
    "lightning": partial(verify_with, train_with_lightning),
    "observer": observe_once,
}


@pytest.mark.parametrize("way", VERIFIES)
def test_the_verdict_of_an_earlier_verification_goes_before_the_next_one_can_fail(
    way, tmp_path, monkeypatch
):
    reference, current = tmp_path / "reference", tmp_path / "current"
    if way == "observer":
        observe_once(None, reference)
    else:
        (train_loop if way == "loop" else train_with_lightning)("record", reference)
    stream = reference / "rank-00000/attempt-000.arrows"
    content = stream.read_bytes()
    VERIFIES[way](reference, current)
    assert json.loads((current / "verdict.json").read_text())["verdict"] == "match"
    (current / "report.html").touch()
    (current / "notes.txt").touch()
    stream.write_bytes(content[:-9] + bytes([content[-9] ^ 1]) + content[-8:])
    with pytest.raises(DetCallbacksError):
        VERIFIES[way](reference, current)
    assert [file.name for file in current.iterdir()] == ["notes.txt"]
    stream.write_bytes(content)
    VERIFIES[way](reference, current)

    # where the rest cannot be removed, at least the verdict is gone, and the next verification can
    def refuse(path: Any, *args: Any, **options: Any) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", refuse)
        with pytest.raises(DetCallbacksError, match="No space left"):
            VERIFIES[way](reference, current)
    assert not (current / "verdict.json").exists()
    VERIFIES[way](reference, current)
    assert json.loads((current / "verdict.json").read_text())["verdict"] == "match"


def test_nothing_but_a_verification_is_removed_and_an_audit_goes_first_too(tmp_path):
    train_loop("record", reference := tmp_path / "reference")
    train_loop("record", other := tmp_path / "other")
    before = read_manifest(other)
    with pytest.raises(DetCallbacksError, match="already holds a run"):
        train_loop("verify", tmp_path / "nowhere", current=other)
    assert read_manifest(other) == before
    audit(reference, tmp_path / "audit")
    assert (tmp_path / "audit/audit.json").exists()
    loop = torch.nn.Linear(2, 1), torch.nn.Linear(2, 1)
    strange = torch.optim.SGD(loop[0].parameters(), lr=0.1)
    with (
        pytest.raises(DetCallbacksError),
        TrainingRun(
            None, mode="audit", current=tmp_path / "audit", model=loop[1], optimizers=strange
        ),
    ):
        pass
    assert not (tmp_path / "audit/audit.json").exists()
