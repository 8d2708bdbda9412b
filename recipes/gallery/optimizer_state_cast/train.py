"""bfloat16 weights with Adam moments in float32; ``resume --fixed`` puts the dtype
back that loading took away.
"""

import sys
from pathlib import Path

import torch
from torch import nn
from torch.nn.functional import mse_loss

from det_callbacks import DetCallbacksError, TrainingRun


class MemoryEfficientAdam(torch.optim.Optimizer):
    """Weights in half precision, their moments in single precision, as fairseq keeps them."""

    def __init__(self, params: object, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            for weight in group["params"]:
                state, gradient = self.state[weight], weight.grad.float()
                first, second = (
                    state.get(name, torch.zeros(())).float() for name in ("exp_avg", "exp_avg_sq")
                )
                state["exp_avg"] = first + 0.1 * (gradient - first)
                state["exp_avg_sq"] = second + 0.01 * (gradient.square() - second)
                update = state["exp_avg"] / (state["exp_avg_sq"].sqrt() + 1e-8)
                weight.copy_(weight.float() - group["lr"] * update)


torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1)).bfloat16()
optimizer = MemoryEfficientAdam(model.parameters(), lr=1e-2)
data = torch.rand(48, 9).bfloat16().split(8)
checkpoint, first = Path("state_cast.pt"), 0
run = TrainingRun(
    "refs/cast",
    mode=sys.argv[1].replace("resume", "verify"),
    model=model,
    optimizers=optimizer,
    overwrite=True,
)
if "resume" in sys.argv:
    saved, first = torch.load(checkpoint), 3
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    if "--fixed" in sys.argv:
        for number, weight in enumerate(model.parameters()):
            optimizer.state[weight] = saved["optimizer"]["state"][number]
    run.resume_from(first)
try:
    with run:
        for number, rows in enumerate(data[first:], start=first):
            if number == 3 and "record" in sys.argv:
                torch.save(
                    {"model": model.state_dict(), "optimizer": optimizer.state_dict()}, checkpoint
                )
            with run.step((rows,)):
                model.zero_grad()
                mse_loss(model(rows[:, :8]), rows[:, 8:]).backward()
                optimizer.step()
except DetCallbacksError as error:
    print(error)
    sys.exit(error.exit_code)
