"""Records fits (``mode="record"``)."""

import operator
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import reduce
from typing import Any

from typing_extensions import override

from det_callbacks.errors import CoverageWarning, NothingComparedError, WriteError, divergence_error
from det_callbacks.report import closing_lines
from det_callbacks.report.findings import findings_line
from det_callbacks.report.verdict import disagreement_text
from det_callbacks.runs.metrics import Reading
from det_callbacks.runs.peers import END_OF_FIT, Peers
from det_callbacks.runs.place import DISAGREEMENT
from det_callbacks.runs.steps import StepTrace
from det_callbacks.runs.writer import RunWriter
from det_callbacks.text import count
from det_callbacks.training.arguments import RunArguments
from det_callbacks.training.session import FIT, TracedSession
from det_callbacks.verify.verification import Verification


class Recording(TracedSession):
    """Writes the fits of one run as a reference.

    A resumed fit continues the existing run, and compares the steps that it repeats.
    """

    run: RunWriter

    def __init__(self, arguments: RunArguments, peers: Peers) -> None:
        super().__init__(arguments, peers)
        self._num_metrics = self._num_before_call = 0
        self._regions: set[str] = set()
        self._is_resuming = self._has_diverged = False

    @override
    def begin(self, *, is_resumed: bool = False, call: str | None = None) -> None:
        has_fit, overwrite = FIT in self.stages, self.arguments.overwrite
        super().begin(is_resumed=is_resumed, call=call)
        self._num_before_call = self._num_metrics
        # if steps are selected, the first recorded one may come later
        self._is_resuming = is_resumed and self.arguments.selection.is_every_step
        if self.run is None:
            goes_on = is_resumed and not overwrite
            options: dict[str, Any] = {"manifest": self.manifest, "peers": self.peers}
            if goes_on and self.peers.broadcast((self.path / "run.json").exists, task=f"looking for {self.path}"):
                self.run = RunWriter.resume(self.path, **options)
                assert self.run.earlier is not None, "it is resumed"
                # the run's folder holds diverging steps until the attempt is discarded
                self.detector = Verification(self.run.earlier, self.path / DISAGREEMENT, steps="common", **options)
                for segment in range(self.run.segment + 1):
                    self.detector.begin_fit(segment, is_resumed=True, is_every_step=self._is_resuming)
            else:
                self.run = RunWriter.create(self.path, overwrite=overwrite, **options)
        elif call is None:
            self.detector = None
            if has_fit:
                self.run.start_segment()
            else:
                self.run.reopen(self.manifest)
        if call is None:
            self.may_stop = self.detector is not None
            self._begin_saving(self.run.stream, self.run.segment, self.run.manifest, is_recording=True)

    @override
    def _add(self, trace: StepTrace, *, step: int, epoch: int) -> bool:
        run, earlier = self.run, self.detector
        if self._is_resuming:
            self._is_resuming = False
            run.note_resumed(step)
        if earlier is not None and earlier.holds(step):
            # ranks continue until they stop together
            differs = earlier.add(trace, step=step, epoch=epoch)
            self.replay.end_step(differs=differs)
            self._has_diverged |= differs
            has_saved = self.replay.saved is not None and self.replay.saved.exists
            # after a new step the chain continues over all steps
            if self._has_diverged or not self.num_steps or has_saved:
                self.chain = earlier.chain(step)
                return self._has_diverged
        else:
            self.replay.write(step)  # before the step itself
            self.num_steps += 1
            self.num_sites += len(trace.digests)
            self._regions.update(trace.program.opaque_regions)
        run.put_program(trace.program)
        if not run.has_layout(trace.layout_id):
            run.put_layout(trace.layout)
        run.put_values(step, trace.values)
        if self.keeper is not None:
            self.keeper.write(trace, step)  # likewise
        self.chain = run.append(step, epoch, trace.program.id, trace.layout_id, trace.digests)
        return False

    @override
    def put_metrics(self, reading: Reading) -> bool:
        earlier = self.detector if self.call is None else None
        # else an attempt that was interrupted there
        if earlier is None or not earlier.goes_beyond(reading.step):
            self._num_metrics += len(reading.metrics)
            self.run.put_reading(reading)
        differs = earlier is not None and earlier.add_metrics(reading)
        self._has_diverged |= differs
        return differs

    @override
    def resume_metrics(self, reading: Reading, *, is_first: bool) -> None:
        self.run.put_reading(reading)

    @override
    def end(self, *, is_early: bool = False) -> None:
        if self.call is not None:
            self._end_call(self.call)
            return
        earlier, selection = self.detector, self.arguments.selection
        ended = self.peers.gather(self._at_end, task=END_OF_FIT)
        if any(end["has_diverged"] for end in ended) and earlier is not None:
            self._take_back(earlier, ended)
        self._end_comparison()
        if not all(end["num_steps"] or end["num_agreed"] for end in ended):
            self._discard()
            selected = "" if self.is_resumed else selection.shown_steps
            raise NothingComparedError(closing_lines.nothing_recorded_text(path=self.path, selected=selected))
        self.run.close(complete=True)
        self._print_once(
            closing_lines.recorded_line(
                path=self._place,
                **{name: sum(end[name] for end in ended) for name in ("num_steps", "num_sites", "num_bytes")},
                level=closing_lines.level_words(selection.level, selection.compiled, self._regions),
                saved=self.replay.to_dict(),
                num_agreed=None if earlier is None else sum(end["num_agreed"] for end in ended),
                num_ranks=self.peers.world_size,
                kept=None if self.keeper is None else reduce(operator.add, (end["kept"] for end in ended)),
                num_metrics=self._num_metrics,
            )
        )
        if self.peers.rank == 0 and (text := findings_line(self.run.path)):
            self.print_line(text)
        for done, found in (("saved for the replay", self.op_replay), ("kept for the keep_tensors", self.keeper)):
            if found is not None and found.unused:
                unused = ", ".join(map(repr, found.unused))
                text = (
                    f"Nothing was {done} patterns {unused}, because no op that they match ran (inputs and outputs of "
                )
                text += "compiled regions are not ops). det-callbacks show RUN --step N lists the ops that ran."
                self._warn_once(text, CoverageWarning)

    def _end_call(self, call: str) -> None:
        before, now = self.peers.broadcast(lambda: [self._num_before_call, self._num_metrics], task=END_OF_FIT)
        if FIT not in self.stages:
            if now:
                self.run.close(complete=True)
            else:
                self._discard()
            if now == before:
                raise NothingComparedError(closing_lines.no_metrics_text(call, reference=self.path))
        self._print_once(closing_lines.recorded_call_line(call, path=self._place, num_metrics=now - before))

    @property
    def _place(self) -> str:
        place = self.run.path
        return str(place) if place == self.path else f"{place}; {self.path} is unchanged"

    def _at_end(self) -> dict[str, Any]:
        try:
            self.run.flush_evidence()  # rank 0 reads it for findings
        except WriteError:
            self.run.close(complete=False)
            raise
        return {
            "num_steps": self.num_steps,
            "num_sites": self.num_sites,
            "num_bytes": self.run.bytes_written,
            "kept": None if self.keeper is None else self.keeper.counts,
            "num_agreed": 0 if (one := self.detector) is None else one.tally.num_steps - (one.tally.num_differing > 0),
            "has_diverged": self._has_diverged,
        }

    def _take_back(self, earlier: Verification, ended: Sequence[Mapping[str, Any]]) -> None:
        self._discard()
        verdict = self.verdict = replace(earlier.finish(is_early=True), current=str(self.path))
        self._end_comparison()
        first = next(end for end in ended if end["has_diverged"])
        counts = {"num_agreed": first["num_agreed"], "num_dropped": first["num_steps"]}
        text = disagreement_text(verdict, path=self.path, **counts, rank=self.peers.rank)
        raise divergence_error(text, verdict)

    def _end_comparison(self) -> None:
        if self.detector is not None:
            self.detector.close(complete=False)
            if self.peers.rank == 0:
                shutil.rmtree(self.detector.current, ignore_errors=True)

    def _discard(self) -> None:
        """Remove this attempt; another fit starts a new session."""
        for step_writer in self._step_writers:
            step_writer.delete()
        self.run.discard()
        self.is_over = True

    @override
    def stop(self, reason: str) -> None:
        self._end_comparison()
        if self.call is not None and FIT in self.stages:
            what = f"so {self.path} records nothing of it"
            self.print_line(f"det_callbacks: {self.call} was stopped by {reason}, {what}")
            return
        # only all ranks together may discard a resumed attempt
        may_discard = self.detector is None or self.peers.world_size == 1
        if may_discard and not self.num_steps and not (self.call and self._num_metrics):
            self._discard()
            what = f"before its first new step: {self.path} is unchanged"
        else:
            self.run.close(complete=False)
            what = f"after {count(self.num_steps, 'step')}: incomplete, in {self._place}"
        self.print_line(f"det_callbacks: recording{self._of_rank} stopped by {reason} {what}")
