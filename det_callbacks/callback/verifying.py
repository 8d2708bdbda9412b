"""What a fit is verified against."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import lightning.pytorch as pl
from typing_extensions import override

from det_callbacks.callback.fits import Waiting, go_on, wait
from det_callbacks.callback.session import Progress, Session
from det_callbacks.compare.opening import open_reference
from det_callbacks.compare.record import REPORT_FILE
from det_callbacks.errors import (
    DivergenceError,
    DivergenceWarning,
    NotComparableError,
    NothingComparedError,
)
from det_callbacks.report.console import count
from det_callbacks.report.fits import (
    level_words,
    no_report_line,
    print_closing_line,
    unfinished_text,
    verified_line,
    waiting_line,
)
from det_callbacks.report.html import write_report
from det_callbacks.report.verdict import verdict_of_rank
from det_callbacks.runs.evidence import NondeterministicOp, Row
from det_callbacks.runs.files import stream_path
from det_callbacks.runs.metrics import Reading
from det_callbacks.runs.peers import ALONE, END_OF_FIT, Peers
from det_callbacks.runs.selection import Selection
from det_callbacks.runs.steps import Expectation, StepTrace
from det_callbacks.runs.store import Run
from det_callbacks.tensors.copies import TENSOR_BUDGET_MIB, TensorBudget
from det_callbacks.tensors.files import KEPT, SavedStep, StepWriter
from det_callbacks.tensors.keep import Keeper
from det_callbacks.tensors.replay import OpReplay, Replay
from det_callbacks.verdict import Verdict
from det_callbacks.verification import Verification, free_folder, write_verdict


class Verifying(Session):
    """The fits of one callback, compared with a reference.

    Args:
        reference: folder of the reference.
        current: folder for the verdict and the diverging steps; None is a new one below ``root``.
        steps: "all" or "common".
        on_divergence: "raise", "collect" or "warn".
        asked: what this run was told to select, to replay and to keep: all else is as in the reference.
        budget_mib: what one step may keep.
        peers: the processes that verify together.
    """

    def __init__(
        self,
        reference: Path,
        current: Path | None,
        *,
        steps: Literal["all", "common"],
        on_divergence: Literal["raise", "collect", "warn"],
        asked: Mapping[str, Any],
        budget_mib: float = TENSOR_BUDGET_MIB,
        peers: Peers = ALONE,
    ) -> None:
        super().__init__(peers)
        self._asked = asked
        self._budget_mib = budget_mib
        self.replay = Replay()
        self.path = reference
        self._current = current
        self._steps = steps
        self._on_divergence = on_divergence
        self._selection = Selection()
        self._verification: Verification | None = None
        self._segment = -1
        self._call: str | None = None
        self._all_calls: list[str] = []

    @override
    def prepare(self, selection: Selection, root: Callable[[], Path]) -> Selection:
        """Return the selection to trace with, which is the reference's; after the first fit began it stays.

        Raises:
            ReferenceNotFoundError, ReferenceFormatError, SelectionError, NotComparableError: see ``open_reference``.
        """
        if self._verification is not None:
            return self._selection
        try:
            _, recorded = self.peers.do(self._open, task=f"opening the reference {self.path}")
        except NotComparableError as error:
            if self.peers.rank == 0 and error.verdict is not None:
                folder = self._current or free_folder(root())
                folder.mkdir(parents=True, exist_ok=True)
                write_verdict(folder, replace(error.verdict, current=str(folder)))
            raise
        return recorded

    def _open(self) -> tuple[Run, Selection]:
        return open_reference(self.path, self._asked, steps=self._steps, peers=self.peers)

    @override
    def begin_fit(
        self,
        manifest: Mapping[str, Any],
        selection: Selection,
        *,
        root: Path,
        is_resumed: bool = False,
        call: str | None = None,
    ) -> None:
        go_on(self)
        self.verdict, self._call = None, call
        if self._verification is None:
            self._selection = selection
            run, _ = self.peers.do(self._open, task=f"opening the reference {self.path}")
            if patterns := run.manifest.replay:
                self.exchange = OpReplay(patterns, self.replay)
            # by rank 0: the others might look when it has made its own already
            current = self.peers.agree(lambda: str(self._current or free_folder(root)), task="choosing a folder")[0]
            self._verification = Verification(
                run, Path(current), manifest=manifest, peers=self.peers, steps=self._steps
            )
            self._begin_keeping(self._verification)
        if call is not None:
            self._verification.withdraw_verdict()
            return
        self._segment += 1
        self._calls.clear()
        if self.keeper is not None and self._segment:
            stream = stream_path(self._verification.current, self.peers.rank, 0, self._segment)
            self.keeper.writer.start_segment(stream, self._segment)
        self._verification.begin_fit(self._segment, is_resumed=is_resumed, is_every_step=selection.is_every_step)

    def _begin_keeping(self, verification: Verification) -> None:
        if patterns := verification.reference.manifest.keep_tensors:
            writer = StepWriter(
                stream_path(verification.current, verification.rank, 0, 0),
                KEPT,
                run_id=verification.run_id,
                rank=verification.rank,
            )
            self.keeper = Keeper(patterns, writer, TensorBudget(self._budget_mib))
            verification.keep_tensors = self.keeper.write

    @override
    def expectation(self, step: int, digest_state: Callable[[], Mapping[str, int]]) -> Expectation | None:
        verification = self._running()
        if verification.is_resuming:
            verification.compare_state(step, digest_state)
        expectation = verification.expectation(step)
        saved = None
        if expectation is not None:
            run, rank = verification.reference, verification.rank
            saved = SavedStep.of(run, rank=rank, segment=self._segment, step=step)
        self.replay.begin(saved)
        if self.keeper is not None:
            self.keeper.begin(is_wanted=expectation is not None and self._has_kept(step))
        return expectation

    def _has_kept(self, step: int) -> bool:
        """Return whether the reference kept tensors of a step that it has."""
        run = self._running().reference
        return SavedStep.of(run, rank=self.peers.rank, segment=self._segment, step=step, kind=KEPT).exists

    @override
    def add(self, trace: StepTrace, *, step: int, epoch: int) -> bool:
        self.replay.counts.end_step()
        self.program = trace.program.id
        verification = self._running()
        differs = verification.add(trace, step=step, epoch=epoch)
        self.chain = verification.chain(step)
        return differs and self._on_divergence == "raise"

    @property
    @override
    def may_stop(self) -> bool:
        return self._on_divergence == "raise"

    @property
    @override
    def progress(self) -> Progress:
        verification = self._running()
        return Progress(
            num_steps=verification.tally.num_steps,
            num_sites=verification.tally.num_sites,
            num_differing=verification.num_differing,
            num_bytes=self.replay.counts.num_bytes,
            chain=self.chain,
        )

    @property
    @override
    def run_id(self) -> str:
        return self._running().run_id

    @override
    def put_evidence(self, rows: Sequence[Row]) -> None:
        self._running().put_evidence(rows)

    @override
    def put_metrics(self, reading: Reading) -> bool:
        return self._running().add_metrics(reading)

    @override
    def resume_metrics(self, reading: Reading, *, is_first: bool) -> None:
        self._running().resume_metrics(reading, is_first=is_first)

    @override
    def count_call(self, call: str) -> None:
        super().count_call(call)
        self._all_calls.append(call)

    @override
    def put_nondeterministic_ops(self, ops: Sequence[NondeterministicOp]) -> None:
        self._running().put_nondeterministic_ops(ops)

    @override
    def end_fit(self, *, is_resumed: bool, is_early: bool = False) -> None:
        """Write the verdict, print the closing line, and raise unless the fits so far match.

        Raises:
            DivergenceError, NotComparableError: unless ``on_divergence`` is "warn", which warns.
            NothingComparedError: no step was compared.
        """
        verification = self._running()
        verification.set_replayed(self.replay.counts.to_dict())
        if is_resumed and not is_early and not verification.has_steps:
            verification.close(complete=False)
            raise NothingComparedError(
                "The checkpoint is of a training that was finished: no step was left, so nothing was compared with "
                f"{self.path}. Verify from an earlier one, or from the start."
            )
        if not is_early and self._call is None:
            verification.end_fit()
        missing = ["fit"] * (verification.num_segments - self._segment - 1)
        missing += self.peers.agree(lambda: [*verification.pending_calls], task=END_OF_FIT)[0]
        is_pending = bool(missing) and not is_early and self._steps == "all"
        verdict = verification.finish(is_pending=is_pending, is_early=is_early)
        level = level_words(self._selection.level, self._selection.compiled, verdict.coverage.opaque_regions)
        if is_pending and not verification.differs_anywhere:
            ended = ["fit"] * (self._segment + 1) + self._all_calls
            stages, num_ended = [*ended, *missing], len(ended)
            self._say(waiting_line(verdict, stages=stages, num_ended=num_ended, level=level))
            error = DivergenceError(unfinished_text(verdict, stages=stages, num_ended=num_ended), verdict)
            write = partial(self._write_unfinished, verdict)
            wait(self, Waiting(error=error, is_fatal=self._on_divergence != "warn", write=write))
            return
        self.verdict = verdict
        report = _report(verification, verdict) if verification.differs_anywhere else None
        self._say(verified_line(verdict, level=level, report=report))
        if verdict.verdict == "match":
            return
        text = verdict_of_rank(verdict, rank=self.peers.rank, world_size=self.peers.world_size)
        if self._on_divergence == "warn":
            pl.utilities.rank_zero_warn(text, category=DivergenceWarning)
            return
        raise (NotComparableError if verdict.verdict == "not_comparable" else DivergenceError)(text, verdict)

    @override
    def stop(self, reason: str) -> None:
        """Close the files: an exception ended the fit. What was found stays found, on each rank by itself."""
        verification = self._running()
        self.verdict = verification.stop(reason)
        later = f" (det-callbacks diff {self.path} {verification.current}: what all ranks found)"
        found = f"no verdict{later if self.peers.world_size > 1 else ''}"
        if self.verdict is not None:
            report = _report(verification, self.verdict)
            found = str(self.verdict.verdict) + ("" if report is None else f"; report: {report}")
        num_steps = count(verification.tally.num_steps, "step")
        rank = "" if self.peers.world_size == 1 else f" of rank {self.peers.rank}"
        self.say(f"det_callbacks: verification{rank} stopped by {reason} after {num_steps}: {found}")

    def _write_unfinished(self, verdict: Verdict) -> None:
        """Keep the verdict that fits of the reference never ran; the processes part, each at its own end."""
        verification = self._running()
        verification.write(verdict)
        _report(verification, verdict)

    def _say(self, text: str) -> None:
        if self.peers.rank == 0:
            self.say(text)

    def _running(self) -> Verification:
        assert self._verification is not None, "a fit was begun"
        return self._verification


def _report(verification: Verification, verdict: Verdict) -> Path | None:
    """Write ``report.html`` beside the verdict, by rank 0; return where it is, None where it could not be written.

    Args:
        verification: that found the divergence.
        verdict: on it.
    """
    if verification.rank:
        return None
    try:
        path = verification.current / REPORT_FILE
        return write_report(path, verdict, reference=verification.reference.path, current=verification.current)
    except Exception as error:  # the divergence is raised next: no fault of a page may come before it
        print_closing_line(no_report_line(error))
        return None
