"""Which settings are in force here, missing or too late, and what differs
from a reference's machine.
"""

import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from det_callbacks.digest.triton_digest import device_choice
from det_callbacks.environment.capture import capture_environment
from det_callbacks.environment.installation import Installation
from det_callbacks.errors import ReferenceFormatError
from det_callbacks.runs.manifest import NOT_RECORDED, OPTION, PLACE, VARIABLE, compare_environments
from det_callbacks.runs.store import Run
from det_callbacks.settings import SETTINGS, DeterminismSettings, settings_in_force
from det_callbacks.verdict import EnvironmentDifference

State = Literal["in force", "not in force", "too late", "no effect here", "left alone"]

_FACTS = (
    *("platform.system", "platform.libc", "cpu.architecture", "cpu.model", "cpu.count"),
    *("torch.cpu_capability", "torch.num_threads", "torch.cuda", "torch.hip"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class SettingFinding:
    """One setting: the value asked for, the one in force, and what to do, if anything."""

    name: str
    wanted: Any
    in_force: Any
    state: State
    to_do: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """The doctor's findings; each difference with the way to remove it, or ""."""

    installation: Installation
    facts: Mapping[str, Any]
    settings: tuple[SettingFinding, ...]
    against: str | None
    differences: tuple[tuple[EnvironmentDifference, str], ...]

    @property
    def missing(self) -> list[str]:
        """The settings that are not in force and would have an effect here."""
        return [
            finding.name
            for finding in self.settings
            if finding.state in ("not in force", "too late")
        ]

    @property
    def is_well(self) -> bool:
        return not self.missing

    @property
    def fills_memory(self) -> bool:
        """Whether deterministic algorithms fill memory that ops only allocate."""
        here = {finding.name: finding.in_force for finding in self.settings}
        return here["deterministic_algorithms"] != "disabled" and bool(
            here["fill_uninitialized_memory"]
        )

    def to_dict(self) -> dict[str, Any]:
        differences = [
            {**asdict(difference), "to_do": to_do} for difference, to_do in self.differences
        ]
        return {"schema": 1, "is_well": self.is_well, **asdict(self), "differences": differences}


def diagnose(
    installation: Installation,
    *,
    against: Run | None = None,
    recorder: str = "",
    variables: Mapping[str, str] | None = None,
) -> Diagnosis:
    """Check the settings of a run, or the defaults, in this process;
    ``recorder`` says what would record.

    ``variables`` are those of the environment before torch and Lightning were imported, which set
    some themselves: these are not compared. By default, all are.
    """
    settings = DeterminismSettings() if against is None else _settings_of(against)
    findings = tuple(
        _find(name, getattr(settings, name), found) for name, found in settings_in_force().items()
    )
    if against is not None and torch.cuda.is_available():
        torch.cuda.init()  # facts of a GPU need a context
    is_twin = against is not None and "pytorch_lightning.version" in against.manifest.environment
    lightning = "pytorch_lightning" if is_twin else "lightning"
    here = capture_environment(lightning=lightning)
    versions = [f"{package}.version" for package in ("python", "torch", lightning)]
    facts = {name: here[name].value for name in (*versions, *_FACTS)}
    count = torch.cuda.device_count()
    facts |= {"recorder": recorder} if recorder else {}
    facts["cuda"] = f"{count} x {torch.cuda.get_device_name(0)}" if count else "no CUDA device"
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is not None:
        device = torch.device(accelerator.type, torch.accelerator.current_device_index())
        facts["digest"] = f"{device}: {device_choice(device)}"
    # the settings of a Trainer or configuration are unknown here
    found = () if against is None else compare_environments(against.manifest.environment, here)
    kept = [one for one in found if one.name in here or one.name.startswith((VARIABLE, OPTION))]
    kept = [one for one in kept if not one.name.startswith(("settings.", "code."))]
    set_here = _changed(dict(os.environ) if variables is None else variables)
    kept = [one for one in kept if one.name not in set_here]
    kept.sort(key=lambda one: (not one.changes_bits, one.name))
    return Diagnosis(
        installation=installation,
        facts=facts,
        settings=findings,
        against=None if against is None else str(against.path).replace(str(Path.home()), "~"),
        differences=tuple((one, _line_for_entry(one.name, one.reference)) for one in kept),
    )


def _changed(variables: Mapping[str, str]) -> set[str]:
    """Return the entries of variables that now have other values."""
    return {f"{VARIABLE}{name}" for name, _ in variables.items() ^ os.environ.items()}


def _find(name: str, wanted: Any, found: Any) -> SettingFinding:
    setting = SETTINGS[name]
    state: State
    to_do = ""
    if wanted is None:
        state = "left alone"
    elif wanted == found:
        state = "in force"
    elif (reason := setting.idle_reason()) is not None:
        state, to_do = "no effect here", f"nothing: {reason}"
    else:
        late = setting.too_late(wanted)
        state = "not in force" if late is None else "too late"
        to_do = (
            setting.how(wanted) if late is None else f"restart with {setting.how(wanted)} ({late})"
        )
    return SettingFinding(name=name, wanted=wanted, in_force=found, state=state, to_do=to_do)


def _settings_of(run: Run) -> DeterminismSettings:
    if not run.manifest.settings:
        raise ReferenceFormatError(
            f"{run.path / 'run.json'} does not say which settings were in force, so there is "
            "nothing to compare with. Pass a run that DeterminismCallback or ObserverContext "
            "recorded.",
            str(run.path),
        )
    known = DeterminismSettings.__dataclass_fields__
    values = dict.fromkeys(known) | {
        name: one for name, one in run.manifest.settings.items() if name in known
    }
    if values["float32_matmul_precision"] == "mixed":
        values["float32_matmul_precision"] = None
    if values["inductor_deterministic"] == (
        values["deterministic_algorithms"] in ("error", "warn")
    ):
        values["inductor_deterministic"] = None  # implied by deterministic_algorithms
    return DeterminismSettings.from_mapping(values)


def _line_for_entry(name: str, value: Any) -> str:
    start, _, rest = name.partition(".")
    if start == "env":
        is_known = value != NOT_RECORDED and PLACE not in str(value)
        return f"unset {rest}" if value is None else f"export {rest}={value}" if is_known else ""
    if name == "torch.num_threads":
        return SETTINGS[rest].how(value)
    if rest == "version" and start in (
        "torch",
        "numpy",
        "lightning",
        "pytorch_lightning",
        "triton",
        "det_callbacks",
    ):
        return f"pip install {start}=={str(value).partition('+')[0]}"
    return (
        f"export ATEN_CPU_CAPABILITY={str(value).lower()}" if name == "torch.cpu_capability" else ""
    )
