"""The facts that a run needs about the training."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from inspect import getattr_static, signature
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from det_callbacks.digest.unobserved import unobserved
from det_callbacks.internals.dynamo import ORIGINAL
from det_callbacks.internals.torch import CHILDREN, DDP_IGNORED, scaler_state
from det_callbacks.ranks.replicas import ReplicatedState, replicated_state
from det_callbacks.report.console import print_closing_line
from det_callbacks.runs.program import further_name
from det_callbacks.settings.generators import Held
from det_callbacks.trace.leaves import attributes_of, flatten
from det_callbacks.training.loading import Draws

Wrap = Callable[[Callable[..., Any]], Callable[..., Any]]
"""Takes a function, and returns a wrapper of it."""


class LoaderFollower:
    """Follows the loaders of the training, and the draws of their samplers;
    this base class does nothing.
    """

    def begin_loaders(
        self,
        loaders: Mapping[str, Any],
        held: Mapping[str, Held],
        *,
        is_in_turn: bool,
        draws: Draws | None = None,
    ) -> None:
        """Receive the loaders, and the generators that they hold, by name.

        ``is_in_turn``: each loader is exhausted before the next begins. ``draws``: of an
        integration that follows the samplers itself.
        """

    def begin_iteration(self) -> None:
        pass

    def begin_draw(self) -> None:
        pass

    def end_draw(self, batch: Any) -> None:
        pass

    def forget_drawn(self) -> None:
        """Release drawn batches that the training will not use."""


def unwrapped(module: nn.Module) -> nn.Module:
    """Return the module inside DDP and compilation wrappers; names are relative to it."""
    while (inner := inside(module)) is not module:
        module = inner
    return module


def inside(module: nn.Module) -> nn.Module:
    """Return the module that a wrapper holds, or the module itself."""
    if isinstance(module, DistributedDataParallel):
        inner: nn.Module = module.module
        return inner
    return getattr(module, ORIGINAL) if ORIGINAL in getattr(module, CHILDREN) else module


class Training:
    """The facts about the training; each integration has a subclass that
    reads them from its framework.

    Required are the attributes without a value: ``choices``, ``hooks``, ``loaders``, ``module``,
    ``optimizers`` and ``folder``. A subclass overrides the others, and the methods, if its
    framework knows more. Where a fit and a step begin and end is determined by when the integration
    calls its run (``FollowedRun``).
    """

    base_phase = "other"  # phase of ops outside ``mark_forward``, a backward pass and an optimizer
    is_own_loop = False  # whether only torch tells where passes and updates begin and end
    rank = 0
    world_size = 1
    step = -1  # the current step, from 0, or the last one
    epoch = 0
    num_batches = 1  # batches of this step, several with accumulation
    num_drawn_ahead = 0  # batches already loaded for later steps
    framework = "lightning"  # the distribution whose version is recorded
    # options that change bits, by name: precision, accumulation, clipping, hyperparameters
    choices: Mapping[str, Any]
    # order and hook -> user code that runs there, and may advance a generator
    hooks: Mapping[tuple[str, str], str]
    # each with its interval, such as "epoch"; "" for one that was only found, of which the run has
    # where it is in its schedule. None if they are unknown
    schedulers: Sequence[tuple[Any, str]] | None = None
    scaler: Any = None  # gradient scaler of mixed precision
    loaders: Mapping[str, Any] | None  # by name, or None before they are known
    module: nn.Module
    optimizers: Sequence[Optimizer]
    folder: Path  # default parent of run folders; read on all ranks together

    def print_line(self, text: str) -> None:
        print_closing_line(text)

    def follow_loaders(self, follower: LoaderFollower) -> None:
        pass

    def mark_forward(self, mark: Wrap) -> None:
        """Wrap the function that computes the loss, until ``leave``."""

    def leave_out(self, wrap: Wrap) -> None:
        """Wrap the framework's own computations inside a step, until ``leave``."""

    def leave(self) -> None:
        pass

    def further_state(self) -> Iterator[tuple[str, Tensor | int | float | bool]]:
        """Yield other state that affects the next step, as it begins;
        must not wait for a device.
        """
        with unobserved():
            for number, (scheduler, interval) in enumerate(self.schedulers or ()):
                name = type(scheduler).__name__
                shown = f"{name} {number}" if number else name
                state = _state_of(scheduler) if interval else _progress_of(scheduler)
                for key, value in state.items():
                    yield from flatten(value, further_name(shown, key))
            if self.scaler is not None:
                for key, tensor in scaler_state(self.scaler).items():
                    yield further_name("the gradient scaler", key), tensor

    @property
    def ddp(self) -> DistributedDataParallel | None:
        """The wrapper of the module under DDP."""
        return None

    def replicated_weights(self) -> dict[str, Tensor] | None:
        """Return the tensors that must be equal on all ranks when a fit begins,
        or None if unknown.
        """
        if self.ddp is None:
            return None
        ignored = set(getattr(self.ddp.module, DDP_IGNORED, ()))
        tensors = {**dict(self.module.named_parameters()), **dict(self.module.named_buffers())}
        return {name: tensor for name, tensor in tensors.items() if name not in ignored}

    def replicated_state(self, ignore: Sequence[str]) -> ReplicatedState:
        """Return the state that must be equal on several ranks;
        raise ``SettingsError`` if that is unknown.
        """
        self.require_replicas()
        options: dict[str, Any] = {"everybody": range(self.world_size), "ignore": ignore}
        if (ddp := self.ddp) is not None:
            options["everybody"] = dist.get_process_group_ranks(ddp.process_group)
            options["ddp_ignores"] = ddp.parameters_to_ignore
        return replicated_state(self.module, self.optimizers, **options)

    def require_replicas(self) -> None:
        """Raise ``SettingsError`` if it is unknown which ranks hold the same parameters."""


def _progress_of(scheduler: Any) -> Mapping[str, Any]:
    """Return where a scheduler is in its schedule: its state without the arguments of its
    constructor and the learning rates, which the options of the optimizer show.
    """
    kind: Any = type(scheduler)
    arguments = _arguments_of(kind)
    return {
        key: value
        for key, value in _state_of(scheduler).items()
        if key == "last_epoch" or not ("lr" in key or key.lstrip("_") in arguments)
    }


@cache
def _arguments_of(kind: Any) -> frozenset[str]:
    return frozenset(signature(kind).parameters)


def _state_of(scheduler: Any) -> Mapping[str, Any]:
    """Return a scheduler's state without a ``state_dict`` of the program, which may do anything."""
    method = getattr_static(type(scheduler), "state_dict", None)
    if getattr(method, "__module__", "").startswith("torch."):
        state: Mapping[str, Any] = scheduler.state_dict()
        return state
    held = attributes_of(scheduler)
    return {key: value for key, value in held.items() if not issubclass(type(value), Optimizer)}
