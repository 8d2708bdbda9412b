"""Resumes at an epoch's end with workers: Lightning draws epoch 0 again;
``--fixed`` resumes exactly.
"""

import sys

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

from det_callbacks import DetCallbacksError, DeterminismCallback


class Classifier(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(8, 3)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


mode, is_resumed = ("record" if "record" in sys.argv else "verify"), "resume" in sys.argv
resume = "plain" if is_resumed and "--fixed" not in sys.argv else "exact"
pl.seed_everything(0, verbose=False)
dataset = TensorDataset(torch.rand(32, 8), torch.randint(3, (32,)))
sampler = DistributedSampler(dataset, num_replicas=1, rank=0, shuffle=True)
trainer = pl.Trainer(
    max_epochs=4,
    accelerator="cpu",
    callbacks=[
        DeterminismCallback("refs/sampler", mode=mode, resume=resume, overwrite=mode == "record"),
        ModelCheckpoint(
            "sampler", filename=mode + "-{epoch}", save_top_k=-1, enable_version_counter=False
        ),
    ],
    logger=False,
    enable_progress_bar=False,
    enable_model_summary=False,
)
checkpoint = "sampler/record-epoch=1.ckpt" if is_resumed else None
try:
    trainer.fit(
        Classifier(),
        DataLoader(dataset, batch_size=8, sampler=sampler, num_workers=1),
        ckpt_path=checkpoint,
    )
except DetCallbacksError as error:
    print(error)
    sys.exit(error.exit_code)
