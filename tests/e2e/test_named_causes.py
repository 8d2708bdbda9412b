"""What people get wrong, planted one at a time: the cause is named, and so is who did it."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from caused import Training
from torch import nn
from trainers import LIGHTNING_ADVICE

pytestmark = [
    LIGHTNING_ADVICE,
    pytest.mark.filterwarnings("ignore:.training_step. returned .None.:UserWarning"),  # Lightning's, of a planted fault
    # workers are forked from a process with threads, which Python 3.12 warns of
    pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning"),  # Python's, of processes that are forked here
]


class DrawsAtBatchEnd(pl.Callback):
    def on_train_batch_end(self, *_: Any) -> None:
        torch.rand(3)


class DrawsBeforeZeroGrad(pl.Callback):
    def on_before_zero_grad(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_step == 2:
            torch.rand(3)


class DrawsAtEpochEnd(pl.Callback):
    def on_train_epoch_end(self, *_: Any) -> None:
        torch.rand(3)


class SeedsAnew(pl.Callback):
    def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_step == 2:
            torch.manual_seed(9)


class LoadsWeights(pl.Callback):
    """Loads weights after every callback was set up."""

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        last = [part for part in pl_module.modules() if isinstance(part, nn.Linear)][-1]
        last.load_state_dict({name: value + 1 for name, value in last.state_dict().items()})


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One thing that differs, and what must be said of it.

    ``says`` is text of the explanation or of the evidence; ``base`` is what the reference has, too.
    """

    change: dict[str, Any]
    cause: str
    says: tuple[str, ...]
    base: dict[str, Any] = field(default_factory=dict)
    says_not: tuple[str, ...] = ()


FAULTS = {
    "another seed": Fault(
        change={"seed": 77},
        cause="initial_weights",
        says=("Set the same seed before the model is built", "seeded with 0 in the reference, 77 now"),
    ),
    "seed set late": Fault(
        change={"is_seeded_late": True},
        cause="initial_weights",
        says=("Set the seed before the model is built", "all that hold more than one value"),
    ),
    "shuffle with another seed": Fault(
        change={"shuffle_seed": 2},
        cause="data_order",
        says=("Give the shuffle the same seed", "train_dataloader.generator", "seeded with 1 in the reference, 2 now"),
    ),
    "unsorted listing": Fault(
        change={"listing": "unsorted"}, cause="data_order", says=("Sort what the data set lists", "the same indices")
    ),
    "unseeded augmentation in workers": Fault(
        base={"augment": "unseeded", "num_workers": 1},
        change={},
        cause="data_content",
        says=("worker seeds", "the sampler drew the same indices", "nowhere in what the reference recorded"),
    ),
    "other content in one transform": Fault(
        change={"augment": "seeded"}, cause="data_content", says=("Look at transforms", "the same indices")
    ),
    "another number of workers": Fault(
        base={"augment": "seeded"},
        change={"num_workers": 2},
        cause="data_content",
        says=("num_workers of train_dataloader is 0 in the reference, 2 now",),
    ),
    "another batch size": Fault(
        change={"batch_size": 32},
        cause="settings",
        says=(
            "Give the loader the same batch size: batch_size of train_dataloader is 16 in the reference, 32 now",
            "the same indices, which are cut into batches of another size",
        ),
        says_not=("nowhere", "drew other"),
    ),
    "a data set without one sample": Fault(
        change={"num_samples": 95},
        cause="data_content",
        says=("The data set is another one", "96 in the reference, 95 now"),
    ),
    "epochs of another length": Fault(
        base={"shuffle_seed": None},
        change={"trainer": {"limit_train_batches": 5}},
        cause="data_order",
        says=("limit_train_batches",),
    ),
    "validation draws": Fault(
        change={"draws_in_validation": True},
        cause="rng",
        says=("Keep validation from drawing from torch.cpu", "equal before validation", "another number of draws"),
    ),
    "callback draws": Fault(
        change={"callbacks": (DrawsAtBatchEnd,)},
        cause="rng",
        says=("on_train_batch_end of DrawsAtBatchEnd", "equal at the batch end of step 0"),
    ),
    "callback before ours draws": Fault(
        change={"first_callbacks": (DrawsAtBatchEnd,)},
        cause="rng",
        says=("on_train_batch_end of DrawsAtBatchEnd", "equal after backward of step 0"),
    ),
    "callback draws before the gradients are reset": Fault(
        change={"callbacks": (DrawsBeforeZeroGrad,)},
        cause="rng",
        says=("on_before_zero_grad of DrawsBeforeZeroGrad", "equal at the batch start of step 2"),
        says_not=("optimizer",),
    ),
    "a step without a loss": Fault(
        change={"skips": True}, cause="forward", says=("Step 2, forward: ", " is only in the reference")
    ),
    "a weight changed in a step that was not recorded": Fault(
        base={"every_n_steps": 3},
        change={"changes_in_step": 4},
        cause="unknown",
        says=("before step 6, and steps before it were not recorded",),
    ),
    "a step with a loss": Fault(
        base={"skips": True},
        change={"skips": False},
        cause="forward",
        says=("Step 2, forward: ", " is only in the current run"),
    ),
    "callback draws at the epoch's end": Fault(
        base={"shuffle_seed": None},
        change={"callbacks": (DrawsAtEpochEnd,)},
        cause="rng",
        says=("on_train_epoch_end of DrawsAtEpochEnd", "the sampler drew other indices"),
    ),
    "callback seeds anew": Fault(
        change={"callbacks": (SeedsAnew,)}, cause="rng", says=("seeded anew in between (0 in the reference, 9 now)",)
    ),
    "dropout with another seed": Fault(
        change={"dropout_seed": 5}, cause="rng", says=("torch.cpu", "equal at the batch start of step 2")
    ),
    "one weight": Fault(
        change={"change_weight": "net.5.bias"},
        cause="initial_weights",
        says=("Look at how net.5.bias is initialised", "1 of "),
    ),
    "weights loaded from elsewhere": Fault(
        change={"load_from": 9}, cause="initial_weights", says=("load the same weights",)
    ),
    "weights loaded by a callback": Fault(
        change={"callbacks": (LoadsWeights,)},
        cause="initial_weights",
        says=("2 of ", "or the weights that were loaded"),
    ),
    "learning rate": Fault(
        change={"lr": 2e-2}, cause="settings", says=("optimizer.AdamW.lr: 0.01 in the reference, 0.02 now",)
    ),
    "learning rate scheduler": Fault(
        change={"scheduler": True},
        cause="settings",
        says=("optimizer.lr_scheduler: none in the reference, StepLR each epoch now, and that is what differs first",),
    ),
    "betas": Fault(change={"betas": (0.8, 0.999)}, cause="settings", says=("optimizer.AdamW.betas",)),
    "gradient clipping": Fault(
        change={"trainer": {"gradient_clip_val": 0.01}}, cause="settings", says=("trainer.gradient_clip_val",)
    ),
    "accumulation": Fault(
        change={"trainer": {"accumulate_grad_batches": 2}},
        cause="settings",
        says=("trainer.accumulate_grad_batches: 1 in the reference, 2 now",),
    ),
}
EVERYDAY = (
    "another seed",
    "shuffle with another seed",
    "unsorted listing",
    "validation draws",
    "callback draws",
    "callback before ours draws",
    "a step without a loss",
    "weights loaded by a callback",
    "another batch size",
    "a data set without one sample",
    "learning rate",
)

Record = Callable[[Training], Path]


@pytest.fixture(scope="module")
def record(tmp_path_factory: pytest.TempPathFactory) -> Record:
    """Record a training once for all tests that compare with it."""
    folders: dict[str, Path] = {}

    def recorded(training: Training) -> Path:
        key = repr(training)
        if key not in folders:
            folders[key] = training.record(tmp_path_factory.mktemp("reference") / "run")
        return folders[key]

    return recorded


CASES = [(name, "op") for name in EVERYDAY] + [
    pytest.param(name, level, marks=pytest.mark.slow)
    for level in ("op", "state")
    for name in FAULTS
    if level != "op" or name not in EVERYDAY
]


@pytest.mark.parametrize(("name", "level"), CASES)
def test_the_cause_of_a_planted_fault_is_named(name: str, level: str, record: Record, tmp_path: Path) -> None:
    fault = FAULTS[name]
    base = Training(level=level, **fault.base)
    verdict = replace(base, **fault.change).verify(record(base), current=tmp_path / "current")
    assert (verdict.verdict, verdict.cause) == ("diverged", fault.cause), verdict.explanation
    said = "\n".join((verdict.explanation, *verdict.evidence))
    assert not [part for part in fault.says if part not in said]
    assert not [part for part in fault.says_not if part in said]


@pytest.mark.soak
@pytest.mark.parametrize(
    "base",
    [
        {},
        {"seed": 5},
        {"shuffle_seed": None},
        {"augment": "seeded"},
        {"augment": "seeded", "num_workers": 2},
        {"draws_in_validation": True},
        {"callbacks": (DrawsAtBatchEnd,)},
        {"trainer": {"accumulate_grad_batches": 2}},
        {"trainer": {"precision": "bf16-mixed"}},
        {"level": "state", "dropout_seed": 3},
    ],
    ids=str,
)
def test_a_clean_pair_matches(base: dict[str, Any], record: Record) -> None:
    training = Training(**base)
    verdict = training.verify(record(training))
    assert (verdict.verdict, verdict.evidence) == ("match", ())
