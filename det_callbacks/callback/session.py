"""What recording, verifying and auditing share: a session is called for each fit of a callback, and each step in it."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning.pytorch as pl

from det_callbacks.audit import AuditReport
from det_callbacks.callback.arguments import CallbackArguments
from det_callbacks.report.fits import print_closing_line
from det_callbacks.runs.evidence import NondeterministicOp, Row
from det_callbacks.runs.metrics import Reading
from det_callbacks.runs.peers import ALONE, Peers
from det_callbacks.runs.selection import Selection
from det_callbacks.runs.steps import Expectation, StepTrace
from det_callbacks.runs.writer import RunWriter
from det_callbacks.tensors.files import REPLAY, SavedStep
from det_callbacks.tensors.keep import Keeper
from det_callbacks.tensors.replay import OpReplay, Replay
from det_callbacks.verdict import Verdict
from det_callbacks.verification import Verification

FIT = "fit"


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """How far a run is on one process, for loggers and progress bars.

    Attributes:
        num_steps: recorded (those that a resumed recording found there and equal, too), or compared.
        num_sites: of those steps.
        num_differing: sites that differ, and steps that only one run has.
        num_bytes: saved for replay, or put back.
        chain: after the last step; None before the first, and once something differed.
    """

    num_steps: int = 0
    num_sites: int = 0
    num_differing: int = 0
    num_bytes: int = 0
    chain: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """A fit, or a test or validation outside of one, that begins.

    Attributes:
        manifest: selection, settings and environment, as run.json has them.
        selection: what is traced.
        is_resumed: it goes on from a checkpoint.
        call: what it is instead of a fit: "trainer.test", say, of which metrics are taken.
    """

    manifest: Mapping[str, Any]
    selection: Selection
    is_resumed: bool = False
    call: str | None = None


class StepHooks:
    """What is called in the steps of one fit; this one does nothing, outside of a fit."""

    def attach(self, trainer: pl.Trainer) -> None:
        """Follow a Trainer that is about to train, and whose data is set up."""

    def mark(self, point: str) -> None:
        """Note the generators at a point of the fit."""

    def begin_step(self, step: int, batch: Any) -> None:
        """Start a step."""

    def note_loss(self, loss: Any) -> None:
        """Note the loss, before the backward pass."""

    def begin_gradients(self) -> None:
        """Note that what follows is done to gradients, until the optimizer steps."""

    def end_step(self, step: int, epoch: int, outputs: Any) -> bool:
        """End a step; return whether to stop because it differs."""
        return False

    def drop_step(self) -> None:
        """Forget a step that did not come to its end; nothing is done where none is open."""

    def flush(self, step: int) -> None:
        """Hand over what was gathered since the last step: the fit is over."""

    def close(self) -> None:
        """Leave nothing open; may be called more than once."""


class Session:
    """What one mode does with the fits of a callback and their steps; it stays over the fits of a Trainer.

    Args:
        arguments: of the callback.
        peers: the processes that have the session together.

    Attributes:
        root: where folders go by default.
        hooks: called in the steps instead of a trace; None of recordings and verifications.
        run: what is written; None of an audit, and before the first stage.
        detector: compares the steps that the run, or its reference, holds already; None where there are none.
        may_stop: whether what differs ends the fit.
        is_over: its files were taken back, so that another fit has a session of its own.
        stages: those so far, FIT or the call; of calls outside of a fit only those that came to their end.
        verdict: of what has run so far; None before the end of a fit.
        audit_report: of an audit; None of every other session.
        num_steps: recorded; those that a detector has compared are in its tally.
        num_sites: of those steps.
        chain: after the last step; None before the first.
        replay: saves tensors of a step, or puts them back.
        op_replay: the outputs of ops that ``replay`` is for; None where no op is.
        keeper: keeps tensors of the steps; None where none are kept.
        print_line: prints a closing line; ``print_beside_bar`` in a Trainer, whose bar may be on the terminal.
    """

    hooks: StepHooks | None = None

    def __init__(self, arguments: CallbackArguments, peers: Peers = ALONE) -> None:
        self.arguments, self.peers, self.root = arguments, peers, Path()
        self.run: RunWriter | Verification | None = None
        self.detector: Verification | None = None
        self.may_stop = self.is_over = False
        self.stages: list[str] = []
        self.verdict: Verdict | None = None
        self.audit_report: AuditReport | None = None
        self.num_steps = self.num_sites = 0
        self.chain: int | None = None
        self.replay = Replay()
        self.op_replay: OpReplay | None = None
        self.keeper: Keeper | None = None
        self.print_line: Callable[[str], None] = print_closing_line
        self._stage: Stage | None = None

    @property
    def path(self) -> Path:
        """Folder of the reference."""
        assert self.arguments.reference is not None, "checked where the callback was made"
        return self.arguments.reference

    @property
    def run_id(self) -> str | None:
        """Random identity of the run; None where nothing is written."""
        return None if self.run is None else self.run.manifest.run_id

    @property
    def stage(self) -> Stage:
        """What began last."""
        assert self._stage is not None, "a stage began"
        return self._stage

    @property
    def progress(self) -> Progress:
        """What was done so far, on this process."""
        detector = self.detector
        return Progress(
            num_steps=self.num_steps + (0 if detector is None else detector.tally.num_steps),
            num_sites=self.num_sites + (0 if detector is None else detector.tally.num_sites),
            num_differing=0 if detector is None else detector.num_differing,
            num_bytes=self.replay.counts.num_bytes,
            chain=self.chain,
        )

    def prepare(self, selection: Selection) -> Selection:
        """Check what can be checked before a fit, and return the selection to trace with."""
        return selection

    def begin(self, stage: Stage) -> None:
        """Begin a fit, or another stage of which metrics are taken."""
        self._stage = stage
        if stage.call is None:
            self.stages.append(FIT)

    def num_calls(self, call: str) -> int:
        """Return how many such calls outside of a fit came since the last fit began."""
        since = self.stages[::-1].index(FIT) if FIT in self.stages else len(self.stages)
        return self.stages[len(self.stages) - since :].count(call)

    def expectation(self, step: int, digest_state: Callable[[], Mapping[str, int]]) -> Expectation | None:
        """Begin a step, and return what is known of it; None when it is new.

        Args:
            step: training batch.
            digest_state: returns the state that the step begins with; called in the first one after a resume.
        """
        detector, expectation = self.detector, None
        if detector is not None and detector.holds(step):
            if detector.is_resuming:
                detector.compare_state(step, digest_state)
            expectation = detector.expectation(step)
        self.replay.begin(None if expectation is None else self._saved(step, REPLAY))
        if self.keeper is not None:
            self.keeper.begin(is_wanted=self._keeps(step))
        return expectation

    def _keeps(self, step: int) -> bool:
        """Return whether tensors of a step are kept."""
        return True

    def _saved(self, step: int, kind: str) -> SavedStep:
        """Return what was saved of a step that there is."""
        detector = self.detector
        assert detector is not None, "there is such a step"
        place = {"rank": self.peers.rank, "segment": detector.segment, "step": step}
        return SavedStep.of(detector.reference, **place, kind=kind)

    def add(self, trace: StepTrace, *, step: int, epoch: int) -> bool:
        """Take a step; return whether to stop because it differs."""
        raise NotImplementedError

    def put_evidence(self, rows: Sequence[Row]) -> None:
        """Take what explains the step that ends."""
        assert self.run is not None, "a fit was begun"
        self.run.put_evidence(rows)

    def put_nondeterministic_ops(self, ops: Sequence[NondeterministicOp]) -> None:
        """Take the list of ops without a deterministic implementation that were called so far."""
        assert self.run is not None, "a fit was begun"
        self.run.put_nondeterministic_ops(ops)

    def put_metrics(self, reading: Reading) -> bool:
        """Take what the module logged, on rank 0; return whether it differs."""
        return False

    def resume_metrics(self, reading: Reading, *, is_first: bool) -> None:
        """Take which metrics a resumed fit may lack, on rank 0."""

    def end(self, *, is_early: bool = False) -> None:
        """Close the stage, print the closing line, and raise what was found.

        Args:
            is_early: it was stopped, so that its later steps are not missing.
        """
        raise NotImplementedError

    def stop(self, reason: str) -> None:
        """Close the files: an exception ended the stage."""
        raise NotImplementedError

    def _print_once(self, text: str) -> None:
        """Print a line on rank 0."""
        if self.peers.rank == 0:
            self.print_line(text)

    def _of_rank(self) -> str:
        return "" if self.peers.world_size == 1 else f" of rank {self.peers.rank}"
