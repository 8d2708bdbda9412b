"""Hugging Face's Trainer and its examples; needs ``pip install
'det_callbacks[hf]'`` (nox -s hf).
"""

import doctest
import os
import random
import re
import weakref
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import loops
import numpy as np
import pytest
import torch
from loops import CLASSES, FEATURES
from processes import run_ranks
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

pytest.importorskip(
    "transformers", reason="transformers is not installed: pip install 'det_callbacks[hf]'"
)

from transformers import Trainer, TrainerCallback, TrainingArguments

from det_callbacks import (
    CheckpointMismatchError,
    DivergenceError,
    NotComparableError,
    SelectionError,
    TrainingRun,
    check_checkpoint,
)
from det_callbacks.huggingface import DeterminismCallback
from det_callbacks.runs.store import Run
from det_callbacks.settings.generators import GeneratorStates

STEPS = 6

pytestmark = [
    pytest.mark.usefixtures("environment_again"),  # which TrainingArguments sets
    pytest.mark.filterwarnings(
        # transformers' own
        "ignore:.*pin_memory.*:UserWarning",
        "ignore:mtime may not be reliable:UserWarning",
        "ignore::DeprecationWarning",
        "ignore::FutureWarning",
    ),
]


class Net(loops.Net):
    def __init__(self) -> None:
        super().__init__()
        self.losses: list[float] = []

    def forward(self, inputs: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = super().forward(inputs)
        loss = cross_entropy(logits, labels)
        self.losses.append(loss.item())
        return {"loss": loss, "logits": logits}


def samples(number: int = 24) -> list[dict[str, Any]]:
    """Random samples that are the same at every call."""
    generator = torch.Generator().manual_seed(3)
    return [
        {"inputs": torch.randn(FEATURES, generator=generator), "labels": number % CLASSES}
        for number in range(number)
    ]


class Fit:
    """One training, of 6 steps by default, that can be made to fail anywhere."""

    def __init__(
        self,
        folder: Path,
        *callbacks: TrainerCallback,
        data: list[dict[str, Any]] | None = None,
        model: Callable[[], nn.Module] = Net,
        **arguments: Any,
    ) -> None:
        for function in (random.seed, np.random.seed, torch.manual_seed):
            function(11)
        quiet: dict[str, Any] = {
            "report_to": [],
            "disable_tqdm": True,
            "use_cpu": True,
            "save_strategy": "no",
        }
        given = {
            "num_train_epochs": 1,
            "per_device_train_batch_size": 4,
            "logging_steps": 4,
            **quiet,
            **arguments,
        }
        args = TrainingArguments(output_dir=str(folder / "out"), **given)
        self.model = model()
        self.trainer = Trainer(
            self.model,
            args,
            train_dataset=data or samples(),  # type: ignore[arg-type]
            eval_dataset=samples(6),  # type: ignore[arg-type]
            callbacks=[*callbacks],
        )

    def train(self, resume: str | None = None) -> "Fit":
        self.trainer.train(resume_from_checkpoint=resume)
        return self


def record(folder: Path, *, callback: dict[str, Any] | None = None, **arguments: Any) -> Path:
    Fit(
        folder, DeterminismCallback(folder / "run", mode="record", **(callback or {})), **arguments
    ).train()
    return folder / "run"


def verify(
    folder: Path, *others: TrainerCallback, resume: str | None = None, **arguments: Any
) -> Any:
    given = {"on_divergence": "collect", **arguments.pop("callback", {})}
    callback = DeterminismCallback(folder / "run", **given)
    with suppress(DivergenceError, NotComparableError):
        Fit(folder, *others, callback, **arguments).train(resume)
    return callback.verdict


class Flips(TrainerCallback):
    """Flips the last bit of a weight before a step."""

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 2:
            kwargs["model"].first.weight.detach().numpy().view(np.int32)[0, 0] ^= 1


STYLES: dict[str, dict[str, Any]] = {
    "plain": {},
    "accumulating": {"gradient_accumulation_steps": 2, "per_device_train_batch_size": 2},
    "ragged": {
        "gradient_accumulation_steps": 4,
        "per_device_train_batch_size": 4,
        "num_train_epochs": 2,
    },
    "evaluated": {"eval_strategy": "steps", "eval_steps": 2, "eval_on_start": True},
    "bf16": {"bf16": True},
    "unclipped": {"max_grad_norm": 0.0},
    "warmup": {"warmup_steps": 2, "lr_scheduler_type": "cosine", "num_train_epochs": 2},
}


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("level", ["op", "state"])
def test_a_training_matches_itself_and_changes_no_bit(tmp_path, style, level):
    bare = Fit(tmp_path / "bare", **STYLES[style]).train()
    after = GeneratorStates.capture()
    callback = DeterminismCallback(tmp_path / "run", mode=("record"), level=level)  # type: ignore[arg-type]
    fit = Fit(tmp_path, callback, **STYLES[style]).train()
    assert GeneratorStates.capture() == after
    assert fit.model.losses == bare.model.losses
    state, before = fit.model.state_dict(), bare.model.state_dict()
    assert all(torch.equal(value, before[name]) for name, value in state.items())
    verdict = verify(tmp_path, **STYLES[style])
    assert verdict.verdict == "match", verdict.explanation
    assert verdict.counts.steps_compared == fit.trainer.state.global_step
    assert bool(verdict.coverage.metrics) is (style == "evaluated")


def test_a_step_holds_batches_loss_clipping_and_update(tmp_path):
    run = Run.open(record(tmp_path, gradient_accumulation_steps=2, per_device_train_batch_size=2))
    sites = run.view(0, 0, 1).program.sites
    of = {
        phase: {site.op for site in sites if site.phase == phase}
        for phase in {site.phase for site in sites}
    }
    assert "aten.addmm.default" in of["forward"]
    assert "aten.mm.default" in of["backward"]
    assert any("_foreach_norm" in op for op in of["gradient"])
    assert any("adamw" in op for op in of["optimizer"])
    # of what the Trainer logs
    assert not any(op == "aten.isnan.default" for ops in of.values() for op in ops)
    names = [site.name for site in sites if site.phase == "data"]
    assert {"batch[0]['inputs']", "batch[1]['labels']"} <= set(names)
    assert [site.name for site in sites].count("loss") == 2


def test_batches_that_were_trained_on_are_let_go(tmp_path):
    known: list[weakref.ref[Tensor]] = []

    class Watches(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            # the last one, and one that accelerate draws ahead
            assert sum(batch() is not None for batch in known) <= 2

    def collate(rows: list[dict[str, Any]]) -> dict[str, Tensor]:
        inputs = torch.stack([row["inputs"] for row in rows])
        known.append(weakref.ref(inputs))
        return {"inputs": inputs, "labels": torch.tensor([row["labels"] for row in rows])}

    fit = Fit(tmp_path, DeterminismCallback(tmp_path / "run", mode="record"), Watches())
    fit.trainer.data_collator = collate
    fit.train()
    assert len(known) == STEPS


def test_what_changed_is_named(tmp_path):
    record(tmp_path)
    data, accumulation = (
        samples(),
        {"gradient_accumulation_steps": 2, "per_device_train_batch_size": 2},
    )
    for changed, cause, says in (
        (
            {"learning_rate": 1e-3},
            "settings",
            "args.learning_rate (5e-05 in the reference, 0.001 in",
        ),
        (accumulation, "settings", "args.gradient_accumulation_steps (1 in the reference, 2 in"),
        ({"data": [*data[1:], data[0]]}, "data_order", ""),
        ({"data_seed": 5}, "data_order", "args.data_seed"),
    ):
        verdict = verify(tmp_path, **changed)
        assert (verdict.verdict, verdict.cause, says in verdict.explanation) == (
            "diverged",
            cause,
            True,
        ), changed
    first = verify(tmp_path, Flips()).first_divergence
    assert (first.phase, first.step, first.name) == ("input", 2, "first.weight")


def test_a_metric_of_an_evaluation_is_compared(tmp_path):
    class Scores:
        factor = 1.0

        def __call__(self, prediction: Any) -> dict[str, float]:
            return {"score": self.factor * float(prediction.predictions.sum())}

    score = Scores()

    def fit(callback: DeterminismCallback) -> None:
        one = Fit(tmp_path, callback, eval_strategy="epoch")
        one.trainer.compute_metrics = score
        one.train()

    fit(DeterminismCallback(tmp_path / "run", mode="record"))
    score.factor = 2.0
    with pytest.raises(DivergenceError, match="eval_score"):
        fit(DeterminismCallback(tmp_path / "run"))


SAVED: dict[str, Any] = {
    "save_strategy": "steps",
    "save_steps": 1,
    "gradient_accumulation_steps": 2,
}
SAVED |= {"per_device_train_batch_size": 2, "num_train_epochs": 2}


@pytest.mark.parametrize("step", [2, 4, STEPS, 7])
def test_a_resumed_training_matches(tmp_path, step):
    """The sums that the Trainer logs begin anew: they are no part of a step."""
    record(tmp_path, **SAVED)
    verdict = verify(tmp_path, resume=str(tmp_path / "out" / f"checkpoint-{step}"), **SAVED)
    assert verdict.verdict == "match", verdict.explanation
    assert verdict.coverage.steps == (step, 2 * STEPS - 1)
    assert verdict.environment == ()


def test_a_resume_without_its_generators_is_named(tmp_path):
    record(tmp_path, **SAVED)
    folder = tmp_path / "out" / "checkpoint-4"
    (folder / "rng_state.pth").unlink()
    with pytest.raises(CheckpointMismatchError, match=r"rng_state\.pth"):
        verify(tmp_path, resume=str(folder), **SAVED)
    folder.with_name("checkpoint-4.digests.json").unlink()
    verdict = verify(tmp_path, resume=str(folder), **SAVED)
    assert (verdict.verdict, verdict.cause) == ("diverged", "rng")
    assert verdict.first_divergence.step == 4


@pytest.mark.parametrize("name", ["LambdaLR: last_epoch", "the gradient scaler: scale"])
def test_a_scaler_or_a_scheduler_that_a_resume_loses_is_named(tmp_path, monkeypatch, name):
    class Scaled(TrainerCallback):
        def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            kwargs["optimizer"].scaler = scaler  # as on a GPU

    def fit(mode: str, resume: str | None = None) -> DeterminismCallback:
        nonlocal scaler
        scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=1)
        callback = DeterminismCallback(tmp_path / "run", mode=mode, on_divergence=("collect"))  # type: ignore[arg-type]
        fit = Fit(tmp_path, Scaled(), callback, **SAVED)
        fit.trainer.accelerator.scaler = scaler
        with suppress(DivergenceError):
            fit.train(resume)
        return callback

    scaler: Any = None
    fit("record")
    checkpoint = str(tmp_path / "out" / "checkpoint-2")
    assert fit("verify", checkpoint).verdict.verdict == "match"
    lost = "_load_scaler" if "scaler" in name else "_load_optimizer_and_scheduler"
    load = getattr(Trainer, lost)

    def load_without(trainer: Trainer, place: str) -> None:
        if "scaler" not in name:
            load(trainer, place)
            trainer.lr_scheduler.last_epoch = 0

    monkeypatch.setattr(Trainer, lost, load_without)
    verdict = fit("verify", checkpoint).verdict
    assert (verdict.cause, verdict.first_divergence.step) == ("checkpoint", 2)
    assert f"state of {name}" in verdict.explanation


def test_a_recording_goes_on_from_a_checkpoint(tmp_path):
    record(tmp_path, **{**SAVED, "max_steps": 5})
    Fit(tmp_path, DeterminismCallback(tmp_path / "run", mode="record"), **SAVED).train(
        str(tmp_path / "out" / "checkpoint-4")
    )
    verdict = verify(tmp_path, **SAVED)
    assert verdict.counts.steps_compared == 2 * STEPS


def test_checkpoints_have_digests_and_are_compared_before_they_are_loaded(tmp_path):
    record(tmp_path, **SAVED, save_total_limit=2)
    out = tmp_path / "out"
    assert sorted(path.name for path in out.glob("checkpoint-*")) == [
        *(
            "checkpoint-11",
            "checkpoint-11.digests.json",
            "checkpoint-12",
            "checkpoint-12.digests.json",
        )
    ]
    assert check_checkpoint(out / "checkpoint-12").equal
    weights = next(out.glob("checkpoint-11/model*"))
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    with pytest.raises(CheckpointMismatchError, match=weights.name):
        Fit(tmp_path, DeterminismCallback(tmp_path / "run"), **SAVED).train(
            str(out / "checkpoint-11")
        )


class Fails(TrainerCallback):
    def __init__(self, hook: str) -> None:
        setattr(self, hook, self._fail)

    def _fail(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step >= 2:
            raise RuntimeError("planted")


@pytest.mark.parametrize(
    "hook", ["on_step_begin", "on_pre_optimizer_step", "on_step_end", "on_log", "on_evaluate"]
)
def test_an_error_leaves_nothing_behind(tmp_path, hook, capsys):
    callback = DeterminismCallback(tmp_path / "run", mode="record")
    fit = Fit(tmp_path, callback, Fails(hook), eval_strategy="steps", eval_steps=3)
    with pytest.raises(RuntimeError, match="planted"):
        fit.train()
    assert TrainingRun.open_run is None
    assert {"training_step", "get_batch_samples"}.isdisjoint(vars(fit.trainer))
    assert "clip_grad_norm_" not in vars(fit.trainer.accelerator)
    assert "stopped by RuntimeError" in capsys.readouterr().out
    assert not Run.open(tmp_path / "run").is_complete
    record(tmp_path, callback={"overwrite": True})


class EndsEarly(TrainerCallback):
    """Ends an epoch in the middle of an accumulation."""

    def on_substep_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        control.should_epoch_stop = state.global_step == 2
        return control


def test_a_step_that_a_callback_cuts_off_is_dropped(tmp_path):
    options = {
        "gradient_accumulation_steps": 2,
        "per_device_train_batch_size": 2,
        "num_train_epochs": 2,
    }
    Fit(
        tmp_path, DeterminismCallback(tmp_path / "run", mode="record"), EndsEarly(), **options
    ).train()
    verdict = verify(tmp_path, EndsEarly(), **options)
    assert verdict.verdict == "match", verdict.explanation


def test_each_train_is_a_fit_of_the_run(tmp_path):
    for mode in ("record", "verify"):
        callback = DeterminismCallback(tmp_path / "run", mode=mode)
        fit = Fit(tmp_path, callback)
        fit.train()
        assert callback.verdict is None  # the reference holds another
        fit.train()
    assert callback.verdict.counts.steps_compared == 2 * STEPS


def test_an_audit_runs_each_op_twice(tmp_path):
    callback = DeterminismCallback(None, mode="audit")
    Fit(tmp_path, callback).train()
    assert callback.audit_report.steps == (0, 1, 2)
    assert not callback.audit_report.findings


def test_a_disabled_one_does_nothing(tmp_path):
    fit = Fit(tmp_path, DeterminismCallback(tmp_path / "run", mode="disabled"))
    assert "train" not in vars(fit.trainer)
    fit.train()
    assert not (tmp_path / "run").exists()


def test_what_is_not_supported_is_refused(tmp_path):
    with pytest.raises(SelectionError, match="resume='exact' is not supported"):
        DeterminismCallback(tmp_path / "run", resume="exact")
    with pytest.raises(SelectionError, match="log_metrics is for Lightning's Trainer"):
        DeterminismCallback(tmp_path / "run", log_metrics=False)
    fit = Fit(tmp_path)
    fit.trainer.add_callback(DeterminismCallback(tmp_path / "run", mode="record"))
    with pytest.raises(SelectionError, match="Pass it to the constructor"):
        fit.train()
    with pytest.raises(SelectionError, match="does not support auto_find_batch_size"):
        record(tmp_path, auto_find_batch_size=True)
    assert not (tmp_path / "run").exists()


@pytest.mark.ddp
def test_ranks_agree_and_a_fault_on_one_is_named(tmp_path):
    def body(rank: int, mode: Any, *others: TrainerCallback) -> None:
        os.environ["RANK"] = str(rank)
        callback = DeterminismCallback(tmp_path / "run", mode=mode, current=tmp_path / "current")
        options: dict[str, Any] = {
            "ddp_backend": "gloo",
            "gradient_accumulation_steps": 2,
            "save_strategy": "epoch",
        }
        Fit(tmp_path, callback, *others, per_device_train_batch_size=2, **options).train()
        print(f"the verdict: {callback.verdict and callback.verdict.verdict}")

    run_ranks(lambda rank: body(rank, "record"), tmp_path / "record", status=0)
    assert check_checkpoint(tmp_path / "out" / "checkpoint-3").equal
    ended = run_ranks(lambda rank: body(rank, "verify"), tmp_path / "verify", status=0)
    assert all("the verdict: match" in one.output for one in ended)
    ended = run_ranks(
        lambda rank: body(rank, "verify", *[Flips()] * rank), tmp_path / "planted", status=1
    )
    assert "rank 1" in ended[0].output
    assert "first.weight" in ended[0].output


def test_the_example_of_the_docs_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    page = (Path(__file__).parents[2] / "docs" / "how-to" / "huggingface.md").read_text()
    names: dict[str, Any] = {"model": Net(), "train_dataset": samples()}
    for example in re.findall(r"(?s)```python\n(.*?)```", page):
        exec(example, names)
    assert len(Run.open("refs/run1").rank(0).steps(0)) == 8


def test_the_example_of_the_docstring_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = {
        "DeterminismCallback": DeterminismCallback,
        "Trainer": Trainer,
        "model": Net(),
        "data": samples(),
    }
    names["args"] = Fit(tmp_path, logging_steps=100).trainer.args
    (test, *_) = doctest.DocTestFinder(recurse=False).find(DeterminismCallback, globs=names)
    said: list[str] = []
    result = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS).run(test, out=said.append)
    assert (result.failed, result.attempted) == (0, 2), "".join(said)


@pytest.mark.slow
def test_trl_with_lora_matches_and_names_the_adapter_that_changed(tmp_path):
    trl = pytest.importorskip("trl", reason="trl is not installed")
    peft = pytest.importorskip("peft", reason="peft is not installed")
    from datasets import Dataset
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    words = {f"w{number}": number for number in range(30)} | {"<pad>": 30, "<eos>": 31}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(WordLevel(words, unk_token="<pad>")),
        pad_token="<pad>",
        eos_token="<eos>",
    )
    generator = torch.Generator().manual_seed(3)
    rows = [torch.randint(30, (12,), generator=generator).tolist() for _ in range(16)]

    def train(
        callback: DeterminismCallback, *others: TrainerCallback, resume: str | None = None
    ) -> None:
        torch.manual_seed(11)
        sizes = {
            "hidden_size": 16,
            "intermediate_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
        }
        model = LlamaForCausalLM(LlamaConfig(vocab_size=32, **sizes))
        args = trl.SFTConfig(
            output_dir=str(tmp_path / "out"),
            max_steps=4,
            per_device_train_batch_size=2,
            gradient_accumulation_steps=2,
            save_steps=2,
            learning_rate=1e-2,
            bf16=False,
            report_to=[],
            disable_tqdm=True,
            use_cpu=True,
        )
        adapters = peft.LoraConfig(
            r=2, lora_dropout=0.1, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"
        )
        data = Dataset.from_dict({"input_ids": rows})
        options: dict[str, Any] = {"processing_class": tokenizer, "peft_config": adapters}
        trl.SFTTrainer(
            model, args, train_dataset=data, callbacks=[*others, callback], **options
        ).train(resume_from_checkpoint=resume)

    train(DeterminismCallback(tmp_path / "run", mode="record"))
    for resume in (None, str(tmp_path / "out" / "checkpoint-2")):
        callback = DeterminismCallback(tmp_path / "run")
        train(callback, resume=resume)
        assert callback.verdict.verdict == "match"
        assert callback.verdict.counts.steps_compared == (4 if resume is None else 2)

    class Scales(TrainerCallback):
        def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == 1:
                weights = dict(kwargs["model"].named_parameters())
                next(
                    weights[name] for name in weights if "layers.1" in name and "lora_B" in name
                ).grad.mul_(2)

    with pytest.raises(DivergenceError) as caught:
        train(DeterminismCallback(tmp_path / "run"), Scales())
    first = caught.value.verdict.first_divergence
    assert first.step == 1
    assert "layers.1.self_attn.q_proj.lora_B" in str(first.name)
