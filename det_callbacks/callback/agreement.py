"""What a resumed recording runs again has to be what the run holds already."""

import shutil
from collections.abc import Mapping, Sequence
from typing import Any

from det_callbacks.compare.record import write_record
from det_callbacks.detector import JUDGING, StepDetector, write_step
from det_callbacks.judge import judge_runs
from det_callbacks.runs.evidence import Row
from det_callbacks.runs.peers import ALONE, Peers
from det_callbacks.runs.program import Program, StepView
from det_callbacks.runs.steps import StepTrace
from det_callbacks.runs.store import Run
from det_callbacks.runs.writer import RunWriter
from det_callbacks.verdict import Verdict

LAST_STEPS = 16
"""Steps whose programs are looked up for a resumed fit: as many as one accumulation is likely to have."""

DISAGREEMENT = ".disagreement"
"""Folder in a run where a resumed attempt puts the step that disagrees with it, for the judge; it is removed."""


class Agreement(StepDetector):
    """Compares the steps of a resumed recording with those that earlier attempts of the same fit recorded.

    Args:
        earlier: the run, opened before the attempt began.
        segment: fit that goes on.
        manifest: of the attempt: its environment tells which differences the machine may have made.
        peers: the processes that record together.
    """

    def __init__(self, earlier: Run, *, segment: int, manifest: Mapping[str, Any], peers: Peers = ALONE) -> None:
        super().__init__(earlier, peers.rank, steps="common")
        self._manifest = manifest
        self._peers = peers
        self._stored: tuple[StepView, tuple[Row, ...]] | None = None
        self._resumed_at: int | None = None
        self.begin_fit(segment, is_resumed=True)

    def begin(self) -> None:
        """Note that the attempt has run a step: what differs after it need not come from the checkpoint."""
        if not self.has_steps:
            self._fit.is_resumed = False

    def last_programs(self) -> tuple[Program, ...]:
        """Return the programs of the last steps that an earlier attempt recorded, each once."""
        run, segment = self.reference, self._fit.segment
        records = (run.rank(self.rank).read(segment, step) for step in self._fit.known[-LAST_STEPS:])
        return tuple(run.program(identity) for identity in dict.fromkeys(record.program_id for record in records))

    def store(self, trace: StepTrace, step: int, epoch: int, rows: Sequence[Row] | None) -> bool:
        """Keep the first step that differs in memory: nobody knows yet where to."""
        if rows is not None:
            view = trace.view(rank=self.rank, step=step, epoch=epoch, segment=self._fit.segment)
            self._stored = view, tuple(rows)
            return True
        return False

    def add(self, trace: StepTrace, *, step: int, epoch: int, is_whole: bool = True) -> bool:
        """Compare a step that an earlier attempt recorded; return whether it differs."""
        if self.is_resuming:
            self._resumed_at = step
        return super().add(trace, step=step, epoch=epoch, is_whole=is_whole)

    def judge(self) -> Verdict:
        """Return the judge's verdict; all ranks call it when the attempt was taken back, and one of them differs."""
        path, segment = self.reference.path, self._fit.segment
        folder = path / DISAGREEMENT
        writer = RunWriter.create(
            folder, manifest=self._manifest, peers=self._peers, purpose="verify", keeps="diverging", overwrite=True
        )
        for _ in range(segment):
            writer.start_segment()
        if self._resumed_at is not None:
            writer.note_resumed(self._resumed_at)
        self._peers.do(lambda: self._write(writer), task="storing the step that differs")

        def judge() -> dict[str, Any]:
            try:
                runs = Run.open(path, check_steps=False), Run.open(folder, check_steps=False)
                return judge_runs(*runs, names=(str(path), str(path)), is_one_run=True).to_dict()
            finally:
                shutil.rmtree(folder)

        return Verdict.from_dict(self._peers.broadcast(judge, task=JUDGING))

    def _write(self, writer: RunWriter) -> None:
        if self._stored is not None:
            view, rows = self._stored
            writer.put_evidence(rows)
            write_step(writer, view)
        writer.close(complete=True)
        write_record(writer.path, self._record(writer.run_id, None))
