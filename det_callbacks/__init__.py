"""Snapshot testing for training runs: record, verify bit for bit, and name the op that differs."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from det_callbacks.errors import (
    CheckpointFormatError,
    CheckpointMismatchError,
    CheckpointNotFoundError,
    CoverageWarning,
    DetCallbacksError,
    DetCallbacksWarning,
    DivergenceError,
    DivergenceWarning,
    ExportError,
    ModuleRunError,
    NondeterministicOpError,
    NondeterministicOpWarning,
    NotComparableError,
    NothingComparedError,
    NotResumableError,
    ReferenceFormatError,
    ReferenceNotFoundError,
    ReplayError,
    RunExistsError,
    RunInUseError,
    SelectionError,
    SettingsError,
    TraceError,
    UnsupportedVersionError,
    WriteError,
)

if TYPE_CHECKING:
    from det_callbacks.audit.equivalence import BitwiseEquivalenceMode
    from det_callbacks.audit.result import (
        AuditError,
        AuditFinding,
        AuditReport,
        EquivalenceError,
        OpMismatch,
    )
    from det_callbacks.checkpoint.check import CheckpointReport, EntryDifference, check_checkpoint
    from det_callbacks.digest.components import StateDigest, digest_state, digest_tensor
    from det_callbacks.integrations.lightning import (
        DeterminismCallback,
        ReplicaAuditCallback,
        prove_resume,
    )
    from det_callbacks.integrations.loop import TrainingRun
    from det_callbacks.numerics.batch_report import (
        BatchInvarianceError,
        BatchInvarianceReport,
        BatchOp,
    )
    from det_callbacks.numerics.batches import check_batch_invariance
    from det_callbacks.numerics.modules import compare_compiled, compare_modules
    from det_callbacks.numerics.result import NumericsError, NumericsReport, TensorComparison
    from det_callbacks.observers.context import ObserverContext
    from det_callbacks.observers.functions import (
        disable_hash_mode,
        enable_hash_mode,
        observe,
        observe_grad,
        observe_non_deterministic,
        observe_non_deterministic_grad,
    )
    from det_callbacks.ranks.replicas import ReplicaDifference, ReplicaError, ReplicaReport
    from det_callbacks.settings import DeterminismSettings, enforce_determinism
    from det_callbacks.trace.hash_mode import HashMode
    from det_callbacks.verdict import (
        Counts,
        Coverage,
        Divergence,
        EnvironmentDifference,
        Finding,
        Verdict,
    )
    from det_callbacks.verify.judge import compare_runs

__all__ = [
    "AuditError",
    "AuditFinding",
    "AuditReport",
    "BatchInvarianceError",
    "BatchInvarianceReport",
    "BatchOp",
    "BitwiseEquivalenceMode",
    "CheckpointFormatError",
    "CheckpointMismatchError",
    "CheckpointNotFoundError",
    "CheckpointReport",
    "Counts",
    "Coverage",
    "CoverageWarning",
    "DetCallbacksError",
    "DetCallbacksWarning",
    "DeterminismCallback",
    "DeterminismSettings",
    "Divergence",
    "DivergenceError",
    "DivergenceWarning",
    "EntryDifference",
    "EnvironmentDifference",
    "EquivalenceError",
    "ExportError",
    "Finding",
    "HashMode",
    "ModuleRunError",
    "NondeterministicOpError",
    "NondeterministicOpWarning",
    "NotComparableError",
    "NotResumableError",
    "NothingComparedError",
    "NumericsError",
    "NumericsReport",
    "ObserverContext",
    "OpMismatch",
    "ReferenceFormatError",
    "ReferenceNotFoundError",
    "ReplayError",
    "ReplicaAuditCallback",
    "ReplicaDifference",
    "ReplicaError",
    "ReplicaReport",
    "RunExistsError",
    "RunInUseError",
    "SelectionError",
    "SettingsError",
    "StateDigest",
    "TensorComparison",
    "TraceError",
    "TrainingRun",
    "UnsupportedVersionError",
    "Verdict",
    "WriteError",
    "check_batch_invariance",
    "check_checkpoint",
    "compare_compiled",
    "compare_modules",
    "compare_runs",
    "digest_state",
    "digest_tensor",
    "disable_hash_mode",
    "enable_hash_mode",
    "enforce_determinism",
    "observe",
    "observe_grad",
    "observe_non_deterministic",
    "observe_non_deterministic_grad",
    "prove_resume",
]

_HOMES = {
    "det_callbacks.audit.result": (
        "AuditError",
        "AuditFinding",
        "AuditReport",
        "EquivalenceError",
        "OpMismatch",
    ),
    "det_callbacks.integrations.lightning": (
        "DeterminismCallback",
        "ReplicaAuditCallback",
        "prove_resume",
    ),
    "det_callbacks.integrations.loop": ("TrainingRun",),
    "det_callbacks.checkpoint.check": ("CheckpointReport", "EntryDifference", "check_checkpoint"),
    "det_callbacks.digest.components": ("StateDigest", "digest_state", "digest_tensor"),
    "det_callbacks.audit.equivalence": ("BitwiseEquivalenceMode",),
    "det_callbacks.verify.judge": ("compare_runs",),
    "det_callbacks.numerics.batch_report": (
        "BatchInvarianceError",
        "BatchInvarianceReport",
        "BatchOp",
    ),
    "det_callbacks.numerics.batches": ("check_batch_invariance",),
    "det_callbacks.numerics.modules": ("compare_compiled", "compare_modules"),
    "det_callbacks.numerics.result": ("NumericsError", "NumericsReport", "TensorComparison"),
    "det_callbacks.observers.context": ("ObserverContext",),
    "det_callbacks.observers.functions": (
        "disable_hash_mode",
        "enable_hash_mode",
        "observe",
        "observe_grad",
        "observe_non_deterministic",
        "observe_non_deterministic_grad",
    ),
    "det_callbacks.ranks.replicas": ("ReplicaDifference", "ReplicaError", "ReplicaReport"),
    "det_callbacks.settings": ("DeterminismSettings", "enforce_determinism"),
    "det_callbacks.trace.hash_mode": ("HashMode",),
    "det_callbacks.verdict": (
        "Counts",
        "Coverage",
        "Divergence",
        "EnvironmentDifference",
        "Finding",
        "Verdict",
    ),
}
"""Public names that are loaded on first use: reading a run needs neither torch nor Lightning."""

__version__: str
"""The version of the installed distribution, read on first use."""


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return import_module("importlib.metadata").version("det_callbacks")
    for home, names in _HOMES.items():
        if name in names:
            try:
                value = globals()[name] = getattr(import_module(home), name)
            except AttributeError as error:
                # ``from det_callbacks import`` would report it as a missing name
                raise ImportError(
                    f"{home} cannot be imported: {error}. Ask: python -m det_callbacks doctor"
                ) from error
            return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
