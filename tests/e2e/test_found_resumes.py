"""A run that begins with the state that a step of the reference left is compared from there on, in any loop."""

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from det_callbacks import DivergenceError, SelectionError, TrainingRun, Verdict, cli

STEPS, AT = 6, 3  # the checkpoint holds what the first AT steps left
ORDER = torch.randperm(STEPS * 8, generator=torch.Generator().manual_seed(5))
DATA = torch.randn(STEPS * 8, 6, generator=torch.Generator().manual_seed(6))


class Loop:
    def __init__(self, seed: int = 0, *, lr: float = 0.05) -> None:
        torch.manual_seed(seed)
        self.model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.2), nn.Linear(8, 3))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=lr)

    def train(self, run: TrainingRun, begin: int = 0, *, batches_from: int | None = None) -> dict[str, Any]:
        """Train the steps from ``begin`` on; return what the loop has after AT of them."""
        saved: dict[str, Any] = {}
        with run:
            for step in range(begin, STEPS):
                at = 8 * (step if batches_from is None else step - begin + batches_from)
                batch = DATA[ORDER[at : at + 8]]
                with run.step(batch):
                    self.model(batch).pow(2).mean().backward()
                    self.optimizer.step()
                    self.optimizer.zero_grad()
                if step + 1 == AT:
                    saved = {"rng": torch.get_rng_state()}
                    for name, part in ("model", self.model), ("optimizer", self.optimizer):
                        saved[name] = {key: _copied(value) for key, value in part.state_dict().items()}
        return saved


def _copied(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.clone()
    if isinstance(value, dict):
        return {key: _copied(one) for key, one in value.items()}
    return value


@pytest.fixture(scope="module", params=["state", "module", "op"])
def recorded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("found") / "reference"
    loop = Loop()
    level = request.param
    run = TrainingRun(folder, mode="record", level=level, model=loop.model, optimizers=loop.optimizer)
    return folder, loop.train(run)


def resumed(recorded: tuple[Path, dict[str, Any]], tmp_path: Path, *left_out: str, **options: Any) -> Verdict:
    folder, saved = recorded
    loop = Loop(seed=9)
    loop.model.load_state_dict(saved["model"])
    if "optimizer" not in left_out:
        loop.optimizer.load_state_dict(_copied(saved["optimizer"]))  # it keeps the tensors that it is given
    if "rng" not in left_out:
        torch.set_rng_state(saved["rng"])
    return verified(loop, folder, tmp_path, begin=AT, **options)


def verified(loop: Loop, folder: Path, tmp_path: Path, **options: Any) -> Verdict:
    run = TrainingRun(folder, current=tmp_path / "current", model=loop.model, optimizers=loop.optimizer)
    try:
        loop.train(run, **options)
    except DivergenceError as error:
        return error.verdict
    return run.verdict


def test_a_whole_resume_is_found_and_matches(recorded, tmp_path, capsys):
    verdict = resumed(recorded, tmp_path)
    assert (verdict.verdict, verdict.resume.step, verdict.resume.how) == ("match", AT, "found")
    assert verdict.coverage.steps == (AT, STEPS - 1)
    assert {*verdict.resume.restored} == {"parameters", "buffers", "optimizer", "generators", "data"}
    assert "differs" not in str(verdict.resume.restored)
    assert f"from step {AT} on, where it resumed" in capsys.readouterr().out
    content = verdict.to_dict()
    assert content["resume"]["step"] == AT
    assert Verdict.from_dict(content) == verdict


@pytest.mark.parametrize(
    ("left_out", "options", "cause", "restored"),
    [
        (["optimizer"], {}, "checkpoint", {"parameters": "restored", "optimizer": "missing", "data": "restored"}),
        (["rng"], {}, "rng", {"optimizer": "restored", "generators": "differs", "data": "restored"}),
        ([], {"batches_from": 0}, "data_order", {"parameters": "restored", "optimizer": "restored", "data": "differs"}),
    ],
    ids=["no optimizer state", "no generators", "the data from the start"],
)
def test_what_it_did_not_restore_is_told(left_out, options, cause, restored, recorded, tmp_path, capsys):
    verdict = resumed(recorded, tmp_path, *left_out, **options)
    assert (verdict.verdict, verdict.cause, verdict.resume.step) == ("diverged", cause, AT)
    found: Mapping[str, Any] = {
        **verdict.resume.restored,
        "generators": verdict.resume.restored["generators"]["torch.cpu"],
        "optimizer": verdict.resume.restored["optimizer"]["exp_avg"],
    }
    assert {name: found[name] for name in restored} == restored


SCRIPT = """
import sys, torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.2), nn.Linear(8, 3))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
loader = DataLoader(TensorDataset(torch.randn(48, 6)), 8, shuffle=True, generator=torch.Generator().manual_seed(3))
saved = torch.load("saved.pt", weights_only=True) if "--resume" in sys.argv else None
if saved:
    model.load_state_dict(saved["model"]), optimizer.load_state_dict(saved["optimizer"])
for step, (batch,) in enumerate(loader):
    if saved and step < 3:
        continue
    if saved and step == 3:
        torch.set_rng_state(saved["rng"])
    model(batch).pow(2).mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    if step == 2 and not saved:
        states = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "rng": torch.get_rng_state()}
        torch.save(states, "saved.pt")
"""


def test_a_script_that_resumes_in_the_middle_of_an_epoch_is_found(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text(SCRIPT)
    command = ["--", sys.executable, "train.py"]
    assert cli.main(["record", "reference", *command]) == 0
    assert cli.main(["verify", "reference", *command, "--resume"]) == 0
    assert "from step 3 on, where it resumed (by its state)" in capfd.readouterr().out


def test_another_start_is_no_resume(recorded, tmp_path):
    folder, _ = recorded
    verdict = verified(Loop(seed=9), folder, tmp_path)
    assert (verdict.cause, verdict.resume) == ("initial_weights", None)
    assert verdict.first_divergence.step == 0


def test_the_same_start_is_no_resume_although_nothing_learns(tmp_path):
    folder = tmp_path / "reference"
    loop = Loop(lr=0.0)
    loop.model[1].eval()
    loop.train(TrainingRun(folder, mode="record", level="state", model=loop.model, optimizers=loop.optimizer))
    loop = Loop(lr=0.0)
    loop.model[1].eval()
    verdict = verified(loop, folder, tmp_path)
    assert (verdict.verdict, verdict.resume) == ("match", None)


def test_where_steps_left_the_same_state_their_batches_tell_or_it_is_refused(tmp_path):
    def still(*, seed: int) -> Loop:
        loop = Loop(seed)
        loop.model[1].eval()
        loop.optimizer = torch.optim.SGD(loop.model.parameters(), lr=0.0)
        return loop

    folder, loop = tmp_path / "reference", still(seed=0)
    before = {key: value.clone() for key, value in loop.model.state_dict().items()}
    with torch.no_grad():
        loop.model[0].weight.add_(1)
    run = TrainingRun(folder, mode="record", level="state", model=loop.model, optimizers=loop.optimizer)
    with run:
        for step in range(STEPS):
            batch = DATA[ORDER[8 * step : 8 * step + 8]]
            with run.step(batch):
                loop.model(batch).pow(2).mean().backward()
                loop.optimizer.step()
                loop.optimizer.zero_grad()
                if step == 0:
                    loop.model.load_state_dict(before)
    loop = still(seed=0)
    verdict = verified(loop, folder, tmp_path, begin=2)
    assert verdict.resume.step == 2
    run = TrainingRun(folder, current=tmp_path / "other", model=loop.model, optimizers=loop.optimizer)
    with pytest.raises(SelectionError, match=r"steps 0, 1, 2, 3 and 1 more of .* left"), run, run.step():
        pass
