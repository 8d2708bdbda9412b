"""The environment variables by which the command line reaches the trainings that it starts, and their ranks."""

LAUNCH = "DET_CALLBACKS_LAUNCH"
"""What ``det-callbacks record``, ``verify`` and ``check`` ask of a script, as JSON: see ``integrations/launch.py``."""

REFUSAL = "refusal"
"""File beside the claim of a launch, into which the callback writes why it ended the script."""

FILL_MEMORY = "DET_CALLBACKS_FILL_MEMORY"
"""``DeterminismCallback`` fills the memory that recorded ops only allocate with this byte, at level op."""

PERTURB = "DET_CALLBACKS_PERTURB"
"""``DeterminismCallback`` changes the last bit of what goes into the first step that is recorded."""

NUM_WORKERS = "DET_CALLBACKS_NUM_WORKERS"
"""``DeterminismCallback`` gives the training's DataLoaders so many workers."""
