"""The tensors of one step after the other, each step written as one file, within a budget."""

import math
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor

from det_callbacks.digest import unobserved
from det_callbacks.errors import ReplayError, SelectionError
from det_callbacks.tensors.copies import copy_bits, plain
from det_callbacks.tensors.files import SavedTensor, StepPlace, tensor_folder, tensor_path, write_tensors
from det_callbacks.trace.late_sites import LateSites

_MIB = 2**20

TENSOR_BUDGET_MIB = 1024.0
"""What one step may save where nothing else is asked for."""

_RESERVED_MIB = 64
"""What is left free on the disk: the digests of the run still have to fit."""


class StepWriter:
    """Copies tensors of the step under way and writes them; one step is held in memory, at most the budget.

    A step is written before it is appended to its stream: a kill in between leaves a file of a step that is not there,
    which is never read, and is replaced when the step is recorded again.

    Args:
        stream: the stream that the steps are appended to; the files go beside it.
        kind: ``REPLAY`` or ``KEPT``.
        run_id: of the run.
        rank: of this process.
        segment: fit of the run.
        budget_mib: what one step may save, in MiB.

    Attributes:
        num_bytes: that the step under way is going to write.
    """

    def __init__(
        self,
        stream: Path,
        kind: str,
        *,
        run_id: str,
        rank: int = 0,
        segment: int = 0,
        budget_mib: float = TENSOR_BUDGET_MIB,
    ) -> None:
        self.num_bytes = 0
        self._stream, self._kind, self._budget_mib = stream, kind, budget_mib
        self._place = StepPlace(run_id=run_id, rank=rank, segment=segment, step=-1)

    def start_segment(self, stream: Path, segment: int) -> None:
        """Go on with the steps of another fit."""
        self._stream, self._place = stream, replace(self._place, segment=segment)

    def copy(
        self, tensors: Sequence[Tensor], op: str, late: LateSites | None, *, pending: int = 0
    ) -> list[SavedTensor]:
        """Return copies of tensors as they are now; whoever writes them adds their bytes to ``num_bytes``.

        Args:
            tensors: plain ones.
            op: what they are of.
            late: of the step under way; None waits for devices.
            pending: bytes that are going to be written with them.

        Raises:
            ReplayError: the budget of the step does not suffice, or one is no plain tensor.
        """
        with unobserved():
            needed = self.num_bytes + pending + sum(plain(tensor).nbytes for tensor in tensors)
        if needed > self._budget_mib * _MIB:
            raise ReplayError(
                f"This step would save {needed / _MIB:.3g} MiB with {op}, and tensor_budget_mib is "
                f"{self._budget_mib:g}. Save fewer tensors, or give a larger tensor_budget_mib."
            )
        return [copy_bits(tensor, late) for tensor in tensors]

    def write(self, step: int, tensors: Mapping[str, SavedTensor], values: Mapping[str, Any]) -> int:
        """Write the tensors of a step that is settled, and begin the next; return the file's bytes.

        Where there are none, a file that the step left before is removed.

        Raises:
            ReplayError: the disk is too full; nothing was written.
            OSError: likewise.
        """
        path = tensor_path(self._stream, self._kind, step)
        path.unlink(missing_ok=True)
        num_bytes, self.num_bytes = self.num_bytes, 0
        if not tensors and not values:
            return 0
        if tensors:
            _require_free(self._stream.parent, num_bytes / _MIB, f"Step {step} would save")
        return write_tensors(path, replace(self._place, step=step), tensors, values)

    def delete(self) -> None:
        """Delete everything that was written beside the stream: its attempt is taken back."""
        shutil.rmtree(tensor_folder(self._stream, self._kind), ignore_errors=True)


def check_budget(value: object) -> float:
    """Return an argument ``tensor_budget_mib``; raise ``SelectionError`` where it is none."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise SelectionError(f"tensor_budget_mib must be a number of MiB above 0; got {value!r}.")
    return value


def require_room(path: Path, budget_mib: float) -> None:
    """Raise ``ReplayError`` where the disk that a run goes to has less free than one of its steps may save."""
    folder = next(folder for folder in (path.absolute(), *path.absolute().parents) if folder.is_dir())
    _require_free(folder, budget_mib, "Nothing was recorded: with this tensor_budget_mib a step may save")


def _require_free(folder: Path, needed_mib: float, who: str) -> None:
    free_mib = shutil.disk_usage(folder).free / _MIB
    if free_mib < needed_mib + _RESERVED_MIB:
        raise ReplayError(
            f"{who} {needed_mib:.3g} MiB, and the disk of {folder} has {free_mib:.3g} MiB free ({_RESERVED_MIB} MiB "
            "are left for the rest of the run). Free some space, record elsewhere, or save fewer tensors."
        )
