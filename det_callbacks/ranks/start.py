"""What must not differ between the processes of a run when it starts.

Data shards, generator states and seeds may differ by design; settings, versions, code, selection and, where they are
replicated, the initial weights may not.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from det_callbacks.errors import SettingsError

MAX_NAMED = 5
"""Entries that a message names; the others are counted."""

_PREFIXES = ("settings.", "python.", "numpy.", "lightning.", "det_callbacks.", "triton.", "trainer.", "torch.")
_NAMES = frozenset({"code.git_commit"})
_BY_DESIGN = frozenset({"settings.seed", "torch.cpu_capability", "torch.num_interop_threads"})
"""What may differ between the ranks: seeds, and what the nodes of a cluster are."""


def start_facts(manifest: Mapping[str, Any], **others: Any) -> dict[str, Any]:
    """Return what a process tells the others at the start of a fit: name -> value, as JSON holds it.

    Args:
        manifest: of run.json: selection and environment.
        others: further entries by name; None is left out.
    """
    environment = {
        name: entry["value"]
        for name, entry in manifest["environment"].items()
        if (name.startswith(_PREFIXES) or name in _NAMES) and name not in _BY_DESIGN
    }
    selection = {f"selection.{name}": value for name, value in manifest["selection"].items()}
    known = {name: value for name, value in others.items() if value is not None}
    saved = {name: list(manifest.get(name, ())) for name in ("replay", "keep_tensors")}
    return {**environment, **selection, **saved, **known}


def require_same(told: Sequence[Mapping[str, Any]]) -> None:
    """Raise ``SettingsError`` that names what differs between ranks, and who is in the minority.

    Args:
        told: what each rank told, by rank.
    """
    names = sorted({name for facts in told for name in facts})
    problems = [text for name in names if (text := _difference(name, [facts.get(name) for facts in told])) is not None]
    if not problems:
        return
    more = f"; and {len(problems) - MAX_NAMED} more" if len(problems) > MAX_NAMED else ""
    raise SettingsError(
        f"The {len(told)} processes of this run do not start alike: {'; '.join(problems[:MAX_NAMED])}{more}. Nothing "
        f"was trained; {len(names) - len(problems)} other entries agree. Give all processes the same code, packages, "
        "settings and weights; only seeds and data may differ."
    )


def _difference(name: str, values: Sequence[Any]) -> str | None:
    by_value: dict[str, list[int]] = {}
    for rank, value in enumerate(values):
        by_value.setdefault(json.dumps(value, sort_keys=True), []).append(rank)
    if len(by_value) == 1:
        return None
    # the larger group is taken for the right one, of equal ones that of the lowest rank
    majority, *minorities = sorted(by_value.items(), key=lambda item: (-len(item[1]), item[1][0]))
    shown = ", ".join(f"{value} on {_ranks(ranks)}" for value, ranks in minorities[:MAX_NAMED])
    return f"{name} is {shown}, and {majority[0]} on {_ranks(majority[1])}"


def _ranks(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, ranks[:8])) + (f" and {len(ranks) - 8} more" if len(ranks) > 8 else "")
    return f"rank {shown}" if len(ranks) == 1 else f"ranks {shown}"
