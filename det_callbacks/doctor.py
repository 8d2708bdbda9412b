"""What is in force in this process, what is missing or too late, and what tells this machine from a reference's."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

import torch

from det_callbacks.digest import device_choice
from det_callbacks.environment import capture_environment
from det_callbacks.errors import ReferenceFormatError
from det_callbacks.runs.environment import compare_environments
from det_callbacks.runs.store import Run
from det_callbacks.settings import SETTINGS, DeterminismSettings, settings_in_force
from det_callbacks.settings.enforce import too_late

State = Literal["in force", "not in force", "too late", "no effect here", "left alone"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SettingFinding:
    """One setting here and now.

    Attributes:
        name: field of ``DeterminismSettings``.
        wanted: value asked for; None where it is left alone.
        in_force: what torch or the process says.
        state: how the two compare.
        to_do: line of code, variable or reason; "" where there is nothing to do.
        why: what may happen without it.
    """

    name: str
    wanted: Any
    in_force: Any
    state: State
    to_do: str
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvironmentFinding:
    """An entry of the environment that is another one than in a reference.

    Attributes:
        name: of the entry.
        reference: value there.
        here: value here.
        is_machine: a machine fact, not a choice.
        changes_bits: whether it can change bits by itself.
        to_do: line that makes it the reference's; "" where there is none.
    """

    name: str
    reference: Any
    here: Any
    is_machine: bool
    changes_bits: bool
    to_do: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """What the doctor found.

    Attributes:
        facts: a few lines on this place, by name.
        settings: every setting.
        against: the reference compared with, None when none was.
        differences: how this place differs from it, those that can change bits first.
    """

    facts: Mapping[str, Any]
    settings: tuple[SettingFinding, ...]
    against: str | None
    differences: tuple[EnvironmentFinding, ...]

    @property
    def is_well(self) -> bool:
        """Whether everything asked for is in force, or can have no effect here."""
        return all(finding.state not in ("not in force", "too late") for finding in self.settings)

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON form."""
        return {
            "schema": 1,
            "is_well": self.is_well,
            "facts": dict(self.facts),
            "settings": [asdict(finding) for finding in self.settings],
            "against": self.against,
            "differences": [asdict(finding) for finding in self.differences],
        }


def diagnose(settings: DeterminismSettings | None = None, *, against: Run | None = None) -> Diagnosis:
    """Look at this process; nothing is changed.

    Args:
        settings: what is asked for; None are the defaults, or with ``against`` what was in force there.
        against: a recorded run.
    """
    if settings is None:
        settings = DeterminismSettings() if against is None else _settings_of(against)
    in_force = settings_in_force()
    findings = tuple(_find(name, getattr(settings, name), found) for name, found in in_force.items())
    differences: tuple[EnvironmentFinding, ...] = ()
    if against is not None:
        if torch.cuda.is_available():
            torch.cuda.init()  # only now: what is said of a GPU can be asked through a context alone
        differences = _differences(against)
    return Diagnosis(
        facts=_facts(),
        settings=findings,
        against=None if against is None else str(against.path),
        differences=differences,
    )


def _find(name: str, wanted: Any, found: Any) -> SettingFinding:
    setting = SETTINGS[name]
    late = None if wanted is None else too_late(setting, wanted)
    state: State
    to_do = ""
    if wanted is None:
        state = "left alone"
    elif wanted == found:
        state = "in force"
    elif setting.is_cuda_only and not torch.cuda.is_available():
        state = "no effect here"
    else:
        state = "not in force" if late is None else "too late"
        to_do = setting.how(wanted) if late is None else f"restart with {setting.how(wanted)} ({late})"
    return SettingFinding(name=name, wanted=wanted, in_force=found, state=state, to_do=to_do, why=setting.why)


def _settings_of(run: Run) -> DeterminismSettings:
    known = DeterminismSettings.__dataclass_fields__
    if not run.manifest.settings:
        raise ReferenceFormatError(
            f"{run.path / 'run.json'} does not say which settings were in force, so there is nothing to compare with. "
            "Name a run that DeterminismCallback or ObserverContext recorded.",
            str(run.path),
        )
    values = {name: value for name, value in run.manifest.settings.items() if name in known and value is not None}
    if values.get("float32_matmul_precision") == "mixed":
        del values["float32_matmul_precision"]
    if values.get("inductor_deterministic") == (values.get("deterministic_algorithms") in ("error", "warn")):
        del values["inductor_deterministic"]  # it follows from the other
    return DeterminismSettings.from_mapping({**dict.fromkeys(known), **values})


def _differences(run: Run) -> tuple[EnvironmentFinding, ...]:
    here = capture_environment()
    found = [
        EnvironmentFinding(
            name=entry.name,
            reference=entry.reference,
            here=entry.current,
            is_machine=entry.is_machine,
            changes_bits=entry.changes_bits,
            to_do=_line_for_entry(entry.name, entry.reference),
        )
        for entry in compare_environments(run.environment, here)
        # what a Trainer or a configuration chose is nothing that can be seen without it
        if entry.name in here.entries and not entry.name.startswith(("settings.", "code."))
    ]
    return tuple(sorted(found, key=lambda finding: (not finding.changes_bits, finding.name)))


def _line_for_entry(name: str, value: Any) -> str:
    if name.startswith("env."):
        variable = name.removeprefix("env.")
        return f"unset {variable}" if value is None else f"export {variable}={value}"
    if name in ("torch.num_threads", "torch.num_interop_threads"):
        return SETTINGS[name.removeprefix("torch.")].how(value)
    package, _, is_version = name.rpartition(".")
    if is_version == "version" and package in ("torch", "numpy", "lightning", "triton", "det_callbacks"):
        return f"pip install {package}=={str(value).partition('+')[0]}"
    if name == "torch.cpu_capability":
        return f"export ATEN_CPU_CAPABILITY={str(value).lower()}"
    return ""


def _facts() -> dict[str, Any]:
    entries = capture_environment().entries
    names = ("python.version", "torch.version", "lightning.version", "cpu.model", "torch.cpu_capability")
    facts = {name: entries[name].value for name in (*names, "torch.num_threads")}
    count = torch.cuda.device_count()
    facts["cuda"] = f"{count} x {torch.cuda.get_device_name(0)}" if count else "no CUDA device"
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is not None:
        device = torch.device(accelerator.type, torch.accelerator.current_device_index())
        facts["digest"] = f"{device}: {device_choice(device)}"
    return facts
