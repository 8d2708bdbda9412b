"""Start-up code of the scripts that det-callbacks starts with settings; Python runs it before the script.

Its folder leaves ``sys.path`` again, and a ``sitecustomize`` of the machine or of the user's runs
as it would have.
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
except ModuleNotFoundError:  # another Python than the training's; where it trains all the same, nothing is recorded
    pass
else:
    begin()
