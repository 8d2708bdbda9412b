"""TrainingRun: loops of one's own are recorded and verified, and misuse says what to do."""

import sys
from collections.abc import Callable
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import loops
import pytest
import torch
from fits import Fit
from loops import STYLES, Loop, train
from processes import run_ranks
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from det_callbacks import (
    DeterminismCallback,
    DivergenceError,
    NothingComparedError,
    ReplicaError,
    RunExistsError,
    SelectionError,
    TrainingRun,
    compare_runs,
)
from det_callbacks.runs.metrics import read_metrics
from det_callbacks.runs.store import Run
from det_callbacks.settings.generators import GeneratorStates
from det_callbacks.training.evidence import metric_of

STEPS = 6


@pytest.fixture(scope="module")
def reference(tmp_path_factory: Any) -> Path:
    torch.manual_seed(0)
    train(Loop, folder := tmp_path_factory.mktemp("loop") / "run", mode="record")
    return folder


def other_factor(loop: Loop, step: int, *, at: int = 2) -> None:
    loop.model.factor = 1.5 if step == at else 1.0  # type: ignore[assignment]


def test_a_package_that_a_step_imports_is_in_the_environment(tmp_path, monkeypatch):
    def late(loop: Loop, step: int) -> None:
        import_module("late_kernels")

    def run_with(version: str, **options: Any) -> TrainingRun:
        folder = tmp_path / version / "site-packages"
        (folder / "late_kernels").mkdir(parents=True)
        (folder / "late_kernels" / "__init__.py").write_text(
            f"import torch\n__version__ = {version!r}\n"
        )
        with monkeypatch.context() as patched:
            patched.syspath_prepend(folder)
            patched.delitem(sys.modules, "late_kernels", raising=False)
            return train(Loop, plant=late, **options)[1]

    run_with("1.0", reference=tmp_path / "run", mode="record")
    entry = Run.open(tmp_path / "run").manifest.environment["package.late_kernels"]
    assert (entry.value, entry.is_machine, entry.changes_bits) == ("1.0", True, True)
    run = run_with("2.0", reference=tmp_path / "run", current=tmp_path / "other")
    (difference,) = run.verdict.environment
    assert (difference.name, difference.reference, difference.current) == (
        "package.late_kernels",
        "1.0",
        "2.0",
    )


@pytest.mark.parametrize("level", ["op", "module", "state"])
def test_a_loop_matches_itself_and_a_fault_is_located(level, tmp_path, capsys):
    train(Loop, tmp_path / "run", mode="record", level=level)
    assert f"det_callbacks: recorded {STEPS} steps" in capsys.readouterr().out
    _, run = train(Loop, tmp_path / "run", current=tmp_path / "same")
    assert (run.verdict.verdict, run.verdict.counts.steps_compared) == ("match", STEPS)
    assert f"det_callbacks: match: verified {STEPS} steps" in capsys.readouterr().out
    with pytest.raises(DivergenceError) as caught:
        train(Loop, tmp_path / "run", current=tmp_path / "other", plant=other_factor)
    verdict = caught.value.verdict
    first = verdict.first_divergence
    # at level op the number is an argument; the weights of the step are those that the step leaves
    wanted = {
        "op": ("forward", "argument"),
        "module": ("forward", "content"),
        "state": ("forward", "content"),
    }[level]
    assert (first.step, first.phase, first.kind) == (2, *wanted)
    assert first.name == ("loss" if level == "state" else first.name)


@pytest.mark.parametrize("style", STYLES)
def test_each_style_trains_as_without_a_run_and_repeats(style, tmp_path):
    """No bit changes: weights, losses and the states of all generators."""
    make = STYLES[style]
    plain = make().run(epochs=2)
    states = GeneratorStates.capture()
    traced, _ = train(make, tmp_path / "run", mode="record", epochs=2)
    assert GeneratorStates.capture() == states
    assert traced.losses == plain.losses
    for name, tensor in plain.model.state_dict().items():
        assert torch.equal(tensor, traced.model.state_dict()[name]), name
    _, run = train(make, tmp_path / "run", current=tmp_path / "current", epochs=2)
    assert (run.verdict.verdict, run.verdict.counts.steps_compared) == ("match", 2 * STEPS)


def test_an_activation_and_a_batch_are_among_what_numpy_may_have_changed(reference, tmp_path):
    def increment(tensor: Any) -> None:
        tensor.detach().numpy()[0, 0] += 1

    class Writes(Loop):
        def train_step(self, batch: Any) -> None:
            if self.num_done == 2:
                increment(batch[0])
            super().train_step(batch)

    class WritesAnActivation(Loop):
        def train_step(self, batch: Any) -> None:
            hook = self.model.get_submodule("drop").register_forward_hook(
                lambda *given: increment(given[-1])
            )
            if self.num_done != 2:
                hook.remove()
            super().train_step(batch)
            hook.remove()

    for kind, name in ((Writes, "batch[0]"), (WritesAnActivation, "the output of aten.mul.Tensor")):
        with pytest.raises(DivergenceError) as caught:
            train(kind, reference, current=tmp_path / kind.__name__)
        verdict = caught.value.verdict
        assert (verdict.cause, verdict.first_divergence.step) == ("external_write", 2)
        assert f"changed {name} or" in verdict.explanation, verdict.explanation


def test_a_seed_within_a_step_is_no_difference_that_the_step_started_with(reference, tmp_path):
    class Reseeded(Loop):
        def train_step(self, batch: Any) -> None:
            if self.num_done == 2:
                torch.manual_seed(5)
            super().train_step(batch)

    with pytest.raises(DivergenceError) as caught:
        train(Reseeded, reference, current=tmp_path / "current")
    verdict = caught.value.verdict
    assert (verdict.cause, verdict.first_divergence.step) == ("rng", 2)
    assert "code in the step changed it before the first draw" in verdict.explanation
    assert "the step started with this difference" not in verdict.explanation


def test_a_loop_without_batches_or_a_batch_is_recorded_too(tmp_path):
    def run_it(**options: Any) -> TrainingRun:
        loop = Loop()
        with TrainingRun(
            tmp_path / "run", model=loop.model, optimizers=loop.optimizers[0], **options
        ) as run:
            for batch in loop.loader:
                with run.step():
                    loop.train_step(batch)
        return run

    run_it(mode="record")
    verdict = run_it(current=tmp_path / "current").verdict
    assert verdict.verdict == "match"


def test_blocks_in_a_row_are_parts_of_one_run(tmp_path, capsys):
    def run_it(num_blocks: int = 2, **options: Any) -> TrainingRun:
        loop = Loop()
        run = TrainingRun(tmp_path / "run", model=loop.model, optimizers=loop.optimizers, **options)
        for _ in range(num_blocks):
            with run:
                loop.run(run)
        return run

    run_it(mode="record")
    assert [len(Run.open(tmp_path / "run").rank(0).steps(segment)) for segment in range(2)] == [
        STEPS
    ] * 2
    verdict = run_it(current=tmp_path / "current").verdict
    assert (verdict.verdict, verdict.counts.steps_compared) == ("match", 2 * STEPS)
    capsys.readouterr()
    first = run_it(num_blocks=1, current=tmp_path / "first", steps="common")
    assert first.verdict.verdict == "match"


def test_what_is_logged_is_compared_by_name(tmp_path):
    def run_it(value: float, at: int = 2, **options: Any) -> TrainingRun:
        loop = Loop()
        with TrainingRun(
            tmp_path / "run", model=loop.model, optimizers=loop.optimizers, **options
        ) as run:
            for number, batch in enumerate(run.batches(loop.loader)):
                with run.step(batch):
                    loop.train_step(batch)
                    run.log("loss", torch.tensor(loop.losses[-1]))
                if number in (at, STEPS - 1):
                    run.log("val_loss", value)
        return run

    run_it(0.5, mode="record")
    readings = read_metrics(Run.open(tmp_path / "run"), 0).by_key.values()
    assert [[*reading.metrics] for reading in readings] == [
        ["loss", "val_loss"] if step in (2, STEPS - 1) else ["loss"] for step in range(STEPS)
    ]
    verdict = run_it(0.5, current=tmp_path / "same").verdict
    assert (verdict.verdict, verdict.coverage.metrics) == ("match", STEPS + 2)
    with pytest.raises(
        DivergenceError, match=r"Metric val_loss logged after step 2 differs: 0\.5"
    ) as caught:
        run_it(0.25, current=tmp_path / "other")
    with pytest.raises(DivergenceError, match=r"val_loss"):  # a Python float has 64 bits
        run_it(0.5 + 1e-15, current=tmp_path / "near")
    assert caught.value.verdict.coverage.steps == (0, 3), "it stops after the next step"
    with pytest.raises(DivergenceError, match=r"val_loss"):  # at another step
        run_it(0.5, at=3, current=tmp_path / "later")
    loop = Loop()
    run = TrainingRun(
        tmp_path / "run2", mode="record", model=loop.model, optimizers=loop.optimizers
    )
    with pytest.raises(SelectionError, match="'loss' was logged twice after step 5"):
        log_after(run, loop, ("loss", 1.0), ("loss", 2.0))
    assert metric_of(2**63).digest != metric_of(2**63 + 1).digest
    run = TrainingRun(
        tmp_path / "run3", mode="record", model=loop.model, optimizers=loop.optimizers
    )
    with pytest.raises(SelectionError, match=r"log takes a number or a tensor; 'text' is a str"):
        log_after(run, loop, ("text", "x"))


def log_after(run: TrainingRun, loop: Loop, *pairs: tuple[str, Any]) -> None:
    with run:
        loop.run(run)
        for name, value in pairs:
            run.log(name, value)


def test_a_loop_that_goes_on_from_its_own_checkpoint_is_compared_from_there_on(reference, tmp_path):
    loop = Loop().run(until=3)
    saved = {"model": loop.model.state_dict(), "optimizer": loop.optimizers[0].state_dict()}
    states = GeneratorStates.capture()

    def go_on(*, with_optimizer: bool, **options: Any) -> TrainingRun:
        loop = Loop()
        batches = iter(loop.loader)  # which draws the order of the samples
        for _ in range(3):
            next(batches)
        loop.model.load_state_dict(saved["model"])
        if with_optimizer:
            loop.optimizers[0].load_state_dict(saved["optimizer"])
        states.restore({})
        run = TrainingRun(
            reference, model=loop.model, optimizers=loop.optimizers, **options
        ).resume_from(3)
        with run:
            for batch in run.batches(batches):
                with run.step(batch):
                    loop.train_step(batch)
        return run

    verdict = go_on(with_optimizer=True, current=tmp_path / "same").verdict
    assert (verdict.verdict, verdict.coverage.steps) == ("match", (3, STEPS - 1))
    with pytest.raises(DivergenceError) as caught:
        go_on(with_optimizer=False, current=tmp_path / "other")
    first = caught.value.verdict.first_divergence
    assert (first.step, first.phase) == (3, "optimizer"), first  # which makes its state anew


def test_a_recording_goes_on_from_a_step(tmp_path):
    loop = Loop()
    run = TrainingRun(tmp_path / "run", mode="record", model=loop.model, optimizers=loop.optimizers)

    def fail_after_three_steps() -> None:
        with run:
            loop.run(run, until=3)
            raise MemoryError

    with pytest.raises(MemoryError):
        fail_after_three_steps()
    assert not Run.open(tmp_path / "run").is_complete
    rest = TrainingRun(
        tmp_path / "run", mode="record", model=loop.model, optimizers=loop.optimizers
    )
    with rest.resume_from(3):
        loop.run(rest, until=5)
    assert Run.open(tmp_path / "run").rank(0).steps(0).tolist() == [0, 1, 2, 3, 4]


def test_replay_keep_only_steps_and_audit_work_as_with_the_callback(tmp_path, capsys):
    arguments: dict[str, Any] = {"replay": ["forward/drop:*"], "keep_tensors": ["forward/last:*"]}
    train(Loop, tmp_path / "run", mode="record", **arguments)
    out = capsys.readouterr().out
    assert "3 ops saved for replay" in out
    assert f"kept {STEPS} tensors" in out
    _, run = train(Loop, tmp_path / "run", current=tmp_path / "same")
    assert (run.verdict.verdict, len(run.verdict.coverage.replayed)) == ("match", 3)
    train(Loop, tmp_path / "some", mode="record", only_steps=[1, 4], level="op")
    assert Run.open(tmp_path / "some").rank(0).steps(0).tolist() == [1, 4]
    _, audited = train(Loop, None, mode=("audit"), current=tmp_path / "audit")  # type: ignore[arg-type]
    assert (audited.audit_report.steps, audited.audit_report.findings) == ((0, 1, 2), ())


def in_step(run: TrainingRun, loop: Loop, function: Callable[[Any], Any]) -> None:
    with run:
        for batch in run.batches(loop.loader):
            with run.step(batch):
                function(batch)


def test_misuse_says_what_to_do(reference, tmp_path):
    loop, folders = Loop(), (tmp_path / str(number) for number in range(100))

    def new(**options: Any) -> TrainingRun:
        given = {"model": loop.model, "optimizers": loop.optimizers, "mode": "record", **options}
        return TrainingRun(next(folders), **given)

    for wrong, text in (
        ({"model": loop}, "model must be a torch.nn.Module; got Loop"),
        ({"optimizers": None}, r"one or several optimizers of torch\.optim; got NoneType"),
        ({"resume": "exact"}, r"TrainingRun has no argument resume.* use resume_from"),
        (
            {"log_metrics": True},
            "TrainingRun has no argument log_metrics, which is for Lightning's Trainer",
        ),
        ({"mode": "off"}, "mode must be one of record, verify, audit, disabled"),
    ):
        with pytest.raises(SelectionError, match=text):
            new(**wrong)
    part: Any = nn.ModuleList([loop.model.first, loop.model.norm])  # type: ignore[list-item]
    text = r"optimizers\[0\] \(AdamW\) updates 2 of 6 parameters that are not in model"
    with pytest.raises(SelectionError, match=text), new(model=part):
        pass
    with pytest.raises(SelectionError, match="A step began inside a step"):
        in_step(run := new(), loop, lambda batch: run.step(batch).__enter__())
    added = torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1)
    with pytest.raises(
        SelectionError, match=r"SGD stepped, but was not passed to TrainingRun.*all optimizers"
    ):
        in_step(new(), loop, lambda batch: added.step())
    with (
        pytest.raises(SelectionError, match=r"AdamW stepped outside a step of the TrainingRun"),
        new(),
    ):
        loop.optimizers[0].step()
    with pytest.raises(SelectionError, match=r"Use step inside the block of its run"), new().step():
        pass
    with (
        pytest.raises(SelectionError, match="Call resume_from before the with block"),
        new() as run,
    ):
        run.resume_from(2)
    with pytest.raises(SelectionError, match="step must be an integer >= 0"):
        new().resume_from(-1)
    with (
        pytest.raises(
            SelectionError, match=r"The TrainingRun of .* is open already.*one run at a time"
        ),
        new(),
        new(),
    ):
        pass
    with (
        pytest.raises(SelectionError, match="This TrainingRun itself is open already"),
        new() as run,
        run,
    ):
        pass
    with (
        pytest.raises(RunExistsError),
        TrainingRun(reference, mode="record", model=loop.model, optimizers=loop.optimizers),
    ):
        pass
    with pytest.raises(NothingComparedError), new():
        pass
    Loop().run()  # nothing is left that would refuse it


def test_each_refusal_advises_what_this_run_has(reference, tmp_path):
    """A verification has no ``overwrite``, and a loop without a step no other steps to select."""
    train(Loop, tmp_path / "other", mode="record")
    with pytest.raises(RunExistsError) as caught:
        train(Loop, reference, current=tmp_path / "other")
    assert (
        "pass another folder for the results (current of DeterminismCallback or TrainingRun"
        in str(caught.value)
    )
    assert "overwrite" not in str(caught.value)
    loop = Loop()
    arguments = {"mode": "record", "model": loop.model, "optimizers": loop.optimizers}
    for more, says in (
        (
            {},
            (
                "The fit had no step, so nothing was recorded in .* Check that its loader returns "
                "batches"
            ),
        ),
        ({"every_n_steps": 2}, "no step that every_n_steps=2 selects"),
    ):
        with (
            pytest.raises(NothingComparedError, match=says),
            TrainingRun(tmp_path / "none", **arguments, **more),
        ):
            pass


def test_within_a_fit_with_the_callback_it_is_refused(tmp_path):
    class Inner(pl.Callback):
        def on_train_batch_end(self, *_: Any, **__: Any) -> None:
            loop = Loop()
            with TrainingRun(
                tmp_path / "b", mode="record", model=loop.model, optimizers=loop.optimizers
            ):
                pass

    with pytest.raises(SelectionError, match=r"The DeterminismCallback of .* is open already"):
        Fit(DeterminismCallback(tmp_path / "a", mode="record"), Inner()).run()


def test_an_exception_in_a_step_makes_the_run_incomplete_also_where_the_program_goes_on(
    reference, tmp_path, capsys
):
    def fail_at(number: int, loop: Loop, step: int) -> None:
        if step == number:
            raise ZeroDivisionError("a bug of the user's")

    class Failing(Loop):
        def train_step(self, batch: Any) -> None:
            fail_at(2, self, self.num_done)
            super().train_step(batch)

    with pytest.raises(ZeroDivisionError):
        train(Failing, tmp_path / "run", mode="record")
    assert (
        "recording stopped by ZeroDivisionError after 2 steps: incomplete"
        in capsys.readouterr().out
    )
    assert not Run.open(tmp_path / "run").is_complete
    with pytest.raises(ZeroDivisionError):
        train(Failing, reference, current=tmp_path / "current")
    assert "verification stopped by ZeroDivisionError after 2 steps" in capsys.readouterr().out

    def catch(*, goes_on: bool, **options: Any) -> None:
        loop = Failing()
        with TrainingRun(model=loop.model, optimizers=loop.optimizers, **options) as run:
            for batch in run.batches(loop.loader):
                try:
                    with run.step(batch):
                        loop.train_step(batch)
                except ZeroDivisionError:
                    if not goes_on:
                        break
                loop.num_done += 1

    for goes_on in (True, False):
        folder = tmp_path / f"caught {goes_on}"
        with pytest.raises(
            NothingComparedError,
            match=r"Step 2 ended with ZeroDivisionError .*Let the error propagate",
        ):
            catch(goes_on=goes_on, reference=folder, mode="record")
        assert not Run.open(folder).is_complete
        with pytest.raises(NothingComparedError, match=r"Step 2 ended with ZeroDivisionError"):
            catch(goes_on=goes_on, reference=reference, current=tmp_path / f"current {goes_on}")


def test_disabled_does_nothing_and_a_run_is_used_again(tmp_path):
    loop, run = train(Loop, tmp_path / "run", mode="disabled")
    assert (len(loop.losses), run.verdict, [*tmp_path.iterdir()]) == (STEPS, None, [])


def test_leaving_batches_in_the_middle_is_fine_and_a_shorter_loop_is_not(reference, tmp_path):
    def short(**options: Any) -> TrainingRun:
        loop = Loop()
        run = TrainingRun(model=loop.model, optimizers=loop.optimizers, **options)
        with run:
            loop.run(run, until=3)
        return run

    short(reference=tmp_path / "run", mode="record")
    assert short(reference=tmp_path / "run", current=tmp_path / "same").verdict.verdict == "match"  # type: ignore[union-attr]
    with pytest.raises(DivergenceError, match=r"missing|fewer|shorter"):
        short(reference=reference, current=tmp_path / "current")


def train_ranks(mode: str, folder: Path, kind: str, fault: bool, rank: int) -> None:
    torch.distributed.init_process_group("gloo", rank=rank, world_size=2)
    try:
        loop = Loop()
        if kind == "ddp":
            loop.model = DistributedDataParallel(loop.model)
        else:
            fully_shard(loop.model.first)  # type: ignore[arg-type]
            fully_shard(loop.model)
        loop.optimizers = [torch.optim.AdamW(loop.model.parameters(), lr=1e-2)]
        loop.loader = DataLoader(loops.samples(), batch_size=4, sampler=[*range(rank, 24, 2)])
        options: dict[str, Any] = {"mode": mode, "current": folder / "current"}
        torch.manual_seed(100 + rank)
        if kind == "ddp":
            options["audit_replicas_every_n_steps"] = 2
        run = TrainingRun(folder / "run", model=loop.model, optimizers=loop.optimizers, **options)

        def plant(step: int) -> None:
            if fault and step == 1 and rank == 1:
                name = "last.bias" if kind == "fsdp2" else "module.last.bias"
                parameter: Any = loop.model.get_parameter(name)
                with torch.no_grad():
                    getattr(parameter, "_local_tensor", parameter).view(-1)[:1] += 1e-3

        loop.plant = plant
        with run:
            loop.run(run)
        print(f"the verdict: {run.verdict and run.verdict.verdict}")
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.ddp
@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
def test_ranks_have_one_run_and_one_verdict(kind, tmp_path):
    body = partial(partial, train_ranks)
    run_ranks(body("record", tmp_path, kind, False), tmp_path / "record", status=0)
    assert Run.open(tmp_path / "run").ranks == [0, 1]
    ended = run_ranks(body("verify", tmp_path, kind, False), tmp_path / "verify", status=0)
    assert "match: verified 6 steps of 2 ranks" in ended[0].output
    assert all("the verdict: match" in one.output for one in ended)
    assert ("replicas agree" in ended[0].output) is (kind == "ddp")
    ended = run_ranks(body("verify", tmp_path, kind, True), tmp_path / "fault", status=1)
    error = ReplicaError if kind == "ddp" else DivergenceError
    assert all(error.__name__ in one.output or "DivergenceError" in one.output for one in ended)
    verdict = compare_runs(tmp_path / "run", tmp_path / "current")
    assert (verdict.first_divergence.step, "settings.seed" in str(verdict.environment)) == (
        1,
        False,
    )
