"""What a run has to know of a training, whatever drives it."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor, nn
from torch.optim import Optimizer

from det_callbacks.environment.rng import Held
from det_callbacks.ranks.replicas import ReplicatedState
from det_callbacks.report.console import print_closing_line
from det_callbacks.training.draws import Draws

Wrap = Callable[[Callable[..., Any]], Callable[..., Any]]
"""Takes a function, and returns one that does the same with something around it."""


class LoaderFollower(Protocol):
    """Follows the loaders of a training, and what they draw."""

    def begin_loaders(
        self, loaders: Mapping[str, Any], held: Mapping[str, Held], *, is_in_turn: bool, draws: Draws | None = None
    ) -> None:
        """Take the loaders by name, and the generators they hold.

        With ``is_in_turn`` one is used up before the next, and a draw may be of any of them. ``draws`` are those of a
        way in that follows the samplers itself, and adds to them.
        """

    def begin_iteration(self) -> None:
        """Note that the loaders begin to be iterated over."""

    def begin_draw(self) -> None:
        """Note that a batch is about to be drawn."""

    def end_draw(self, batch: Any) -> None:
        """Take a batch that was drawn."""

    def forget_drawn(self) -> None:
        """Let go of the batches that were drawn: none of them is trained on any more."""


class Training:
    """Ten facts of a training; each way in has a subclass that says where its framework keeps them.

    These are the module, optimizers, schedulers, loaders, step, epoch, rank with world size, the folder, and among the
    choices the precision with its scaler. The tenth, where a fit begins and ends, is when the way in calls its run.

    Attributes:
        base_phase: the phase of what runs in a step outside ``mark_forward``, a backward pass and an optimizer.
        choices: what else was chosen and changes bits, by name: precision, accumulation, clipping, hyperparameters.
        hooks: what else is called at the points of a step, by point; it explains a generator that moved there.
        loaders: those that the batches of the steps come from, by name; None before they are known.
        num_batches: batches of the loaders that this step is made of, as with accumulation.
        num_drawn_ahead: batches that were drawn already and come after those of this step.
        schedulers: each learning rate scheduler, and when it steps ("epoch"); None if unknown.
        step: the number of the step under way, counted from 0, or of the last one.
        epoch: counted from 0.
        framework: the distribution that trains, whose version is kept; a loop may use Lightning's Fabric.
        folder: where the folders of runs go by default; asked for on all ranks together.
    """

    base_phase = "other"
    rank = 0
    world_size = 1
    step = -1
    epoch = 0
    num_batches = 1
    num_drawn_ahead = 0
    framework = "lightning"
    choices: Mapping[str, Any]
    hooks: Mapping[str, str]
    schedulers: Sequence[tuple[object, str]] | None = None
    loaders: Mapping[str, Any] | None
    module: nn.Module
    optimizers: Sequence[Optimizer]
    folder: Path

    def print_line(self, text: str) -> None:
        """Print a closing line."""
        print_closing_line(text)

    def follow_loaders(self, follower: LoaderFollower) -> None:
        """Tell a follower of the loaders, and of what they draw, until ``leave``."""

    def mark_forward(self, mark: Wrap) -> None:
        """Wrap what computes the loss, until ``leave``; nothing where the ``base_phase`` is "forward"."""

    def leave_out(self, wrap: Wrap) -> None:
        """Wrap what the framework does within a step for itself, until ``leave``."""

    def leave(self) -> None:
        """Leave the training as it was; may be called more than once."""

    def further_state(self) -> Iterator[tuple[str, Tensor | int | float | bool]]:
        """Yield what else decides the next step: ("state of StepLR: last_epoch", 3); read as each step begins.

        It may not wait for a device. By default there is none.
        """
        yield from ()

    def replicated_weights(self) -> Mapping[str, Tensor] | None:
        """Return the parameters and buffers that are equal on all ranks when a fit begins; None if unknown."""
        return None

    def replicated_state(self, ignore: Sequence[str]) -> ReplicatedState:
        """Return what several ranks have to hold alike; raises ``SettingsError`` where that is unknown."""
        raise NotImplementedError
