"""What a fit is verified against."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from lightning.pytorch.utilities import rank_zero_warn
from typing_extensions import override

from det_callbacks.callback.fits import Waiting, go_on, wait
from det_callbacks.callback.session import FIT, Session, Stage
from det_callbacks.compare.record import REPORT_FILE
from det_callbacks.errors import DivergenceError, DivergenceWarning, NotComparableError, NothingComparedError
from det_callbacks.report.console import count
from det_callbacks.report.fits import (
    level_words,
    print_closing_line,
    unfinished_text,
    verified_line,
    waiting_line,
)
from det_callbacks.report.html import write_report
from det_callbacks.report.verdict import verdict_of_rank
from det_callbacks.runs.files import stream_path
from det_callbacks.runs.metrics import Reading
from det_callbacks.runs.peers import END_OF_FIT
from det_callbacks.runs.selection import Selection
from det_callbacks.runs.steps import StepTrace
from det_callbacks.runs.store import Run
from det_callbacks.tensors.copies import TensorBudget
from det_callbacks.tensors.files import KEPT, StepWriter
from det_callbacks.tensors.keep import Keeper
from det_callbacks.tensors.replay import OpReplay
from det_callbacks.verdict import Verdict
from det_callbacks.verification import Verification, free_folder, open_reference, write_verdict


class Verifying(Session):
    """The fits of one callback, compared with a reference by a ``Verification``.

    The verdict and the diverging steps go to ``current``, or to a new folder below the Trainer's.
    """

    run: Verification | None
    _reference: Run

    @override
    def prepare(self, selection: Selection) -> Selection:
        """Return the selection to trace with, which is the reference's; after the first fit began it stays.

        Raises:
            ReferenceNotFoundError, ReferenceFormatError, SelectionError, NotComparableError: see ``open_reference``.
        """
        if self.run is not None:
            return self.stage.selection
        arguments = self.arguments
        opens = partial(open_reference, self.path, arguments.asked, steps=arguments.steps, peers=self.peers)
        try:
            self._reference = self.peers.run_on_all(opens, task=f"opening the reference {self.path}")
        except NotComparableError as error:
            if self.peers.rank == 0 and error.verdict is not None:
                folder = arguments.current or free_folder(self.root)
                folder.mkdir(parents=True, exist_ok=True)
                write_verdict(folder, replace(error.verdict, current=str(folder)))
            raise
        return self._reference.manifest.selection

    @override
    def begin(self, stage: Stage) -> None:
        super().begin(stage)
        go_on(self)
        self.verdict, was_open = None, self.run is not None
        if self.run is None:
            self.run = self.detector = self._begin_verification(self._reference, stage)
            self.may_stop = self.arguments.on_divergence == "raise"
        if stage.call is not None:
            self.run.withdraw_verdict()
            return
        segment = self.stages.count(FIT) - 1
        if was_open and not segment:
            self.run.reopen(stage.manifest)
        if self.keeper is not None and segment:
            stream = stream_path(self.run.current, self.peers.rank, 0, segment)
            self.keeper.writer.start_segment(stream, segment)
        self.run.begin_fit(segment, is_resumed=stage.is_resumed, is_every_step=stage.selection.is_every_step)

    def _begin_verification(self, run: Run, stage: Stage) -> Verification:
        arguments, peers = self.arguments, self.peers
        # by rank 0: the others might look when it has made its own already
        folder = peers.broadcast(lambda: str(arguments.current or free_folder(self.root)), task="choosing a folder")
        verification = Verification(run, Path(folder), manifest=stage.manifest, peers=peers, steps=arguments.steps)
        if patterns := run.manifest.replay:
            self.op_replay = OpReplay(patterns, self.replay)
        if patterns := run.manifest.keep_tensors:
            stream = stream_path(verification.current, peers.rank, 0, 0)
            writer = StepWriter(stream, KEPT, run_id=verification.manifest.run_id, rank=peers.rank)
            self.keeper = Keeper(patterns, writer, TensorBudget(arguments.tensor_budget_mib))
            verification.keep_tensors = self.keeper.write
        return verification

    @override
    def _keeps(self, step: int) -> bool:
        return self._running.holds(step) and self._saved(step, KEPT).exists

    @override
    def add(self, trace: StepTrace, *, step: int, epoch: int) -> bool:
        differs = self._running.add(trace, step=step, epoch=epoch)
        self.replay.end_step(differs=differs)
        self.chain = self._running.chain(step)
        return differs and self.may_stop

    @override
    def put_metrics(self, reading: Reading) -> bool:
        return self._running.add_metrics(reading) and self.may_stop

    @override
    def resume_metrics(self, reading: Reading, *, is_first: bool) -> None:
        self._running.resume_metrics(reading, is_first=is_first)

    @override
    def end(self, *, is_early: bool = False) -> None:
        """Write the verdict, print the closing line, and raise unless the fits so far match.

        Raises:
            DivergenceError, NotComparableError: unless ``on_divergence`` is "warn", which warns.
            NothingComparedError: no step was compared.
        """
        verification, stage = self._running, self.stage
        verification.set_replayed(self.replay.counts.to_dict())
        if stage.call is None and stage.is_resumed and not is_early and not verification.has_steps:
            verification.close(complete=False)
            raise NothingComparedError(
                "The checkpoint is of a training that was finished: no step was left, so nothing was compared with "
                f"{self.path}. Verify from an earlier one, or from the start."
            )
        if not is_early and stage.call is None:
            verification.end_fit()
        missing = [FIT] * (verification.num_segments - self.stages.count(FIT))
        missing += self.peers.gather(lambda: [*verification.pending_calls], task=END_OF_FIT)[0]
        is_pending = bool(missing) and not is_early and self.arguments.steps == "all"
        verdict = verification.finish(is_pending=is_pending, is_early=is_early)
        level = level_words(stage.selection.level, stage.selection.compiled, verdict.coverage.opaque_regions)
        if is_pending and not verification.differs_anywhere:
            self._wait(verdict, missing, level)
            return
        self.verdict = verdict
        report = self._report(verdict) if verification.differs_anywhere else None
        self._print_once(verified_line(verdict, level=level, report=report))
        if verdict.verdict == "match":
            return
        text = verdict_of_rank(verdict, rank=self.peers.rank, world_size=self.peers.world_size)
        if self.arguments.on_divergence != "warn":
            raise (NotComparableError if verdict.verdict == "not_comparable" else DivergenceError)(text, verdict)
        rank_zero_warn(text, category=DivergenceWarning)

    def _wait(self, verdict: Verdict, missing: Sequence[str], level: str) -> None:
        """Agree so far: the verdict comes with the last of the fits and tests that the reference holds."""
        stages, num_ended = [*self.stages, *missing], len(self.stages)
        self._print_once(waiting_line(verdict, stages=stages, num_ended=num_ended, level=level))
        error = DivergenceError(unfinished_text(verdict, stages=stages, num_ended=num_ended), verdict)

        def write() -> None:  # the processes part, each at its own end
            self._running.write(verdict)
            self._report(verdict)

        wait(self, Waiting(error=error, is_fatal=self.arguments.on_divergence != "warn", write=write))

    @override
    def stop(self, reason: str) -> None:
        """Close the files: an exception ended the fit. What was found stays found, on each rank by itself."""
        verification = self._running
        self.verdict = verification.stop(reason)
        later = f" (det-callbacks diff {self.path} {verification.current}: what all ranks found)"
        found = f"no verdict{later if self.peers.world_size > 1 else ''}"
        if self.verdict is not None:
            report = self._report(self.verdict)
            found = str(self.verdict.verdict) + ("" if report is None else f"; report: {report}")
        num_steps = count(verification.tally.num_steps, "step")
        self.print_line(f"det_callbacks: verification{self._of_rank()} stopped by {reason} after {num_steps}: {found}")

    def _report(self, verdict: Verdict) -> Path | None:
        """Write ``report.html`` beside the verdict, on rank 0; return its path, None where it could not be written."""
        if self.peers.rank:
            return None
        current = self._running.current
        try:
            return write_report(current / REPORT_FILE, verdict, reference=self.path, current=current)
        except Exception as error:  # the divergence is raised next: no fault of a page may come before it
            print_closing_line(f"det_callbacks: no report was written ({type(error).__name__}: {error})")
            return None

    @property
    def _running(self) -> Verification:
        assert self.run is not None, "a fit was begun"
        return self.run
