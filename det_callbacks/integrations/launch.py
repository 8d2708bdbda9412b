"""Sets up a script that ``det-callbacks record``, ``verify`` or ``check`` started: settings first, then a callback.

Lightning calls the entry point ``callbacks`` for each Trainer. Before the script, Python runs
``startup/sitecustomize.py``, which is on ``PYTHONPATH`` and calls ``begin``. Both read one environment
variable. Running the script with ``runpy`` would not reach its ranks, or programs that a shell script
starts.
"""

import importlib.util
import json
import os
import random
import sys
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from det_callbacks.environment.variables import LAUNCH


def callbacks() -> list[Any]:
    """Return the callback of this process if a command requests one; else return [], and import nothing."""
    if LAUNCH not in os.environ:
        return []
    from det_callbacks.integrations.lightning.launched import launched_callback  # noqa: PLC0415  # loads Lightning
    from det_callbacks.integrations.torch_steps import follow_torch  # noqa: PLC0415  # likewise

    follow_torch(os.environ[LAUNCH]).give_way()
    return [launched_callback(os.environ[LAUNCH])]


def begin() -> None:
    """Follow torch from its import on, with the settings in force.

    No generator of torch or NumPy can draw before the import, so the settings apply then. Importing
    torch here would be too early for ``os.environ["OMP_NUM_THREADS"] = "1"`` in the script, which torch
    reads at import.
    """
    if LAUNCH not in os.environ:
        return
    settings = json.loads(os.environ[LAUNCH])["settings"]
    if (seed := settings.get("seed")) is not None:
        random.seed(seed)
        sys.meta_path.insert(0, _AfterImport("numpy", lambda numpy: numpy.random.seed(seed)))
    sys.meta_path.insert(0, _AfterImport("torch", lambda torch: _begin_with_torch(settings)))


def _begin_with_torch(settings: dict[str, Any]) -> None:
    from det_callbacks.integrations.torch_steps import follow_torch  # noqa: PLC0415  # loads torch

    if settings:
        _enforce(settings)
    follow_torch(os.environ[LAUNCH])


class _AfterImport:
    """Finder that calls a function with a module right after its first import, and then removes itself."""

    def __init__(self, name: str, call: Callable[[Any], object]) -> None:
        self._name, self._call = name, call

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        if name != self._name:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        loader: Any = None if spec is None else spec.loader
        if loader is not None:
            execute = loader.exec_module

            def execute_and_call(module: ModuleType) -> None:
                del loader.exec_module
                execute(module)
                self._call(module)

            loader.exec_module = execute_and_call
        return spec


def _enforce(settings: dict[str, Any]) -> None:
    """Apply settings; if that fails, end the process with status 2."""
    from det_callbacks.errors import DetCallbacksError  # noqa: PLC0415  # only where it is asked for
    from det_callbacks.settings import DeterminismSettings, enforce_determinism  # noqa: PLC0415  # likewise

    try:
        enforce_determinism(DeterminismSettings.choose(**settings))
    except DetCallbacksError as error:
        sys.stderr.write(f"{type(error).__name__}: {error}\n")
        raise SystemExit(error.exit_code) from error
