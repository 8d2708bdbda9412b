"""Going on as if a training had never been interrupted: what a checkpoint leaves out of a training's state."""

from det_callbacks.resume.held import find_generators
from det_callbacks.rng import GeneratorStates

__all__ = ["GeneratorStates", "find_generators"]
