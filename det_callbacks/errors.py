"""The exceptions and warnings of det_callbacks.

Each exception with the exit code of a program that ends with it: 1 is diverged or failed, 2 could not do it, 3 not
comparable. An error that carries a report is defined next to the report, in the file after the code.

    DetCallbacksError             2
      DivergenceError             1
        NotComparableError        3
      AuditError                  1  audit/result.py
      EquivalenceError            1  audit/result.py
      NumericsError               1  numerics/result.py
      ReplicaError                1  ranks/replicas.py
      CheckpointMismatchError     1
      CheckpointFormatError       2
      CheckpointNotFoundError     2
      ReferenceFormatError        2
      ReferenceNotFoundError      2
      RunExistsError              2
      RunInUseError               2
      WriteError                  2
      ExportError                 2
      SettingsError               2
        NondeterministicOpError   2
      SelectionError              2
      NothingComparedError        2
      NotResumableError           2
      RankError                   2
      CheckError                  2
      ModuleRunError              2
      ReplayError                 2
      TraceError                  2
      UnsupportedVersionError     2
"""

from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:  # the doctor starts without the imports of verdict.py
    from det_callbacks.verdict import Verdict


class DetCallbacksError(Exception):
    """Root of the exceptions of det_callbacks.

    Its first argument is the text for the user: what is wrong, what was still right, and what to do next. Further
    arguments are its data, the attributes that ``_data`` names, so it survives pickling.
    """

    exit_code = 2
    _data: ClassVar[tuple[str, ...]] = ()

    def __init__(self, message: str = "", *data: Any) -> None:
        super().__init__(message, *data)
        for name, value in zip(self._data, data, strict=False):
            setattr(self, name, value)

    def __str__(self) -> str:
        return str(self.args[0])


class DivergenceError(DetCallbacksError):
    """The current run differs from the reference; ``verdict`` says how."""

    exit_code = 1
    _data = ("verdict",)
    verdict: "Verdict | None" = None


class NotComparableError(DivergenceError):
    """The bits differ, and so does the machine in a way that can change bits, so nothing is proven."""

    exit_code = 3


def divergence_error(message: str, verdict: "Verdict") -> DivergenceError:
    """Return the error of a verdict other than a match."""
    kind = NotComparableError if verdict.verdict == "not_comparable" else DivergenceError
    return kind(message, verdict)


class RankError(DetCallbacksError):
    """Process ``rank`` failed with an exit code, or is gone; -1 if the rank is unknown."""

    _data = ("rank", "exit_code")
    rank: int = -1


class NotResumableError(DetCallbacksError):
    """A resumed run cannot be the run that saved the checkpoint; ``problems`` has a sentence for each reason."""

    _data = ("problems",)
    problems: tuple[str, ...] = ()


class ModuleRunError(DetCallbacksError):
    """One of two modules that are compared, ``side`` "base" or "control", raised its ``__cause__`` in ``iteration``."""

    _data = ("side", "iteration")
    side: str = ""
    iteration: int = 0


class _PathError(DetCallbacksError):
    """An error of a file or folder, with its path."""

    _data: ClassVar[tuple[str, ...]] = ("path",)
    path: str = ""


class ReferenceNotFoundError(_PathError, FileNotFoundError):
    """The folder has no run."""


class ReferenceFormatError(_PathError, ValueError):
    """A file of a run is damaged, truncated, empty, incomplete or of a foreign format version."""


class RunExistsError(_PathError, FileExistsError):
    """The folder of a new recording already has a run or foreign files."""


class RunInUseError(_PathError):
    """Another process is writing to the folder of a run; the message names it."""


class WriteError(_PathError):
    """A file or folder cannot be written: the disk is full, it is read-only, or a file is in the way."""


class ExportError(_PathError):
    """A data set cannot be written to this folder, or there is nothing to write."""


class CheckError(DetCallbacksError):
    """A script cannot be checked: it is missing, or a check does not support the options."""


class CheckpointMismatchError(_PathError):
    """A checkpoint does not match the digests next to it: ``entries`` ("section: name") differ, or only the bytes."""

    exit_code = 1
    _data = ("path", "entries")
    entries: tuple[str, ...] = ()


class CheckpointFormatError(_PathError, ValueError):
    """A checkpoint, or the file of its digests, is truncated, damaged or of a foreign version."""


class CheckpointNotFoundError(_PathError, FileNotFoundError):
    """A checkpoint, or the file of its digests, is missing."""


class UnsupportedVersionError(DetCallbacksError):
    """The installed torch or Lightning lacks a private name that the requested feature needs."""


class SettingsError(DetCallbacksError):
    """A determinism setting is invalid, conflicts with another, comes too late, or is not in force."""


class NondeterministicOpError(SettingsError, RuntimeError):
    """``module`` called ``op``, which has no deterministic implementation and is not on the allow-list."""

    _data = ("op", "module")
    op: str = ""
    module: str = ""


class SelectionError(DetCallbacksError, ValueError):
    """The arguments of a recording or verification select nothing, or do not match the reference."""


class NothingComparedError(DetCallbacksError):
    """A verification compared no site, which is never a match."""


class TraceError(DetCallbacksError):
    """A step cannot be traced: modes were left out of order, or this use is not supported."""


class ReplayError(DetCallbacksError):
    """Tensors cannot be saved (the budget, the disk), or saved bits cannot be restored to a live tensor."""


class DetCallbacksWarning(UserWarning):
    """Root of the warnings of det_callbacks."""


class DivergenceWarning(DetCallbacksWarning):
    """The run diverged under ``on_divergence="warn"``."""


class NondeterministicOpWarning(DetCallbacksWarning):
    """An op without a deterministic implementation was called under ``deterministic_algorithms="warn"``."""


class CoverageWarning(DetCallbacksWarning):
    """The trace does not cover a part of a step, or had to stop."""
