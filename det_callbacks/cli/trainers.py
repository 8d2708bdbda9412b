"""Why a script left no run."""

import json
from pathlib import Path

from det_callbacks.text import listed

_LIGHTNING = ("lightning.pytorch", "pytorch_lightning")
_OTHERS = {"keras": "Keras", "tensorflow": "TensorFlow", "jax": "JAX"}
TRAINERS = (*_LIGHTNING, *_OTHERS, "torch")
"""``integrations/launch.py`` records which of these modules a process loaded."""


def nothing_text(verb: str, notes: Path) -> str:
    """Return why a script that succeeded left no run, from the notes of its processes."""
    loaded = {name for file in notes.glob("loaded-*") for name in json.loads(file.read_text(encoding="utf-8"))}
    head = f"The script succeeded, but nothing was {verb}"
    others = [title for name, title in _OTHERS.items() if name in loaded]
    if "torch" in loaded and loaded.isdisjoint(_LIGHTNING):
        return (
            f"{head}: no optimizer of torch.optim stepped after a call of a module that holds its parameters, with "
            "gradients enabled, or the script records itself. If the script updates parameters itself, put its loop "
            "into a TrainingRun (docs/how-to/plain-loop.md)"
        )
    if others and loaded.isdisjoint(_LIGHTNING):
        return f"{head}: it trains with {listed(others)}, which this command cannot reach"
    reasons = "no Trainer ran a fit, or the Trainer already had a DeterminismCallback"
    if not loaded:
        reasons += (
            ", or the Python that trains has no det_callbacks installed, or ignores PYTHONPATH (its flags -E and -I)"
        )
    return f"{head}: {reasons}" + (
        f". It also loads {listed(others)}, which this command cannot reach" if others else ""
    )
