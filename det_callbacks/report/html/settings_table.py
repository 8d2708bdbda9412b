"""The environments of two runs side by side: what differs first."""

import json
from dataclasses import dataclass
from typing import Any

from det_callbacks.runs.environment import Environment, EnvironmentEntry

MAX_SETTINGS = 1_000
_MAX_TEXT = 300


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """One entry of both environments; "" stands for an entry that a run does not have."""

    name: str
    reference: str
    current: str
    differs: bool
    is_machine: bool
    changes_bits: bool


def list_settings(reference: Environment, current: Environment) -> tuple[Setting, ...]:
    """Return all entries: those that differ and can change bits, others that differ, and the rest by name."""
    found = []
    for name in sorted({*reference.entries, *current.entries}):
        ours, theirs = reference.entries.get(name), current.entries.get(name)
        known = theirs or ours
        assert known is not None, "one of them has it"
        found.append(
            Setting(
                name=name,
                reference=_text(ours),
                current=_text(theirs),
                differs=ours is None or theirs is None or ours.value != theirs.value,
                is_machine=known.is_machine,
                changes_bits=known.changes_bits,
            )
        )
    found.sort(key=lambda setting: (not setting.differs, not (setting.differs and setting.changes_bits), setting.name))
    return tuple(found[:MAX_SETTINGS])


def _text(entry: EnvironmentEntry | None) -> str:
    if entry is None:
        return ""
    value: Any = entry.value
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return text if len(text) <= _MAX_TEXT else f"{text[:_MAX_TEXT]}..."
