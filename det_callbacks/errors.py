"""Every exception and warning of det_callbacks.

Each exception carries its data as positional arguments equal to ``args`` (so it survives pickling, which
``ddp_spawn`` and DataLoader workers do to it) and an ``exit_code``, which the command line, the Hydra job callback
and the recipes exit with: 1 diverged or failed, 2 could not do it, 3 not comparable.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from det_callbacks.audit import AuditReport, OpMismatch
    from det_callbacks.numerics import NumericsReport
    from det_callbacks.ranks import ReplicaReport
    from det_callbacks.verdict import Verdict


class DetCallbacksError(Exception):
    """Root of everything det_callbacks raises on purpose.

    Its first argument is the text shown to the user, which says three things: what is wrong, what was still right, and
    what to do next. Further arguments are its data.
    """

    exit_code = 2

    def __str__(self) -> str:
        return str(self.args[0]) if self.args else ""


class DivergenceError(DetCallbacksError):
    """The current run is not the reference, bit for bit.

    Args:
        verdict: the verdict that led here.
    """

    exit_code = 1

    def __init__(self, message: str, verdict: "Verdict | None" = None) -> None:
        super().__init__(message, verdict)
        self.verdict = verdict


class NotComparableError(DivergenceError):
    """The bits differ, and so does the machine in a way that can change bits: nothing is proven either way."""

    exit_code = 3


class RankError(DetCallbacksError):
    """Another process of the run failed, or is not there any more.

    Args:
        rank: which; -1 when that cannot be told.
        exit_code: of its error.
    """

    def __init__(self, message: str, rank: int = -1, exit_code: int = 2) -> None:
        super().__init__(message, rank, exit_code)
        self.rank = rank
        self.exit_code = exit_code


class NotResumableError(DetCallbacksError):
    """A resumed run cannot be the same run as the one that saved the checkpoint.

    Args:
        problems: why, one sentence each.
    """

    def __init__(self, message: str, problems: tuple[str, ...] = ()) -> None:
        super().__init__(message, problems)
        self.problems = problems


class EquivalenceError(DetCallbacksError):
    """An op gave other bits when it was run again on the same inputs.

    Args:
        mismatch: the op, its module, source, number of differing elements and ULPs.
    """

    exit_code = 1

    def __init__(self, message: str, mismatch: "OpMismatch | None" = None) -> None:
        super().__init__(message, mismatch)
        self.mismatch = mismatch


class AuditError(DetCallbacksError):
    """An audit found something that gives other bits when it is run again.

    Args:
        report: what was found.
    """

    exit_code = 1

    def __init__(self, message: str, report: "AuditReport | None" = None) -> None:
        super().__init__(message, report)
        self.report = report


class NumericsError(DetCallbacksError, AssertionError):
    """Two modules differ by more than is tolerated.

    Args:
        report: all that was compared.
    """

    exit_code = 1

    def __init__(self, message: str, report: "NumericsReport | None" = None) -> None:
        super().__init__(message, report)
        self.report = report


class ModuleRunError(DetCallbacksError):
    """One of two modules that are compared raised; its own error is the cause (``__cause__``).

    Args:
        side: "base" or "control".
        iteration: in which.
    """

    def __init__(self, message: str, side: str = "", iteration: int = 0) -> None:
        super().__init__(message, side, iteration)
        self.side = side
        self.iteration = iteration


class ReplicaError(DetCallbacksError):
    """Ranks that have to hold the same parameters, buffers or optimizer state do not.

    Args:
        report: what differs, on which ranks, and since when.
    """

    exit_code = 1

    def __init__(self, message: str, report: "ReplicaReport | None" = None) -> None:
        super().__init__(message, report)
        self.report = report


class _PathError(DetCallbacksError):
    """An error of a file or a folder, whose path is its data."""

    def __init__(self, message: str, path: str = "") -> None:
        super().__init__(message, path)
        self.path = path


class ReferenceNotFoundError(_PathError, FileNotFoundError):
    """There is no run where one was expected."""


class ReferenceFormatError(_PathError, ValueError):
    """A file of a run is damaged, truncated, empty, incomplete or of a foreign format version."""


class RunExistsError(_PathError, FileExistsError):
    """Recording was asked for where a run, or something that is not ours, already is."""


class ExportError(_PathError):
    """A data set cannot be written where it was asked for, or there is nothing to write."""


class ReportError(_PathError):
    """An HTML report cannot be written where it was asked for."""


class CheckError(DetCallbacksError):
    """A script cannot be checked: it is not there, or what is asked for is not what a check can do."""


class CheckpointMismatchError(DetCallbacksError):
    """A checkpoint is not what the digests beside it say.

    Args:
        path: the checkpoint.
        entries: what differs, each as "section: name"; empty where only the file's bytes do.
    """

    exit_code = 1

    def __init__(self, message: str, path: str = "", entries: tuple[str, ...] = ()) -> None:
        super().__init__(message, path, entries)
        self.path = path
        self.entries = entries


class CheckpointFormatError(_PathError, ValueError):
    """A checkpoint, or the file of its digests, is truncated, damaged or of a foreign version."""


class CheckpointNotFoundError(_PathError, FileNotFoundError):
    """There is no checkpoint, or no digests beside it, where they are needed."""


class SettingsError(DetCallbacksError):
    """A determinism setting is invalid, conflicts with another, comes too late, or is not in force."""


class NondeterministicOpError(SettingsError, RuntimeError):
    """An op without a deterministic implementation was called, and the allow-list does not let it through.

    Args:
        op: ``namespace.op.overload``.
        module: qualified name of the module that called it.
    """

    def __init__(self, message: str, op: str = "", module: str = "") -> None:
        super().__init__(message, op, module)
        self.op = op
        self.module = module


class SelectionError(DetCallbacksError, ValueError):
    """What was asked to be recorded or verified selects nothing, or is not what the reference holds."""


class NothingComparedError(DetCallbacksError):
    """A verification ended without a single compared site; that is never a match."""


class TraceError(DetCallbacksError):
    """A step cannot be traced: modes were left out of order, or the trace is used in a way it does not support."""


class ReplayError(DetCallbacksError):
    """Tensors cannot be saved (the budget, the disk), or saved bits cannot be put back into a live tensor."""


class OpFactsError(DetCallbacksError):
    """What the installed torch says of its ops cannot be read: its docstring is missing or has another form."""


class DetCallbacksWarning(UserWarning):
    """Root of the warnings of det_callbacks."""


class DivergenceWarning(DetCallbacksWarning):
    """The run diverged, and ``on_divergence="warn"`` was asked for."""


class NondeterministicOpWarning(DetCallbacksWarning):
    """An op without a deterministic implementation was called under ``deterministic_algorithms="warn"``."""


class CoverageWarning(DetCallbacksWarning):
    """Part of a step is not covered by the trace, or the trace had to stop."""
