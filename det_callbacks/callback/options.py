"""What a DeterminismCallback was asked for, before anything is open."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Never

from det_callbacks.audit import AuditReport
from det_callbacks.callback.alerts import AlertCallback
from det_callbacks.callback.arguments import (
    check_arguments,
    check_audit,
    check_keep,
    check_replay,
    refuse_unknown,
)
from det_callbacks.callback.auditing import Auditing
from det_callbacks.callback.checkpointing import Checkpointing
from det_callbacks.callback.logged import LoggedHooks
from det_callbacks.callback.metrics import Metrics
from det_callbacks.callback.recording import Recording
from det_callbacks.callback.replicas import Replicas
from det_callbacks.callback.spawned import InheritedSettings
from det_callbacks.callback.together import Together
from det_callbacks.callback.tracing import Tracing
from det_callbacks.callback.verifying import Verifying
from det_callbacks.patterns import as_patterns
from det_callbacks.runs.selection import Selection
from det_callbacks.settings import DeterminismSettings
from det_callbacks.tensors.replay import replay_patterns
from det_callbacks.tensors.writer import TENSOR_BUDGET_MIB, check_budget
from det_callbacks.verdict import Verdict


class CallbackOptions(LoggedHooks, AlertCallback):
    """The arguments of ``DeterminismCallback``, which documents them, checked and as attributes; nothing is open."""

    def __init__(
        self,
        reference: str | Path | None,
        *,
        mode: Literal["record", "verify", "audit", "disabled"] = "verify",
        current: str | Path | None = None,
        level: Literal["op", "module", "state"] | None = None,
        modules: Sequence[str] | None = None,
        phases: Sequence[str] | None = None,
        every_n_steps: int | None = None,
        only_steps: Sequence[int] | None = None,
        compiled: Literal["run", "eager"] | None = None,
        steps: Literal["all", "common"] = "all",
        on_divergence: Literal["raise", "collect", "warn"] = "raise",
        settings: DeterminismSettings | Mapping[str, Any] | None = None,
        replay: Sequence[str] | str | Path | None = None,
        keep_tensors: Sequence[str] | None = None,
        tensor_budget_mib: float = TENSOR_BUDGET_MIB,
        resume: Literal["exact", "warn", "plain"] = "exact",
        audit_replicas_every_n_steps: int = 0,
        overwrite: bool = False,
        log_metrics: bool = True,
        **unknown: Never,
    ) -> None:
        super().__init__()
        refuse_unknown(unknown)
        check_arguments(
            reference=reference,
            mode=mode,
            current=current,
            steps=steps,
            on_divergence=on_divergence,
            audit_replicas_every_n_steps=audit_replicas_every_n_steps,
            overwrite=overwrite,
            resume=resume,
            log_metrics=log_metrics,
        )
        self.reference = None if reference is None else Path(reference)
        self.mode = mode
        self.current = None if current is None else Path(current)
        selected: dict[str, Any] = {
            "level": level,
            "modules": modules,
            "phases": phases,
            "every_n_steps": every_n_steps,
            "only_steps": only_steps,
            "compiled": compiled,
        }
        selected = {name: value for name, value in selected.items() if value is not None}
        self.selection = Selection(**selected)
        self.asked = {name: getattr(self.selection, name) for name in selected}
        self.steps = steps
        if settings is not None and not isinstance(settings, DeterminismSettings):
            settings = DeterminismSettings.from_mapping(settings)
        self.settings = settings
        self.on_divergence = on_divergence
        self.audit_replicas_every_n_steps = audit_replicas_every_n_steps
        self.overwrite = overwrite
        self.replay: tuple[str, ...] = ()
        if replay is not None:
            self.replay = self.asked["replay"] = replay_patterns(replay)
        if self.replay and mode == "record":
            check_replay(self.selection)
        self.keep_tensors: tuple[str, ...] = ()
        if keep_tensors is not None:
            self.keep_tensors = self.asked["keep_tensors"] = as_patterns("keep_tensors", keep_tensors)
        self.tensor_budget_mib = check_budget(tensor_budget_mib)
        if self.keep_tensors and mode == "record":
            check_keep(self.selection)
        if mode == "audit":
            check_audit(self.selection, self.replay, self.keep_tensors)
        self.resume = resume
        self.log_metrics = log_metrics
        self.audit_report: AuditReport | None = None
        self.verdict: Verdict | None = None
        self.choices: dict[str, Any] = {}
        self._checkpointing: Checkpointing | None = None
        self._together = Together()
        self._inherited = InheritedSettings()
        self._replicas = Replicas(audit_replicas_every_n_steps, on_divergence=on_divergence)
        self._metrics = Metrics()
        self._trace: Tracing | None = None
        self._run: Recording | Verifying | Auditing | None = None
        self._step = -1
        self._is_fitting = False
        self._call: str | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Return what a copy takes along: the arguments and the verdict, never the files of a fit under way."""
        # Lightning hangs methods of the module, and so the whole model, on each callback as `log` and `log_dict`.
        fresh = vars(
            type(self)(
                None,
                mode="disabled",
                on_divergence=self.on_divergence,
                audit_replicas_every_n_steps=self.audit_replicas_every_n_steps,
            )
        )
        return {name: value if name.startswith("_") else vars(self)[name] for name, value in fresh.items()}
