"""Where tensors cannot be kept, or what was kept cannot be read: it is said, and no number is wrong."""

import json
import shutil
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from kept import Small, fit, numbers_of, output_of, planted, record, ulps_at, verify
from lightning.pytorch.callbacks import ModelCheckpoint
from processes import run_ranks
from processes import train as train_ranks
from styles import Classifier
from trainers import LIGHTNING_ADVICE

from det_callbacks import DeterminismCallback, SelectionError, compare_runs
from det_callbacks.cli import main
from det_callbacks.report.verdict import verdict_lines
from det_callbacks.runs.store import Run
from det_callbacks.tensors import files

pytestmark = [
    LIGHTNING_ADVICE,
    # of on_divergence="warn", which is what is tried
    pytest.mark.filterwarnings("ignore::det_callbacks.DivergenceWarning"),
]  # on_divergence="warn"

ADDMM = "aten.addmm.default"
FIRST = f"forward/first:{ADDMM}"
ONE_ULP = planted(ADDMM, lambda out, args: ulps_at(out, (1, 3)))


def kept_files(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.rglob("kept/*/*.safetensors"))


def test_what_a_budget_does_not_suffice_for_is_said_everywhere(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # the 4 tensors of a call have 240 bytes
    reference = record(tmp_path / "ref", [FIRST], budget=0.0002)
    line = capsys.readouterr().out
    reason = f"This step would save 0.000229 MiB with {ADDMM}, and tensor_budget_mib is 0.0002."
    assert "NOT those of 4 calls from step 0 on: " in line
    assert f"from step 0 on: {reason}" in line
    assert "By how much these differ cannot be told later" in line
    assert main(["show", str(reference)]) == 0
    shown = capsys.readouterr().out
    assert f"tensors kept: {FIRST}" in shown
    assert f"NOT kept: 4 calls from step 0 on: {reason}" in shown
    verdict = verify(reference, around=ONE_ULP)
    problem = f"the reference did not keep it: {reason}"
    assert numbers_of(verdict).problem.startswith(problem)
    assert numbers_of(verdict).output == ()
    assert f"cannot be told: {problem}" in verdict_lines(verdict)
    assert f"This cannot be told: {problem}" in (tmp_path / "current" / "report.html").read_text()
    assert "keep_tensors=" in verdict_lines(verdict)
    assert numbers_of(compare_runs(reference, tmp_path / "current")) == numbers_of(verdict)


def test_a_call_is_kept_whole_or_not_at_all(tmp_path: Path) -> None:
    """Within a step too: what fits is kept, with all that belongs to it."""
    reference = record(tmp_path / "ref", ["forward/*"], budget=0.0008)
    (path,) = reference.rglob("kept/*/step-000000000.safetensors")
    view = Run.open(reference).view(0, 0, 0)
    assert view.program.ops_digested > 3
    change = planted(ADDMM, lambda out, args: ulps_at(out, (1, 3)), step=0)
    assert [tensor.tensor for tensor in numbers_of(verify(reference, around=change)).inputs] == ["self", "mat1", "mat2"]
    assert path.exists()


@pytest.mark.parametrize("kind", ["little room", "no room"])
def test_a_full_disk_stops_no_run_and_is_said(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if kind == "little room":
        monkeypatch.setattr(files.shutil, "disk_usage", lambda path: SimpleNamespace(free=2**20))
        reason = "has 1 MiB free"
    else:

        def fail(*_: Any) -> int:
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(files, "_write_tensors", fail)
        reason = "No space left on device"
    reference = record(tmp_path / "ref", [FIRST])
    line = capsys.readouterr().out
    assert "recorded 4 steps" in line
    assert "; kept 0 tensors of 0 steps (0 bytes), and NOT those of 4 calls from step 0 on: " in line
    assert reason in line
    monkeypatch.undo()
    verdict = verify(reference, around=ONE_ULP)
    assert verdict.verdict == "diverged"
    assert numbers_of(verdict).problem.startswith("the reference did not keep it")
    assert (reason in numbers_of(verdict).problem) == (kind == "little room")


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-7] ^= 1  # of the last tensor
    path.write_bytes(content)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-40])


def exchange(path: Path) -> None:
    shutil.copyfile(path.with_name("step-000000002.safetensors"), path)


def forge(path: Path) -> None:
    content = path.read_bytes()
    assert b'\\"occurrence\\": 0' in content
    path.write_bytes(content.replace(b'\\"occurrence\\": 0', b'\\"occurrence\\": 1', 1))


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole")
    verdict = verify(record(folder / "ref", [FIRST]), around=planted(ADDMM, lambda out, args: out.add_(1.0), step=1))
    assert output_of(verdict).num_differing == 24
    return folder


@pytest.mark.parametrize("side", ["ref", "current"])
@pytest.mark.parametrize("damage", [flip, cut, exchange, forge, Path.unlink])
def test_damage_is_said_and_never_a_number(
    whole: Path, tmp_path: Path, damage: Callable[[Path], None], side: str
) -> None:
    shutil.copytree(whole, tmp_path, dirs_exist_ok=True)
    (path,) = (tmp_path / side).rglob("kept/*/step-000000001.safetensors")
    damage(path)
    verdict = compare_runs(tmp_path / "ref", tmp_path / "current")
    assert verdict.verdict == "diverged"
    numbers = numbers_of(verdict)
    assert (numbers.output, numbers.inputs) == ((), ())
    name = "the reference" if side == "ref" else "the current run"
    if damage is Path.unlink:
        assert numbers.problem == f"{name} did not keep it"
    else:
        assert numbers.problem.startswith(f"what {name} kept could not be read: {path} is damaged: ")


# attempts


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty:UserWarning")  # resumed
def test_a_resumed_recording_goes_on_keeping(tmp_path: Path) -> None:
    saving = partial(
        ModelCheckpoint, tmp_path / "kept-checkpoints", every_n_train_steps=1, save_top_k=-1, filename="{step}"
    )
    reference = tmp_path / "ref"

    def train(**options: Any) -> None:
        torch.manual_seed(0)
        callback = DeterminismCallback(reference, mode="record", keep_tensors=[FIRST])
        fit(callback, Small, callbacks=[saving()], enable_checkpointing=True, **options)

    train(max_steps=3)
    checkpoint = tmp_path / "kept-checkpoints" / "step=2.ckpt"
    with pytest.raises(SelectionError, match=r"recorded with keep_tensors=\['forward/first.*Nothing was changed"):
        fit(
            DeterminismCallback(reference, mode="record"),
            callbacks=[saving()],
            enable_checkpointing=True,
            ckpt_path=checkpoint,
        )
    train(ckpt_path=checkpoint)
    kept = {path.parent.name: path.name for path in reference.rglob("kept/*/*3.safetensors")}
    assert kept == {"attempt-001.segment-000": "step-000000003.safetensors"}
    assert len(kept_files(reference)) == 4
    for step, attempt in ((1, "current-1"), (3, "current-3")):
        change = planted(ADDMM, lambda out, args: ulps_at(out, (1, 3)), step=step)
        assert output_of(verify(reference, around=change, current=tmp_path / attempt)).num_differing == 1


# several ranks


def body(folder: Path, mode: Any, rank: int) -> None:
    """Rank 1 computes otherwise in step 1 of the verification."""
    options: Any = {"keep_tensors": [FIRST]} if mode == "record" else {"on_divergence": "warn"}
    callback = DeterminismCallback(folder / "ref", mode=mode, current=folder / "current", **options)
    model = Classifier()
    with (
        nullcontext()
        if mode == "record" or rank == 0
        else planted(ADDMM, lambda out, args: ulps_at(out, (1, 3)), step=1)(model)
    ):
        train_ranks(callback, model=lambda: model)
    if callback.verdict is not None:
        (folder / f"verdict-{rank}.json").write_text(json.dumps(callback.verdict.to_dict()))


@pytest.mark.slow
@pytest.mark.ddp
def test_the_numbers_of_the_rank_that_differs_are_told_to_all(tmp_path: Path) -> None:
    torch.manual_seed(0)
    for mode in ("record", "verify"):
        for ended in run_ranks(partial(body, tmp_path, mode), tmp_path / mode):
            assert ended.exit_code == 0, ended.output
    verdicts = [json.loads((tmp_path / f"verdict-{rank}.json").read_text()) for rank in range(2)]
    assert verdicts[0] == verdicts[1]
    first = verdicts[0]["first_divergence"]
    assert (first["rank"], first["step"]) == (1, 1)
    assert first["numbers"]["output"][0]["num_differing"] == 1
    assert first["numbers"]["output"][0]["first"] == [1, 3]
    offline = compare_runs(tmp_path / "ref", tmp_path / "current").first_divergence
    assert offline is not None
    assert offline.to_dict()["numbers"] == first["numbers"]
