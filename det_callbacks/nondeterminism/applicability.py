"""Whether what torch says of an op can be meant for one recorded call of it."""

import ast
import re
from collections.abc import Mapping, Sequence
from typing import Any

from det_callbacks.nondeterminism.op_facts import OpFact

_VALUE = re.compile(r"\b(\w+)=('[^']*'|True|False)")
_CONVOLUTION = re.compile(r"torch\.nn\.Conv(Transpose)?(\d)d")


def may_apply(fact: OpFact, *, op: str, phase: str, arguments: Mapping[str, Any], varying: Sequence[str] = ()) -> bool:
    """Return whether a fact can be about a call; false only where name, phase or arguments exclude it.

    Device, dtype and "requires grad" are not looked at: a recording does not hold them.

    Args:
        fact: what torch says.
        op: ``namespace.op.overload`` of the call.
        phase: in which the op ran.
        arguments: the call's constant arguments by name; one that is not there has its default.
        varying: names of arguments whose values are not known.
    """
    base = op.rpartition(".")[0]
    if base not in fact.ops:
        return False
    if fact.is_of_backward and not base.endswith("_backward") and phase != "backward":
        return False
    return _is_dimension_of(fact.name, arguments) and _has_values_of(fact.condition, arguments, varying)


def _is_dimension_of(name: str, arguments: Mapping[str, Any]) -> bool:
    found = _CONVOLUTION.fullmatch(name)
    if not found or not {"stride", "transposed"} <= arguments.keys():
        return True
    return len(arguments["stride"]) == int(found[2]) and arguments["transposed"] == bool(found[1])


def _has_values_of(condition: str, arguments: Mapping[str, Any], varying: Sequence[str]) -> bool:
    # "with accumulate=True"; two values of one argument are alternatives: "when reduce='sum' or reduce='mean'"
    documented: dict[str, list[Any]] = {}
    for name, text in _VALUE.findall(condition):
        documented.setdefault(name, []).append(ast.literal_eval(text))
    for name, values in documented.items():
        # torch leaves arguments at their default out of the call; flags are off by default
        given = arguments.get(name, False if isinstance(values[0], bool) else None)
        # another type is another spelling: mode='max' of EmbeddingBag is mode=2 in aten
        if name not in varying and isinstance(given, type(values[0])) and given not in values:
            return False
    return True
