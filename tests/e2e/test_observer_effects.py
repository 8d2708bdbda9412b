"""A recorded training calls the program's own code as often as an unrecorded one, and ends with the same bits.

Each case is one step of a training. ``CALLS`` counts the calls of the program's code, and ``SEEN`` collects what that
code sees of torch.
"""

import collections
import copy
import dataclasses
import gc
import io
import os
import pickle
import random
import signal
import sys
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.utils import parametrizations, parametrize
from torch.overrides import TorchFunctionMode
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only
from torch.utils.checkpoint import checkpoint
from torch.utils.data import BatchSampler, DataLoader, Dataset, TensorDataset, get_worker_info

from trainers import LIGHTNING_ADVICE, quiet_trainer

from det_callbacks import DeterminismCallback, TrainingRun
from det_callbacks.runs.store import Run
from det_callbacks.trace.hash_mode import HashMode

CALLS = collections.Counter[str]()
SEEN: list[Any] = []
LEVELS = ("op", "module", "state")


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
    x: Any = Descriptor()  # noqa: RUF009  # a descriptor


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
        return Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype, requires_grad=inner.requires_grad)

    def __init__(self, inner: Tensor) -> None:
        self.held = inner

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        CALLS[f"hiding {func}"] += 1
        args, kwargs = tree_map_only(Hiding, lambda one: one.held, (args, kwargs or {}))
        return tree_map_only(Tensor, cls, func(*args, **kwargs))


@torch.library.custom_op("observer_effects::twice", mutates_args=())
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


class Samples(Dataset[Tensor]):
    def __len__(self) -> int:
        noted("len")
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


# Steps


Step = Callable[[nn.Module, Any], Tensor]


def loss_of(model: nn.Module, x: Any) -> Tensor:
    return model(x).square().mean()


def before(action: Callable[[nn.Module, Any], object]) -> Step:
    """Return a step that does something first."""

    def step(model: nn.Module, batch: Any) -> Tensor:
        action(model, batch)
        return loss_of(model, batch)

    return step


def in_function_mode(model: nn.Module, batch: Any) -> Tensor:
    with Seeing():
        loss = loss_of(model, batch)
        torch.autograd.backward(loss, retain_graph=True)
    return loss


def in_dispatch_mode(model: nn.Module, batch: Any) -> Tensor:
    with Passing():
        return loss_of(model, batch)


def with_hooks_seen(model: nn.Module, batch: Any) -> Tensor:
    output = model(batch)
    graph = output.grad_fn
    SEEN.append((output._backward_hooks, output._version, graph.name(), [str(one[0]) for one in graph.next_functions]))
    SEEN[-1] = (*SEEN[-1][:3], len(SEEN[-1][3]))
    output.retain_grad()
    SEEN.append(output.retains_grad)
    return output.square().mean()


def inferring(model: nn.Module, batch: Any) -> None:
    with torch.inference_mode():
        output = model(batch)
        SEEN.append((output.is_inference(), output.sum().item()))
        try:
            SEEN.append(output._version)
        except RuntimeError as error:
            SEEN.append(str(error))


def tracing(model: nn.Module, batch: Any) -> None:
    traced = torch.jit.trace(model, batch, check_trace=False)
    SEEN.append([str(node.kind()) for node in traced.inlined_graph.nodes()])


def jacobian(model: nn.Module, batch: Any) -> None:
    SEEN.append(torch.autograd.functional.jacobian(model, batch, vectorize=True).sum().item())


def batched_gradients(model: nn.Module, batch: Any) -> None:
    x = batch.clone().requires_grad_()
    torch.autograd.grad(model(x), x, torch.eye(3)[:, :, None], is_grads_batched=True)


def hessian(model: nn.Module, batch: Any) -> None:
    SEEN.append(torch.func.hessian(lambda x: loss_of(model, x))(batch).sum().item())


def transformed(model: nn.Module, batch: Any) -> None:
    parameters = dict(nn.Module.named_parameters(model))

    def loss(own: Any, x: Tensor) -> Tensor:
        return torch.func.functional_call(model, own, (x,)).square().mean()

    found = torch.vmap(torch.func.grad(loss), in_dims=(None, 0))(parameters, batch)
    SEEN.append([one.sum().item() for one in found.values()])
    SEEN.append(torch.func.jvp(lambda x: model(x), (batch,), (batch,))[1].sum().item())


def graphs(model: nn.Module, batch: Any) -> None:
    SEEN.append(str(torch.fx.symbolic_trace(model).graph))
    SEEN.append(str(torch.fx.experimental.proxy_tensor.make_fx(model)(batch).graph))


def exported(model: nn.Module, batch: Any) -> None:
    SEEN.append(str(torch.export.export(model, (batch,), strict=False).graph))


def copied(model: nn.Module, batch: Any) -> None:
    SEEN.append([one.sum().item() for one in copy.deepcopy(model).parameters()])
    loaded = pickle.loads(pickle.dumps(model))
    SEEN.append(loss_of(loaded, batch).item())
    torch.save(model.state_dict(), io.BytesIO())
    SEEN.append(len(pickle.dumps(model(batch).detach())))


def fake(model: nn.Module, batch: Any) -> None:
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        SEEN.append(str(model(mode.from_tensor(batch))))
        SEEN.append(str(torch.ones(2) + 1))


def meta(model: nn.Module, batch: Any) -> None:
    loss_of(copy.deepcopy(model).to("meta"), batch.to("meta")).backward()


def nested(model: nn.Module, batch: Any) -> None:
    SEEN.append(torch.nested.nested_tensor([batch, batch[:2]], layout=torch.jagged).mul(2).values().sum().item())
    SEEN.append(torch.nested.nested_tensor([batch, batch[:2]]).to_padded_tensor(0.0).sum().item())


def layouts(model: nn.Module, batch: Any) -> None:
    for other in (batch.to_sparse(), batch.to_sparse_csr(), batch.to_mkldnn()):
        SEEN.append((other + other).to_dense().sum().item())
    quantised = torch.quantize_per_tensor(batch, 0.1, 0, torch.qint8)
    SEEN.append(quantised.dequantize().sum().item())


def in_threads(model: nn.Module, batch: Any) -> None:
    threads = [threading.Thread(target=lambda: SEEN.append(model(batch).sum().item())) for _ in range(2)]
    for thread in threads:
        thread.start()
        thread.join()


def traced_by_python(model: nn.Module, batch: Any) -> Tensor:
    """A debugger's tracer, and a profiler."""

    def trace(frame: Any, event: str, argument: Any) -> Any:
        if "det_callbacks" not in frame.f_code.co_filename:
            CALLS[f"{event} {frame.f_code.co_name}" if frame.f_code.co_name == "forward" else "other"] += 0
        return None

    sys.setprofile(trace)
    sys.settrace(trace)
    try:
        with torch.profiler.profile():
            return loss_of(model, batch)
    finally:
        sys.settrace(None)
        sys.setprofile(None)


def in_anomaly_mode(model: nn.Module, batch: Any) -> Tensor:
    with torch.autograd.set_detect_anomaly(True):
        loss = loss_of(model, batch)
        torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)
        return loss


def saved_on_cpu(model: nn.Module, batch: Any) -> Tensor:
    with torch.autograd.graph.save_on_cpu():
        return loss_of(model, batch)


def hiding(model: nn.Module, batch: Any) -> Tensor:
    wrapped = Hiding(batch)
    return loss_of(model, (torch.tanh(wrapped * 2) + wrapped).held)


def two_tensors(model: nn.Module, batch: Any) -> Tensor:
    return loss_of(model, TwoTensor(batch, batch.clone()).mul(2).add(1).a)


def subclassed(model: nn.Module, batch: Any) -> Tensor:
    return loss_of(model, batch.as_subclass(Sub)).as_subclass(Tensor)


def generated(model: nn.Module, batch: Any) -> Tensor:
    def parts() -> Iterator[Tensor]:
        for layer in model.children():
            noted("generator")
            yield layer

    x = batch
    for layer in parts():
        x = layer(x)
    return x.square().mean()


def finalised(model: nn.Module, batch: Any) -> None:
    """The order in which objects die."""
    seen: list[int] = []
    output = model(batch)
    held = weakref.ref(output, lambda _: seen.append(1)), weakref.ref(model(batch), lambda _: seen.append(2))
    SEEN.append([one() is None for one in held])
    del output
    SEEN.append(seen)


def signalled(model: nn.Module, batch: Any) -> Tensor:
    before = signal.signal(signal.SIGUSR1, lambda *_: noted("signal"))
    try:
        for layer in model.children():
            os.kill(os.getpid(), signal.SIGUSR1)
            batch = layer(batch)
    finally:
        signal.signal(signal.SIGUSR1, before)
    return batch.square().mean()


def without_environment(model: nn.Module, batch: Any) -> None:
    SEEN.append((get_worker_info(), len(os.environ) > 0))
    os.environ.clear()


def warned(model: nn.Module, batch: Any) -> Tensor:
    """Warnings of torch's C++ code, in forward and backward, and one of Python code about its caller."""
    batch.to(torch.complex64).to(torch.float32)
    loss = loss_of(model, batch)
    loss.grad  # noqa: B018  # warns
    torch.autograd.backward(loss, create_graph=True)
    torch.autograd.backward(loss, grad_variables=torch.ones(()), retain_graph=True)
    warnings.warn("from the program", stacklevel=2)
    torch.ones(3).resize_(2).T.unsqueeze(0)
    return loss


def shared(model: nn.Module, batch: Any) -> None:
    SEEN.append(batch.clone().share_memory_().is_shared())


def parametrised(model: nn.Module, batch: Any) -> None:
    if not parametrize.is_parametrized(model[0]):
        return
    SEEN.append(model[0].weight.sum().item())


def noisy(_: Any = None) -> nn.Module:
    model = network()
    parametrize.register_parametrization(model[0], "weight", Noise(), unsafe=True)
    parametrizations.weight_norm(model[2])
    return model


def function(model: nn.Module, batch: Any) -> Tensor:
    class Square(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            noted("forward")
            ctx.save_for_backward(x)
            return x * x

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            noted("backward")
            return gradient * 2 * ctx.saved_tensors[0]

    hooked = Square.apply(model(batch))
    hooked.register_hook(lambda gradient: noted("hook"))
    handle = model[0].register_full_backward_hook(lambda *_: noted("module hook"))
    hooked.mean().backward(retain_graph=True)
    handle.remove()
    return checkpoint(model, batch, use_reentrant=False).mean() + hooked.mean()


def with_saved_hooks(model: nn.Module, batch: Any) -> Tensor:
    def keep(tensor: Tensor) -> Tensor:
        noted("saved")
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, keep):
        output = model(batch)
    handle = torch.autograd.graph.register_multi_grad_hook([output], lambda _: noted("multi-grad hook"))
    (gradient,) = torch.autograd.grad(output.sum(), model[0].weight, create_graph=True)
    handle.remove()
    loss: Tensor = gradient.square().sum() + output.square().mean()
    return loss


def with_dual_numbers(model: nn.Module, batch: Any) -> None:
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(batch, torch.ones_like(batch))
        SEEN.append(torch.autograd.forward_ad.unpack_dual(model(dual)).tangent.sum().item())


def with_other_values(model: nn.Module, batch: Any) -> Tensor:
    """Parameters are computed, as in meta-learning, and the gradients of a step flow through them."""
    parameters = {name: 2 * value for name, value in nn.Module.named_parameters(model)}
    loss: Tensor = torch.func.functional_call(model, parameters, (batch,)).square().mean()
    return loss


def drawn_in_vmap(model: nn.Module, batch: Any) -> None:
    def dropped(x: Tensor) -> Tensor:
        return nn.functional.dropout(model(x), 0.5)

    SEEN.append(torch.vmap(dropped, randomness="different")(batch).sum().item())


def written_in_place(model: nn.Module, batch: Any) -> Tensor:
    output = model(batch)
    output.mul_(2)
    output[0] = 1
    output.register_hook(lambda _: noted("hook"))
    loss: Tensor = output.square().mean()
    return loss


def several(model: nn.Module, batch: Any) -> Tensor:
    """Outputs of which some get no gradient, an output that is a leaf, and one that is given twice."""
    first, second = model(batch)
    SEEN.append((first._backward_hooks, second._backward_hooks, first is second))
    return first.mean()


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.both, self.leaf = Halves(), Leaf()

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        first, second = self.both(x)
        return first + self.leaf(x), second


class Halves(nn.Linear):
    def __init__(self) -> None:
        super().__init__(4, 4)

    def forward(self, x: Tensor) -> Any:
        return super().forward(x).chunk(2, dim=1)


class Leaf(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight


def of_class(kind: Any) -> Callable[[], nn.Module]:
    """Return a maker of models whose first weight has a class of its own."""

    def make() -> nn.Module:
        model = network()
        wrapped = kind(model[0].weight.detach())
        model[0].weight = nn.Parameter(wrapped)
        return model

    return make


def deepest(model: nn.Module, batch: Any) -> None:
    """As deep as the program can go, with the limit that it sees."""
    used = 0
    frame: Any = sys._getframe()
    while frame is not None:
        used, frame = used + 1, frame.f_back
    before = sys.getrecursionlimit()
    sys.setrecursionlimit(used + 120)
    try:
        SEEN.append(model(batch).sum().item())
    finally:
        sys.setrecursionlimit(before)


ONES = torch.ones(3, 4)


def tensors() -> list[Any]:
    return [ONES.clone() for _ in range(3)]


def loader_of_samples() -> DataLoader[Tensor]:
    return DataLoader(Samples(), batch_size=3, shuffle=True, collate_fn=Collate())


def plain_loader() -> DataLoader[Any]:
    return DataLoader(TensorDataset(torch.ones(9, 4)), batch_size=3, shuffle=True)


def pickled(loader: Any) -> None:
    """What a worker that is spawned, or a copy of a Trainer, needs."""
    for copied in (pickle.loads(pickle.dumps(loader)), copy.deepcopy(loader), copy.copy(loader.batch_sampler)):
        sampler = copied if isinstance(copied, BatchSampler) else copied.batch_sampler
        SEEN.append((type(sampler) is BatchSampler, sampler.batch_size, len(list(sampler))))


LOADER = plain_loader()

CASES: dict[str, dict[str, Any]] = {
    "a lazy mapping": {"step": lambda model, batch: loss_of(model, batch["x"]), "batch": LazyMapping},
    "a lazy dictionary": {"step": lambda model, batch: loss_of(model, batch["x"]), "batch": lambda x: LazyDict(x=x)},
    "a lazy sequence": {"step": lambda model, batch: loss_of(model, batch[0]), "batch": LazySequence},
    "a lazy list": {"step": lambda model, batch: loss_of(model, next(iter(batch))), "batch": lambda x: LazyList([x])},
    "a named tuple": {"step": lambda model, batch: loss_of(model, batch[0]), "batch": Point},
    "properties": {"step": lambda model, batch: loss_of(model, batch.x), "batch": Guarded},
    "descriptors": {"step": lambda model, batch: loss_of(model, batch.x), "batch": Described},
    "keys": {"step": lambda model, batch: loss_of(model, ONES), "batch": lambda x: {Guarded(x): x}},
    "an output": {"model": Unwrapping},
    "a function mode": {"step": in_function_mode},
    "a dispatch mode": {"step": in_dispatch_mode},
    "a class of tensors": {"step": subclassed},
    "a custom op": {"step": lambda model, batch: loss_of(model, twice(batch.requires_grad_()))},
    "hooks": {"step": with_hooks_seen},
    "autograd functions": {"step": function},
    "a module's methods": {"model": lambda: network(Overriding)},
    "parametrizations": {"model": noisy, "step": before(parametrised)},
    "an optimizer's methods": {"optimizer": Adam},
    "a data set and its loader": {"loader": loader_of_samples},
    "a pickled loader": {
        "loader": lambda: LOADER,
        "step": lambda model, batch: loss_of(model, (pickled(LOADER), batch[0])[1]),
    },
    "inference mode": {"step": before(inferring)},
    "torch.jit.trace": {"step": before(tracing)},
    "a vectorised jacobian": {"step": before(jacobian)},
    "batched gradients": {"step": before(batched_gradients)},
    "torch.func.hessian": {"step": before(hessian)},
    "torch.func": {"step": before(transformed)},
    "torch.fx": {"step": before(graphs)},
    "torch.export": {"step": before(exported)},
    "copies": {"step": before(copied)},
    "fake tensors": {"step": before(fake)},
    "meta tensors": {"step": before(meta)},
    "nested tensors": {"step": before(nested)},
    "other layouts": {"step": before(layouts)},
    "threads": {"step": before(in_threads)},
    "a tracer of Python": {"step": traced_by_python},
    "anomaly mode": {"step": in_anomaly_mode},
    "saved tensors on the CPU": {"step": saved_on_cpu},
    "a wrapper without inner tensors": {"step": hiding},
    "a wrapper": {"step": two_tensors},
    "hooks of saved tensors": {"step": with_saved_hooks},
    "dual numbers": {"step": before(with_dual_numbers)},
    "computed parameters": {"step": with_other_values},
    "randomness in vmap": {"step": before(drawn_in_vmap)},
    "writes in place": {"step": written_in_place},
    "several outputs": {"model": Two, "step": several},
    "a class of weights": {"model": of_class(lambda value: value.as_subclass(Sub))},
    "wrapped weights": {"model": of_class(lambda value: TwoTensor(value, value.clone()))},
    "weights of a class that hides them": {"model": of_class(Hiding)},
    "a low recursion limit": {"step": before(deepest)},
    "a generator in forward": {"step": generated},
    "weak references": {"step": before(finalised)},
    "signals": {"step": signalled},
    "shared memory": {"step": before(shared)},
    "no environment": {"step": before(without_environment)},
    "a deep module": {"model": lambda: Deep(225), "step": lambda model, batch: model(batch).mean()},
    "warnings": {"step": warned},
}


def values_in(parameter: Any) -> Any:
    plain = getattr(parameter, "held", getattr(parameter, "a", parameter))
    with torch._C.DisableTorchFunction():
        return plain.detach().clone().as_subclass(Tensor).tolist()


def train(case: Mapping[str, Any], record: Callable[..., Any] | None = None) -> dict[str, Any]:
    """Train three steps; ``record`` makes a recorder of a model and an optimizer."""

    def loop(model: nn.Module, optimizer: Any, loader: Any, step: Step) -> None:
        with nullcontext() if record is None else record(model, optimizer) as run:
            for batch in loader if run is None else run.batches(loader):
                with nullcontext() if run is None else run.step(batch):
                    step(model, batch).backward()
                    optimizer.step()
                    optimizer.zero_grad()

    return outcome(case, loop)


class Batches:
    def __init__(self, batches: list[Any]) -> None:
        self.batches = batches

    def __iter__(self) -> Iterator[Any]:
        return iter(self.batches)


class Lit(pl.LightningModule):
    def __init__(self, model: nn.Module, optimizer: Any, step: Step) -> None:
        super().__init__()
        self.model, self.optimizer, self.step = model, optimizer, step

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.step(self.model, batch)

    def configure_optimizers(self) -> Any:
        return self.optimizer


def fit(case: Mapping[str, Any], *callbacks: DeterminismCallback) -> dict[str, Any]:
    """Train three steps in a Trainer."""

    def loop(model: nn.Module, optimizer: Any, loader: Any, step: Step) -> None:
        batches = Batches(loader) if isinstance(loader, list) else loader  # Lightning takes a list for several loaders
        quiet_trainer(*callbacks).fit(Lit(model, optimizer, step), batches)

    return outcome(case, loop)


def outcome(case: Mapping[str, Any], loop: Callable[[nn.Module, Any, Any, Step], object]) -> dict[str, Any]:
    """Return all that the program sees of a loop."""
    CALLS.clear()
    SEEN.clear()
    for seed in (random.seed, np.random.seed, torch.manual_seed):
        seed(0)
    model = case.get("model", network)()
    optimizer = case.get("optimizer", torch.optim.SGD)(model.parameters(), lr=0.01)
    make_batch = case.get("batch", torch.clone)
    loader = case["loader"]() if "loader" in case else [make_batch(ONES) for _ in range(3)]
    step = case.get("step", loss_of)
    environment = dict(os.environ)
    CALLS.clear()
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("default")
            loop(model, optimizer, loader, step)
    finally:
        os.environ.update(environment)
    return {
        "calls": dict(CALLS),
        "seen": list(SEEN),
        "warnings": [(one.category, str(one.message), one.filename, one.lineno) for one in caught],
        "weights": [values_in(parameter) for parameter in nn.Module.parameters(model)],
        "torch": torch.get_rng_state().tolist(),
        "python": random.getstate(),
        "numpy": np.random.get_state()[1].tolist(),
    }


class Stepper(SimpleNamespace):
    """Records with one ``HashMode``."""

    def __enter__(self) -> "Stepper":
        return self

    def __exit__(self, *_: object) -> None: ...

    def batches(self, loader: Any) -> Any:
        return loader

    def step(self, batch: Any) -> HashMode:
        return self.mode


def in_run(folder: Any, level: str, model: nn.Module, optimizer: Any) -> TrainingRun:
    return TrainingRun(folder / "run", mode="record", level=level, model=model, optimizers=optimizer)


def in_mode(model: nn.Module, _optimizer: Any) -> Stepper:
    return Stepper(mode=HashMode(model))


def assert_same(alone: Mapping[str, Any], recorded: Mapping[str, Any]) -> None:
    for name, value in alone.items():
        assert recorded[name] == value, name


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("around", [Seeing, Passing])
def test_modes_around_a_recorded_training_see_the_same_training(around, level, tmp_path):
    def inside(record: Any = None) -> dict[str, Any]:
        with around():
            return train({"step": function}, record)

    inside()
    assert_same(inside(), inside(partial(in_run, tmp_path, level)))


@pytest.mark.parametrize("how", [*LEVELS, "mode"])
@pytest.mark.parametrize("name", CASES)
def test_a_recorded_training_is_the_same_training(name, how, tmp_path):
    case = CASES[name]
    train(case)  # what torch does once in a process
    alone = train(case)
    assert_same(alone, train(case, in_mode if how == "mode" else partial(in_run, tmp_path, how)))


@LIGHTNING_ADVICE
@pytest.mark.parametrize(
    ("name", "level"),
    [
        *(("properties", level) for level in LEVELS),
        *(("hooks", "module"), ("a function mode", "op"), ("a class of tensors", "op"), ("parametrizations", "state")),
        *(("a module's methods", "op"), ("an optimizer's methods", "op"), ("a data set and its loader", "op")),
        *(("torch.jit.trace", "op"), ("a vectorised jacobian", "op"), ("a wrapper without inner tensors", "op")),
    ],
)
def test_a_recorded_fit_is_the_same_fit(name, level, tmp_path):
    case = CASES[name]
    fit(case)
    alone = fit(case)
    assert_same(alone, fit(case, DeterminismCallback(tmp_path / "run", mode="record", level=level)))
