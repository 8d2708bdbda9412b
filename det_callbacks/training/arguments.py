"""The arguments of a run, and the manifest (run.json) that describes them and the training."""

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, get_args

import msgspec

from det_callbacks.digest.host import format_digest
from det_callbacks.environment.capture import capture_environment, command_choice
from det_callbacks.environment.variables import PERTURB, REPLACES_OWN
from det_callbacks.errors import SelectionError
from det_callbacks.runs.manifest import GENERATOR, OPTIMIZER, WITHOUT_EFFECT, EnvironmentEntry
from det_callbacks.runs.selection import Level, Selection, as_patterns
from det_callbacks.settings import DeterminismSettings, settings_in_force, settings_without_effect
from det_callbacks.settings.generators import digest_generator
from det_callbacks.tensors.copies import TENSOR_BUDGET_MIB, check_budget
from det_callbacks.tensors.replay import replay_patterns
from det_callbacks.trace.generators import process_generators
from det_callbacks.training.training import Training

Mode = Literal["record", "verify", "audit", "disabled"]
OnDivergence = Literal["raise", "collect", "warn"]
Steps = Literal["all", "common"]
Resume = Literal["exact", "plain"]
Stage = Literal["fit", "validate", "test", "predict"]


class RunArguments:
    """The arguments of ``DeterminismCallback``, checked; it documents them."""

    called = "DeterminismCallback"  # in messages
    is_of_command = False  # whether ``det-callbacks`` made it, not the script

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
        stages: Sequence[Stage] = ("fit",),
    ) -> None:
        super().__init__()
        if REPLACES_OWN in os.environ and settings is None and not self.is_of_command:
            mode = "disabled"
        self.mode, self.steps, self.on_divergence, self.resume = mode, steps, on_divergence, resume
        self.overwrite, self.log_metrics = overwrite, log_metrics
        self.audit_replicas_every_n_steps = audit_replicas_every_n_steps
        for name, kind in (
            ("mode", Mode),
            ("steps", Steps),
            ("on_divergence", OnDivergence),
            ("resume", Resume),
        ):
            require_one_of(name, getattr(self, name), kind)
        for name, flag in (("overwrite", overwrite), ("log_metrics", log_metrics)):
            if not isinstance(flag, bool):
                raise SelectionError(f"{name} must be True or False; got {flag!r}.")
        if isinstance(stages, str) or not stages or len({*stages}) < len(stages):
            raise SelectionError(
                f"stages must be a list of different words such as ['fit', 'test']; got {stages!r}."
            )
        for stage in stages:
            require_one_of("stages", stage, Stage)
        self.stages: tuple[Stage, ...] = tuple(stages)
        require_integer("audit_replicas_every_n_steps", audit_replicas_every_n_steps, 0)
        may_lack = mode in ("audit", "disabled")
        for name, path, is_optional in (
            ("reference", reference, may_lack),
            ("current", current, True),
        ):
            if not (is_optional and path is None) and not (
                isinstance(path, str | Path) and str(path)
            ):
                raise SelectionError(f"{name} must be the path of a folder; got {path!r}.")
        self.reference = None if reference is None else Path(reference)
        self.current = None if current is None else Path(current)
        chosen: dict[str, Any] = {
            "level": level,
            "modules": modules,
            "phases": phases,
            "every_n_steps": every_n_steps,
        }
        chosen |= {"only_steps": only_steps, "compiled": compiled}
        given = {name: value for name, value in chosen.items() if value is not None}
        self.selection = Selection(**given)  # while verifying: the reference's
        self.asked = {name: getattr(self.selection, name) for name in given}
        self.replay: tuple[str, ...] = ()
        self.keep_tensors: tuple[str, ...] = ()
        if replay is not None:
            self.replay = self.asked["replay"] = replay_patterns(replay)
        if keep_tensors is not None:
            self.keep_tensors = self.asked["keep_tensors"] = as_patterns(
                "keep_tensors", keep_tensors
            )
        self.tensor_budget_mib = check_budget(tensor_budget_mib)
        if settings is not None and not isinstance(settings, DeterminismSettings):
            settings = DeterminismSettings.from_mapping(settings)
        self.settings = settings
        self.choices: dict[str, Any] = {}
        self._check_combinations()
        self._reset()

    def _reset(self) -> None:
        """Initialise the attributes of a run that has not begun."""

    def _check_combinations(self) -> None:
        selection = self.selection
        got = f"got level={selection.level!r} and {selection.shown_steps}."
        if (
            self.mode == "record"
            and self.replay
            and (selection.level != "op" or not selection.is_every_step)
        ):
            needs = (
                'replay needs level="op" and every_n_steps=1, because it saves outputs as ops '
                "produce them"
            )
            raise SelectionError(f"{needs}; {got}")
        if self.mode == "record" and self.keep_tensors and selection.level != "op":
            instead = "Record the steps that matter at level op, for example only_steps=[812]."
            raise SelectionError(
                f'keep_tensors needs level="op", which records ops; {got} {instead}'
            )
        selects_all = replace(selection, only_steps=None) == Selection()
        if self.mode == "audit" and not (
            selects_all and not self.replay and not self.keep_tensors
        ):  # else skipped ops would look clean
            raise SelectionError(
                "An audit runs every op of its steps and keeps no tensors; omit "
                f"{', '.join(sorted(self.asked.keys() - {'only_steps'}))}."
            )
        if self.mode == "audit" and self.stages != ("fit",):
            raise SelectionError("An audit runs the ops of a fit again; omit stages.")
        if self.mode == "audit" and self.reference is not None:
            raise SelectionError(
                f"An audit needs no reference: pass None instead of {str(self.reference)!r}."
            )

    def check_world_size(self, world_size: int) -> None:
        """Raise for an audit of several processes."""
        if self.mode == "audit" and world_size > 1:
            raise SelectionError(
                f"An audit reruns ops in one process, but this run has {world_size} processes, "
                "which would hang in collectives. Audit with one process (devices=1)."
            )


def require_integer(name: str, value: object, least: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise SelectionError(f"{name} must be an integer >= {least}; got {value!r}.")


def require_one_of(name: str, value: object, kind: Any) -> None:
    if value not in (allowed := get_args(kind)):
        raise SelectionError(f"{name} must be one of {', '.join(allowed)}; got {value!r}.")


def manifest_of(
    training: Training, arguments: RunArguments, *, is_resumed: bool = False
) -> dict[str, Any]:
    allow = [] if arguments.settings is None else list(arguments.settings.allow)
    chosen: dict[str, Any] = {**training.choices, **optimizer_choices(training.optimizers)}
    if (schedulers := training.schedulers) is not None:
        names = [
            type(scheduler).__name__ + f" each {interval}" * bool(interval)
            for scheduler, interval in schedulers
        ]
        chosen["optimizer.lr_scheduler"] = ", ".join(names) or "none"
    chosen |= {**_started_by(), **arguments.choices, "settings": {"allow": allow}}
    if idle := settings_without_effect():
        chosen[WITHOUT_EFFECT] = idle
    if PERTURB in os.environ:
        chosen["inputs of the first step"] = "last bit changed"
    starts = {} if is_resumed else _generator_starts()
    environment = {**capture_environment(choices=chosen, lightning=training.framework), **starts}
    return {
        "selection": arguments.selection.to_dict(),
        "settings": {**settings_in_force(), "allow": allow},
        "environment": msgspec.to_builtins(environment),
        "replay": list(arguments.replay),
        "keep_tensors": list(arguments.keep_tensors),
    }


def _generator_starts() -> dict[str, EnvironmentEntry]:
    return {
        f"{GENERATOR}{name}": EnvironmentEntry(
            value=format_digest(digest_generator(generator)), is_machine=True, changes_bits=False
        )
        for name, generator in process_generators()
    }


def _started_by() -> dict[str, Any]:
    if "hydra.core.hydra_config" in sys.modules:
        # a script need not load Hydra
        from det_callbacks.environment.hydra import job_choices  # noqa: PLC0415

        return {**command_choice(), **job_choices()}
    return command_choice()


def optimizer_choices(optimizers: Sequence[Any]) -> dict[str, Any]:
    """Return the optimizers' classes and options, in the order of the classes' names:
    programs may list them in any.
    """
    optimizers = sorted(
        (one for one in optimizers if one.param_groups), key=lambda one: type(one).__name__
    )
    choices: dict[str, Any] = {
        OPTIMIZER: ", ".join(type(optimizer).__name__ for optimizer in optimizers) or "none"
    }
    for index, optimizer in enumerate(optimizers):
        groups = [
            {name: value for name, value in group.items() if name not in ("params", "initial_lr")}
            # schedulers are separate choices: show the rate that they started from
            | ({"lr": group["initial_lr"]} if "initial_lr" in group else {})
            for group in optimizer.param_groups
        ]
        others = {f"group {number}": group for number, group in enumerate(groups[1:], start=1)}
        name = (
            type(optimizer).__name__
            if len(optimizers) == 1
            else f"{index}.{type(optimizer).__name__}"
        )
        choices[f"optimizer.{name}"] = {**groups[0], **others}
    return choices
