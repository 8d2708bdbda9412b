"""State of a loop that nothing of it names: schedulers, the gradient scaler, averaged weights."""

import copy
from typing import Any

import pytest
import torch
from test_found_resumes import AT, DATA, STEPS, Loop, copied
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from det_callbacks import DivergenceError, TrainingRun
from det_callbacks.integrations.loop import LoopTraining


def test_schedulers_and_the_scaler_of_a_loop_are_found_and_no_others():
    loop, other = Loop(), Loop()
    inner = torch.optim.lr_scheduler.StepLR(loop.optimizer, 2)
    later = torch.optim.lr_scheduler.ExponentialLR(loop.optimizer, 0.9)
    both = torch.optim.lr_scheduler.SequentialLR(loop.optimizer, [inner, later], [4])
    of_other = torch.optim.lr_scheduler.StepLR(other.optimizer, 2)
    scaler, unused = torch.amp.GradScaler("cpu"), torch.amp.GradScaler("cpu", enabled=False)
    training = LoopTraining(loop.model, [loop.optimizer])
    assert training.schedulers == [(both, "")]
    assert training.scaler is scaler
    # where it is in its schedule, and not what it was made with: that shows in the learning rate
    assert {name for name, _ in training.further_state()} == {
        "state of SequentialLR: last_epoch",
        "state of the gradient scaler: scale",
        "state of the gradient scaler: growth_tracker",
    }
    newest = torch.amp.GradScaler("cpu")
    assert LoopTraining(loop.model, [loop.optimizer]).scaler is newest
    assert None not in (of_other, unused)  # they are alive


class Averages(nn.Module):
    """Averages the weights, as ``ModelEmaV2`` of timm does."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.module = copy.deepcopy(model)


@pytest.mark.parametrize("kind", [AveragedModel, Averages])
def test_the_average_of_a_loops_weights_is_found_and_no_other(kind):
    loop = Loop()
    average, of_other = kind(loop.model), kind(nn.Linear(3, 3))

    def found() -> set[str]:
        training = LoopTraining(loop.model, [loop.optimizer])
        return {name for name, _ in training.further_state()}

    names = {f"state of {kind.__name__}: {name}" for name in average.state_dict()}
    assert found() == names
    wrapped = nn.DataParallel(loop.model)  # holds the model itself
    assert found() == names
    assert None not in (of_other, wrapped)
    loop.model.average = average  # in the model's state already
    assert found() == set()


@pytest.mark.parametrize(
    ("lost", "named"),
    [
        ("", ""),
        ("scaler", "the gradient scaler"),
        ("average", "AveragedModel"),
    ],
)
def test_a_scaler_or_averaged_weights_that_are_not_restored_are_told(lost, named, tmp_path):
    saved: dict[str, Any] = {}

    def train(mode: str, begin: int = 0, **options: Any) -> TrainingRun:
        loop, scaler = Loop(), torch.amp.GradScaler("cpu", growth_interval=2)
        average = AveragedModel(loop.model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
        parts = {"model": loop.model, "optimizer": loop.optimizer}
        parts |= {"scaler": scaler, "average": average}
        if begin:
            for name in parts.keys() - {lost}:
                parts[name].load_state_dict(copied(saved[name]))
            torch.set_rng_state(saved["rng"])
        options |= {"mode": mode, "level": "state", "model": loop.model}
        with TrainingRun(tmp_path / "run", optimizers=loop.optimizer, **options) as run:
            for step in range(begin, STEPS):
                batch = DATA[8 * step : 8 * step + 8]
                with run.step(batch):
                    scaler.scale(loop.model(batch).pow(2).mean()).backward()
                    scaler.step(loop.optimizer)
                    scaler.update()
                    loop.optimizer.zero_grad()
                average.update_parameters(loop.model)
                if step + 1 == AT:
                    saved.update({name: copied(part.state_dict()) for name, part in parts.items()})
                    saved["rng"] = torch.get_rng_state()
        return run

    train("record")
    if not lost:
        assert train("verify", AT, current=tmp_path / "current").verdict.verdict == "match"
        return
    with pytest.raises(DivergenceError) as caught:
        train("verify", AT, current=tmp_path / "current")
    verdict = caught.value.verdict
    assert (verdict.cause, verdict.first_divergence.step) == ("checkpoint", AT)
    assert verdict.first_divergence.name.startswith(f"state of {named}: ")
    further = dict.fromkeys(["the gradient scaler", "AveragedModel"], "restored")
    assert verdict.resume.restored["further"] == {**further, named: "differs"}
