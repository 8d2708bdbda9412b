"""What a fit is recorded into."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lightning.pytorch.utilities import rank_zero_warn

from det_callbacks.errors import CoverageWarning, NothingComparedError
from det_callbacks.replay import OpSaver, ReplayChoice, SavedTensors
from det_callbacks.report import count, print_closing_line, recorded_line
from det_callbacks.trace.selection import Selection
from det_callbacks.trace.steps import StepTrace
from det_callbacks.trace.writer import RunWriter
from det_callbacks.verdict import Verdict


class Recording:
    """The fits of one callback, written as a reference.

    Args:
        path: folder of the reference.
        overwrite: replace a run that is there.
        replay: whose outputs are saved.

    Attributes:
        saver: where the tensors of a step are kept; None before a fit.
        saved: nothing: what a reference kept of a step.
        exchange: what the recorder hands outputs to; None when none are saved, and before a fit.
    """

    def __init__(self, path: Path, *, overwrite: bool, replay: ReplayChoice) -> None:
        self._path = path
        self._replay = replay
        self.saver: SavedTensors | None = None
        self.saved = None
        self.exchange: OpSaver | None = None
        self._overwrite = overwrite
        self._writer: RunWriter | None = None
        self._selection = Selection()
        self._num_steps = self._num_sites = 0
        self.chain: int | None = None
        """After the last step that was recorded; None before the first."""
        self.program: int | None = None
        """Id of the program of that step."""
        self.verdict: Verdict | None = None
        """There is none of a recording."""

    def begin_fit(self, manifest: Mapping[str, Any], selection: Selection, *, is_resumed: bool) -> None:
        """Open the run for the steps of a fit; a resumed fit goes on with the run that is there.

        Raises:
            RunExistsError: there is one, and it is not gone on with.
        """
        self._selection = selection
        if self._writer is not None:
            self._writer.start_segment()
        elif is_resumed and (self._path / "run.json").exists() and not self._overwrite:
            self._writer = RunWriter.resume(self._path, manifest=manifest)
        else:
            self._writer = RunWriter.create(self._path, manifest=manifest, overwrite=self._overwrite)
        if self.saver is not None:
            self.saver.start_segment(self._writer.stream, self._writer.segment)
            return
        self.saver = SavedTensors(
            self._writer.stream,
            run_id=self._writer.run_id,
            segment=self._writer.segment,
            budget_mib=self._replay.budget_mib,
            total_budget_mib=self._replay.total_mib,
        )
        if self._replay.patterns:
            self.exchange = OpSaver(self._replay.patterns, self.saver)

    @property
    def run_id(self) -> str:
        """Random identity of the run."""
        return self._running().run_id

    def expectation(self, step: int) -> None:
        """Expect nothing; a step begins."""
        if self.saver is not None:
            self.saver.clear()
        if self.exchange is not None:
            self.exchange.begin_step()

    def add(self, trace: StepTrace, *, step: int, epoch: int) -> bool:
        """Write a step; return False, as nothing can differ."""
        writer = self._running()
        writer.put_program(trace.program)
        if not writer.has_layout(trace.layout_id):
            writer.put_layout(trace.layout)
        assert self.saver is not None, "a fit was begun"
        self.saver.write(step)  # first: a step that is there has what was saved of it
        if self.exchange is not None:
            self.exchange.counts.end_step()
        self.chain = writer.append(step, epoch, trace.program.id, trace.layout_id, trace.digests)
        self.program = trace.program.id
        self._num_steps += 1
        self._num_sites += len(trace.digests)
        return False

    def put_nondeterministic_ops(self, ops: Sequence[Mapping[str, Any]]) -> None:
        """Keep the list of ops without a deterministic implementation that were called so far."""
        self._running().put_nondeterministic_ops(ops)

    def end_fit(self, *, is_resumed: bool, is_early: bool = False, observed: Mapping[str, Any] | None = None) -> None:
        """Close the run's files and print the closing line.

        Args:
            is_resumed: as in ``Verifying``; it makes no difference here.
            is_early: likewise.
            observed: what observations saved, as ``ReplayCounts`` has it.

        Raises:
            NothingComparedError: no step was recorded.
        """
        writer = self._running()
        writer.close(complete=self._num_steps > 0)
        if not self._num_steps:
            raise NothingComparedError(
                f"Nothing was recorded in {self._path}: the fit had no step that every_n_steps="
                f"{self._selection.every_n_steps} selects."
            )
        print_closing_line(
            recorded_line(
                path=self._path,
                num_steps=self._num_steps,
                num_sites=self._num_sites,
                num_bytes=writer.bytes_written,
                level=self._selection.level,
                saved={**(observed or {}), **(self.exchange.counts.to_dict() if self.exchange else {})},
            )
        )
        if self.exchange is not None and self.exchange.unused:
            rank_zero_warn(
                f"Nothing was saved for the replay patterns {', '.join(map(repr, self.exchange.unused))}: no op that "
                "they mean ran. det-callbacks show --ops names those that did.",
                category=CoverageWarning,
            )

    def stop(self, reason: str) -> None:
        """Leave the run as incomplete: an exception ended the fit."""
        self._running().close(complete=False)
        print_closing_line(
            f"det_callbacks: recording stopped by {reason} after {count(self._num_steps, 'step')}: "
            f"{self._path} is incomplete"
        )

    def _running(self) -> RunWriter:
        assert self._writer is not None, "a fit was begun"
        return self._writer
