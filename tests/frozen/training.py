"""The training whose runs are kept here: ``python training.py FOLDER`` records one,
and verifies another against it.

Its numbers are small multiples of powers of two, so that every machine and every version of torch
gets the same bits. ``tests/frozen/format-2`` was made in an empty folder outside of the repository
by the version of its ``run.json``.
"""

import sys
from collections import OrderedDict
from pathlib import Path

import torch
from torch import Tensor, nn

from det_callbacks import DivergenceError, TrainingRun, Verdict


class Scale(nn.Module):
    def __init__(self, wrong_at: int | None) -> None:
        super().__init__()
        self.wrong_at, self.calls = wrong_at, 0

    def forward(self, inputs: Tensor) -> Tensor:
        factor = 1.5 if self.calls == self.wrong_at else 1.0
        self.calls += 1
        return inputs * factor


def network(wrong_at: int | None) -> nn.Module:
    """Return the model, whose layer "scale" uses another factor in one step."""
    torch.manual_seed(0)
    layers = {
        "first": nn.Linear(4, 4),
        "relu": nn.ReLU(),
        "scale": Scale(wrong_at),
        "last": nn.Linear(4, 2),
    }
    model = nn.Sequential(OrderedDict(layers))
    for parameter in model.parameters():
        numbers = torch.arange(parameter.numel()).remainder(5) - 2
        parameter.data = numbers.reshape(parameter.shape) / 4
    return model


def train(folder: Path, *, mode: str, wrong_at: int | None = None) -> Verdict | None:
    """Record into ``folder/reference``, or verify another run against it,
    and return the verdict.
    """
    model = network(wrong_at)
    optimizer = torch.optim.SGD(model.parameters(), lr=1 / 16, momentum=0.5)
    chosen = (
        {"keep_tensors": ["forward/scale:aten.mul.Tensor"]}
        if mode == "record"
        else {"current": folder / "current"}
    )
    run = TrainingRun(folder / "reference", mode=mode, model=model, optimizers=optimizer, **chosen)
    try:
        with run:
            for step in range(2):
                batch = torch.arange(32.0).reshape(8, 4).remainder(5) - 2 + step
                with run.step(batch):
                    loss = (model(batch) * batch[:, :2]).sum() / 8
                    loss.backward()
                    optimizer.step()
                    optimizer.zero_grad()
            run.log("loss", loss)
    except DivergenceError:
        pass
    return run.verdict


if __name__ == "__main__":
    to = Path(sys.argv[1])
    train(to, mode="record")
    train(to, mode="verify", wrong_at=1)
