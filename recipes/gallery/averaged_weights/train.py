"""An EMA callback, which validates and saves with the average; ``--fixed`` goes on from the raw
weights at a resume.
"""

import sys
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.demos.boring_classes import BoringModel
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader

from det_callbacks import DetCallbacksError, DeterminismCallback


class ExponentialMovingAverage(pl.Callback):
    """The model has the average from a validation on, until training goes on."""

    collected: dict[str, torch.Tensor] | None = None

    def setup(self, trainer: pl.Trainer, pl_module: Any, stage: str) -> None:
        self.average = AveragedModel(pl_module.layer, multi_avg_fn=get_ema_multi_avg_fn(0.9))

    def store(self, layer: torch.nn.Module) -> None:
        self.collected = {name: weight.clone() for name, weight in layer.state_dict().items()}

    def on_fit_start(self, trainer: pl.Trainer, pl_module: Any) -> None:
        if "--fixed" not in sys.argv:
            self.store(pl_module.layer)

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, *_: Any) -> None:
        self.average.update_parameters(pl_module.layer)

    def on_validation_epoch_start(self, trainer: pl.Trainer, pl_module: Any) -> None:
        self.store(pl_module.layer)
        pl_module.layer.load_state_dict(self.average.module.state_dict())

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: Any) -> None:
        pl_module.layer.load_state_dict(self.collected or pl_module.layer.state_dict())

    def state_dict(self) -> dict[str, Any]:
        return {"average": self.average.state_dict(), "collected": self.collected}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.average.load_state_dict(state_dict["average"])
        self.collected = state_dict["collected"]


mode = "record" if "record" in sys.argv else "verify"
pl.seed_everything(0, verbose=False)
ours = DeterminismCallback(
    "refs/averaged", mode=mode, level="state", resume="plain", overwrite=mode == "record"
)
saving = ModelCheckpoint(
    "averaged", filename=mode + "-{epoch}", save_top_k=-1, enable_version_counter=False
)
quiet = {
    "logger": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "num_sanity_val_steps": 0,
}
trainer = pl.Trainer(
    max_epochs=4, accelerator="cpu", callbacks=[ExponentialMovingAverage(), ours, saving], **quiet
)
loaders = [
    DataLoader(torch.rand(16, 32), batch_size=4, generator=torch.Generator()) for _ in range(2)
]
try:
    trainer.fit(
        BoringModel(),
        *loaders,
        ckpt_path="averaged/record-epoch=1.ckpt" if "resume" in sys.argv else None,
    )
except DetCallbacksError as error:
    print(error)
    sys.exit(error.exit_code)
