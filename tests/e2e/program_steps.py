"""Steps that use much of torch; each returns the loss."""

import copy
import io
import os
import pickle
import signal
import sys
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from program_code import (
    CALLS,
    SEEN,
    Collate,
    Hiding,
    Noise,
    Passing,
    Samples,
    Seeing,
    Sub,
    network,
    noted,
)
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.utils import parametrizations, parametrize
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils.checkpoint import checkpoint
from torch.utils.data import BatchSampler, DataLoader, TensorDataset, get_worker_info

ONES = torch.ones(3, 4)


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
    SEEN.append(
        (
            output._backward_hooks,
            output._version,
            graph.name(),
            [str(one[0]) for one in graph.next_functions],
        )
    )
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
    SEEN.append(
        torch.nested.nested_tensor([batch, batch[:2]], layout=torch.jagged)
        .mul(2)
        .values()
        .sum()
        .item()
    )
    SEEN.append(torch.nested.nested_tensor([batch, batch[:2]]).to_padded_tensor(0.0).sum().item())


def layouts(model: nn.Module, batch: Any) -> None:
    others = batch.to_sparse(), batch.to_sparse_csr(), batch.to_mkldnn()
    SEEN.extend((other + other).to_dense().sum().item() for other in others)
    quantised = torch.quantize_per_tensor(batch, 0.1, 0, torch.qint8)
    SEEN.append(quantised.dequantize().sum().item())


def in_threads(model: nn.Module, batch: Any) -> None:
    threads = [
        threading.Thread(target=lambda: SEEN.append(model(batch).sum().item())) for _ in range(2)
    ]
    for thread in threads:
        thread.start()
        thread.join()


def traced_by_python(model: nn.Module, batch: Any) -> Tensor:
    """A debugger's tracer, and a profiler."""

    def trace(frame: Any, event: str, argument: Any) -> Any:
        if "det_callbacks" not in frame.f_code.co_filename:
            CALLS[
                f"{event} {frame.f_code.co_name}" if frame.f_code.co_name == "forward" else "other"
            ] += 0
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
    held = (
        weakref.ref(output, lambda _: seen.append(1)),
        weakref.ref(model(batch), lambda _: seen.append(2)),
    )
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
    """Warnings of torch's C++ code, in forward and backward,
    and one of Python code about its caller.
    """
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
    handle = torch.autograd.graph.register_multi_grad_hook(
        [output], lambda _: noted("multi-grad hook")
    )
    (gradient,) = torch.autograd.grad(output.sum(), model[0].weight, create_graph=True)
    handle.remove()
    loss: Tensor = gradient.square().sum() + output.square().mean()
    return loss


def with_dual_numbers(model: nn.Module, batch: Any) -> None:
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(batch, torch.ones_like(batch))
        SEEN.append(torch.autograd.forward_ad.unpack_dual(model(dual)).tangent.sum().item())


def with_other_values(model: nn.Module, batch: Any) -> Tensor:
    """Parameters are computed, as in meta-learning, and the gradients of a
    step flow through them.
    """
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
    """Outputs of which some get no gradient, an output that is a leaf,
    and one that is given twice.
    """
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


def tensors() -> list[Any]:
    return [ONES.clone() for _ in range(3)]


def loader_of_samples() -> DataLoader[Tensor]:
    return DataLoader(Samples(), batch_size=3, shuffle=True, collate_fn=Collate())


def plain_loader() -> DataLoader[Any]:
    return DataLoader(TensorDataset(torch.ones(9, 4)), batch_size=3, shuffle=True)


def pickled(loader: Any) -> None:
    """What a worker that is spawned, or a copy of a Trainer, needs."""
    for copied in (
        pickle.loads(pickle.dumps(loader)),
        copy.deepcopy(loader),
        copy.copy(loader.batch_sampler),
    ):
        sampler = copied if isinstance(copied, BatchSampler) else copied.batch_sampler
        SEEN.append((type(sampler) is BatchSampler, sampler.batch_size, len(list(sampler))))
