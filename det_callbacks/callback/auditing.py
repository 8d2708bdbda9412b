"""A fit in which steps, or their ops, are run again: ``mode="audit"``."""

import json
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal, Protocol

import lightning.pytorch as pl
from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loggers import Logger
from lightning.pytorch.loops.fetchers import _DataLoaderIterDataFetcher
from lightning.pytorch.loops.loop import _Loop
from lightning.pytorch.plugins import Precision
from lightning.pytorch.profilers import Profiler
from lightning.pytorch.strategies import Strategy

from det_callbacks.audit import AuditReport, HeldState, OpAudit, StepAudit, replay_list
from det_callbacks.callback.alerts import AlertCallback
from det_callbacks.callback.loops import mark_training_step
from det_callbacks.compare.live import free_folder
from det_callbacks.errors import AuditError, DivergenceWarning, NothingComparedError, StepNotRepeatableError, TraceError
from det_callbacks.report import audit_line, audit_lines, print_closing_line
from det_callbacks.trace.hash_mode import HashMode
from det_callbacks.trace.program import StepView
from det_callbacks.trace.run_files import replace_atomically
from det_callbacks.trace.selection import Selection

AUDIT_FILE = "audit.json"
REPLAY_FILE = "replay.yaml"

_LEFT = (pl.Trainer, _Loop, Strategy, Accelerator, Precision, Logger, Profiler, AlertCallback)
"""Lightning's own machinery and ours; what a step changes in it is named in ``_loop_state``."""


class _Auditor(Protocol):
    """What looks at the chosen steps."""

    def attach(self, trainer: pl.Trainer) -> None: ...

    def begin_step(self, step: int) -> None: ...

    def end_step(self, step: int) -> None: ...

    def before_optimizer(self) -> None: ...

    def detach(self) -> None: ...

    def report(self) -> AuditReport: ...


class Auditing:
    """The fits of one callback, audited.

    Args:
        folder: for ``audit.json`` and ``replay.yaml``; None is a new one below the Trainer's.
        kind: "ops" runs each op of the chosen steps twice, "step" each chosen step ``num_runs`` times.
        steps: which, by number.
        num_runs: of a step.
        on_divergence: "warn" warns of what was found, everything else raises at the end of the fit.

    Attributes:
        outcome: what was found so far; None before the end of a fit.
    """

    def __init__(
        self,
        folder: Path | None,
        *,
        kind: Literal["ops", "step"],
        steps: Sequence[int],
        num_runs: int,
        on_divergence: str,
    ) -> None:
        self.outcome: AuditReport | None = None
        self._folder = folder
        self._kind = kind
        self._steps = frozenset(steps)
        self._num_runs = num_runs
        self._on_divergence = on_divergence
        self._auditor: _Auditor | None = None
        self.say: Callable[[str], None] = print_closing_line
        """Prints a line; whoever trains may know what else is on the terminal."""

    def begin_fit(self, trainer: pl.Trainer, pl_module: pl.LightningModule, selection: Selection) -> None:
        """Make ready for the steps of a fit."""
        if self._folder is None:
            self._folder = free_folder(Path(trainer.log_dir or trainer.default_root_dir), kind="audit")
        for name in (AUDIT_FILE, REPLAY_FILE):  # of an earlier audit: not to be taken for this one's
            (self._folder / name).unlink(missing_ok=True)
        if self._auditor is not None:
            return
        if self._kind == "ops":
            self._auditor = _OpAuditor(pl_module)
        else:
            self._auditor = _StepAuditor(pl_module, selection, self._steps, self._num_runs)

    def attach(self, trainer: pl.Trainer) -> None:
        """Reach into the loops of a fit that is about to train."""
        self._running().attach(trainer)

    def begin_step(self, step: int) -> None:
        """Start a step."""
        if step in self._steps:
            self._running().begin_step(step)

    def before_optimizer(self) -> None:
        """Note that unscaling and clipping come next."""
        self._running().before_optimizer()

    def end_step(self, step: int) -> None:
        """End a step."""
        if step in self._steps:
            self._running().end_step(step)

    def detach(self) -> None:
        """Leave no mode open and nothing of ours in the loops; may be called more than once."""
        if self._auditor is not None:
            self._auditor.detach()

    def end_fit(self) -> None:
        """Write what was found, print the closing line, and raise when there was anything.

        Raises:
            AuditError: something differed, unless ``on_divergence`` is "warn", which warns.
            NothingComparedError: no step was audited.
        """
        report = self._running().report()
        self.outcome = report
        if not report.num_compared:
            wanted = ", ".join(map(str, sorted(self._steps)))
            raise NothingComparedError(
                f"Nothing was audited: the fit had none of the steps that audit_steps asks for ({wanted})."
            )
        assert self._folder is not None
        self._folder.mkdir(parents=True, exist_ok=True)
        replace_atomically(self._folder / AUDIT_FILE, json.dumps(report.to_dict(), indent=1).encode())
        replay = self._folder / REPLAY_FILE
        comments = (
            f"What an audit of the steps {', '.join(map(str, report.steps))} found. Give it to record and to verify:",
            f"determinism.replay={replay} (Hydra), or replay={str(replay)!r}",
        )
        replace_atomically(replay, replay_list(report.replay, comments).encode())
        missed = sorted(self._steps.difference(report.steps))
        self.say(audit_line(report, folder=self._folder, missed=missed))
        if not report.findings:
            return
        text = audit_lines(report, replay=replay)
        if self._on_divergence == "warn":
            pl.utilities.rank_zero_warn(text, category=DivergenceWarning)
            return
        raise AuditError(text, report)

    def stop(self, reason: str) -> None:
        """Say that an exception ended the fit."""
        self.outcome = None
        self.say(f"det_callbacks: audit stopped by {reason}; nothing was written")

    def _running(self) -> _Auditor:
        assert self._auditor is not None, "a fit was begun"
        return self._auditor


class _OpAuditor:
    """Runs each op of the chosen steps twice."""

    def __init__(self, pl_module: pl.LightningModule) -> None:
        self._audit = OpAudit(pl_module)
        self._restore: Callable[[], object] | None = None

    def attach(self, trainer: pl.Trainer) -> None:
        self.detach()
        self._restore = mark_training_step(trainer, self._audit.mode.marks_forward)

    def begin_step(self, step: int) -> None:
        self._audit.begin(step)

    def before_optimizer(self) -> None:
        self._audit.mode.phase = "gradient"

    def end_step(self, step: int) -> None:
        self._audit.end()

    def detach(self) -> None:
        self._audit.mode.abandon()
        restore, self._restore = self._restore, None
        if restore is not None:
            restore()

    def report(self) -> AuditReport:
        return self._audit.report()


class _StepAuditor:
    """Runs the chosen steps several times: what Lightning does between ``on_train_batch_start`` and ``..._end``.

    Its two optimization loops are called in one place each with one method, ``run`` (read at Lightning 2.6.6), so that
    one attribute of each is set for the time of the fit.
    """

    def __init__(
        self, pl_module: pl.LightningModule, selection: Selection, steps: frozenset[int], num_runs: int
    ) -> None:
        self._steps = steps
        self._audit = StepAudit(num_runs)
        self._hash_mode = HashMode.for_training(pl_module, selection)
        self._restores: list[Callable[[], object]] = []

    def attach(self, trainer: pl.Trainer) -> None:
        self.detach()
        if isinstance(trainer.fit_loop._data_fetcher, _DataLoaderIterDataFetcher):
            raise StepNotRepeatableError(
                "training_step takes dataloader_iter and draws its batches itself, so a step cannot be run again from "
                'the same data. Take a batch, or use audit="ops".'
            )
        self._hash_mode.optimizers = list(trainer.optimizers)
        self._restores.append(mark_training_step(trainer, self._hash_mode.marks_forward))
        epoch_loop = trainer.fit_loop.epoch_loop
        loop: Any
        for loop in (epoch_loop.automatic_optimization, epoch_loop.manual_optimization):
            loop.run = partial(self._run, trainer, loop.run)
            self._restores.append(partial(loop.__dict__.pop, "run", None))

    def begin_step(self, step: int) -> None:
        pass

    def before_optimizer(self) -> None:
        self._hash_mode.recorder.phase = "gradient"

    def end_step(self, step: int) -> None:
        pass

    def detach(self) -> None:
        self._hash_mode.abandon()
        while self._restores:
            self._restores.pop()()

    def report(self) -> AuditReport:
        return self._audit.report()

    def _run(self, trainer: pl.Trainer, run: Callable[..., Any], *args: Any) -> Any:
        step = trainer.fit_loop.epoch_loop.total_batch_idx
        if step not in self._steps:
            return run(*args)
        roots = {"batch": _batch(args), **_loop_state(trainer)}
        return self._audit.run(
            step, HeldState(roots, left=(*_LEFT, _StepAuditor)), partial(self._trace, step, run, args)
        )

    def _trace(self, step: int, run: Callable[..., Any], args: tuple[Any, ...]) -> tuple[StepView, Any]:
        self._hash_mode.begin(batch=_batch(args), is_first=True)
        try:
            outcome = run(*args)
            trace = self._hash_mode.finish()
        except BaseException:  # Ctrl-C too: the trace is closed, and it is raised again
            self._hash_mode.abandon()
            raise
        if trace is None:
            raise TraceError(
                f"Step {step} could not be traced, because a dispatch mode was left open in it. Close that mode within "
                "the training step."
            )
        return trace.view(step=step), outcome


def _batch(args: tuple[Any, ...]) -> Any:
    """Return the batch among the arguments of an optimization loop; the last one holds those of ``training_step``."""
    return args[-1].get("batch", args[-1])


def _loop_state(trainer: pl.Trainer) -> dict[str, object]:
    """Return what a training step may change, by name: the module, optimizers, others' callbacks, logs, progress."""
    epoch_loop = trainer.fit_loop.epoch_loop
    callbacks: list[Callback] = vars(trainer)["callbacks"]
    is_ours = "lightning.", "det_callbacks."
    others = [callback for callback in callbacks if not type(callback).__module__.startswith(is_ours)]
    return {
        "model": trainer.lightning_module,
        "optimizers": trainer.optimizers,
        "optimizers of the strategy": trainer.strategy._lightning_optimizers,
        "learning rate schedulers": trainer.lr_scheduler_configs,
        "precision": vars(trainer.precision_plugin),
        **{f"callback {type(callback).__name__}": callback for callback in others},
        "logged values": epoch_loop._results,
        "logger connector": vars(trainer._logger_connector),
        "progress": [vars(epoch_loop.automatic_optimization), vars(epoch_loop.manual_optimization)],
    }
