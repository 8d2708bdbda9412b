"""Snapshot testing for training runs: record, verify bit for bit, and name the op that differs."""

from det_callbacks.audit import AuditFinding, AuditReport
from det_callbacks.callback import DeterminismCallback
from det_callbacks.checkpoint import CheckpointReport, EntryDifference, check_checkpoint
from det_callbacks.compare import compare_runs
from det_callbacks.digest import digest_tensor
from det_callbacks.equivalence import BitwiseEquivalenceMode, OpMismatch
from det_callbacks.errors import (
    AuditError,
    CheckpointFormatError,
    CheckpointMismatchError,
    CheckpointNotFoundError,
    CoverageWarning,
    DetCallbacksError,
    DetCallbacksWarning,
    DivergenceError,
    DivergenceWarning,
    EquivalenceError,
    NondeterministicOpError,
    NondeterministicOpWarning,
    NotComparableError,
    NothingComparedError,
    ReferenceFormatError,
    ReferenceNotFoundError,
    ReplayError,
    RunExistsError,
    SelectionError,
    SettingsError,
    StepNotRepeatableError,
    TraceError,
)
from det_callbacks.observe import (
    ObserverContext,
    disable_hash_mode,
    enable_hash_mode,
    observe,
    observe_grad,
    observe_non_deterministic,
    observe_non_deterministic_grad,
)
from det_callbacks.settings import DeterminismSettings, enforce_determinism
from det_callbacks.trace.hash_mode import HashMode
from det_callbacks.verdict import Counts, Coverage, Divergence, EnvironmentDifference, Verdict

__all__ = [
    "AuditError",
    "AuditFinding",
    "AuditReport",
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
    "HashMode",
    "NondeterministicOpError",
    "NondeterministicOpWarning",
    "NotComparableError",
    "NothingComparedError",
    "ObserverContext",
    "OpMismatch",
    "ReferenceFormatError",
    "ReferenceNotFoundError",
    "ReplayError",
    "RunExistsError",
    "SelectionError",
    "SettingsError",
    "StepNotRepeatableError",
    "TraceError",
    "Verdict",
    "check_checkpoint",
    "compare_runs",
    "digest_tensor",
    "disable_hash_mode",
    "enable_hash_mode",
    "enforce_determinism",
    "observe",
    "observe_grad",
    "observe_non_deterministic",
    "observe_non_deterministic_grad",
]
