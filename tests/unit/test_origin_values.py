"""Numbers that go from a tensor through Python into the arguments of later ops."""

from functools import partial

import torch
from tracing import step_of

from det_callbacks.compare import compare_steps
from det_callbacks.trace.hash_mode import HashMode

DATA = torch.arange(1.0, 5.0)


def origins(first: float, second: float, factor: float = 1.0) -> list[tuple[str, bool | None]]:
    """Return op and origin of what differs between two steps that begin with another addend."""

    def body(addend: float, scale: float) -> None:
        count = DATA + addend
        number = count.sum().item()
        DATA * number
        DATA * scale

    given = ((first, 1.0), (second, factor))
    views = [step_of(HashMode(), partial(body, *numbers)).view() for numbers in given]
    return [(entry.op, entry.is_origin) for entry in compare_steps(*views).divergences]


def test_an_argument_that_may_come_from_a_differing_number_is_no_proven_origin():
    found = origins(0.5, 0.25)
    assert found[0] == ("aten.add.Tensor", True)
    assert ("aten._local_scalar_dense.default", False) in found
    assert ("aten.mul.Tensor", None) in found
    assert [entry for entry in found if entry[1]] == [("aten.add.Tensor", True)]


def test_an_argument_that_changed_without_such_a_number_is_an_origin():
    assert origins(0.5, 0.5, 2.0) == [("aten.mul.Tensor", True)]
