"""Saving tensors while a run is recorded, within a budget."""

import math
import shutil
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from det_callbacks.errors import ReplayError, SelectionError
from det_callbacks.replay.counts import ReplayCounts
from det_callbacks.replay.files import StepPlace, replay_folder, replay_path, write_step
from det_callbacks.replay.late import Copy, LateCopy, copy_in_order, settled
from det_callbacks.replay.parts import num_bytes
from det_callbacks.trace.late_sites import LateSites

MIB = 2**20

TENSOR_BUDGET_MIB = 1024.0
"""What one step may save where nothing else is asked for."""

RESERVED_BYTES = 64 * MIB
"""What is left free on the disk: the digests of the run still have to fit."""


class SavedTensors:
    """Collects the tensors of one step after the other and writes each step as one file.

    ``keep`` copies at once, since a tensor may change later in its step; on a device that computes digests it asks for
    the copy, which has arrived when the step is settled. Pinned memory for such copies is bounded by the step's budget.
    ``write`` comes after that, and before the step is appended to its stream: a kill in between leaves a file of a step
    that is not there, which is never read, and is replaced when the step is recorded again.

    Args:
        stream: the stream that the steps are appended to; their saved tensors go beside it.
        run_id: of the run.
        rank: of this process.
        segment: fit of the run.
        budget_mib: what one step may save, in MiB.

    Example:
        >>> saved = SavedTensors(writer.stream, run_id=writer.run_id)  # doctest: +SKIP
        >>> saved.keep("forward/net:aten.mm.default#0.0", output, op="aten.mm.default")  # doctest: +SKIP
        >>> saved.write(12)  # doctest: +SKIP
    """

    def __init__(
        self,
        stream: Path,
        *,
        run_id: str,
        rank: int = 0,
        segment: int = 0,
        budget_mib: float = TENSOR_BUDGET_MIB,
    ) -> None:
        self.budget_mib = budget_mib
        self._place: dict[str, Any] = {"run_id": run_id, "rank": rank, "segment": segment}
        self._stream = stream
        self._tensors: dict[str, Copy] = {}
        self._values: dict[str, Any] = {}
        self._by_op: Counter[str] = Counter()

    @property
    def folder(self) -> Path:
        """Where the files go."""
        return replay_folder(self._stream)

    @property
    def num_bytes(self) -> int:
        """Bytes collected for the step under way."""
        return sum(self._by_op.values())

    def start_segment(self, stream: Path, segment: int) -> None:
        """Go on with the steps of another fit."""
        self.clear()
        self._stream = stream
        self._place["segment"] = segment

    def keep(
        self,
        key: str,
        tensor: Tensor,
        *,
        op: str = "",
        late: LateSites | None = None,
        counts: ReplayCounts | None = None,
    ) -> None:
        """Copy a tensor as it is now.

        Args:
            key: names it within its step, as ``phase/module:op#occurrence.output`` or
                ``observation:name#occurrence.leaf``.
            tensor: any with data.
            op: what the budget is shown by when it does not suffice; by default the key.
            late: of the step under way; None copies at once whatever the device.
            counts: where it is counted, as the op; with a copy that is late, when the step is settled.

        Raises:
            ReplayError: the budget of the step does not suffice; nothing was copied or written.
            ValueError: the step has a tensor of this key already.
            TypeError: it is no tensor with data.
        """
        if key in self._tensors or key in self._values:
            raise ValueError(f"the step has saved {key!r} already")
        needed = num_bytes(tensor)
        self._check_budget(op or key, needed)
        self._tensors[key] = copy = copy_in_order(tensor, late)
        self._by_op[op or key] += copy.num_bytes
        if counts is not None:
            note = partial(counts.add, op or key, differs=False, num_bytes=copy.num_bytes)
            if late is not None and isinstance(copy, LateCopy):
                late.ask((), lambda _: note())
            else:
                note()

    def keep_value(self, key: str, value: bool | int | float | complex | str | None) -> None:
        """Keep a plain value in the place of a tensor; numbers are kept exactly."""
        if key in self._tensors or key in self._values:
            raise ValueError(f"the step has saved {key!r} already")
        if isinstance(value, float):
            self._values[key] = {"float": value.hex()}
        elif isinstance(value, complex):
            self._values[key] = {"complex": [value.real.hex(), value.imag.hex()]}
        else:
            self._values[key] = value

    def write(self, step: int) -> int:
        """Write what was collected as the saved tensors of a step; return the bytes written, 0 if there was nothing.

        Raises:
            ReplayError: the disk is too full; nothing was written.
            TraceError: the step was not settled, see ``Recorder.finish``.
        """
        tensors, values = self._tensors, self._values
        path = replay_path(self._stream, step)
        if not tensors and not values:
            path.unlink(missing_ok=True)  # a step that was recorded before, and saved something then
            return 0
        whole = {key: settled(copy) for key, copy in tensors.items()}
        needed = self.num_bytes
        free = shutil.disk_usage(self._stream.parent).free
        if free < needed + RESERVED_BYTES:
            raise ReplayError(
                f"Step {step} would save {_mib(needed)} to {path.parent}, and the disk has {_mib(free)} free "
                f"({_mib(RESERVED_BYTES)} are kept for the rest of the run). Nothing of this step was written, the "
                "steps before it are whole. Free some space, record elsewhere, or save fewer tensors."
            )
        written = write_step(path, StepPlace(**self._place, step=step), whole, values)
        self.clear()
        return written

    def delete(self) -> None:
        """Delete everything that was saved beside the stream: its attempt is taken back."""
        self.clear()
        if self.folder.is_dir():
            shutil.rmtree(self.folder)

    def clear(self) -> None:
        """Drop what was collected, when a step is abandoned."""
        self._tensors = {}
        self._values = {}
        self._by_op.clear()

    def _check_budget(self, op: str, needed: int) -> None:
        in_step = self.num_bytes + needed
        if in_step <= self.budget_mib * MIB:
            return
        shares = Counter(self._by_op)
        shares[op] += needed
        largest = ", ".join(f"{name} {_mib(size)}" for name, size in shares.most_common(5))
        more = f" and {len(shares) - 5} more" if len(shares) > 5 else ""
        raise ReplayError(
            f"This step would save {_mib(in_step)}, and tensor_budget_mib is {self.budget_mib:g}. So far in this step: "
            f"{largest}{more}. Nothing of this step was written, the steps before it are whole. Save fewer tensors, or "
            "give a larger tensor_budget_mib."
        )


def check_budget(value: object) -> float:
    """Return an argument ``tensor_budget_mib``; raise ``SelectionError`` where it is none."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise SelectionError(f"tensor_budget_mib must be a number of MiB above 0; got {value!r}.")
    return value


def require_room(path: Path, budget_mib: float) -> None:
    """Raise ``ReplayError`` where the disk that a run goes to has less free than one of its steps may save."""
    folder = next(folder for folder in (path.absolute(), *path.absolute().parents) if folder.is_dir())
    free = shutil.disk_usage(folder).free
    if free < budget_mib * MIB + RESERVED_BYTES:
        raise ReplayError(
            f"One step may save {budget_mib:g} MiB for replay (tensor_budget_mib), and the disk of {path} has "
            f"{_mib(free)} free ({_mib(RESERVED_BYTES)} are kept for the rest of the run). Nothing was recorded. Free "
            "some space, record elsewhere, or give a smaller tensor_budget_mib."
        )


def _mib(size: int) -> str:
    return f"{size / MIB:.3g} MiB" if size < 1000 * MIB else f"{size / MIB:.0f} MiB"
