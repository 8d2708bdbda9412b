"""What a script trained with, where nothing was recorded of it."""

import json
from pathlib import Path

from det_callbacks.report.console import listed

_LIGHTNING = ("lightning.pytorch", "pytorch_lightning")
_OTHERS = {
    "transformers.trainer": "the Trainer of transformers",
    "composer.trainer": "the Trainer of Composer",
    "lightning.fabric": "Fabric (lightning.fabric)",
    "lightning_fabric": "Fabric (lightning_fabric)",
    "fastai.learner": "the Learner of fastai",
    "ignite.engine": "the Engine of Ignite",
    "skorch": "skorch",
    "keras": "Keras",
    "accelerate": "Accelerate",
    "tensorflow": "TensorFlow",
    "jax": "JAX",
}
TRAINERS = (*_LIGHTNING, *_OTHERS, "torch")
"""Modules that tell what trains in a process; ``integrations/launch.py`` notes those that a process loaded."""


def nothing_text(verb: str, notes: Path) -> str:
    """Return why nothing was recorded or verified by a script that ended well, from what its processes noted there."""
    loaded = {name for file in notes.glob("loaded-*") for name in json.loads(file.read_text(encoding="utf-8"))}
    head = f"the script ended well, and nothing was {verb}"
    others = [title for name, title in _OTHERS.items() if name in loaded]
    if loaded and loaded.isdisjoint(_LIGHTNING):
        trains = f"with {listed(others)}" if others else "in a loop of its own on torch"
        return (
            f"{head}: it has no Trainer of lightning.pytorch or pytorch_lightning, and trains {trains}, which this "
            "command cannot reach. Record its steps in the script itself: docs/how-to/observe.md"
        )
    reasons = "no Trainer had a fit, or one had a DeterminismCallback of the script's own"
    if not loaded:
        reasons += ", or the Python that trains has no det_callbacks installed"
    return f"{head}: {reasons}" + (
        f". It also loads {listed(others)}, which this command cannot reach" if others else ""
    )
