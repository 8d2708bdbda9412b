"""The exceptions and warnings of det_callbacks.

Each exception with the exit code of a program that ends with it: 1 is diverged or failed, 2 could
not do it, 3 not comparable. An error that carries a report is defined next to the report, in the
file after the code.

    DetCallbacksError             2
      DivergenceError             1
        NotComparableError        3
      AuditError                  1  audit/result.py
      EquivalenceError            1  audit/result.py
      NumericsError               1  numerics/result.py
      BatchInvarianceError        1  numerics/batch_report.py
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

from det_callbacks.text import visible

if TYPE_CHECKING:  # the doctor starts without the imports of verdict.py
    from det_callbacks.verdict import Verdict


class DetCallbacksError(Exception):
    """Root of the exceptions of det_callbacks.

    Its first argument is the text for the user: what is wrong, what was still right, and what to do
    next. Further arguments are its data, the attributes that ``_data`` names,
    so it survives pickling.

    Attributes:
        exit_code: exit status of a program that ends with this error: 1 diverged or failed, 2 could
            not do it, 3 not comparable.

    Examples:
        >>> try:
        ...     train("refs/run1", lr=0.2)
        ... except DetCallbacksError as error:
        ...     error.exit_code
        det_callbacks: diverged: ...
        1
    """

    exit_code = 2
    _data: ClassVar[tuple[str, ...]] = ()

    def __init__(self, message: str = "", *data: Any) -> None:
        super().__init__(message, *data)
        for name, value in zip(self._data, data, strict=False):
            setattr(self, name, value)

    def __str__(self) -> str:
        return visible(str(self.args[0]))  # a terminal shows it, and it may quote a run


class DivergenceError(DetCallbacksError):
    """The current run differs from the reference; ``verdict`` says how.

    Attributes:
        verdict: the Verdict, or None if another process judged the runs.

    Examples:
        >>> try:
        ...     train("refs/run1", lr=0.2)
        ... except DivergenceError as error:
        ...     error.exit_code, error.verdict.cause
        det_callbacks: diverged: ...
        (1, 'settings')
    """

    exit_code = 1
    _data = ("verdict",)
    verdict: "Verdict | None" = None


class NotComparableError(DivergenceError):
    """The bits differ, and so does the machine in a way that can change bits, so nothing is proven.

    Examples:
        >>> torch.set_num_threads(torch.get_num_threads() + 1)
        >>> try:
        ...     train("refs/run1", lr=0.2)
        ... except NotComparableError as error:
        ...     (
        ...         error.exit_code,
        ...         [entry.name for entry in error.verdict.environment if entry.is_machine],
        ...     )
        ... finally:
        ...     torch.set_num_threads(torch.get_num_threads() - 1)
        det_callbacks: not_comparable: ...
        (3, ['torch.num_threads'])
    """

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
    """A resumed run cannot be the run that saved the checkpoint;
    ``problems`` has a sentence for each reason.

    Examples:
        >>> NotResumableError(
        ...     "The checkpoint was saved in a validation.", ("It was saved in a validation.",)
        ... ).problems
        ('It was saved in a validation.',)
    """

    _data = ("problems",)
    problems: tuple[str, ...] = ()


class ModuleRunError(DetCallbacksError):
    """One of two modules that are compared, ``side`` "base" or "control",
    raised its ``__cause__`` in ``iteration``.

    Examples:
        >>> try:
        ...     compare_modules(torch.nn.Linear(4, 2), torch.nn.Linear(3, 2), torch.ones(1, 4))
        ... except ModuleRunError as error:
        ...     error.side, error.iteration, type(error.__cause__).__name__
        ('control', 0, 'RuntimeError')
    """

    _data = ("side", "iteration")
    side: str = ""
    iteration: int = 0


class _PathError(DetCallbacksError):
    """An error of a file or folder, with its path."""

    _data: ClassVar[tuple[str, ...]] = ("path",)
    path: str = ""


class ReferenceNotFoundError(_PathError, FileNotFoundError):
    """The folder has no run.

    Attributes:
        path: the folder.

    Examples:
        >>> train("refs/none")
        Traceback (most recent call last):
        det_callbacks.errors.ReferenceNotFoundError: There is no run in refs/none: ...
    """


class ReferenceFormatError(_PathError, ValueError):
    """A file of a run is damaged, truncated, empty, incomplete or of a foreign format version.

    Attributes:
        path: the file, or the folder if the error concerns several files.

    Examples:
        >>> _ = Path("refs/run2/run.json").write_text("{")
        >>> compare_runs("refs/run1", "refs/run2")
        Traceback (most recent call last):
        det_callbacks.errors.ReferenceFormatError: refs/run2/run.json is damaged: ...
    """


class RunExistsError(_PathError, FileExistsError):
    """The folder of a new recording already has a run or foreign files.

    Attributes:
        path: the folder.

    Examples:
        >>> train("refs/run1", mode="record")
        Traceback (most recent call last):
        det_callbacks.errors.RunExistsError: refs/run1 already holds a run ...
    """


class RunInUseError(_PathError):
    """Another process is writing to the folder of a run; the message names it.

    Attributes:
        path: the folder.

    Examples:
        >>> RunInUseError("Process 71 is writing to refs/run1.", "refs/run1").path
        'refs/run1'
    """


class WriteError(_PathError):
    """A file or folder cannot be written: the disk is full, it is read-only,
    or a file is in the way.

    Attributes:
        path: the file or folder.

    Examples:
        >>> Path("full").touch()
        >>> train("full/run1", mode="record")
        Traceback (most recent call last):
        det_callbacks.errors.WriteError: Cannot write full/run1: full is a file; ...
    """


class ExportError(_PathError):
    """A data set cannot be written to this folder, or there is nothing to write.

    Attributes:
        path: the folder of the data set.

    Examples:
        >>> from det_callbacks import cli
        >>> cli.main(["export", "refs/run1", "--to", "refs/run2"])
        2
    """


class CheckError(DetCallbacksError):
    """A script cannot be checked: it is missing, or a check does not support the options."""


class CheckpointMismatchError(_PathError):
    """A checkpoint does not match the digests next to it: ``entries`` ("section: name")
    differ, or only the bytes.

    Attributes:
        path: the checkpoint.
        entries: the entries that differ, as "section: name";
            empty if only the bytes of the file differ.

    Examples:
        >>> error = CheckpointMismatchError(
        ...     "last.ckpt is not what was saved.", "last.ckpt", ("epoch",)
        ... )
        >>> error.exit_code, error.entries
        (1, ('epoch',))
    """

    exit_code = 1
    _data = ("path", "entries")
    entries: tuple[str, ...] = ()


class CheckpointFormatError(_PathError, ValueError):
    """A checkpoint, or the file of its digests, is truncated, damaged or of a foreign version.

    Attributes:
        path: the file.

    Examples:
        >>> _ = Path("last.ckpt").write_text("no checkpoint")
        >>> check_checkpoint("last.ckpt", "last.ckpt")
        Traceback (most recent call last):
        det_callbacks.errors.CheckpointFormatError: ...
    """


class CheckpointNotFoundError(_PathError, FileNotFoundError):
    """A checkpoint, or the file of its digests, is missing.

    Attributes:
        path: the file.

    Examples:
        >>> check_checkpoint("none.ckpt")
        Traceback (most recent call last):
        det_callbacks.errors.CheckpointNotFoundError: There is no checkpoint none.ckpt on this ...
    """


class UnsupportedVersionError(DetCallbacksError):
    """The installed torch or Lightning lacks a private name that det_callbacks needs.

    ``det-callbacks doctor`` lists all such names.

    Examples:
        >>> UnsupportedVersionError.exit_code
        2
    """


class SettingsError(DetCallbacksError):
    """A determinism setting is invalid, conflicts with another, comes too late, or is not in force.

    Examples:
        >>> enforce_determinism({"num_threads": 0})
        Traceback (most recent call last):
        det_callbacks.errors.SettingsError: num_threads=0 is not allowed; use an integer from 1 ...
    """


class NondeterministicOpError(SettingsError, RuntimeError):
    """``module`` called ``op``, which has no deterministic implementation and
    is not on the allow-list.

    Examples:
        >>> def replace(x):
        ...     return x.put_(torch.tensor([0]), torch.ones(1))
        >>> try:
        ...     train("refs/run3", mode="record", extra=replace)
        ... except NondeterministicOpError as error:
        ...     error.op, error.module
        det_callbacks: recording stopped ...
        ('aten.put_.default', '')
    """

    _data = ("op", "module")
    op: str = ""
    module: str = ""


class SelectionError(DetCallbacksError, ValueError):
    """The arguments of a recording or verification select nothing, or do not match the reference.

    Examples:
        >>> train("refs/run1", level="layer")
        Traceback (most recent call last):
        det_callbacks.errors.SelectionError: level must be one of op, module, state; got 'layer'.
    """


class NothingComparedError(DetCallbacksError):
    """A verification compared no site, which is never a match.

    Examples:
        >>> with ObserverContext("runs", "first"):
        ...     pass
        Traceback (most recent call last):
        det_callbacks.errors.NothingComparedError: Nothing was observed, ...
    """


class TraceError(DetCallbacksError):
    """A step cannot be traced: modes were left out of order, or this use is not supported.

    Examples:
        >>> mode = HashMode()
        >>> with mode, mode:
        ...     pass
        Traceback (most recent call last):
        det_callbacks.errors.TraceError: HashMode is already open, ...
    """


class ReplayError(DetCallbacksError):
    """Tensors cannot be saved (the budget, the disk), or saved bits cannot be
    restored to a live tensor.

    Examples:
        >>> train("refs/run3", mode="record", replay=["*addmm*"], tensor_budget_mib=1e-6)
        Traceback (most recent call last):
        det_callbacks.errors.ReplayError: This step would save ...
    """


class DetCallbacksWarning(UserWarning):
    """Root of the warnings of det_callbacks.

    Examples:
        >>> # makes each warning of det_callbacks an error
        >>> warnings.simplefilter("error", DetCallbacksWarning)
    """

    def __str__(self) -> str:
        return visible(super().__str__())


class DivergenceWarning(DetCallbacksWarning):
    """The run diverged under ``on_divergence="warn"``.

    Examples:
        >>> with warnings.catch_warnings(
        ...     record=True, action="always", category=DivergenceWarning
        ... ) as caught:
        ...     verdict = train("refs/run1", lr=0.2, on_divergence="warn").verdict
        det_callbacks: diverged: ...
        >>> len(caught), verdict.verdict
        (1, 'diverged')
    """


class NondeterministicOpWarning(DetCallbacksWarning):
    """An op without a deterministic implementation was called under
    ``deterministic_algorithms="warn"``.

    Examples:
        >>> def replace(x):
        ...     return x.put_(torch.tensor([0]), torch.ones(1))
        >>> with warnings.catch_warnings(
        ...     record=True, action="always", category=NondeterministicOpWarning
        ... ) as caught:
        ...     _ = train(
        ...         "refs/run3",
        ...         mode="record",
        ...         settings={"deterministic_algorithms": "warn"},
        ...         extra=replace,
        ...     )
        det_callbacks: recorded 3 steps, ...
        >>> [str(one.message).split()[0] for one in caught]
        ['aten.put_.default']
    """


class CoverageWarning(DetCallbacksWarning):
    """The trace does not cover a part of a step, or had to stop.

    Examples:
        >>> with warnings.catch_warnings(
        ...     record=True, action="always", category=CoverageWarning
        ... ) as caught:
        ...     with ObserverContext("runs", "first"):
        ...         # no backward pass follows
        ...         _ = observe_grad("x", torch.ones(2, requires_grad=True))
        >>> len(caught)
        1
    """
