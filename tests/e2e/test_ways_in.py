"""Each way in does the same: it records, verifies, resumes,
and names the same culprit of the same training.
"""

import importlib.util
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import ways
from lightning.pytorch.callbacks import ModelCheckpoint
from test_followed_loops import fork
from torch.nn.functional import cross_entropy
from torch.optim import AdamW
from torch.utils.data import DataLoader, SequentialSampler
from trainers import LIGHTNING_ADVICE, quiet_trainer
from ways import AT, BATCH, NUM_STEPS, Net, Samples

from det_callbacks import DeterminismCallback, DivergenceError, TrainingRun, Verdict, compare_runs
from det_callbacks.cli import check as checks
from det_callbacks.cli import main
from det_callbacks.runs.store import Run

if importlib.util.find_spec("transformers") is not None:
    import transformers.trainer  # noqa: F401  # which adds filters of warnings

Train = Callable[..., None]


class Module(pl.LightningModule):
    def __init__(self, fault: str, first: int) -> None:
        super().__init__()
        self.net, self.fault = Net(fault, first), fault

    def training_step(self, batch: Any, _: int) -> Any:
        return cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self) -> Any:
        return AdamW(self.parameters(), lr=ways.rate(self.fault))


def lightning(callback: dict[str, Any], fault: str, is_resumed: bool) -> None:
    ways.seed(fault)
    saving = ModelCheckpoint(".", "{step}", every_n_train_steps=AT, save_top_k=-1)
    trainer = quiet_trainer(
        DeterminismCallback("run", **callback), saving, enable_checkpointing=True
    )
    module = Module(fault, AT if is_resumed else 0)
    loader = DataLoader(Samples(fault), batch_size=BATCH)
    trainer.fit(module, loader, ckpt_path=f"step={AT}.ckpt" if is_resumed else None)


def training_run(callback: dict[str, Any], fault: str, is_resumed: bool) -> None:
    def run(model: Any, optimizer: Any) -> TrainingRun:
        return TrainingRun("run", model=model, optimizers=optimizer, **callback)

    ways.plain(fault, Path("checkpoint.pt") if is_resumed else None, run)


def hugging_face(callback: dict[str, Any], fault: str, is_resumed: bool) -> None:
    from transformers import Trainer, TrainingArguments

    from det_callbacks.huggingface import DeterminismCallback as OfTrainer

    class InOrder(Trainer):
        def _get_train_sampler(self, *_: Any) -> Any:
            return SequentialSampler(data)

    ways.seed(fault)
    args = TrainingArguments(
        output_dir="out",
        num_train_epochs=1,
        per_device_train_batch_size=BATCH,
        learning_rate=ways.rate(fault),
        seed=1 if fault == "seed" else 0,
        save_strategy="no" if fault or is_resumed else "steps",
        save_steps=AT,
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
    )
    net = Net(fault, AT if is_resumed else 0)
    data: Any = Samples(fault, is_named=True)
    trainer = InOrder(net, args, train_dataset=data, callbacks=[OfTrainer("run", **callback)])
    trainer.train(resume_from_checkpoint=f"out/checkpoint-{AT}" if is_resumed else None)


def followed(way: str) -> Train:
    def train(callback: dict[str, Any], fault: str, is_resumed: bool) -> None:
        given = {"overwrite": "--overwrite", "current": f"--current={callback.get('current')}"}
        words = [given[name] for name in callback if name in given]
        script = [
            sys.executable,
            ways.__file__,
            way,
            fault or "none",
            *(["resumed"] if is_resumed else []),
        ]
        assert main([callback["mode"], "run", *words, "--", *script]) in (0, 1, 3)

    return train


WAYS: dict[str, Train] = {
    "lightning": lightning,
    "TrainingRun": training_run,
    "hugging_face": hugging_face,
    **{name: followed(name) for name in ways.SCRIPTS},
}
NEEDS = {"hugging_face": "transformers", "accelerate": "accelerate"}

pytestmark = [
    LIGHTNING_ADVICE,
    pytest.mark.usefixtures("environment_again"),
    pytest.mark.filterwarnings(
        "ignore:Checkpoint directory",  # in which the run that is resumed saved
        # transformers' own
        "ignore:.*pin_memory.*",
        "ignore::DeprecationWarning",
        "ignore::FutureWarning",
    ),
]


@pytest.fixture(params=WAYS)
def way(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Train:
    needed = NEEDS.get(request.param)
    if needed is not None and importlib.util.find_spec(needed) is None:
        pytest.skip(f"{needed} is not installed: pip install 'det_callbacks[hf]'")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(checks, "run_process", fork)
    return WAYS[request.param]


@pytest.fixture
def recorded(way: Train) -> Train:
    way({"mode": "record"}, "", False)
    return way


def verify(way: Train, fault: str, *, is_resumed: bool = False) -> Verdict:
    with suppress(DivergenceError):
        way({"mode": "verify", "current": Path(fault or "same")}, fault, is_resumed)
    folder = Path(fault or "same")
    return compare_runs("run", folder / "run" if (folder / "run").exists() else folder)


def test_a_training_matches_itself_and_each_fault_is_named(recorded):
    run = Run.open("run")
    assert len(run.rank(0).steps(0)) == NUM_STEPS
    same = verify(recorded, "")
    assert (same.verdict, same.counts.steps_compared) == ("match", NUM_STEPS)
    found = {}
    for fault in ("data", "forward", "rng", "backward", "state", "seed", "settings"):
        verdict = verify(recorded, fault)
        assert verdict.verdict == "diverged"
        first = verdict.first_divergence
        assert first is not None
        found[fault] = (verdict.cause, first.step, first.phase, first.op, first.is_origin)
    # a scheduler, which Hugging Face's Trainer always has, differs before the update
    assert found.pop("settings")[:2] == ("settings", 0)
    assert found == {
        "data": ("data_content", AT, "data", "", False),
        "forward": ("forward", AT, "forward", "aten.leaky_relu.default", True),
        "rng": ("rng", AT, "forward", "aten.rand.default", True),
        "backward": ("backward", AT, "backward", "aten.mul.Tensor", True),
        "state": ("external_write", AT, "input", "", False),
        "seed": ("initial_weights", 0, "state", "", False),
    }


def test_a_resumed_training_is_compared_from_there_on(recorded):
    verdict = verify(recorded, "", is_resumed=True)
    assert (verdict.verdict, verdict.coverage.steps) == ("match", (AT, NUM_STEPS - 1)), (
        verdict.explanation
    )
    assert verdict.resume is not None
    assert verdict.resume.step == AT
    assert verdict.resume.restored["parameters"] == "restored"
    assert {*verdict.resume.restored["optimizer"].values()} == {"restored"}
    assert verify(recorded, "backward", is_resumed=True).cause == "backward"
