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
    # workers are forked from a process with threads, which Python 3.12 warns of
    pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning"),  # Python's, of processes that are forked here
]


class DrawsAtBatchEnd(pl.Callback):
    def on_train_batch_end(self, *_: Any) -> None:
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
    module: dict[str, str] | None = None
    """Network -> module of the first divergence."""


FAULTS = {
    "another seed": Fault(
        change={"seed": 77},
        cause="initial_weights",
        says=("Set the same seed before the model is built", "seeded with 0 in the reference and with 77 now"),
    ),
    "seed set late": Fault(
        change={"is_seeded_late": True},
        cause="initial_weights",
        says=("Set the seed before the model is built", "initial tensors that hold more than one value"),
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
        says=("worker seeds", "the sampler drew the same samples", "nowhere in what the reference recorded"),
    ),
    "other content in one transform": Fault(
        change={"augment": "seeded"}, cause="data_content", says=("Look at transforms", "the same indices")
    ),
    "another number of workers": Fault(
        base={"augment": "seeded"},
        change={"num_workers": 2},
        # the text is augmented without random numbers; there, the order of the second epoch differs
        cause="data_content|data_order",
        says=("num_workers of train_dataloader: 0 in the reference, 2 now",),
    ),
    "another batch size": Fault(
        change={"batch_size": 32},
        cause="settings",
        says=(
            "Give the loader the same batch size: the sampler drew the same samples, and they are cut into other",
            "batch_size of train_dataloader: 16 in the reference, 32 now",
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
    "validation draws, and the shuffle follows": Fault(
        base={"shuffle_seed": None}, change={"draws_in_validation": True}, cause="rng", says=("Keep validation from",)
    ),
    "callback draws": Fault(
        change={"callbacks": (DrawsAtBatchEnd,)},
        cause="rng",
        says=("on_train_batch_end of DrawsAtBatchEnd", "equal at the batch end of step 0"),
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
        change={"change_weight": True}, cause="initial_weights", says=("Look at how {weight} is initialised", "1 of ")
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
    "betas": Fault(change={"betas": (0.8, 0.999)}, cause="settings", says=("optimizer.AdamW.betas",)),
    "weight decay": Fault(change={"weight_decay": 0.1}, cause="settings", says=("optimizer.AdamW.weight_decay",)),
    "gradient clipping": Fault(
        change={"trainer": {"gradient_clip_val": 0.01}}, cause="settings", says=("trainer.gradient_clip_val",)
    ),
    "accumulation": Fault(
        change={"trainer": {"accumulate_grad_batches": 2}},
        cause="settings",
        says=("trainer.accumulate_grad_batches: 1 in the reference, 2 now",),
    ),
    "autocast": Fault(
        change={"trainer": {"precision": "bf16-mixed"}},
        cause="settings",
        says=("trainer.precision: 32-true in the reference, bf16-mixed now",),
        module={"digits": "net.0", "text": "net.encoder.layers.0.self_attn"},
    ),
    "equivalent op": Fault(
        change={"activation": nn.Hardtanh},
        cause="forward",
        says=("only in the reference", "aten.relu.default"),
        module={"digits": "net.2", "text": "net.act"},
    ),
    "scaled loss": Fault(
        change={"loss_scale": 1 + 1e-7}, cause="forward", says=("other: 1.0 -> 1.0000001",), module={"digits": ""}
    ),
}
EVERYDAY = (
    "another seed",
    "shuffle with another seed",
    "unsorted listing",
    "validation draws",
    "callback draws",
    "weights loaded by a callback",
    "another batch size",
    "a data set without one sample",
    "learning rate",
)
WEIGHTS = {"digits": "net.5.bias", "text": "net.head.bias"}

_OF_OPS = ("other: ", "only in", "aten.")
"""What is only said where ops are recorded."""

Record = Callable[[Training], Path]


@pytest.fixture(autouse=True)
def seeds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take back what ``seed_everything`` leaves in the environment."""
    for name in ("PL_GLOBAL_SEED", "PL_SEED_WORKERS"):
        monkeypatch.setenv(name, "0")


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


def marks_of(network: str, level: str, name: str) -> tuple[pytest.MarkDecorator, ...]:
    return () if (network, level) == ("digits", "op") and name in EVERYDAY else (pytest.mark.slow,)


def cases() -> list[Any]:
    return [
        pytest.param(network, level, name, id=f"{network}-{level}-{name}", marks=marks)
        for network, level in (("digits", "op"), ("text", "op"), ("digits", "state"))
        for name in FAULTS
        for marks in [marks_of(network, level, name)]
    ]


@pytest.mark.parametrize(("network", "level", "name"), cases())
def test_the_cause_of_a_planted_fault_is_named(
    network: str, level: str, name: str, record: Record, tmp_path: Path
) -> None:
    fault = FAULTS[name]
    base = Training(network=network, level=level, **fault.base)
    change = dict(fault.change)
    if "change_weight" in change:
        change["change_weight"] = WEIGHTS[network]
    reference = record(base)
    verdict = replace(base, **change).verify(reference, current=tmp_path / "current")
    assert verdict.verdict == "diverged"
    assert verdict.cause in fault.cause.split("|"), verdict.explanation
    said = "\n".join((verdict.explanation, *verdict.evidence))
    for part in fault.says:
        if level == "op" or not part.startswith(_OF_OPS):
            assert part.format(weight=WEIGHTS[network]) in said
    assert not [part for part in fault.says_not if part in said]
    assert verdict.first_divergence is not None
    if level == "op" and fault.module is not None and network in fault.module:
        assert verdict.first_divergence.module == fault.module[network]


@pytest.mark.soak
@pytest.mark.parametrize("network", ["digits", "text"])
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
def test_a_clean_pair_matches(network: str, base: dict[str, Any], record: Record) -> None:
    training = Training(network=network, **base)
    verdict = training.verify(record(training))
    assert (verdict.verdict, verdict.evidence) == ("match", ())


@pytest.mark.slow
@pytest.mark.parametrize("network", ["digits", "text"])
def test_a_bit_of_a_checkpoint_is_named(network: str, tmp_path: Path) -> None:
    saved = tmp_path / "saved.ckpt"
    training = Training(network=network, trainer={"max_steps": 3})
    trainer = training.plain_fit(tmp_path)
    trainer.save_checkpoint(saved)
    content = torch.load(saved, weights_only=True)
    content["state_dict"][WEIGHTS[network]].view(torch.int32)[0] ^= 1
    changed = tmp_path / "changed.ckpt"
    torch.save(content, changed)
    resumed = replace(training, ckpt_path=saved, trainer={"max_steps": 6})
    reference = resumed.record(tmp_path / "reference" / "run")
    verdict = replace(resumed, ckpt_path=changed).verify(reference)
    assert (verdict.verdict, verdict.cause) == ("diverged", "checkpoint")
    assert WEIGHTS[network] in verdict.explanation


@pytest.mark.slow
@pytest.mark.parametrize("network", ["digits", "text"])
def test_the_number_of_threads_is_never_a_silent_difference(network: str, record: Record) -> None:
    reference = record(Training(network=network))
    threads = torch.get_num_threads()
    torch.set_num_threads(1 if threads > 1 else 2)
    try:
        verdict = Training(network=network).verify(reference)
    finally:
        torch.set_num_threads(threads)
    assert verdict.verdict in ("match", "not_comparable")
    assert "torch.num_threads" in [entry.name for entry in verdict.environment]
