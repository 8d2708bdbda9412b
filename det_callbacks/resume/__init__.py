"""What a checkpoint leaves out of a training's state: generators, gradients under way, where its data is."""

from det_callbacks.resume.generators import GeneratorStates
from det_callbacks.resume.held import find_generators
from det_callbacks.resume.state import DataPosition, Reduction, ResumeState

__all__ = ["DataPosition", "GeneratorStates", "Reduction", "ResumeState", "find_generators"]
