"""Sets up a script that ``det-callbacks record``, ``verify`` or ``check`` started:
settings first, then a callback.

Lightning calls the entry point ``callbacks`` for each Trainer. Before the script, Python runs
``startup/sitecustomize.py``, which is on ``PYTHONPATH`` and calls ``begin``. Both read one
environment variable. Running the script with ``runpy`` would not reach its ranks, or programs that
a shell script starts.
"""

import atexit
import json
import random
import sys
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from det_callbacks.environment.variables import launch_request


def callbacks() -> list[Any]:
    """Return the callback of this process if a command requests one; else
    return [], and import nothing.
    """
    asked = launch_request()
    if asked is None:
        return []
    # loads Lightning
    from det_callbacks.integrations.lightning.determinism import launched_callback  # noqa: PLC0415
    from det_callbacks.integrations.torch_steps import follow_torch  # noqa: PLC0415  # likewise

    follow_torch(asked).give_way()
    return [launched_callback(asked)]


def begin() -> None:
    """Follow torch from its import on, with the settings in force.

    No generator of torch or NumPy can draw before the import, so the settings apply then. Importing
    torch here would be too early for ``os.environ["OMP_NUM_THREADS"] = "1"`` in the script, which
    torch reads at import.
    """
    asked = launch_request()
    if asked is None:
        return
    atexit.register(_report_seen)
    settings = json.loads(asked)["settings"]
    if (seed := settings.get("seed")) is not None:
        random.seed(seed)
        _after_import("numpy", lambda numpy: numpy.random.seed(seed))
    _after_import("torch", lambda torch: _begin_with_torch(asked, settings))


def _begin_with_torch(asked: str, settings: dict[str, Any]) -> None:
    """Apply the settings and follow torch; if that fails, end the process with status 2."""
    from det_callbacks.errors import DetCallbacksError  # noqa: PLC0415  # only when asked
    from det_callbacks.integrations.torch_steps import follow_torch  # noqa: PLC0415  # loads torch

    # likewise
    from det_callbacks.settings import DeterminismSettings, enforce_determinism  # noqa: PLC0415

    try:
        if settings:
            enforce_determinism(DeterminismSettings.choose(**settings))
        follow_torch(asked)
    except DetCallbacksError as error:
        sys.stderr.write(f"{type(error).__name__}: {error}\n")
        raise SystemExit(error.exit_code) from error


def _report_seen() -> None:
    """Tell the command that this process never imported torch; what it does
    with torch, TorchSteps tells.
    """
    # a process that ends needs no speed
    from det_callbacks.integrations.seen import report_seen  # noqa: PLC0415

    if "torch" not in sys.modules:
        report_seen(
            "torch was not imported, and no other framework is supported", is_of_torch=False
        )


def _after_import(name: str, call: Callable[[Any], object]) -> None:
    """Call a function with a module right after its first import,
    or now if it is imported already.
    """
    if name in sys.modules:
        call(sys.modules[name])
    else:
        sys.meta_path.insert(0, _AfterImport(name, call))


class _AfterImport:
    """Finder that calls a function with a module once, after a loader executed the module.

    It stays until then: a library may look for the module without importing it,
    and an import may fail.
    """

    def __init__(self, name: str, call: Callable[[Any], object]) -> None:
        self._name, self._call = name, call

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        if name != self._name or self not in sys.meta_path:
            return None
        others: list[Any] = sys.meta_path[sys.meta_path.index(self) + 1 :]
        specs = (
            other.find_spec(name, path, target) for other in others if hasattr(other, "find_spec")
        )
        spec = next((spec for spec in specs if spec is not None), None)
        loader: Any = None if spec is None else spec.loader
        if loader is not None:
            execute = loader.exec_module

            def execute_and_call(module: ModuleType) -> None:
                execute(module)
                vars(loader).pop("exec_module", None)
                if self in sys.meta_path:
                    sys.meta_path.remove(self)
                    self._call(module)

            loader.exec_module = execute_and_call
        return spec
