"""What torch says of its ops, and which of them a run uses, as JSON-able data, for ``det-callbacks ops --json``."""

from collections.abc import Sequence
from importlib.metadata import version
from typing import Any

from det_callbacks.nondeterminism import BEHAVIOURS, OpFact
from det_callbacks.report.op_usage import OpUsage
from det_callbacks.runs.store import Run


def op_facts_to_dict(facts: Sequence[OpFact]) -> dict[str, Any]:
    """Return all that torch says of its ops."""
    return {**_head(facts), "run": None, "entries": [_fact_to_dict(fact) for fact in facts]}


def op_usage_to_dict(usage: OpUsage, facts: Sequence[OpFact], run: Run) -> dict[str, Any]:
    """Return what torch says of the ops that a run uses, with their sites in one step by module."""
    return {
        **_head(facts),
        "run": {
            "path": str(run.path),
            "run_id": run.run_id,
            "complete": run.is_complete,
            "selection": run.manifest.get("selection"),
            "num_ops": usage.num_ops,
            "num_programs": usage.num_programs,
        },
        "entries": [
            {
                **_fact_to_dict(use.fact),
                "used": list(use.ops),
                "modules": [{"module": module, "sites": number} for module, number in use.sites.items()],
            }
            for use in usage.uses
        ],
    }


def _head(facts: Sequence[OpFact]) -> dict[str, Any]:
    counts = {behaviour: sum(fact.behaviour == behaviour for fact in facts) for behaviour in BEHAVIOURS}
    return {"schema": 1, "torch": version("torch"), "counts": counts}


def _fact_to_dict(fact: OpFact) -> dict[str, Any]:
    return {
        "name": fact.name,
        "ops": list(fact.ops),
        "behaviour": fact.behaviour,
        "device": fact.device,
        "condition": fact.condition,
    }
