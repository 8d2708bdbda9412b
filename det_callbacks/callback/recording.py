"""What a fit is recorded into."""

import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import reduce
from typing import Any

from lightning.pytorch.utilities import rank_zero_warn
from typing_extensions import override

from det_callbacks.callback.arguments import CallbackArguments
from det_callbacks.callback.session import FIT, Session, Stage
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
from det_callbacks.runs.evidence import Row
from det_callbacks.runs.metrics import Reading
from det_callbacks.runs.peers import END_OF_FIT, Peers
from det_callbacks.runs.steps import Expectation, StepTrace
from det_callbacks.runs.store import Run
from det_callbacks.runs.writer import RunWriter
from det_callbacks.tensors.copies import TensorBudget
from det_callbacks.tensors.files import KEPT, REPLAY, StepWriter
from det_callbacks.tensors.keep import Keeper
from det_callbacks.tensors.kept import KeptCounts
from det_callbacks.tensors.replay import OpReplay, Replay
from det_callbacks.verification import Verification

DISAGREEMENT = ".disagreement"
"""Folder in a run where a resumed attempt puts the steps that disagree with it, for the judge; it is removed."""


class Recording(Session):
    """The fits of one callback, written as a reference.

    A resumed fit goes on with the run that is there. Steps that it runs again are compared, not written a second time:
    they are in the run, and so is what was saved of them for replay. Its ``verdict`` is of a resumed fit that disagreed
    with the run; None of every other one.
    """

    run: RunWriter | None

    def __init__(self, arguments: CallbackArguments, peers: Peers) -> None:
        super().__init__(arguments, peers)
        self._step_writers: list[StepWriter] = []
        self._num_metrics = self._num_before_call = 0
        self._regions: set[str] = set()
        self._is_resumed = self._has_diverged = False

    @override
    def begin(self, stage: Stage) -> None:
        """Open the run; a resumed fit goes on with the run that is there.

        Raises:
            RunExistsError: there is one, and it is not gone on with.
            SelectionError: it is gone on with, and was recorded with other patterns to replay or to keep.
            ReferenceFormatError: it is gone on with, and is damaged or was recorded with another selection.
        """
        has_fit = FIT in self.stages
        super().begin(stage)
        self._num_before_call = self._num_metrics
        if stage.call is not None:
            self.run = self.run or self._create()
            return
        # where steps are left out, the first one that is recorded need not be the first one after the checkpoint
        self._is_resumed = stage.is_resumed and stage.selection.is_every_step
        if self.run is not None:
            self.detector = None
            if has_fit:
                self.run.start_segment()
            else:
                self.run.reopen(stage.manifest)
        elif stage.is_resumed and not self.arguments.overwrite and self._is_there():
            earlier = self.peers.run_on_all(self._open_earlier, task=f"opening the run {self.path}")
            self.run = RunWriter.resume(self.path, manifest=stage.manifest, peers=self.peers)
            self.detector = Verification(
                earlier, self.path / DISAGREEMENT, manifest=stage.manifest, peers=self.peers, steps="common"
            )
            for segment in range(self.run.segment + 1):
                self.detector.begin_fit(segment, is_resumed=True, is_every_step=self._is_resumed)
        else:
            self.run = self._create()
        self.may_stop = self.detector is not None
        self._begin_saving(self.run)

    def _begin_saving(self, writer: RunWriter) -> None:
        if self._step_writers:
            for step_writer in self._step_writers:
                step_writer.start_segment(writer.stream, writer.segment)
            return
        place: dict[str, Any] = {"run_id": writer.manifest.run_id, "rank": self.peers.rank, "segment": writer.segment}
        replayed, kept = self._step_writers = [StepWriter(writer.stream, kind, **place) for kind in (REPLAY, KEPT)]
        budget = TensorBudget(self.arguments.tensor_budget_mib)
        self.replay = Replay(replayed, budget)
        if patterns := self.arguments.replay:
            self.op_replay = OpReplay(patterns, self.replay)
        if patterns := self.arguments.keep_tensors:
            self.keeper = Keeper(patterns, kept, budget)

    def _is_there(self) -> bool:
        """Return whether rank 0 sees a run to go on with; the others see its folder."""
        return self.peers.broadcast((self.path / "run.json").exists, task=f"looking for {self.path}")

    def _open_earlier(self) -> Run:
        """Open this rank's part of the run that is gone on with; one with other patterns to save is refused."""
        earlier = Run.open(self.path, ranks=(self.peers.rank,))
        for name in ("replay", "keep_tensors"):
            recorded, asked = list(getattr(earlier.manifest, name)), list(self.stage.manifest.get(name, ()))
            if set(recorded) != set(asked):
                raise SelectionError(
                    f"{self.path} was recorded with {name}={recorded}, and this attempt asks for {asked}. "
                    "Nothing was changed. Resume with the same patterns, or record to another folder."
                )
        return earlier

    def _create(self) -> RunWriter:
        overwrite = self.arguments.overwrite
        return RunWriter.create(self.path, manifest=self.stage.manifest, peers=self.peers, overwrite=overwrite)

    @override
    def expectation(self, step: int, digest_state: Callable[[], Mapping[str, int]]) -> Expectation | None:
        if self._is_resumed:
            self._is_resumed = False
            self._running.note_resumed(step)
        return super().expectation(step, digest_state)

    @override
    def add(self, trace: StepTrace, *, step: int, epoch: int) -> bool:
        writer, earlier = self._running, self.detector
        if earlier is not None and earlier.holds(step):
            # once is enough: several ranks go on until they stop together
            differs = earlier.add(trace, step=step, epoch=epoch)
            self.replay.end_step(differs=differs)
            self._has_diverged |= differs
            has_saved = self.replay.saved is not None and self.replay.saved.exists
            # where a new step came before, the chain goes on over all steps; saved tensors are where they were saved
            if self._has_diverged or not self.num_steps or has_saved:
                self.chain = earlier.chain(step)
                return self._has_diverged
        else:
            self.replay.write(step)  # first: a step that is there has what was saved of it
            self.num_steps += 1
            self.num_sites += len(trace.digests)
            self._regions.update(trace.program.opaque_regions)
        writer.put_program(trace.program)
        if not writer.has_layout(trace.layout_id):
            writer.put_layout(trace.layout)
        writer.put_values(step, trace.values)
        if self.keeper is not None:
            self.keeper.write(trace, step)  # first, likewise
        self.chain = writer.append(step, epoch, trace.program.id, trace.layout_id, trace.digests)
        return False

    @override
    def put_evidence(self, rows: Sequence[Row]) -> None:
        if self.detector is not None:
            self.detector.put_evidence(rows)
        super().put_evidence(rows)

    @override
    def put_metrics(self, reading: Reading) -> bool:
        self._num_metrics += len(reading.metrics)
        self._running.put_reading(reading)
        return False

    @override
    def resume_metrics(self, reading: Reading, *, is_first: bool) -> None:
        self._running.put_reading(reading)

    @override
    def end(self, *, is_early: bool = False) -> None:
        """Close the run's files and print the closing line.

        Raises:
            DivergenceError, NotComparableError: a step that was run again is not what the run holds. The attempt is
                taken back: the run is what it was before.
            NothingComparedError: no step was recorded.
        """
        if self.stage.call is not None:
            self._end_call(self.stage.call)
            return
        writer, earlier = self._running, self.detector
        ended = self.peers.gather(self._at_end, task=END_OF_FIT)
        if any(end["has_diverged"] for end in ended) and earlier is not None:
            self._take_back(earlier, ended)
        self._end_comparison()
        if not all(end["num_steps"] or end["num_agreed"] for end in ended):
            self._discard()
            selected = "" if self.stage.is_resumed else self.stage.selection.shown_steps
            raise NothingComparedError(nothing_recorded_text(path=self.path, selected=selected))
        writer.close(complete=True)
        selection, kept = self.stage.selection, None
        if self.keeper is not None:
            kept = reduce(KeptCounts.with_rank, (KeptCounts(**end["kept"]) for end in ended))
        self._print_once(
            recorded_line(
                path=self._place,
                **{name: sum(end[name] for end in ended) for name in ("num_steps", "num_sites", "num_bytes")},
                level=level_words(selection.level, selection.compiled, self._regions),
                saved=self.replay.counts.to_dict(),
                num_agreed=None if earlier is None else sum(end["num_agreed"] for end in ended),
                num_ranks=self.peers.world_size,
                kept=kept,
                num_metrics=self._num_metrics,
            )
        )
        for done, found in (("saved for the replay", self.op_replay), ("kept for the keep_tensors", self.keeper)):
            if found is not None and found.unused:
                rank_zero_warn(
                    f"Nothing was {done} patterns {', '.join(map(repr, found.unused))}: no op that they mean ran "
                    "(the ends of compiled regions are none). det-callbacks show RUN --step N names those that did.",
                    category=CoverageWarning,
                )

    def _end_call(self, call: str) -> None:
        """Say what was recorded of a test or validation outside of a fit."""
        numbers = self.peers.broadcast(lambda: [self._num_before_call, self._num_metrics], task=END_OF_FIT)
        num_new = numbers[1] - numbers[0]
        if FIT not in self.stages:
            if numbers[1]:
                self._running.close(complete=True)
            else:
                self._discard()
            if not num_new:
                raise NothingComparedError(no_metrics_text(call, reference=self.path))
        self._print_once(recorded_call_line(call, path=self._place, num_metrics=num_new))

    @property
    def _place(self) -> str:
        """Where the recording lies; one that is not whole, or has no step, does not replace the run that is there."""
        place = self._running.path
        return str(place) if place == self.path else f"{place}; {self.path} is as it was before"

    def _at_end(self) -> dict[str, Any]:
        """Return what the ranks tell each other at the end of a fit."""
        return {
            "num_steps": self.num_steps,
            "num_sites": self.num_sites,
            "num_bytes": self._running.bytes_written,
            "kept": (KeptCounts() if self.keeper is None else self.keeper.counts).to_dict(),
            "num_agreed": 0 if self.detector is None else self.detector.tally.num_steps,
            "has_diverged": self._has_diverged,
        }

    def _take_back(self, earlier: Verification, ended: Sequence[Mapping[str, Any]]) -> None:
        """Leave the run as it was before this attempt, and raise what differs."""
        self._discard()
        verdict = self.verdict = replace(earlier.finish(is_early=True), current=str(self.path))
        self._end_comparison()
        first = next(end for end in ended if end["has_diverged"])
        counts = {"num_agreed": first["num_agreed"] - 1, "num_dropped": first["num_steps"]}
        text = disagreement_text(verdict, path=self.path, **counts, rank=self.peers.rank)
        raise (NotComparableError if verdict.verdict == "not_comparable" else DivergenceError)(text, verdict)

    def _end_comparison(self) -> None:
        """Leave nothing of the comparison with the steps that were there."""
        if self.detector is not None:
            self.detector.close(complete=False)
            if self.peers.rank == 0:
                shutil.rmtree(self.detector.current, ignore_errors=True)

    def _discard(self) -> None:
        """Take the attempt back; another fit goes on with the run anew."""
        for step_writer in self._step_writers:
            step_writer.delete()
        self._running.discard()
        self.is_over = True

    @override
    def stop(self, reason: str) -> None:
        """Leave the run as incomplete: an exception ended the fit. One that only repeated steps leaves it as it was."""
        self._end_comparison()
        line, path = f"det_callbacks: recording{self._of_rank()} stopped by {reason} ", self._running.path
        if self.stage.call is not None and FIT in self.stages:
            line = (
                f"det_callbacks: {self.stage.call} was stopped by {reason}, so nothing of it is recorded in {self.path}"
            )
        elif self.detector is not None and not self.num_steps and self.peers.world_size == 1:
            # all ranks take an attempt back together, and the others may not be here
            num_agreed = self.detector.tally.num_steps
            self._discard()
            line += f"after {count(num_agreed, 'step')} that {self.path} held already: it is as it was before"
        elif self.detector is None and not self.num_steps and not (self.stage.call and self._num_metrics):
            self._discard()
            line += f"before its first step: nothing is recorded in {self.path}"
        else:
            self._running.close(complete=False)
            line += f"after {count(self.num_steps, 'step')}: {path} is incomplete"
            line += "" if path == self.path else f", and {self.path} is as it was before"
        self.print_line(line)

    @property
    def _running(self) -> RunWriter:
        assert self.run is not None, "a fit was begun"
        return self.run
