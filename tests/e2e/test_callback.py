"""The callback where something is refused, goes wrong or ends early: one clear message, never a
match, nothing left.
"""

import copy
import json
import pickle
import re
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import replaced_page
import torch
from fits import Classifier, Fit, Plain, RaiseAt, StopError, Validated, assert_nothing_left, record
from lightning.pytorch.callbacks import LambdaCallback
from torch import nn
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.flop_counter import FlopCounterMode
from trainers import LIGHTNING_ADVICE

from det_callbacks import (
    CoverageWarning,
    DetCallbacksError,
    DeterminismCallback,
    DivergenceError,
    DivergenceWarning,
    NothingComparedError,
    ReferenceFormatError,
    ReferenceNotFoundError,
    RunExistsError,
    SelectionError,
    SettingsError,
    TraceError,
    cli,
)
from det_callbacks.environment.variables import NUM_WORKERS
from det_callbacks.internals.replaced import ReplacedMethods
from det_callbacks.runs.evidence import evidence_path, read_evidence
from det_callbacks.runs.store import Run
from det_callbacks.training.evidence import set_workers

pytestmark = LIGHTNING_ADVICE


def refused_before_training(callback: DeterminismCallback, data: Any = None) -> DetCallbacksError:
    too_late = RaiseAt("on_sanity_check_start", StopError("too late"), call=1)
    fit = Fit(callback, too_late, model=Classifier if data else Validated)
    with pytest.raises(DetCallbacksError) as caught:
        fit.trainer.fit(fit.model, data or fit.loader)
    assert_nothing_left(fit, callback)
    assert (fit.trainer.global_step, callback.verdict, caught.value.exit_code) == (0, None, 2)
    return caught.value


@pytest.fixture
def damageable(reference: Path, tmp_path: Path) -> Path:
    """A copy of a reference."""
    return Path(shutil.copytree(reference, tmp_path / "reference"))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"mode": "on"}, "mode must be one of record, verify, audit, disabled; got 'on'."),
        ({"steps": "some"}, "steps must be one of all, common; got 'some'."),
        (
            {"on_divergence": "stop"},
            "on_divergence must be one of raise, collect, warn; got 'stop'.",
        ),
        ({"level": "ops"}, "level must be one of op, module, state; got 'ops'."),
        (
            {"phases": "forward"},
            "phases must be a list of strings; got the string 'forward': write",
        ),
        ({"modules": []}, "modules must have at least one pattern"),
        ({"every_n_steps": 0}, "every_n_steps must be an integer >= 1; got 0."),
        ({"reference": None}, "reference must be the path of a folder; got None."),
        ({"reference": ""}, "reference must be the path of a folder; got ''."),
        ({"current": ""}, "current must be the path of a folder; got ''."),
        ({"overwrite": "yes"}, "overwrite must be True or False; got 'yes'."),
        ({"log_metrics": 1}, "log_metrics must be True or False"),
        ({"mode": "audit"}, "An audit needs no reference: pass None instead of 'somewhere'"),
        (
            {"mode": "audit", "reference": None, "phases": ["backward"]},
            "runs every op .* omit phases",
        ),
        ({"mode": "audit", "reference": None, "replay": ["*"]}, "runs every op .* omit replay"),
        ({"replay": ["index_add"]}, "names no op"),
        ({"replay": "aten.add.Tensor"}, r"write \['aten.add.Tensor'\]"),
        ({"replay": "missing.yaml"}, r"missing\.yaml cannot be read"),
        ({"replay": ["*"], "level": "module"}, 'replay needs level="op"'),
        ({"replay": ["*"], "every_n_steps": 2}, "every_n_steps=1"),
        (
            {"replay": ["*"], "tensor_budget_mib": float("inf")},
            "tensor_budget_mib must be a number of MiB",
        ),
        ({"keep_tensors": "aten.mm.default"}, "keep_tensors must be a list of strings"),
        (
            {"keep_tensors": ["sideways/aten.mm.default"]},
            "keep_tensors: .* asks for the phase 'sideways'",
        ),
        (
            {"keep_tensors": ["*"], "tensor_budget_mib": "8"},
            "tensor_budget_mib must be a number of MiB above 0",
        ),
        ({"keep_tensors": ["*"], "level": "module"}, 'keep_tensors needs level="op"'),
        (
            {"keep_tensors": ["*"], "mode": "audit", "reference": None},
            "runs every op .* keeps no tensors",
        ),
    ],
)
def test_a_wrong_argument_is_refused_at_construction(arguments, message):
    with pytest.raises(SelectionError, match=message) as caught:
        DeterminismCallback(**{"reference": "somewhere", "mode": "record", **arguments})
    assert (caught.value.exit_code, isinstance(caught.value, ValueError)) == (2, True)


@pytest.mark.parametrize("number", [0, 2])
def test_a_loader_gets_its_workers_with_what_goes_with_them(number):
    options: dict[str, Any] = {
        "num_workers": 1,
        "persistent_workers": True,
        "prefetch_factor": 3,
        "timeout": 30,
    }
    data = TensorDataset(torch.arange(8.0))
    for loader in (
        DataLoader(data, 4, **options, multiprocessing_context="fork"),
        DataLoader(data, 4),
    ):
        set_workers([[1, 2], loader], str(number))
        kind = "_MultiProcessingDataLoaderIter" if number else "_SingleProcessDataLoaderIter"
        assert type(iter(loader)).__name__ == kind
        for _ in range(2):
            assert [batch.tolist() for (batch,) in loader] == [[0, 1, 2, 3], [4, 5, 6, 7]]


REFUSED: list[Any] = [  # modules, workers that the environment asks for, and what is said
    (
        ["nett.*"],
        "0",
        "'nett.*' in modules matches no module of the model. Its modules are: '', 'first'",
    ),
    (["*"], "2", "DET_CALLBACKS_NUM_WORKERS=2, but the training has no torch DataLoader"),
    (["*"], "-1", "DET_CALLBACKS_NUM_WORKERS=-1, but"),
]


@pytest.mark.parametrize(("modules", "workers", "message"), REFUSED)
def test_what_cannot_be_had_of_a_training_is_refused(
    modules, workers, message, monkeypatch, tmp_path
):
    monkeypatch.setenv(NUM_WORKERS, workers)
    callback = DeterminismCallback(tmp_path / "run", mode="record", modules=modules)
    error = refused_before_training(callback, None if workers == "0" else [[torch.ones(2, 4)]])
    assert isinstance(error, SelectionError if workers == "0" else SettingsError)
    assert message in str(error)
    assert not (tmp_path / "run" / "run.json").exists()


def test_loaders_that_a_scheduler_had_set_up_are_followed_and_get_no_workers(monkeypatch, tmp_path):
    class Asking(Classifier):
        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(
                self.parameters(), lr=1 / self.trainer.estimated_stepping_batches
            )

    Fit(DeterminismCallback(tmp_path / "run", mode="record"), model=Asking).run()
    run = Run.open(tmp_path / "run")
    stream = run.rank(0).file_of(0, 0).path
    rows = read_evidence(evidence_path(stream), run_id=run.manifest.run_id)
    assert {"before a batch is drawn", "before the loader starts"} <= {row.moment for row in rows}
    monkeypatch.setenv(NUM_WORKERS, "1")
    with pytest.raises(SettingsError, match="number of workers can still be set"):
        Fit(DeterminismCallback(tmp_path / "other", mode="record"), model=Asking).run()


def test_what_is_given_may_be_the_references(tmp_path):
    reference = tmp_path / "run"
    Fit(DeterminismCallback(reference, mode="record", level="state", every_n_steps=2)).run()
    taken: list[dict[str, Any]] = [
        {"level": "state", "every_n_steps": 2},
        {
            "modules": ["*"],
            "phases": ["optimizer", "forward", "backward"],
            "replay": [],
            "keep_tensors": [],
        },
    ]
    for number, given in enumerate(taken):
        callback = DeterminismCallback(reference, current=tmp_path / str(number), **given)
        Fit(callback).run()
        selection = callback.selection
        assert (callback.verdict.verdict, selection.level, selection.every_n_steps) == (
            "match",
            "state",
            2,
        )
    # also where it is the default of a recording
    others = {
        "level": "op",
        "every_n_steps": 1,
        "compiled": "eager",
        "keep_tensors": ["aten.mm.default"],
    }
    for name, value in others.items():
        error = refused_before_training(
            DeterminismCallback(reference, current=tmp_path / "current", **{name: value})
        )
        assert "Leave that out to use the reference's" in str(error)
        assert f"{name}=" in str(error)


def test_what_is_replaced_has_a_row_on_its_page():
    """Nothing else sets attributes of foreign objects, but for the class of a
    loader with many followers.
    """
    package = Path(cli.__file__).parents[1]
    sets = re.compile(r"\bsetattr\(|\bvars\([^)]*\)\[[^]]*\] =|\.__class__ = |__dict__\[[^]]*\] =")
    rooms = ("training", "integrations", "checkpoint")
    files = [path for room in rooms for path in package.glob(f"{room}/**/*.py")]
    found = {path.name: number for path in files if (number := len(sets.findall(path.read_text())))}
    assert found == {"trainer.py": 2}
    with pytest.raises(AssertionError, match=r"replaced\.md has no row for forward of Linear"):
        ReplacedMethods().put(nn.Linear(1, 1), "forward", lambda one: one)
    source = "".join(path.read_text() for path in package.rglob("*.py"))
    listed = {name for name in replaced_page.NAMES if not re.search(rf'[".]{name}"', source)}
    assert not listed, "the page lists what nothing replaces"


def test_no_run_is_written_over(reference, damageable, tmp_path, monkeypatch):
    for run, arguments in (
        (damageable, {"reference": damageable, "mode": "record"}),
        (damageable, {"reference": reference, "current": damageable}),
        (reference, {"reference": reference, "current": reference}),
    ):
        assert isinstance(refused_before_training(DeterminismCallback(**arguments)), RunExistsError)
        assert Run.open(run).is_complete
    monkeypatch.chdir(tmp_path)
    for number in range(2):  # a folder of its own, or the one that is given, again
        Fit(DeterminismCallback(reference)).run()
        verdict = json.loads(
            (tmp_path / "determinism" / f"verify-{number:03d}" / "verdict.json").read_text()
        )
        assert verdict["verdict"] == "match"
        Fit(DeterminismCallback(reference, current=tmp_path / "current")).run()
    error = refused_before_training(
        DeterminismCallback(tmp_path / "current", current=tmp_path / "other")
    )
    assert isinstance(error, ReferenceFormatError)
    assert "a verification wrote it" in str(error)


# what happens to which file of the run, and what is then said of it
UNUSABLE: dict[str, tuple[Callable[[Path], object], str]] = {
    "": (shutil.rmtree, "There is no run in"),
    "run.json": (
        lambda path: path.write_text(
            path.read_text().replace('"format_version": 2', '"format_version": 99')
        ),
        "has format_version 99, but this version of det_callbacks reads 2",
    ),
    "rank-00000/attempt-000.arrows": (Path.unlink, "damaged"),
}


@pytest.mark.parametrize("file", UNUSABLE)
def test_an_unusable_reference_is_an_error_that_names_the_file(file, damageable, tmp_path):
    damage, message = UNUSABLE[file]
    damage(damageable / file)
    for steps in ("all", "common"):
        error = refused_before_training(
            DeterminismCallback(damageable, current=tmp_path / "current", steps=steps)
        )
        assert isinstance(error, ReferenceFormatError if file else ReferenceNotFoundError)
        assert message in str(error)
        assert str(damageable / file) in str(error)
        assert not (tmp_path / "current").exists()


# what goes wrong in a fit, or ends it early


# (hook, call that raises, whether it comes before ours, steps that are recorded;
# none where no run is there)
HOOKS: list[Any] = [
    ("on_fit_start", 1, True, []),
    ("on_train_start", 1, True, []),
    ("on_before_backward", 1, False, []),
    ("backward", 3, True, [0, 1]),
    ("on_after_backward", 3, True, [0, 1]),
    ("on_train_batch_start", 3, False, [0, 1]),
    ("on_train_batch_end", 3, True, [0, 1]),
    ("on_train_batch_end", 3, False, [0, 1, 2]),
    ("on_validation_batch_start", 3, True, [0, 1]),
    ("on_train_end", 1, True, [0, 1, 2, 3]),
]


@pytest.mark.parametrize(("hook", "call", "is_before", "steps"), HOOKS)
def test_an_exception_in_another_callback(hook, call, is_before, steps, tmp_path, capsys):
    """After the backward pass somebody presses Ctrl-C, which Lightning makes an exit of."""
    is_ctrl_c = hook == "on_after_backward"
    callback = DeterminismCallback(tmp_path / "run", mode="record")
    other = RaiseAt(hook, KeyboardInterrupt() if is_ctrl_c else StopError(hook), call=call)
    fit = Fit(
        *((other, callback) if is_before else (callback, other)),
        model=Validated,
        val_check_interval=2,
    )
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(SystemExit if is_ctrl_c else StopError):
        fit.run()
    signal.signal(signal.SIGINT, before)  # Lightning leaves it ignored
    assert_nothing_left(fit, callback)
    said = capsys.readouterr().out
    if not steps:
        assert not (tmp_path / "run" / "run.json").exists()
        assert (f"before its first new step: {tmp_path}" in said) == (hook != "on_fit_start")
        record(tmp_path / "run")
        return
    run = Run.open(tmp_path / "run")
    assert "process did not end as it should" in str(run.incomplete_reason)
    assert run.rank(0).steps(0).tolist() == steps
    reason = "KeyboardInterrupt" if is_ctrl_c else "StopError"
    assert f"recording stopped by {reason} after {len(steps)} steps" in said


def test_no_step_is_an_error_and_never_a_match(reference, tmp_path):
    cases: list[tuple[Any, Any]] = [({}, {"max_epochs": 0}), ({"only_steps": [99]}, {})]
    for arguments, options in cases:
        callback = DeterminismCallback(tmp_path / "run", mode="record", **arguments)
        fit = Fit(callback, **options)
        with pytest.raises(NothingComparedError):
            fit.run()
        assert_nothing_left(fit, callback)
        assert list((tmp_path / "run").iterdir()) == []
    with pytest.raises(DivergenceError):
        Fit(
            DeterminismCallback(reference, current=tmp_path / "current"), limit_train_batches=0
        ).run()


def test_modes_below_and_above_change_nothing_and_one_left_open_is_no_match(tmp_path):
    above = FlopCounterMode(display=False)
    opening = LambdaCallback(on_train_batch_start=lambda *_: above.__enter__())
    closing = LambdaCallback(on_before_zero_grad=lambda *_: above.__exit__(None, None, None))
    with FlopCounterMode(display=False) as alone:
        Fit(model=Plain).run()
    callback = DeterminismCallback(
        record(tmp_path / "run", model=Plain), current=tmp_path / "current"
    )
    with FlopCounterMode(display=False) as below:
        Fit(callback, opening, closing, model=Plain).run()
    assert callback.verdict.verdict == "match"
    assert below.get_total_flops() == alone.get_total_flops() > above.get_total_flops() > 0

    callback = DeterminismCallback(tmp_path / "run", current=tmp_path / "current")
    fit = Fit(callback, opening, model=Plain)
    with (
        pytest.warns(CoverageWarning, match="FlopCounterMode|_FlopCounterMode"),
        pytest.raises(TraceError, match=r"Step 0 could not be traced.*Close that mode") as caught,
    ):
        fit.run()
    assert (caught.value.exit_code, callback.verdict) == (2, None)
    # it is not ours to close; ours lies below it, turned off, until it is
    above.__exit__(None, None, None)
    for left in reversed(_get_current_dispatch_mode_stack()):
        assert not left.is_on
        left.__exit__(None, None, None)
    assert "training_step" not in vars(fit.trainer.strategy)


def test_a_callback_can_be_copied_and_pickled_at_any_time(reference, tmp_path):
    def copied(callback: DeterminismCallback) -> list[DeterminismCallback]:
        return [copy.deepcopy(callback), pickle.loads(pickle.dumps(callback))]

    callback = DeterminismCallback(
        reference, current=tmp_path / "current", steps="common", on_divergence="collect"
    )
    copies = copied(callback)
    assert vars(callback).keys() == vars(copies[0]).keys()
    Fit(
        LambdaCallback(on_before_zero_grad=lambda *_: copies.extend(copied(callback))), callback
    ).run()
    assert callback.verdict.verdict == "match"
    assert len(copies) == 10
    copies += copied(callback)
    assert copies[-1].verdict == callback.verdict
    for item in (copies[0], copies[9], copies[-1]):
        assert (item.reference, item.steps, item.on_divergence) == (reference, "common", "collect")
    copies[9].current = tmp_path / "again"
    Fit(copies[9]).run()
    assert copies[9].verdict.verdict == "match"
    # a copy audits its replicas too, as one that ``ddp_spawn`` sends to its ranks
    callback = DeterminismCallback(tmp_path, audit_replicas_every_n_steps=5, on_divergence="warn")
    for item in copied(callback):
        assert (item._replicas.every_n_steps, item._replicas.on_divergence) == (5, "warn")
        assert item._replicas is not callback._replicas


OUTCOMES: list[Any] = [
    ("raise", DivergenceError, 1),
    ("warn", DivergenceWarning, 4),
    ("collect", StopError, 3),
]


@pytest.mark.parametrize(("on_divergence", "outcome", "num_steps"), OUTCOMES)
def test_what_a_divergence_leads_to(on_divergence, outcome, num_steps, reference, tmp_path):
    """Where it is collected, another callback stops the fit: there is a verdict all the same."""
    callback = DeterminismCallback(
        reference, current=tmp_path / "current", on_divergence=on_divergence
    )
    others = [RaiseAt("on_train_batch_end", StopError("stop"))] if outcome is StopError else []
    fit = Fit(callback, *others)
    with torch.no_grad():
        fit.model.first.weight.add_(1)
    words = "stop" if outcome is StopError else r"differs \(first\.weight"
    with (
        pytest.warns(outcome, match=words)
        if on_divergence == "warn"
        else pytest.raises(outcome, match=words)
    ):
        fit.run()
    verdict = callback.verdict
    assert verdict.verdict == "diverged"
    run = Run.open(tmp_path / "current")
    assert run.is_complete == (outcome is not StopError)
    assert (fit.trainer.global_step, verdict.counts.steps_compared, run.rank(0).num_steps) == (
        num_steps,
    ) * 3
    assert_nothing_left(fit, callback)


def test_a_callback_that_is_disabled_one_too_many_or_without_processes(
    reference, monkeypatch, tmp_path
):
    disabled = DeterminismCallback(tmp_path / "disabled", mode="disabled")
    Fit(disabled, DeterminismCallback(tmp_path / "run", mode="record", level="state")).run()
    assert disabled.verdict is None
    with pytest.raises(SelectionError, match="two DeterminismCallbacks"):
        Fit(*(DeterminismCallback(tmp_path / name, mode="record") for name in ("a", "b"))).run()
    fit = Fit(DeterminismCallback(reference, current=tmp_path / "current"))
    monkeypatch.setattr(pl.Trainer, "world_size", property(lambda self: 2))
    with pytest.raises(DetCallbacksError, match=r"has 2 processes, but torch\.distributed has 1"):
        fit.run()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run"]
