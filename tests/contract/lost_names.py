"""Trains in a process for each private name, in which that name is lost: ``python lost_names.py FOLDER NAME...``.

A comma joins names that are lost together; "all" stands for every name. What happens is printed as JSON, a line each.
Processes are forked, since an interpreter that imports torch takes longer than a training.
"""

import json
import os
import sys
import traceback
from importlib import import_module
from pathlib import Path
from pkgutil import walk_packages
from typing import Any

import lightning.pytorch as pl
import torch
import torch._inductor.output_code  # what a process that has compiled something has loaded
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from trainers import quiet_trainer


class Net(pl.LightningModule):
    """Dropout and a gradient hook, whose factor may be another one in step 1."""

    def __init__(self, factor: float = 1.0) -> None:
        super().__init__()
        self.factor = factor
        self.body = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 1))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        output = self.body(batch[0])
        output.register_hook(lambda gradient: gradient * (self.factor if batch_idx == 1 else 1.0))
        return output.square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def train(folder: Path, mode: str, factor: float = 1.0) -> Any:
    from det_callbacks import DeterminismCallback  # after the name was lost

    torch.manual_seed(0)
    data = DataLoader(TensorDataset(torch.randn(12, 4)), batch_size=4)
    callback = DeterminismCallback(folder / "reference", mode=mode, settings=None)
    quiet_trainer(callback, log_every_n_steps=1).fit(Net(factor), data)
    return callback.verdict


def outcome(folder: Path) -> dict[str, Any]:
    """Return what a recording and two verifications come to, the second of another gradient; or the refusal."""
    from det_callbacks import DivergenceError, UnsupportedVersionError  # likewise

    try:
        train(folder, "record")
    except UnsupportedVersionError as error:
        return {"refused": str(error)}
    same = train(folder, "verify")
    try:
        train(folder, "verify", factor=1.5)
    except DivergenceError as error:
        first = error.verdict and error.verdict.first_divergence
        assert first is not None
        place = {"step": first.step, "phase": first.phase, "is_origin": first.is_origin}
        return {"verdict": same.verdict, "lost": same.coverage.lost, "first": place}
    return {"verdict": same.verdict, "lost": same.coverage.lost, "first": None}


def lose(names: set[str]) -> None:
    """Let the package find nothing under these names, or under any, before it looks them up."""
    from det_callbacks.internals import private_names as lookup  # likewise

    find = lookup.find
    lost = lookup.MISSING
    lookup.find = lambda path, *example: lost if path in names or names == {"all"} else find(path, *example)


def main(folder: Path, names: list[str]) -> None:
    for number, name in enumerate(names):
        if process := os.fork():
            os.waitpid(process, 0)
            continue
        try:
            lose(set(name.split(",")))
            package = import_module("det_callbacks")
            for module in walk_packages(package.__path__, "det_callbacks."):
                # the last is for transformers, which the package does not bring
                if not module.name.endswith(("__main__", "sitecustomize", "huggingface")):
                    import_module(module.name)
            sys.stdout.write(json.dumps({"name": name, **outcome(folder / str(number))}) + "\n")
        except Exception:  # shown, and the test fails
            sys.stdout.write(json.dumps({"name": name, "raised": traceback.format_exc()}) + "\n")
        sys.stdout.flush()
        os._exit(0)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
