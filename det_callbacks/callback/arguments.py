"""The arguments of the callbacks: what is allowed, and the message for everything else."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, get_args

import lightning.pytorch as pl

from det_callbacks.checkpoint.resume import Resume
from det_callbacks.errors import SelectionError
from det_callbacks.patterns import as_patterns
from det_callbacks.runs.selection import Selection
from det_callbacks.settings import DeterminismSettings
from det_callbacks.tensors.copies import TENSOR_BUDGET_MIB, check_budget
from det_callbacks.tensors.replay import replay_patterns

Mode = Literal["record", "verify", "audit", "disabled"]
Level = Literal["op", "module", "state"]
OnDivergence = Literal["raise", "collect", "warn"]
Steps = Literal["all", "common"]


class CallbackArguments(pl.Callback):
    """The arguments of ``DeterminismCallback``, which documents them, checked and as attributes; nothing is open.

    Attributes:
        selection: what is traced; of a verification, what its reference was recorded with, once that is open.
        asked: the fields of the selection, ``replay`` and ``keep_tensors``, as far as they were given.
        gives_way: it does nothing where the Trainer has another one.
    """

    gives_way = False

    def __init__(
        self,
        reference: str | Path | None,
        *,
        mode: Mode = "verify",
        current: str | Path | None = None,
        level: Level | None = None,
        modules: Sequence[str] | None = None,
        phases: Sequence[str] | None = None,
        every_n_steps: int | None = None,
        only_steps: Sequence[int] | None = None,
        compiled: Literal["run", "eager"] | None = None,
        steps: Steps = "all",
        on_divergence: OnDivergence = "raise",
        settings: DeterminismSettings | Mapping[str, Any] | None = None,
        replay: Sequence[str] | str | Path | None = None,
        keep_tensors: Sequence[str] | None = None,
        tensor_budget_mib: float = TENSOR_BUDGET_MIB,
        resume: Resume = "exact",
        audit_replicas_every_n_steps: int = 0,
        overwrite: bool = False,
        log_metrics: bool = True,
    ) -> None:
        super().__init__()
        require_one_of("mode", mode, Mode)
        require_one_of("steps", steps, Steps)
        require_one_of("on_divergence", on_divergence, OnDivergence)
        require_one_of("resume", resume, Resume)
        if mode in ("record", "verify") and not _is_path(reference):
            raise SelectionError(f"reference must be the path of a folder; got {reference!r}.")
        if current is not None and not _is_path(current):
            raise SelectionError(f"current must be the path of a folder, or None; got {current!r}.")
        require_whole("audit_replicas_every_n_steps", audit_replicas_every_n_steps, 0)
        for name, flag in (("overwrite", overwrite), ("log_metrics", log_metrics)):
            if not isinstance(flag, bool):
                raise SelectionError(f"{name} must be True or False; got {flag!r}.")
        self.reference = None if reference is None else Path(reference)
        self.mode = mode
        self.current = None if current is None else Path(current)
        given: dict[str, Any] = {"level": level, "modules": modules, "phases": phases, "every_n_steps": every_n_steps}
        given |= {"only_steps": only_steps, "compiled": compiled}
        given = {name: value for name, value in given.items() if value is not None}
        self.selection = Selection(**given)
        self.asked = {name: getattr(self.selection, name) for name in given}
        self.steps = steps
        self.on_divergence = on_divergence
        if settings is not None and not isinstance(settings, DeterminismSettings):
            settings = DeterminismSettings.from_mapping(settings)
        self.settings = settings
        self.replay: tuple[str, ...] = ()
        if replay is not None:
            self.replay = self.asked["replay"] = replay_patterns(replay)
        self.keep_tensors: tuple[str, ...] = ()
        if keep_tensors is not None:
            self.keep_tensors = self.asked["keep_tensors"] = as_patterns("keep_tensors", keep_tensors)
        self.tensor_budget_mib = check_budget(tensor_budget_mib)
        self.resume = resume
        self.audit_replicas_every_n_steps = audit_replicas_every_n_steps
        self.overwrite = overwrite
        self.log_metrics = log_metrics
        if mode == "record":
            self._check_recording()
        if mode == "audit":
            self._check_audit()
        self._begin_closed()

    def _begin_closed(self) -> None:
        """Set what a callback has besides its arguments."""

    def _check_recording(self) -> None:
        """Refuse to record steps or ops without what has to be saved of them."""
        selection = self.selection
        if self.replay and (selection.level != "op" or not selection.is_every_step):
            raise SelectionError(
                'replay needs level="op" and every_n_steps=1, since each output has to be saved where it is made; got '
                f"level={selection.level!r} and {selection.shown_steps}."
            )
        if self.keep_tensors and selection.level != "op":
            raise SelectionError(
                f'keep_tensors needs level="op", at which ops are seen; got level={selection.level!r}. Record the '
                "steps that matter at level op: only_steps=[812]."
            )

    def _check_audit(self) -> None:
        """Refuse to audit less than everything: what it missed would look clean."""
        if replace(self.selection, only_steps=None) != Selection() or self.replay or self.keep_tensors:
            raise SelectionError(
                "An audit looks at every op of the steps in only_steps, and keeps nothing; leave level, modules, "
                "phases, every_n_steps, replay and keep_tensors at their defaults. Got "
                f"{self.selection.to_dict()}, replay={list(self.replay)} and keep_tensors={list(self.keep_tensors)}."
            )

    def check_trainer(self, trainer: pl.Trainer) -> None:
        """Refuse a Trainer that has another such callback, or several processes to do what one alone can do."""
        callbacks = [other for other in vars(trainer)["callbacks"] if isinstance(other, CallbackArguments)]
        if sum(callback.mode != "disabled" and not callback.gives_way for callback in callbacks) > 1:
            raise SelectionError(
                "This Trainer has two DeterminismCallbacks, and each would have to leave its trace before the other. "
                "Give it one; to record and verify, train twice."
            )
        if self.mode == "audit" and trainer.world_size > 1:
            raise SelectionError(
                f"An audit runs ops again in one process, and this Trainer starts {trainer.world_size}: the others "
                "would wait in their collectives. Audit with devices=1."
            )


def require_whole(name: str, value: object, least: int) -> None:
    """Raise ``SelectionError`` for what is no whole number, or too small."""
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise SelectionError(f"{name} must be a whole number from {least} on; got {value!r}.")


def _is_path(value: object) -> bool:
    return isinstance(value, str | Path) and bool(str(value))


def require_one_of(name: str, value: object, kind: Any) -> None:
    """Raise ``SelectionError`` for what is none of the values of a ``Literal``."""
    if value not in (allowed := get_args(kind)):
        raise SelectionError(f"{name} must be one of {', '.join(allowed)}; got {value!r}.")
