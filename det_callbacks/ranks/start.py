"""Whether the processes of a run start alike.

Data shards, generator states and seeds may differ. Settings, versions, code and selection must agree, and so must the
initial weights where they are replicated.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from det_callbacks.digest.state import digest_state
from det_callbacks.errors import SettingsError
from det_callbacks.ranks.group import RankGroup, by_majority
from det_callbacks.report.console import ranks_text

MAX_NAMED = 5
"""Entries that a message names; the others are counted."""

_PREFIXES = ("settings.", "python.", "numpy.", "lightning.", "det_callbacks.", "triton.", "trainer.", "torch.")
_NAMES = frozenset({"code.git_commit"})
_BY_DESIGN = frozenset({"settings.seed", "torch.cpu_capability", "torch.num_interop_threads"})
"""What may differ between the ranks: seeds, and properties of each node's CPU."""


def require_same_start(group: RankGroup, manifest: Mapping[str, Any], weights: Mapping[str, Tensor] | None) -> None:
    """Raise ``SettingsError`` on all ranks when they do not start alike; one exchange, and a pass over the weights.

    Args:
        group: of all ranks.
        manifest: of run.json: selection and environment.
        weights: by name, where each rank has all of them.
    """
    if group.world_size > 1:
        digests = {} if weights is None else digest_state(weights).tensors
        facts = start_facts(manifest) | {f"weights of {name}": digest for name, digest in digests.items()}
        require_same(group.gather(lambda: facts, task="comparing how the ranks start"))


def start_facts(manifest: Mapping[str, Any]) -> dict[str, Any]:
    """Return what has to be the same in all processes; settings without an effect on this machine are left out."""
    environment = {
        name: entry["value"]
        for name, entry in manifest["environment"].items()
        if (name.startswith(_PREFIXES) or name in _NAMES) and name not in _BY_DESIGN
        if entry["changes_bits"] or not name.startswith("settings.")
    }
    selection = {f"selection.{name}": value for name, value in manifest["selection"].items()}
    saved = {name: manifest.get(name, ()) for name in ("replay", "keep_tensors")}
    return {**environment, **selection, **saved}


def require_same(told: Sequence[Mapping[str, Any]]) -> None:
    """Raise ``SettingsError`` that names which of the facts of each rank differ, and who is in the minority."""
    names = sorted({name for facts in told for name in facts})
    problems = []
    for name in names:
        # the larger group is taken for the right one, of equal ones that of the lowest rank
        values = {rank: json.dumps(facts.get(name), sort_keys=True) for rank, facts in enumerate(told)}
        (value, ranks), *others = by_majority(values)
        if others:
            shown = ", ".join(f"{other} on {ranks_text(held)}" for other, held in others[:MAX_NAMED])
            problems.append(f"{name} is {shown}, and {value} on {ranks_text(ranks)}")
    if problems:
        more = f"; and {len(problems) - MAX_NAMED} more" if len(problems) > MAX_NAMED else ""
        raise SettingsError(
            f"The {len(told)} processes of this run do not start alike: {'; '.join(problems[:MAX_NAMED])}{more}. "
            f"Nothing was trained; {len(names) - len(problems)} other entries agree. Give all processes the same code, "
            "packages, settings and weights; only seeds and data may differ."
        )
