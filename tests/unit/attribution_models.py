"""Models whose backward passes are hard to attribute: one a difficulty, each with a step to run.

Every module's forward gets a stack frame that carries the module's name as its file name.
"""

from collections.abc import Callable
from typing import Any

import torch
from numerics_models import Transformer
from torch import Tensor, library, nn
from torch.utils.checkpoint import checkpoint


def standing_in(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function behind a frame of its own, whose file is called after a module."""
    code = compile(
        "def stand_in(*args, **kwargs):\n    return function(*args, **kwargs)\n",
        f"<module {name}>",
        "exec",
    )
    scope: dict[str, Any] = {"function": function}
    exec(code, scope)
    return scope["stand_in"]


def name_frames(model: nn.Module) -> None:
    for name, module in model.named_modules():
        module.forward = standing_in(name, module.forward)


class Scale(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return x * factor

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad * ctx.factor, None


class Turn(torch.autograd.Function):
    """Its forward makes a view only."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * 1.0


class Through(torch.autograd.Function):
    """Calls a module in forward, and again in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, module: nn.Module) -> Tensor:
        ctx.module = module
        ctx.save_for_backward(x)
        return module(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            out = ctx.module(x)
        (result,) = torch.autograd.grad(out, x, grad)
        return result * 1.0, None


@library.custom_op("attribution::soften", mutates_args=())
def soften(x: Tensor, strength: float) -> Tensor:
    return torch.tanh(x * strength)


soften.register_autograd(
    lambda ctx, grad: (grad * (1 - ctx.saved_tensors[0] ** 2), None),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(output),
)


class Functional(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return Turn.apply(Scale.apply(Turn.apply(soften(x @ self.weight, 0.5)), 3.0))


class Customs(nn.Module):
    """Autograd functions and a custom op, whose backward passes are Python's."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.inner = (
            nn.Linear(4, 4),
            Functional(4, 4),
            nn.Sequential(nn.Linear(4, 4), nn.Tanh()),
        )

    def forward(self, x: Tensor) -> Tensor:
        y = Through.apply(self.two(Scale.apply(self.one(x), 2.0)), self.inner)
        return soften(y, 2.0) * self.one(y) * Scale.apply(Turn.apply(y), 0.5)


class Gate(nn.Module):
    """Writes into views: columns, rows, masks."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        y = self.fc(x) * 1.0
        y[:, :3].mul_(2)
        y[:, 0] += y[:, 1].detach()
        y[:, 2:4][1:] = 0.5
        return (
            y.view(-1, 2, 3).transpose(1, 2).masked_fill_(torch.zeros(3, 2, dtype=torch.bool), 0.0)
        )


class Views(nn.ModuleList):
    def forward(self, x: Tensor) -> Tensor:
        rows = self[0](x).reshape(-1, 6).clone()
        head = rows[:, :2]
        rows.add_(1)
        z = self[1](rows)
        z.mul_(3)
        return self[2](z.reshape(-1, 6)) * head


class Inner(nn.Module):
    """Checkpoints a lambda with ops outside any module call,
    and modules that lie elsewhere in the tree.
    """

    def __init__(self, name: str, elsewhere: nn.Module, *, reentrant: bool) -> None:
        super().__init__()
        self.name, self.reentrant = name, reentrant
        self.own = nn.Linear(4, 4)
        self.elsewhere = elsewhere

    def forward(self, x: Tensor) -> Tensor:
        def nested(y: Tensor) -> Tensor:
            return (Scale.apply(self.elsewhere(y) * 2, 0.5) + y).tanh()

        def closure(y: Tensor) -> Tensor:
            first = self.own(self.elsewhere(y))
            second = checkpoint(standing_in(self.name, nested), first, use_reentrant=self.reentrant)
            return Scale.apply(self.own(second) * 3, 2.0).sin() + torch.ops.aten.relu(second) * 1.5

        return checkpoint(standing_in(self.name, closure), x, use_reentrant=self.reentrant) + 1


class Checkpointing(nn.Module):
    def __init__(self, *, reentrant: bool) -> None:
        super().__init__()
        self.aaa = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Dropout(0.2))
        self.inner = nn.ModuleList(
            Inner(f"inner.{i}", self.aaa, reentrant=reentrant) for i in range(2)
        )
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        x = self.aaa(x) * 3
        for module in self.inner:
            x = checkpoint(module, x, use_reentrant=self.reentrant)
        at_once = checkpoint(
            standing_in("", lambda y: y.exp().sin() * y), x, use_reentrant=self.reentrant
        )
        return at_once + checkpoint(self.aaa, x, use_reentrant=self.reentrant).cos()


Step = Callable[[], None]


def _plain(model: nn.Module, make_input: Callable[[], Tensor]) -> tuple[nn.Module, Step]:
    name_frames(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)

    def step() -> None:
        optimizer.zero_grad()
        model(make_input()).float().square().mean().backward()
        optimizer.step()

    return model, step


class Penalty(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        x = x.detach().requires_grad_()
        (grad,) = torch.autograd.grad(super().forward(x).sum(), x, create_graph=True)
        return grad.square().sum() * 2


class Penalised(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        inner = Inner("penalty.1", nn.Linear(4, 4), reentrant=False)
        self.first = nn.Linear(4, 4)
        self.penalty = Penalty(nn.Linear(4, 4), inner, nn.Tanh(), nn.LayerNorm(4), nn.Linear(4, 1))

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        return (
            checkpoint(self.penalty, y, use_reentrant=False, early_stop=False)
            + y.sum()
            + self.penalty(y)
        )


def _halve(parameter: Tensor) -> None:
    parameter.grad.mul_(0.5)


class Hooked(nn.Module):
    """Every kind of hook that runs ops in a backward pass, one of them a module call."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.three = (
            nn.Linear(4, 4),
            nn.Linear(4, 4),
            nn.Linear(4, 4, bias=False),
        )
        self.two.register_full_backward_hook(lambda _module, grads, _outputs: (grads[0] * 2,))
        self.one.weight.register_hook(lambda grad: grad.clamp(-1, 1))
        self.one.bias.register_post_accumulate_grad_hook(_halve)

    def forward(self, x: Tensor) -> Tensor:
        with torch.autograd.graph.saved_tensors_hooks(
            lambda saved: saved * 2, lambda packed: packed / 2
        ):
            y = Through.apply(self.two(self.one(x)).exp(), self.three)
        y.register_hook(lambda grad: Scale.apply(self.three(grad), 0.5))
        return y.sin()


def _functional() -> tuple[nn.Module, Step]:
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1))
    name_frames(model)

    def step() -> None:
        x = _rows()
        slope = torch.func.grad(
            lambda y: torch.func.functional_call(model, dict(model.named_parameters()), y).sum()
        )
        (
            model(x).sum()
            + slope(x).square().sum()
            + torch.func.vmap(lambda row: model(row))(x).sum()
        ).backward()

    return model, step


def _rows() -> Tensor:
    return torch.randn(3, 4)


MODELS: dict[str, Callable[[], tuple[nn.Module, Step]]] = {
    "transformer": lambda: _plain(
        Transformer(width=8, is_tied=True), lambda: torch.randint(50, (2, 6))
    ),
    "views": lambda: _plain(Views([Gate(), Gate(), nn.Linear(6, 2)]), lambda: torch.randn(3, 6)),
    "functions and a custom op": lambda: _plain(Customs(), _rows),
    "nested checkpoints": lambda: _plain(
        Checkpointing(reentrant=False), lambda: _rows().requires_grad_()
    ),
    "nested checkpoints, reentrant": lambda: _plain(
        Checkpointing(reentrant=True), lambda: _rows().requires_grad_()
    ),
    "gradient penalty": lambda: _plain(Penalised(), _rows),
    "hooks": lambda: _plain(Hooked(), lambda: _rows().requires_grad_()),
    "torch.func": _functional,
}
