"""Code of a program that counts its calls: batches, tensors, modes, modules,
optimizers and data sets.
"""

import collections
import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, library, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only
from torch.utils.data import Dataset

CALLS = collections.Counter[str]()
SEEN: list[Any] = []


def noted(name: str) -> None:
    """Count a call, and draw: an additional call changes the bits of the training."""
    CALLS[name] += 1
    torch.rand(1)


# Batches


class LazyMapping(Mapping[str, Tensor]):
    def __init__(self, value: Tensor) -> None:
        self.value = value

    def __getitem__(self, key: str) -> Tensor:
        noted("getitem")
        return self.value + torch.rand(1)

    def __iter__(self) -> Iterator[str]:
        noted("iter")
        return iter(["x"])

    def __len__(self) -> int:
        noted("len")
        return 1


class LazyDict(dict[str, Tensor]):
    def __getitem__(self, key: str) -> Tensor:
        noted("getitem")
        return super().__getitem__(key) + torch.rand(1)

    def items(self) -> Any:
        noted("items")
        return super().items()

    def __iter__(self) -> Iterator[str]:
        noted("iter")
        return super().__iter__()


class LazySequence(Sequence[Tensor]):
    def __init__(self, value: Tensor) -> None:
        self.value = value

    def __getitem__(self, index: Any) -> Any:
        noted("getitem")
        return self.value + torch.rand(1)

    def __len__(self) -> int:
        noted("len")
        return 1


class LazyList(list[Tensor]):
    def __iter__(self) -> Iterator[Tensor]:
        noted("iter")
        return super().__iter__()


class Point(collections.namedtuple("Point", ["x"])):
    __slots__ = ()

    def __iter__(self) -> Iterator[Tensor]:
        noted("iter")
        return super().__iter__()

    def __getitem__(self, index: Any) -> Any:
        noted("getitem")
        return super().__getitem__(index)


class Guarded:
    def __init__(self, value: Tensor) -> None:
        self.value = value

    @property
    def x(self) -> Tensor:
        noted("property")
        return self.value + torch.rand(1)

    def __getattribute__(self, name: str) -> Any:
        noted("getattribute")
        return super().__getattribute__(name)

    def __repr__(self) -> str:
        noted("repr")
        return "Guarded"

    def __bool__(self) -> bool:
        noted("bool")
        return True

    def __eq__(self, other: object) -> bool:
        noted("eq")
        return self is other

    def __hash__(self) -> int:
        noted("hash")
        return 1


class Descriptor:
    def __get__(self, owner: Any, _class: Any = None) -> Any:
        if owner is None:
            return 0
        noted("descriptor")
        return vars(owner)["_x"] + torch.rand(1)

    def __set__(self, owner: Any, value: Any) -> None:
        vars(owner)["_x"] = value


@dataclasses.dataclass
class Described:
    x: Any = Descriptor()  # a descriptor


@dataclasses.dataclass
class Output:
    loss: Tensor

    def __getattribute__(self, name: str) -> Any:
        if name == "loss":
            noted("output")
        return super().__getattribute__(name)


# Tensors and modes


class Sub(Tensor):
    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        noted(f"subclass {func}")
        return super().__torch_function__(func, types, args, kwargs or {})


class Seeing(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        CALLS[f"mode {func.__name__}"] += 1
        return func(*args, **(kwargs or {}))


class Passing(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        CALLS[f"dispatch {func}"] += 1
        return func(*args, **(kwargs or {}))


class Hiding(Tensor):
    """A wrapper without ``__tensor_flatten__``."""

    held: Tensor

    @staticmethod
    def __new__(cls, inner: Tensor) -> "Hiding":
        return Tensor._make_wrapper_subclass(
            cls, inner.shape, dtype=inner.dtype, requires_grad=inner.requires_grad
        )

    def __init__(self, inner: Tensor) -> None:
        self.held = inner

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        CALLS[f"hiding {func}"] += 1
        args, kwargs = tree_map_only(Hiding, lambda one: one.held, (args, kwargs or {}))
        return tree_map_only(Tensor, cls, func(*args, **kwargs))


@library.custom_op("observer_effects::twice", mutates_args=())
def twice(x: Tensor) -> Tensor:
    with Seeing():
        return x + torch.rand(1) + x


@twice.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


twice.register_autograd(lambda ctx, gradient: 2 * gradient)


# Modules


class Overriding(nn.Sequential):
    def named_parameters(self, *args: Any, **kwargs: Any) -> Any:
        noted("named_parameters")
        return super().named_parameters(*args, **kwargs)

    def named_buffers(self, *args: Any, **kwargs: Any) -> Any:
        noted("named_buffers")
        return super().named_buffers(*args, **kwargs)

    def named_modules(self, *args: Any, **kwargs: Any) -> Any:
        noted("named_modules")
        return super().named_modules(*args, **kwargs)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        noted("state_dict")
        return super().state_dict(*args, **kwargs)

    @property
    def scale(self) -> Tensor:
        noted("scale")
        return torch.rand(1)

    def __repr__(self) -> str:
        noted("repr")
        return "Overriding"


class Wrapping(nn.Sequential):
    def forward(self, x: Tensor) -> Any:
        return Output(loss=super().forward(x))


class Unwrapping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = network(Wrapping)

    def forward(self, x: Tensor) -> Tensor:
        loss: Tensor = self.inner(x).loss
        return loss


class Noise(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        noted("parametrization")
        return weight + 1e-3 * torch.rand(1)


class Deep(nn.Module):
    """Calls itself."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        self.depth = depth
        self.inner = Deep(depth - 1) if depth else None
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight if self.inner is None else self.inner(x * self.weight)


class Adam(torch.optim.Adam):
    def __repr__(self) -> str:
        noted("repr")
        return "Adam"

    def state_dict(self) -> Any:
        noted("state_dict")
        return super().state_dict()


class Schedule(torch.optim.lr_scheduler.StepLR):
    def state_dict(self) -> Any:
        noted("state_dict")
        return super().state_dict()


class Samples(Dataset[Tensor]):
    def __len__(self) -> int:  # asked for once more, see docs/explanation/coverage.md
        return 9

    def __getitem__(self, index: int) -> Tensor:
        noted("getitem")
        return torch.ones(4) * index

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("__"):
            noted(f"getattr {name}")
        raise AttributeError(name)


class Collate:
    def __call__(self, samples: list[Tensor]) -> Tensor:
        noted("collate")
        return torch.stack(samples)

    def __getattr__(self, name: str) -> Any:
        noted(f"getattr {name}")
        raise AttributeError(name)


def network(kind: Any = nn.Sequential) -> nn.Module:
    return kind(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
