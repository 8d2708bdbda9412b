"""Mixed precision, whose checkpoint has everything but the gradient scaler;
``--fixed`` keeps that, too.
"""

import sys
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins import MixedPrecision
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from det_callbacks import DetCallbacksError, DeterminismCallback


class Regression(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        output = self.net(batch[0][:, :8])
        return nn.functional.mse_loss(output.float(), 100 * batch[0][:, 8:])

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-3)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / 20)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        if "--fixed" not in sys.argv:
            del checkpoint["MixedPrecision"]  # the Trainer of then had nothing to save here


mode = "record" if "record" in sys.argv else "verify"
pl.seed_everything(0, verbose=False)
trainer = pl.Trainer(
    max_epochs=2,
    accelerator="cpu",
    plugins=MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=65536.0)),
    callbacks=[
        DeterminismCallback(
            "refs/scaler", mode=mode, level="state", resume="plain", overwrite=mode == "record"
        ),
        ModelCheckpoint(
            "scaler", filename=mode + "-{epoch}", save_top_k=-1, enable_version_counter=False
        ),
    ],
    logger=False,
    enable_progress_bar=False,
    enable_model_summary=False,
)
checkpoint = "scaler/record-epoch=0.ckpt" if "resume" in sys.argv else None
try:
    loader = DataLoader(TensorDataset(torch.rand(44, 9)), batch_size=4, generator=torch.Generator())
    trainer.fit(Regression(), loader, ckpt_path=checkpoint)
except DetCallbacksError as error:
    print(error)
    sys.exit(error.exit_code)
