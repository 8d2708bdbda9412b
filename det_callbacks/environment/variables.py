"""The environment variables by which the command line reaches the trainings that it starts, and their ranks."""

LAUNCH = "DET_CALLBACKS_LAUNCH"
"""What ``det-callbacks record``, ``verify`` and ``check`` ask of a script, as JSON: see ``integrations/launch.py``."""

REFUSAL = "refusal"
"""File beside the claim of a launch, into which the callback writes why it ended the script."""

NUM_WORKERS = "DET_CALLBACKS_NUM_WORKERS"
"""``DeterminismCallback`` gives the training's DataLoaders so many workers."""
