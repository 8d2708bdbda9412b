"""The arguments of an op that are no tensors: how they are compared and written down."""

import json
from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor

from det_callbacks.runs.program import plain_value
from det_callbacks.trace.overloads import OpPlan


class _Varying:
    """Stands for an argument that changes from step to step: equal to everything."""

    __slots__ = ()
    __hash__ = None  # type: ignore[assignment]  # equal to everything, so no hash can be right

    def __eq__(self, other: object) -> bool:
        return True


class _NotANumber:
    """Stands for NaN among the arguments of a call: equal to every NaN."""

    __slots__ = ()
    __hash__ = None  # type: ignore[assignment]  # NaNs of one process have different hashes

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, float | complex) and other != other)


VARYING = _Varying()
NAN = _NotANumber()


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


def exact_form(consts: Sequence[Any], varying: Sequence[int]) -> str:
    """Return the text form of the constant arguments but those that vary."""
    return repr([const for index, const in enumerate(consts) if index not in varying])


def needs_exact(value: Any, *, is_number: bool) -> bool:
    """Return whether an argument may equal another that is not the same: 0.0 == -0.0, 1 == 1.0 == True.

    Args:
        value: the argument.
        is_number: whether any kind of number is taken, so that 1, 1.0 and True are not the same.
    """
    if isinstance(value, list | tuple):
        return any(needs_exact(item, is_number=is_number) for item in value)
    if isinstance(value, float) and value == 0.0:
        return True
    if not is_number or not isinstance(value, int | float | complex):
        return False
    return isinstance(value, complex) or (value == value and abs(value) < 2**63 and value == int(value))


def comparable(value: Any) -> Any:
    """Return an argument in a form that equals itself: NaN does not."""
    if isinstance(value, list | tuple):
        return [comparable(item) for item in value] if any(item != item for item in value) else value
    return NAN if isinstance(value, float | complex) and value != value else value


def arguments_json(names: Sequence[str], consts: Sequence[Any]) -> str:
    """Return the JSON object of constant arguments; varying ones are left out."""
    pairs = zip(names, consts, strict=True)
    return json.dumps(
        {name: plain_value(const) for name, const in pairs if const is not VARYING}, separators=(",", ":")
    )
