"""Environment variables that pass the command line's requests to the scripts it
starts, and to their ranks.
"""

import os
from functools import cache

LAUNCH = "DET_CALLBACKS_LAUNCH"
"""The request of ``det-callbacks record``, ``verify`` or ``check``, as JSON: see
``integrations/launch.py``.
"""

REFUSAL = "refusal"
"""File next to the claim of a launch, where the callback writes why it ended the script."""

SEEN = "seen-"
"""Begin of the names of files next to the claim, where each process writes what
it did with torch.
"""

FILL_MEMORY = "DET_CALLBACKS_FILL_MEMORY"
"""``DeterminismCallback`` fills memory that recorded ops allocate without writing it
with this byte, at level op.
"""

PERTURB = "DET_CALLBACKS_PERTURB"
"""``DeterminismCallback`` changes the last bit of the inputs of the first recorded step."""

LAST_STEP = "DET_CALLBACKS_LAST_STEP"
"""The run and the script end well after this step; with a plus sign,
after so many steps of this run.
"""

REPLACES_OWN = "DET_CALLBACKS_REPLACES_OWN"
"""Runs that the script itself has do nothing, unless they apply settings,
so that the command follows the script.
"""

CAPTURE = "DET_CALLBACKS_CAPTURE"
"""The call whose inputs are saved, as JSON: see ``CallCapture`` in ``tensors/calls.py``."""

RECORDER = "DET_CALLBACKS_RECORDER"
"""Which code records the ops of a step: python, native (``native/build.py``), or auto,
the default: native where it has been built, else python.
"""

NUM_WORKERS = "DET_CALLBACKS_NUM_WORKERS"
"""``DeterminismCallback`` gives the training's DataLoaders this number of workers."""


@cache
def launch_request() -> str | None:
    """Return the command's request, read once: a script may clear its variables."""
    return os.environ.get(LAUNCH)
