"""Faults: what may go wrong in a training, planted where the seed says,
and how a verdict has to name it.

A fault in an op is planted below what records: to a recorder,
it is the op itself that returned other bits.
"""

import random
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from trainings import KINDS, STEPS, Training

PHASES = ("forward", "backward", "optimizer")
INTEGERS = {4: torch.int32, 2: torch.int16}


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One fault in one training: ``call`` is the number of the op in its step,
    where it is in an op.
    """

    training: str
    change: str
    phase: str
    step: int
    seed: int
    call: int = -1
    op: str = ""

    @property
    def cause(self) -> str:
        """The cause that a verdict has to name."""
        return self.phase if self.op else OUTSIDE[self.change][1]


# changes of the bits of an op's output; each returns nothing and may do nothing


def _integers(values: Tensor) -> Tensor:
    return values.view(INTEGERS[values.element_size()])


def one_ulp(values: Tensor, chance: random.Random) -> None:
    _integers(values)[chance.randrange(len(values))] += 1


def one_bit(values: Tensor, chance: random.Random) -> None:
    _integers(values)[chance.randrange(len(values))] ^= 1 << chance.randrange(
        8 * values.element_size() - 9
    )


def same_bit_twice(values: Tensor, chance: random.Random) -> None:
    places = chance.sample(range(len(values)), 2)
    _integers(values)[places] ^= 1 << chance.randrange(8 * values.element_size() - 9)


def two_signs(values: Tensor, chance: random.Random) -> None:
    values[chance.sample(range(len(values)), 2)] *= -1


def two_swapped(values: Tensor, chance: random.Random) -> None:
    one, other = chance.sample(range(len(values)), 2)
    values[[one, other]] = values[[other, one]]


def rolled(values: Tensor, chance: random.Random) -> None:
    values.copy_(values.roll(chance.randrange(1, len(values))))


CHANGES: dict[str, Callable[[Tensor, random.Random], None]] = {
    "one ULP": one_ulp,
    "one bit": one_bit,
    "the same bit of two elements": same_bit_twice,
    "two signs": two_signs,
    "two elements swapped": two_swapped,
    "all elements moved": rolled,
}


# faults outside of ops: at the start, or before a step; each returns the name of what differs first


def initial_weight(training: Training, batch: tuple[Tensor, Tensor], chance: random.Random) -> str:
    name, weight = chance.choice([*training.model.named_parameters()])
    one_ulp(weight.detach().view(-1), chance)
    return name


def written_weight(training: Training, batch: tuple[Tensor, Tensor], chance: random.Random) -> str:
    name, weight = chance.choice([*training.model.named_parameters()])
    weight.detach().numpy().reshape(-1).view("int32")[chance.randrange(weight.numel())] ^= 1 << 12
    return name


def written_gradient(
    training: Training, batch: tuple[Tensor, Tensor], chance: random.Random
) -> str:
    name, weight = chance.choice([*training.model.named_parameters()])

    def write() -> None:
        assert weight.grad is not None
        weight.grad.numpy().reshape(-1).view("int32")[0] ^= 1 << 12
        training.before_update = None

    training.before_update = write
    return f"grad of {name}"


def learning_rate(training: Training, batch: tuple[Tensor, Tensor], chance: random.Random) -> str:
    training.optimizer.param_groups[0]["lr"] *= 1.01
    return ""


def other_content(training: Training, batch: tuple[Tensor, Tensor], chance: random.Random) -> str:
    inputs, _ = batch
    if inputs.is_floating_point():
        one_ulp(inputs.view(-1), chance)
    else:
        inputs[0, 0] = (inputs[0, 0] + 1) % 24
    return "batch[0]"


def other_order(training: Training, batch: tuple[Tensor, Tensor], chance: random.Random) -> str:
    order = torch.arange(len(batch[0])).roll(chance.randrange(1, len(batch[0])))
    for part in batch:
        part.copy_(part[order])
    return "batch[0]"


def extra_draw(training: Training, batch: tuple[Tensor, Tensor], chance: random.Random) -> str:
    torch.rand(1)
    return "torch.cpu"


OUTSIDE: dict[str, tuple[Callable[..., str], str]] = {
    "an initial weight": (initial_weight, "initial_weights"),
    "a weight written between steps": (written_weight, "external_write"),
    "a gradient written before the update": (written_gradient, "external_write"),
    "another learning rate": (learning_rate, "optimizer"),
    "other content of a batch": (other_content, "data_content"),
    "other order of a batch": (other_order, "data_order"),
    "a random number drawn": (extra_draw, "rng"),
}


AT_START = "an initial weight"


class Below(TorchDispatchMode):
    """Below the recorder: runs the op, and changes what it wrote when ``Above``
    has said that it is the one.
    """

    def __init__(self, fault: Fault) -> None:
        super().__init__()
        self.fault, self.armed, self.has_changed = fault, "", False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        if self.armed == str(func):
            self.armed = ""
            written = writable(func, output, args)
            assert written is not None
            before = _integers(written).clone()
            CHANGES[self.fault.change](written, random.Random(self.fault.seed))
            self.has_changed = not torch.equal(before, _integers(written))
        return output


class Above(TorchDispatchMode):
    """Above the recorder: sees the training's own ops only,
    and not those with which a recorder looks at tensors.
    """

    def __init__(self, below: Below | None = None) -> None:
        super().__init__()
        self.below, self.num_seen = below, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.below is not None and self.num_seen == self.below.fault.call:
            self.below.armed = str(func)
        self.num_seen += 1
        return func(*args, **(kwargs or {}))


class Looking(TorchDispatchMode):
    """Lists the ops of a step in which a fault can be planted: number, phase, name."""

    def __init__(self, training: Training) -> None:
        super().__init__()
        self.training, self.num_seen = training, 0
        self.places: list[tuple[int, str, str]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        if self.training.phase in PHASES and writable(func, output, args) is not None:
            self.places.append((self.num_seen, self.training.phase, str(func)))
        self.num_seen += 1
        return output


def writable(func: Any, output: Any, args: Any) -> Tensor | None:
    """Return the elements of a tensor that an op wrote, in the order of memory;
    None where there is none to change.
    """
    base = str(func).split(".")[1]
    if "empty" in base:
        return None
    first = output[0] if isinstance(output, tuple | list) and output else output
    if first is None and args and isinstance(args[0], tuple | list):  # foreach and fused ops
        first = args[0][0]
    if (
        not isinstance(first, Tensor)
        or first.dtype not in (torch.float32, torch.bfloat16)
        or first.numel() < 4
    ):
        return None
    given = {one.untyped_storage().data_ptr() for one in args if isinstance(one, Tensor)}
    if first.untyped_storage().data_ptr() in given and not base.endswith("_"):  # a view
        return None
    extent = 1 + sum(
        (size - 1) * stride for size, stride in zip(first.shape, first.stride(), strict=True)
    )
    if extent != first.numel():  # expanded, or with gaps
        return None
    return first.detach().as_strided((first.numel(),), (1,))


def begin(fault: Fault | None, training: Training) -> None:
    """Plant what is different from the start."""
    if fault is not None and fault.change == AT_START:
        OUTSIDE[AT_START][0](training, training.batches[0], random.Random(fault.seed))


def strike(fault: Fault | None, training: Training, step: int) -> None:
    """Plant, before its step, a fault outside of ops."""
    if fault is not None and not fault.op and fault.change != AT_START and step == fault.step:
        OUTSIDE[fault.change][0](training, training.batches[step], random.Random(fault.seed))


def named_first(fault: Fault) -> str:
    """Return the name of what a fault outside of ops makes different first."""
    training = KINDS[fault.training]()
    return OUTSIDE[fault.change][0](
        training, training.batches[fault.step], random.Random(fault.seed)
    )


Planted = tuple[Callable[[int], AbstractContextManager[object]], Callable[[], bool]]


@contextmanager
def planted(fault: Fault | None) -> Iterator[Planted]:
    """Plant a fault in an op; yields what is opened in each step, above the recorder,
    and whether bits changed.
    """
    if fault is None or not fault.op:
        yield lambda step: Above(), lambda: True
        return
    with Below(fault) as below:
        yield lambda step: Above(below if step == fault.step else None), lambda: below.has_changed


def draw_faults(count: int, seed: int) -> Iterator[Fault]:
    """Yield faults: training, change, phase and place from the seed."""
    chance = random.Random(seed)
    places = {name: _places(make()) for name, make in KINDS.items()}
    in_ops = [(change, phase) for change in CHANGES for phase in PHASES]
    changes = in_ops + [(change, "") for change in OUTSIDE]
    for number in range(count):
        change, phase = changes[number % len(changes)]
        training = chance.choice([*KINDS])
        step = 0 if change == AT_START else chance.randrange(1, STEPS)
        of_fault: dict[str, Any] = {
            "change": change,
            "phase": phase,
            "step": step,
            "seed": chance.randrange(1 << 30),
        }
        if phase:
            call, op = chance.choice(
                [(call, op) for call, at, op in places[training] if at == phase]
            )
            of_fault |= {"call": call, "op": op}
        yield Fault(training=training, **of_fault)


def _places(training: Training) -> list[tuple[int, str, str]]:
    """Return the ops of the second step, which all later ones repeat,
    in which a fault can be planted.
    """
    for batch in training.batches[:2]:
        with Looking(training) as looking:
            training.step(batch)
    return looking.places
