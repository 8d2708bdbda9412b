"""What det_callbacks does in a training step, without a Trainer: a trace written to a
folder, and a TrainingRun.
"""

from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path

import torch
from models import Workload, train_once

from det_callbacks import HashMode, TrainingRun
from det_callbacks.runs.writer import RunWriter
from det_callbacks.trace.compiled.replaced import REPLACED


class Ours:
    """Records the steps between ``start_step`` and ``end_step``, as the callback does.

    Args:
        workload: what is trained.
        optimizer: whose state is recorded.
        level: "state", "module" or "op".
        folder: where the run is written.
    """

    def __init__(
        self, workload: Workload, optimizer: torch.optim.Optimizer, level: str, folder: Path
    ) -> None:
        self.folder = folder
        self.num_steps = 0
        self._mode = HashMode(workload.model, level=level)
        self._mode.optimizers = [optimizer]
        self._writer = RunWriter.create(
            folder, manifest={"selection": {"level": level}, "environment": {}}
        )
        REPLACED.follow(self)  # as a run does from its start to its end, so that no step has to

    def start_step(self, batch: object) -> None:
        self._mode.begin(batch=batch)

    def note_loss(self, loss: torch.Tensor) -> None:
        self._mode.record_values("forward", loss, "loss")

    def end_step(self) -> None:
        trace = self._mode.finish()
        assert trace is not None, "another dispatch mode was left open in the step"
        self._writer.put_program(trace.program)
        if not self._writer.has_layout(trace.layout_id):
            self._writer.put_layout(trace.layout)
        self._writer.put_values(self.num_steps, trace.values)
        self._writer.append(self.num_steps, 0, trace.program.id, trace.layout_id, trace.digests)
        self.num_steps += 1
        if self.num_steps == 1:
            self._bytes_of_first = self._writer.bytes_written

    def close(self) -> None:
        self._bytes_of_others = self._writer.bytes_written - self._bytes_of_first
        self._writer.close(complete=True)
        REPLACED.unfollow(self)

    def figures(self) -> dict[str, float]:
        """Return what the last step consisted of, and what all but the first take on disk;
        call it when closed.
        """
        trace = self._mode.trace
        assert trace is not None
        return {
            "ops": trace.program.ops_seen,
            "sites": len(trace.digests),
            "bytes_a_step": self._bytes_of_others // max(self.num_steps - 1, 1),
            "num_programs": len(list(self.folder.glob("programs/*.parquet"))),
            "num_layouts": len(list(self.folder.glob("layouts/*.parquet"))),
            "bytes_of_programs_and_layouts": sum(
                file.stat().st_size for file in self.folder.glob("*/*.parquet")
            ),
        }


class Loop:
    """A TrainingRun, with all that it does beside what ``Ours`` does;
    ``open`` it around steps in a row.

    A process has one run at a time, and each time that it is opened the first steps find their
    program anew. So these are trained by ``open``.
    """

    def __init__(
        self, workload: Workload, optimizer: torch.optim.Optimizer, level: str, folder: Path
    ) -> None:
        self._workload, self._optimizer = workload, optimizer
        self._run = TrainingRun(
            folder, mode="record", level=level, model=workload.model, optimizers=optimizer
        )

    def open(self) -> None:
        self._run.__enter__()
        for number in range(3):
            self.train(number)

    def train(self, number: int) -> None:
        batch = self._workload.batch(number)
        with self._run.step(batch):
            train_once(self._workload, self._optimizer, batch)

    def close(self) -> None:
        with redirect_stdout(StringIO()):
            self._run.__exit__(None, None, None)
