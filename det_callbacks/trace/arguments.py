"""The arguments of an op that are no tensors: numbers are values of the step, all else belongs to the program.

A learning rate or a shape may be another in each step. So each number, and each list of numbers, is left out of the
program, and the step has one digest of all those of a call; dtypes, flags and words are part of the program. What a
step's program is follows from the step alone, whatever this process has recorded before.
"""

import json
from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor

from det_callbacks.runs.program import plain_value
from det_callbacks.trace.overloads import OpPlan


def is_number(value: Any) -> bool:
    """Return whether an argument is a value of the step: a number, or a list of numbers."""
    if isinstance(value, list | tuple):
        return all(map(is_number, value))
    return isinstance(value, int | float | complex) and not isinstance(value, bool)


def names_of_arguments(plan: OpPlan, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[str]:
    """Yield the names of the arguments that are no tensors, in the order in which the recorder collects them."""
    written = {write.name for write in plan.writes} if plan.is_overwrite else set()
    for name, value in (*zip(plan.argument_names, args, strict=False), *kwargs.items()):
        if name in written or isinstance(value, Tensor):
            continue
        if isinstance(value, list | tuple) and any(isinstance(item, Tensor) for item in value):
            yield from (f"{name}[{index}]" for index, item in enumerate(value) if not isinstance(item, Tensor))
        else:
            yield name


def is_ambiguous(value: Any, *, is_number: bool) -> bool:
    """Return whether an argument may equal another that is not the same: 0.0 == -0.0, 1 == 1.0 == True.

    Args:
        value: the argument.
        is_number: whether any kind of number is taken, so that 1, 1.0 and True are not the same.
    """
    if isinstance(value, list | tuple):
        return any(is_ambiguous(item, is_number=is_number) for item in value)
    if isinstance(value, float) and value == 0.0:
        return True
    if not is_number or not isinstance(value, int | float | complex):
        return False
    return isinstance(value, complex) or (value == value and abs(value) < 2**63 and value == int(value))


def arguments_json(arguments: Mapping[str, Any]) -> str:
    """Return the JSON object of arguments by name."""
    return json.dumps({name: plain_value(value) for name, value in arguments.items()}, separators=(",", ":"))
