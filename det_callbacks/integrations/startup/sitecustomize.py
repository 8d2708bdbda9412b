"""Start-up code for scripts that det-callbacks starts; Python runs it before the script.

It removes its folder from ``sys.path``, and runs the ``sitecustomize`` that Python would have run
without it.
"""

import importlib.util
import os
import sys

_here = os.path.dirname(os.path.abspath(__file__))
sys.path[:] = [path for path in sys.path if os.path.abspath(path) != _here]
_ours = sys.modules.pop("sitecustomize")
_other = importlib.util.find_spec("sitecustomize")
if _other is not None and _other.loader is not None:
    sys.modules["sitecustomize"] = _module = importlib.util.module_from_spec(_other)
    _other.loader.exec_module(_module)
else:
    sys.modules["sitecustomize"] = _ours

try:
    from det_callbacks.integrations.launch import begin
except ModuleNotFoundError:  # not the training's Python; if it does train, nothing is recorded
    pass
else:
    begin()
