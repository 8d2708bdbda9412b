"""Going on as if a training had never been interrupted: what a checkpoint leaves out of a training's state."""

from det_callbacks.resume.generators import GeneratorStates
from det_callbacks.resume.held import find_generators

__all__ = ["GeneratorStates", "find_generators"]
