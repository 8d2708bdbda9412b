"""Each finding on a training that has it, and none on the nearest innocent one;
the examples in the docstrings.
"""

import json
import random
import re
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from findings_data import FromProcess, Mine, Stuck, WithEpoch, in_batches, of_workers, twice
from findings_loops import GUILTY_LOOPS, INNOCENT_LOOPS
from findings_models import (
    Adversarial,
    Attends,
    AttendsAndSeeds,
    Averaged,
    ClearsToZero,
    Dead,
    EndsInEval,
    Forks,
    InEval,
    InFloat32,
    NeverCleared,
    Padded,
    Plain,
    SeedsEpochs,
    SeedsSteps,
    SlowHead,
    Unused,
    WithoutHead,
    WithoutNorm,
)
from fits import Classifier, Samples, Scheduled
from loops import Loop, Net, samples
from processes import run_ranks, run_training
from rule_pages import example, is_current, when
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, RandomSampler, TensorDataset
from trainers import LIGHTNING_ADVICE, quiet_trainer

from det_callbacks import (
    DeterminismCallback,
    ObserverContext,
    SelectionError,
    TrainingRun,
    compare_runs,
    observe,
)
from det_callbacks.cli import main
from det_callbacks.findings.fit_summary import fits_of
from det_callbacks.findings.table import RULES, find_findings
from det_callbacks.runs.store import Run
from det_callbacks.verdict import Finding, Verdict

pytestmark = [
    LIGHTNING_ADVICE,
    pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning"),  # Python's, of workers
]


def record(
    folder: Path, model: Callable[[], Any], loader: Any, *callbacks: pl.Callback, **options: Any
) -> Path:
    chosen = {
        name: options.pop(name)
        for name in ("level", "only_steps", "every_n_steps")
        if name in options
    }
    for seed in (random.seed, np.random.seed, torch.manual_seed):
        seed(11)
    callback = DeterminismCallback(folder, mode="record", **{"level": "state", **chosen})
    quiet_trainer(callback, *callbacks, **{"max_epochs": 2, **options}).fit(
        model(), loader() if callable(loader) else loader
    )
    return folder


def findings_in(folder: Path) -> list[Finding]:
    return [*find_findings(Run.open(folder), ignored=())]


def shuffled(**options: Any) -> DataLoader[Any]:
    return DataLoader(Samples(), **{"batch_size": 8, "shuffle": True, **options})


def in_order(batch_size: int = 8) -> DataLoader[Any]:
    return DataLoader(Samples(), batch_size=batch_size)


def variant(base: type[Any], **attributes: Any) -> type[Any]:
    return type(f"Other{base.__name__}", (base,), attributes)


Training = Callable[[Path], Path]


def training(
    model: Callable[[], Any] = Plain, loader: Any = shuffled, *callbacks: Any, **options: Any
) -> Training:
    return lambda folder: record(folder, model, loader, *(make() for make in callbacks), **options)


# finding -> trainings that have it: ranks, steps, names; the first one is
# the example in the docstring
GUILTY: Mapping[str, list[tuple[Training, tuple[int, ...], list[str]]]] = {
    "repeated_order": [
        (training(Plain, shuffled, SeedsEpochs, max_epochs=3), (8, 11), ["train_dataloader"]),
        (
            training(Plain, lambda: shuffled(shuffle=False, sampler=WithEpoch(forgets=True))),
            (4, 7),
            ["train_dataloader"],
        ),
        (
            training(Plain, lambda: shuffled(batch_size=32), SeedsEpochs, max_epochs=3),
            (2, 2),
            ["train_dataloader"],
        ),
        (
            training(Plain, shuffled, SeedsEpochs, only_steps=[0], max_epochs=3),
            (8, 11),
            ["train_dataloader"],
        ),
        (
            training(
                Plain,
                lambda: shuffled(shuffle=False, sampler=Mine(Samples())),
                SeedsEpochs,
                max_epochs=3,
            ),
            (8, 11),
            ["train_dataloader"],
        ),
        (
            training(
                Plain, lambda: in_batches(RandomSampler(Samples())), SeedsEpochs, max_epochs=3
            ),
            (8, 11),
            ["train_dataloader"],
        ),
        (
            training(
                Plain, lambda: in_batches(FromProcess(shuffles=True)), SeedsEpochs, max_epochs=3
            ),
            (8, 11),
            ["train_dataloader"],
        ),
    ],
    "repeated_batch": [
        (
            training(Plain, lambda: DataLoader(Stuck(2), batch_size=None), max_epochs=1),
            (3, 7),
            ["batch[0]", "batch[1]"],
        ),
        (
            training(
                Plain,
                lambda: shuffled(shuffle=False, sampler=[0, 1, 2, 3] * 12, batch_size=4),
                max_epochs=1,
            ),
            (1, 11),
            ["batch[0]", "batch[1]"],
        ),
        (
            training(Plain, lambda: twice(num_workers=2), max_epochs=1),
            (1, 15),
            ["batch[0]", "batch[1]"],
        ),
    ],
    "equal_workers": [
        (training(Plain, lambda: of_workers(shares=False), max_epochs=1), (0, 31), ["batch[0]"]),
        (
            training(Plain, lambda: of_workers(shares=False, number=16), max_epochs=3),
            (0, 23),
            ["batch[0]"],
        ),
    ],
    "reseeded": [
        (training(Classifier, shuffled, SeedsEpochs, max_epochs=3), (4, 8), ["torch.cpu"]),
        (training(SeedsSteps, in_order, level="op", max_epochs=1), (0, 1), ["torch.cpu"]),
        (training(AttendsAndSeeds, in_order, level="op", max_epochs=1), (0, 1), ["torch.cpu"]),
    ],
    "not_in_optimizer": [(training(WithoutHead), (0, 7), ["last.weight", "last.bias"])],
    "no_gradient": [(training(Unused, max_epochs=6), (0, 23), ["unused.weight", "unused.bias"])],
    "frozen_parameter": [
        (training(SlowHead), (0, 7), ["last.weight", "last.bias"]),
        (training(SlowHead, max_epochs=6, every_n_steps=3), (0, 21), ["last.weight", "last.bias"]),
        (
            training(SlowHead, max_epochs=6, accumulate_grad_batches=2),
            (1, 23),
            ["last.weight", "last.bias"],
        ),
    ],
    "uncleared_gradient": [
        (training(NeverCleared, level="op"), (1, 7), ["first.weight", "first.bias"])
    ],
    "constant_loss": [
        (
            training(
                variant(Dead, training_step=lambda self, batch, _: self(batch[0]).square().mean())
            ),
            (0, 7),
            ["loss"],
        )
    ],
    "unused_precision": [
        (training(InFloat32, precision="bf16-mixed", level="op"), (0, 7), ["trainer.precision"]),
    ],
    "constant_output": [(training(Dead, level="op"), (1, 7), ["act"])],
    "uninitialised_read": [(training(Padded, level="op"), (0, 7), ["aten.nan_to_num.default"])],
    "stale_state": [
        (training(InEval), (0, 7), ["norm.running_mean", "norm.running_var"]),
        (training(EndsInEval, max_epochs=6), (4, 23), ["norm.running_mean", "norm.running_var"]),
        (training(Averaged, max_epochs=6), (0, 23), ["head_ema.weight", "head_ema.bias"]),
    ],
}

INNOCENT: Mapping[str, Training] = {
    "plain": training(Classifier, level="op"),
    "no shuffle": training(Classifier, in_order, level="op"),
    "set_epoch": training(Plain, lambda: shuffled(shuffle=False, sampler=WithEpoch(forgets=False))),
    "one order, at random": training(
        Plain, lambda: in_batches(FromProcess(shuffles=False)), SeedsEpochs, max_epochs=3
    ),
    "shuffled by torch's generator": training(
        Plain, lambda: in_batches(FromProcess(shuffles=True)), max_epochs=3
    ),
    "two rounds of workers": training(
        Plain, lambda: of_workers(shares=False, number=8), max_epochs=4
    ),
    "few samples": training(
        Plain,
        lambda: DataLoader(TensorDataset(torch.randn(3, 12), torch.arange(3)), 3, shuffle=True),
    ),
    "generator of the loader": training(
        Plain, lambda: shuffled(generator=torch.Generator().manual_seed(1))
    ),
    "overfit_batches": training(Plain, in_order, overfit_batches=2, max_epochs=8),
    "overfit one batch": training(Plain, in_order, overfit_batches=1, max_epochs=8),
    "full batches": training(Plain, lambda: in_order(32), max_epochs=8),
    "one sample a batch": training(
        WithoutNorm,
        lambda: DataLoader(
            TensorDataset(torch.ones(16, 12), torch.zeros(16).long()), 1, shuffle=True
        ),
    ),
    "constant data": training(
        Plain, lambda: DataLoader(TensorDataset(torch.ones(64, 12), torch.zeros(64).long()), 8)
    ),
    "iterable": training(Plain, lambda: DataLoader(Stuck(8), batch_size=None)),
    "workers": training(Plain, lambda: of_workers(shares=True), max_epochs=1),
    "workers of a list": training(
        Plain, lambda: shuffled(batch_size=2, num_workers=2), max_epochs=1
    ),
    "attention without dropout": training(Attends, level="op"),
    "generator put back": training(Forks, in_order, level="op"),
    "frozen by choice": training(variant(WithoutHead, is_trained=False)),
    "taken now and then": training(variant(Unused, is_used=True), max_epochs=6),
    "few steps": training(Unused),
    "statistics of few steps": training(EndsInEval, max_epochs=5),
    "warmup from zero": training(variant(SlowHead, for_good=False)),
    "accumulation": training(Classifier, accumulate_grad_batches=4, max_epochs=4, level="op"),
    "some units are dead": training(
        variant(Dead, bias=0.0, configure_optimizers=Classifier.configure_optimizers), level="op"
    ),
    "padded with zeros": training(variant(Padded, fills=True), level="op"),
    "norm frozen by choice": training(variant(InEval, affine_is_trained=False)),
    "averaged": training(variant(Averaged, updates=True), max_epochs=6),
    "adversarial": training(Adversarial, level="op"),
    "cleared to zero": training(ClearsToZero, level="op"),
    "bias before a norm": training(
        Scheduled, shuffled, max_epochs=8, accumulate_grad_batches=3, gradient_clip_val=0.1
    ),
    "mixed precision": training(Plain, precision="bf16-mixed", level="op"),
    "level module": training(Classifier, level="module"),
}


def message(finding: Finding) -> str:
    text = re.sub(r"at tests/\S+:\d+ in", "at net.py:7 in", finding.explanation)
    return "\n".join(textwrap.wrap(text, 92, break_on_hyphens=False))


ALL_GUILTY = {
    word: [*GUILTY.get(word, []), *GUILTY_LOOPS.get(word, [])]
    for word in {**GUILTY, **GUILTY_LOOPS}
}
ALL_INNOCENT = {**INNOCENT, **INNOCENT_LOOPS}
CASES = [(word, number) for word, known in ALL_GUILTY.items() for number in range(len(known))]


@pytest.mark.parametrize(
    ("word", "number"), CASES, ids=[f"{word} {number}" for word, number in CASES]
)
def test_a_training_that_has_it_is_found(word, number, tmp_path):
    train, steps, names = ALL_GUILTY[word][number]
    found = {one.finding: one for one in findings_in(train(tmp_path / "run"))}
    assert word in found, found
    assert {*found} & {"repeated_batch", "equal_workers"} <= {word}  # two explanations of one thing
    assert (found[word].ranks, found[word].steps, [*found[word].names][: len(names)]) == (
        (0,),
        steps,
        names,
    )
    if not number:
        (rule,) = (rule for rule in RULES if word == rule.name)
        assert message(found[word]) == example(rule)


@pytest.mark.parametrize("name", ALL_INNOCENT)
def test_the_nearest_innocent_training_is_not_accused(name, tmp_path):
    assert findings_in(ALL_INNOCENT[name](tmp_path / "run")) == []


def test_gradients_are_measured_only_if_a_parameter_does_not_change(tmp_path):
    measured = {
        model: fit.optimized.with_large_gradient
        for model in (Plain, SlowHead)
        for (fit,) in fits_of(Run.open(record(tmp_path / model.__name__, model, shuffled)))
    }
    assert measured[Plain] == []
    assert {"last.weight", "first.weight"} <= {*measured[SlowHead]}


# torch 2.15 reads memory that it did not write (its issue 176254)
KNOWN = ("nn.CircularPad2d AdamW: uninitialised_read", "nn.CircularPad3d ASGD: uninitialised_read")
CLEAN = {
    "styles": [pytest.mark.slow],
    "modules": [pytest.mark.slow],
    "models": [
        pytest.mark.slow,
        pytest.mark.skipif(not find_spec("torchvision"), reason="needs torchvision"),
    ],
}


@pytest.mark.parametrize(
    "source", [pytest.param(source, marks=marks) for source, marks in CLEAN.items()]
)
def test_correct_trainings_of_many_kinds_are_not_accused(source):
    script = Path(__file__).with_name("clean_trainings.py")
    ended = subprocess.run(
        [sys.executable, script, source], capture_output=True, text=True, check=True
    )
    *accused, last = ended.stdout.splitlines()
    assert [line for line in accused if not line.startswith(KNOWN)] == []
    assert (
        int(last.removesuffix(" trainings")) >= {"styles": 7, "modules": 100, "models": 12}[source]
    )


class SeedsRanks(Classifier):
    def on_train_start(self) -> None:
        torch.manual_seed(11 + self.global_rank)


class NeverAverages(Plain):
    def on_train_start(self) -> None:
        self.trainer.strategy.model.require_backward_grad_sync = False


RANKS: Mapping[str, tuple[dict[str, Any], list[str], str, str]] = {
    "equal batches": (
        {"model": Plain, "use_distributed_sampler": False},
        [],
        "equal_ranks",
        "Ranks 0 and 1 get the same batches",
    ),
    "equal draws": (
        {"model": Classifier},
        ["torch.cpu"],
        "equal_ranks",
        "Ranks 0 and 1 draw the same random numbers from torch.cpu",
    ),
    "gradients are never averaged": (
        {"model": NeverAverages},
        ["first.weight"],
        "unequal_replicas",
        "first.weight",
    ),
    "innocent": ({"model": SeedsRanks}, [], "", ""),
}
EXAMPLES_OF_RANKS = {"equal batches", "gradients are never averaged"}


@pytest.mark.ddp
@pytest.mark.parametrize("name", RANKS)
def test_what_ranks_do_is_found(name, tmp_path):
    options, names, word, text = RANKS[name]
    ended = run_training("record", tmp_path, level="state", batches=8, **options)
    found = findings_in(tmp_path / "run")
    line = f"1 finding: {word}; see det-callbacks findings"
    outputs = [one.output for one in ended]
    assert [output.count(line) for output in outputs] == [int(bool(word)), 0], outputs
    assert [(one.finding, one.ranks, [*one.names][:1]) for one in found] == (
        [(word, (0, 1), names)] if word else []
    )
    assert all(one.explanation.startswith(text) for one in found)
    if name in EXAMPLES_OF_RANKS:
        (rule,) = (rule for rule in RULES if word == rule.name)
        assert message(found[0]) == example(rule)


class Codebook(Net):
    """Follows the mean of what its rank sees."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.randn(12))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        outputs = super().forward(inputs - self.mean)
        self.mean.lerp_(inputs.mean(0), 0.1)
        return outputs


def train_replicas(folder: Path, kind: str, rank: int) -> None:
    torch.distributed.init_process_group("gloo", rank=rank, world_size=2)
    try:
        loop = Loop(nn.Sequential(Codebook()) if "codebook" in kind else None)
        inner = loop.model
        loop.model = DistributedDataParallel(inner, broadcast_buffers=kind != "own codebook")
        if kind == "shards":  # the biases begin equal, as shards of zeros do
            torch.nn.init.constant_(inner.first.bias, 0.0)
            torch.nn.init.normal_(inner.first.weight, generator=torch.Generator().manual_seed(rank))
        if kind in ("bypassed", "shards"):
            loop.model = inner
        loop.loader = DataLoader(samples(), batch_size=2, sampler=[*range(rank, 24, 2)])
        with TrainingRun(
            folder / "run", mode="record", model=loop.model, optimizers=loop.optimizers
        ) as run:
            loop.run(run, epochs=2 if "codebook" in kind else 1)
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.ddp
@pytest.mark.parametrize(
    "kind", ["bypassed", "averaged", "shards", "own codebook", "broadcast codebook"]
)
def test_replicas_of_any_launcher_that_began_equal_and_drift_apart_are_found(kind, tmp_path):
    run_ranks(lambda rank: train_replicas(tmp_path, kind, rank), tmp_path / "output", status=0)
    found = [one for one in findings_in(tmp_path / "run") if one.finding == "unequal_replicas"]
    expected = {"bypassed": [(0, 5)], "own codebook": [(1, 11)]}.get(kind, [])
    assert [(one.ranks, one.steps) for one in found] == [((0, 1), steps) for steps in expected]
    assert kind != "own codebook" or found[0].names == ("0.mean",)
    assert all("although they were equal before" in one.explanation for one in found)


def test_every_finding_has_a_training_and_the_page_is_made_of_their_files():
    assert {rule.name for rule in RULES} == {*ALL_GUILTY, "equal_ranks", "unequal_replicas"}
    assert all(map(when, RULES))
    assert is_current("findings"), "run make findings"


@pytest.fixture(scope="module")
def repeating(tmp_path_factory: Any) -> Path:
    folder = tmp_path_factory.mktemp("repeating") / "run"
    return record(folder, WithoutHead, shuffled, SeedsEpochs(), max_epochs=3, level="op")


def test_the_command_says_what_was_found_and_show_and_the_verdict_too(
    repeating, tmp_path, capsys, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    words = ["repeated_order", "not_in_optimizer"]
    assert main(["findings", str(repeating), "--json"]) == 1
    content = json.loads(capsys.readouterr().out)
    assert (content["schema"], content["run"]) == (1, str(repeating))
    assert [one["finding"] for one in content["findings"]] == words
    assert {*content["findings"][0]} == {"finding", "explanation", "ranks", "steps", "names"}
    assert main(["findings", str(repeating)]) == 1
    shown = capsys.readouterr().out
    assert all(word in shown for word in words)
    assert main(["show", str(repeating)]) == 0
    assert "\n2 findings\n" in capsys.readouterr().out
    assert main(["show", str(repeating), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["findings"] == content["findings"]
    verdict = compare_runs(repeating, repeating)
    assert (verdict.verdict, verdict.exit_code) == ("match", 0)
    assert verdict.to_dict()["findings"] == content["findings"]
    assert Verdict.from_dict(verdict.to_dict()) == verdict
    assert main(["diff", str(repeating), str(repeating), "--html", "report.html"]) == 0
    assert "\n2 findings\n" in capsys.readouterr().out
    assert "although train_dataloader shuffles" in Path("report.html").read_text()


def test_a_finding_is_ignored_by_its_word_and_an_unknown_word_is_refused(
    repeating, tmp_path, capsys, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    table = "[tool.det_callbacks]\nignore_findings = "
    Path("pyproject.toml").write_text(f'{table}["repeated_order", "reseeded"]')
    assert main(["findings", str(repeating), "--json"]) == 1
    assert [one["finding"] for one in json.loads(capsys.readouterr().out)["findings"]] == [
        "not_in_optimizer"
    ]
    Path("pyproject.toml").write_text(f'{table}["repeated_order", "reseeded", "not_in_optimizer"]')
    assert main(["findings", str(repeating)]) == 0
    assert "no findings" in capsys.readouterr().out
    for wrong in ('["reseeded", "repeat_order"]', '"reseeded"'):
        Path("pyproject.toml").write_text(table + wrong)
        assert main(["findings", str(repeating)]) == 2
        assert "not_in_optimizer, no_gradient, uncleared_gradient" in capsys.readouterr().err
        with pytest.raises(SelectionError, match="ignore_findings"):  # before it trains
            record(tmp_path / "run", Plain, shuffled)


def test_a_run_that_cannot_be_read_has_no_findings(repeating, tmp_path, capsys):
    assert main(["findings", str(tmp_path)]) == 2
    damaged = tmp_path / "run"
    shutil.copytree(repeating, damaged)
    path = next(damaged.rglob("*.evidence.arrows"))
    content = path.read_bytes()
    path.write_bytes(content[:-700] + b"?" + content[-699:])
    assert main(["findings", str(damaged)]) == 2
    assert str(path) in capsys.readouterr().err
    assert main(["show", str(damaged)]) == 0
    assert "They cannot be read" in capsys.readouterr().out
    verdict = compare_runs(repeating, damaged)
    assert (verdict.verdict, verdict.findings) == ("match", ())
    assert "findings of the current run cannot be read" in verdict.evidence[-1]


def test_findings_need_the_evidence_that_a_complete_training_recorded(repeating, tmp_path, capsys):
    run = tmp_path / "run"
    shutil.copytree(repeating, run)
    evidence, stream = (
        run / "rank-00000/attempt-000.evidence.arrows",
        run / "rank-00000/attempt-000.arrows",
    )
    evidence.unlink()
    assert main(["findings", str(run)]) == 2
    assert f"{evidence} is damaged: it is missing" in capsys.readouterr().err
    # a killed process may have written none
    stream.write_bytes(stream.read_bytes()[:-8])
    assert main(["findings", str(run)]) == 0
    assert "may lack evidence" in capsys.readouterr().out
    # an ObserverContext records none
    with ObserverContext(tmp_path, "observed"):
        observe("x", torch.ones(2))
    assert main(["findings", str(tmp_path / "observed")]) == 0


def test_a_recording_ends_with_a_line_on_what_was_found(tmp_path, capsys):
    record(tmp_path / "run", WithoutHead, shuffled)
    line = (
        "det_callbacks: 1 finding: not_in_optimizer; see det-callbacks findings "
        f"{tmp_path / 'run'}\n"
    )
    assert line in capsys.readouterr().out
    record(tmp_path / "other", Plain, shuffled)
    assert "finding" not in capsys.readouterr().out
