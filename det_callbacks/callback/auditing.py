"""A fit in which the ops of some steps are run again: ``mode="audit"``."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path

import lightning.pytorch as pl

from det_callbacks.audit import AuditFinding, AuditReport, OpMismatch, replay_list
from det_callbacks.callback.loops import mark_training_step
from det_callbacks.equivalence import BitwiseEquivalenceMode
from det_callbacks.errors import AuditError, DivergenceWarning, NothingComparedError
from det_callbacks.report.fits import audit_line, audit_lines, print_closing_line
from det_callbacks.runs.files import replace_atomically
from det_callbacks.verification import free_folder

AUDIT_FILE = "audit.json"
REPLAY_FILE = "replay.yaml"
NUM_STEPS = 3
"""Steps that are audited where none are chosen: the first ones that come."""


class Auditing:
    """The fits of one callback, audited.

    Args:
        folder: for ``audit.json`` and ``replay.yaml``; None is a new one below the Trainer's.
        steps: whose ops are run again, by number; None is the first three.
        on_divergence: "warn" warns of what was found, everything else raises at the end of the fit.

    Attributes:
        outcome: what was found so far; None before the end of a fit.
    """

    def __init__(self, folder: Path | None, *, steps: Sequence[int] | None, on_divergence: str) -> None:
        self.outcome: AuditReport | None = None
        self._folder = folder
        self._chosen = steps
        self._on_divergence = on_divergence
        self._mode: BitwiseEquivalenceMode | None = None
        self._steps: list[int] = []
        self._found: dict[tuple[str, str, str], list[tuple[int, OpMismatch]]] = {}
        self._restore: Callable[[], object] | None = None
        self.say: Callable[[str], None] = print_closing_line
        """Prints a line; whoever trains may know what else is on the terminal."""

    def begin_fit(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Make ready for the steps of a fit."""
        if self._folder is None:
            self._folder = free_folder(Path(trainer.log_dir or trainer.default_root_dir), kind="audit")
        for name in (AUDIT_FILE, REPLAY_FILE):  # of an earlier audit: not to be taken for this one's
            (self._folder / name).unlink(missing_ok=True)
        self._mode = self._mode or BitwiseEquivalenceMode(model=pl_module, base_phase="other")

    def attach(self, trainer: pl.Trainer) -> None:
        """Mark the training step of a fit that is about to train."""
        self.detach()
        self._restore = mark_training_step(trainer, self._running.marks_forward)

    def begin_step(self, step: int) -> None:
        """Start a step."""
        if step in self._chosen if self._chosen is not None else len(self._steps) < NUM_STEPS:
            self._running.begin()

    def before_optimizer(self) -> None:
        """Note that unscaling and clipping come next."""
        self._running.phase = "gradient"

    def end_step(self, step: int) -> None:
        """End a step; nothing is done when none is under way."""
        if not self._running.is_open:
            return
        self._steps.append(step)
        for mismatch in self._running.finish():
            place = (mismatch.phase, mismatch.module, mismatch.op)
            self._found.setdefault(place, []).append((step, mismatch))

    def detach(self) -> None:
        """Leave no mode open and nothing of ours in the loops; may be called more than once."""
        if self._mode is not None:
            self._mode.abandon()
        restore, self._restore = self._restore, None
        if restore is not None:
            restore()

    def end_fit(self) -> None:
        """Write what was found, print the closing line, and raise when there was anything.

        Raises:
            AuditError: something differed, unless ``on_divergence`` is "warn", which warns.
            NothingComparedError: no step was audited.
        """
        report = self.outcome = AuditReport(
            steps=tuple(self._steps),
            num_compared=self._running.num_compared,
            skipped=dict(self._running.skipped),
            findings=tuple(map(AuditFinding.of, self._found.values())),
        )
        if not report.num_compared:
            wanted = "" if self._chosen is None else f" that only_steps asks for ({', '.join(map(str, self._chosen))})"
            raise NothingComparedError(f"Nothing was audited: the fit had none of the steps{wanted}.")
        assert self._folder is not None
        self._folder.mkdir(parents=True, exist_ok=True)
        replace_atomically(self._folder / AUDIT_FILE, json.dumps(report.to_dict(), indent=1).encode())
        replay = self._folder / REPLAY_FILE
        comments = (
            f"What an audit of the steps {', '.join(map(str, report.steps))} found. Give it to record and to verify:",
            f"determinism.replay={replay} (Hydra), or replay={str(replay)!r}",
        )
        replace_atomically(replay, replay_list(report.replay, comments).encode())
        missed = sorted(set(self._chosen or ()).difference(report.steps))
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

    @property
    def _running(self) -> BitwiseEquivalenceMode:
        assert self._mode is not None, "a fit was begun"
        return self._mode
