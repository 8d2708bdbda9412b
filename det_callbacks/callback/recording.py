"""What a fit is recorded into."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial, reduce
from pathlib import Path
from typing import Any

from lightning.pytorch.utilities import rank_zero_warn
from typing_extensions import override

from det_callbacks.callback.agreement import Agreement
from det_callbacks.callback.session import Progress, Session
from det_callbacks.compare.record import Tally
from det_callbacks.errors import (
    CoverageWarning,
    DivergenceError,
    NotComparableError,
    NothingComparedError,
    SelectionError,
)
from det_callbacks.report.console import count
from det_callbacks.report.fits import (
    level_words,
    no_metrics_text,
    nothing_recorded_text,
    recorded_call_line,
    recorded_line,
)
from det_callbacks.report.verdict import disagreement_text
from det_callbacks.runs.evidence import NondeterministicOp, Row
from det_callbacks.runs.metrics import Reading
from det_callbacks.runs.peers import ALONE, END_OF_FIT, Peers
from det_callbacks.runs.program import Program
from det_callbacks.runs.selection import Selection
from det_callbacks.runs.steps import Expectation, StepTrace
from det_callbacks.runs.store import Run
from det_callbacks.runs.writer import RunWriter
from det_callbacks.tensors.copies import TensorBudget
from det_callbacks.tensors.files import KEPT, REPLAY, SavedStep, StepWriter
from det_callbacks.tensors.keep import Keeper
from det_callbacks.tensors.kept import KeptCounts
from det_callbacks.tensors.replay import OpReplay, Replay


class Recording(Session):
    """The fits of one callback, written as a reference.

    A resumed fit goes on with the run that is there. Steps that it runs again are compared, not written a second time:
    they are in the run, and so is what was saved of them for replay.

    Args:
        path: folder of the reference.
        overwrite: replace a run that is there.
        replay: patterns of ops whose outputs are saved.
        keep: patterns of ops whose tensors are kept.
        budget_mib: what one step may save, for replay and to keep together.
        peers: the processes that record together.

    Attributes:
        verdict: of a resumed fit that disagreed with the run; None of every other one.
    """

    def __init__(
        self,
        path: Path,
        *,
        overwrite: bool,
        replay: Sequence[str],
        keep: Sequence[str],
        budget_mib: float,
        peers: Peers = ALONE,
    ) -> None:
        super().__init__(peers)
        self.path = path
        self._patterns = replay, keep
        self._step_writers: list[StepWriter] = []
        self._budget = TensorBudget(budget_mib)
        self._overwrite = overwrite
        self._writer: RunWriter | None = None
        self._agreement: Agreement | None = None
        self._selection = Selection()
        self._num_steps = self._num_sites = self._num_metrics = 0
        self._regions: set[str] = set()
        self._call: str | None = None
        self._num_before_call = 0
        self._has_fit = False
        self._is_resumed = self._has_diverged = False

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
        """Open the run for the steps of a fit; a resumed fit goes on with the run that is there.

        Raises:
            RunExistsError: there is one, and it is not gone on with.
            SelectionError: it is gone on with, and was recorded with other patterns to replay or to keep.
            ReferenceFormatError: it is gone on with, and is damaged or was recorded with another selection.
        """
        self._selection = selection
        self._call, self._num_before_call = call, self._num_metrics
        if call is not None:
            self._writer = self._writer or self._create(manifest)
            return
        # where steps are left out, the first one that is recorded need not be the first one after the checkpoint
        self._is_resumed = is_resumed and selection.is_every_step
        if self._writer is not None:
            self._agreement = None
            self._calls.clear()
            (self._writer.start_segment if self._has_fit else self._writer.reopen)()
        elif is_resumed and not self._overwrite and self._is_there():
            open_run = partial(_open_earlier, self.path, manifest, rank=self.peers.rank)
            earlier = self.peers.do(open_run, task=f"opening the run {self.path}")
            self._writer = RunWriter.resume(self.path, manifest=manifest, peers=self.peers)
            self._agreement = Agreement(earlier, segment=self._writer.segment, manifest=manifest, peers=self.peers)
            if not self._is_resumed:
                self._agreement.begin()
        else:
            self._writer = self._create(manifest)
        self._has_fit = True
        if self._step_writers:
            for step_writer in self._step_writers:
                step_writer.start_segment(self._writer.stream, self._writer.segment)
            return
        self.replay = Replay(self._step_writer(self._writer, REPLAY), self._budget)
        replay, keep = self._patterns
        if replay:
            self.exchange = OpReplay(replay, self.replay)
        if keep:
            self.keeper = Keeper(keep, self._step_writer(self._writer, KEPT), self._budget)

    def _step_writer(self, writer: RunWriter, kind: str) -> StepWriter:
        place: dict[str, Any] = {"run_id": writer.run_id, "rank": self.peers.rank, "segment": writer.segment}
        self._step_writers.append(StepWriter(writer.stream, kind, **place))
        return self._step_writers[-1]

    def _is_there(self) -> bool:
        """Return whether rank 0 sees a run to go on with; the others see its folder."""
        return bool(self.peers.agree((self.path / "run.json").exists, task=f"looking for {self.path}")[0])

    def _create(self, manifest: Mapping[str, Any]) -> RunWriter:
        return RunWriter.create(self.path, manifest=manifest, peers=self.peers, overwrite=self._overwrite)

    @property
    @override
    def may_stop(self) -> bool:
        return self._agreement is not None

    @property
    @override
    def progress(self) -> Progress:
        agreed = Tally() if self._agreement is None else self._agreement.tally
        return Progress(
            num_steps=self._num_steps + agreed.num_steps,
            num_sites=self._num_sites + agreed.num_sites,
            num_differing=agreed.num_differing,
            num_bytes=self.replay.counts.num_bytes if self.replay else 0,
            chain=self.chain,
        )

    @property
    @override
    def run_id(self) -> str:
        return self._running().run_id

    @property
    @override
    def earlier_programs(self) -> tuple[Program, ...]:
        return () if self._agreement is None else self._agreement.last_programs()

    @override
    def expectation(self, step: int, digest_state: Callable[[], Mapping[str, int]]) -> Expectation | None:
        writer = self._running()
        if self._is_resumed:
            self._is_resumed = False
            writer.note_resumed(step)
            if self._agreement is not None and self._agreement.holds(step):
                self._agreement.compare_state(step, digest_state)
        saved, expectation = None, None
        if self._agreement is not None and self._agreement.holds(step):
            expectation = self._agreement.expectation(step)
            earlier = self._agreement.reference
            saved = SavedStep.of(earlier, rank=self.peers.rank, segment=writer.segment, step=step)
        assert self.replay is not None, "a fit was begun"
        self.replay.begin(saved)
        if self.keeper is not None:
            self.keeper.begin()
        return expectation

    @override
    def add(self, trace: StepTrace, *, step: int, epoch: int) -> bool:
        assert self.replay is not None, "a fit was begun"
        if self._agreement is not None and self._agreement.holds(step):
            # once is enough: several ranks go on until they stop together
            self._has_diverged |= self._agreement.add(trace, step=step, epoch=epoch)
            # where a new step came before, the chain goes on over all steps; saved tensors are where they were saved
            if self._has_diverged or not self._num_steps or self._has_saved_tensors():
                self.chain, self.program = self._agreement.chain(step), trace.program.id
                return self._has_diverged
        else:
            if self._agreement is not None:
                self._agreement.begin()
            self.replay.write(step)  # first: a step that is there has what was saved of it
            self._num_steps += 1
            self._num_sites += len(trace.digests)
            self._regions.update(trace.program.opaque_regions)
        writer = self._running()
        writer.put_program(trace.program)
        if not writer.has_layout(trace.layout_id):
            writer.put_layout(trace.layout)
        if self.keeper is not None:
            self.keeper.write(trace, step)  # first, likewise
        self.chain = writer.append(step, epoch, trace.program.id, trace.layout_id, trace.digests)
        self.program = trace.program.id
        return False

    def _has_saved_tensors(self) -> bool:
        return self.replay is not None and self.replay.saved is not None and self.replay.saved.exists

    @override
    def put_evidence(self, rows: Sequence[Row]) -> None:
        if self._agreement is not None:
            self._agreement.put_evidence(rows)
        self._running().put_evidence(rows)

    @override
    def put_metrics(self, reading: Reading) -> bool:
        self._num_metrics += len(reading.metrics)
        self._running().put_reading(reading)
        return False

    @override
    def resume_metrics(self, reading: Reading, *, is_first: bool) -> None:
        self._running().put_reading(reading)

    @override
    def put_nondeterministic_ops(self, ops: Sequence[NondeterministicOp]) -> None:
        self._running().put_nondeterministic_ops(ops)

    @override
    def end_fit(self, *, is_resumed: bool, is_early: bool = False) -> None:
        """Close the run's files and print the closing line.

        Raises:
            DivergenceError, NotComparableError: a step that was run again is not what the run holds. The attempt is
                taken back: the run is what it was before.
            NothingComparedError: no step was recorded.
        """
        if self._call is not None:
            self._end_call(self._call)
            return
        writer = self._running()
        agreement = self._agreement
        ended = self.peers.agree(self._at_end, task=END_OF_FIT)
        if any(end["has_diverged"] for end in ended) and agreement is not None:
            self._take_back(ended)
        num_agreed = sum(end["num_agreed"] for end in ended)
        is_empty = not all(end["num_steps"] or end["num_agreed"] for end in ended)
        if is_empty and agreement is not None:
            self._discard()
        writer.close(complete=not is_empty)
        if is_empty:
            selected = "" if is_resumed else self._selection.shown_steps
            raise NothingComparedError(nothing_recorded_text(path=self.path, selected=selected))
        if self.peers.rank == 0:
            self.say(
                recorded_line(
                    path=self.path,
                    num_steps=sum(end["num_steps"] for end in ended),
                    num_sites=sum(end["num_sites"] for end in ended),
                    num_bytes=sum(end["num_bytes"] for end in ended),
                    level=level_words(self._selection.level, self._selection.compiled, self._regions),
                    saved=self.replay.counts.to_dict() if self.replay else {},
                    num_agreed=None if agreement is None else num_agreed,
                    num_ranks=self.peers.world_size,
                    kept=reduce(KeptCounts.with_rank, (KeptCounts(**end["kept"]) for end in ended))
                    if self.keeper is not None
                    else None,
                    num_metrics=self._num_metrics,
                )
            )
        for done, found in (("saved for the replay", self.exchange), ("kept for the keep_tensors", self.keeper)):
            if found is not None and found.unused:
                rank_zero_warn(
                    f"Nothing was {done} patterns {', '.join(map(repr, found.unused))}: no op that they mean ran "
                    "(the ends of compiled regions are none). det-callbacks show RUN --step N names those that did.",
                    category=CoverageWarning,
                )

    def _end_call(self, call: str) -> None:
        """Say what was recorded of a test or validation outside of a fit."""
        num_metrics = self.peers.agree(lambda: self._num_metrics - self._num_before_call, task=END_OF_FIT)[0]
        if not self._has_fit:
            self._running().close(complete=self.peers.agree(lambda: self._num_metrics, task=END_OF_FIT)[0] > 0)
        if not num_metrics and not self._has_fit:
            raise NothingComparedError(no_metrics_text(call, reference=self.path))
        if self.peers.rank == 0:
            self.say(recorded_call_line(call, path=self.path, num_metrics=num_metrics))

    def _at_end(self) -> dict[str, Any]:
        """Return what the ranks tell each other at the end of a fit."""
        agreement = self._agreement
        return {
            "num_steps": self._num_steps,
            "num_sites": self._num_sites,
            "num_bytes": self._running().bytes_written,
            "kept": (KeptCounts() if self.keeper is None else self.keeper.counts).to_dict(),
            "num_agreed": 0 if agreement is None else agreement.tally.num_steps,
            "has_diverged": self._has_diverged,
        }

    def _take_back(self, ended: Sequence[Mapping[str, Any]]) -> None:
        """Leave the run as it was before this attempt, and raise what differs."""
        agreement = self._agreement
        assert agreement is not None, "what diverged was compared"
        self._discard()
        self.verdict = verdict = agreement.judge()
        first = next(end for end in ended if end["has_diverged"])
        text = disagreement_text(
            verdict,
            path=self.path,
            num_agreed=first["num_agreed"] - 1,
            num_dropped=first["num_steps"],
            rank=self.peers.rank,
        )
        raise (NotComparableError if verdict.verdict == "not_comparable" else DivergenceError)(text, verdict)

    def _discard(self) -> None:
        """Take the attempt back; another fit would go on with the run anew."""
        for step_writer in self._step_writers:
            step_writer.delete()
        self._step_writers.clear()
        self._running().discard_attempt()
        self._writer = self._agreement = self.replay = self.exchange = self.keeper = None
        self._has_diverged = False
        self._num_steps = self._num_sites = self._num_metrics = 0
        self._regions.clear()

    @override
    def stop(self, reason: str) -> None:
        """Leave the run as incomplete: an exception ended the fit. One that only repeated steps leaves it as it was."""
        if self._call is not None and self._has_fit:
            self.say(
                f"det_callbacks: {self._call} was stopped by {reason}, so nothing of it is recorded in {self.path}"
            )
            return
        # all ranks take an attempt back together, and the others may not be here
        if self._agreement is not None and not self._num_steps and self.peers.world_size == 1:
            num_agreed = self._agreement.tally.num_steps
            self._discard()
            self.say(
                f"det_callbacks: recording stopped by {reason} after {count(num_agreed, 'step')} that {self.path} "
                "held already: it is as it was before"
            )
            return
        self._running().close(complete=False)
        rank = "" if self.peers.world_size == 1 else f" of rank {self.peers.rank}"
        self.say(
            f"det_callbacks: recording{rank} stopped by {reason} after {count(self._num_steps, 'step')}: "
            f"{self.path} is incomplete"
        )

    def _running(self) -> RunWriter:
        assert self._writer is not None, "a fit was begun"
        return self._writer


def _open_earlier(path: Path, manifest: Mapping[str, Any], *, rank: int) -> Run:
    """Open a run that is gone on with, as far as it is of a rank; one with other patterns to save is refused."""
    earlier = Run.open(path, ranks=(rank,))
    for name in ("replay", "keep_tensors"):
        recorded, asked = list(getattr(earlier.manifest, name)), list(manifest.get(name, ()))
        if set(recorded) != set(asked):
            raise SelectionError(
                f"{path} was recorded with {name}={recorded}, and this attempt asks for {asked}. "
                "Nothing was changed. Resume with the same patterns, or record to another folder."
            )
    return earlier
