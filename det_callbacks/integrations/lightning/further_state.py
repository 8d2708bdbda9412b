"""State of a Trainer's callbacks that affects the next step, such as averaged weights."""

from collections.abc import Callable, Iterator
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Checkpoint, EarlyStopping, ProgressBar, StochasticWeightAveraging
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

from det_callbacks.internals.torch import BUFFERS, PARAMETERS
from det_callbacks.internals.twins import either
from det_callbacks.runs.program import further_name
from det_callbacks.trace.op.components import holds_data
from det_callbacks.trace.state.leaves import flatten
from det_callbacks.trace.state.walker import StateWalker

MAX_BYTES = 1 << 20  # limit on the tensors in the ``state_dict`` of a callback that is read at each step


class StateOfCallbacks:
    """Lists this state when a step begins, after all callbacks have finished the previous step.

    It omits callbacks that only decide when training stops or what is saved (EarlyStopping,
    ModelCheckpoint). It reads averaged weights in place, and the ``state_dict`` of other callbacks.
    """

    def __init__(self, trainer: pl.Trainer, own: pl.Callback, print_line: Callable[[str], None]) -> None:
        self._trainer, self._own, self._print_line = trainer, own, print_line
        self._asked: list[tuple[str, pl.Callback]] | None = None
        self._walkers = dict[nn.Module, StateWalker]()

    def entries(self) -> Iterator[tuple[str, Tensor]]:
        for name, callback in self._callbacks():
            for attribute, average in self._averages(callback):
                walker = self._walkers.setdefault(average, StateWalker(average))
                tensors = walker.walk(PARAMETERS, BUFFERS)
                yield from ((further_name(name, f"{attribute}.{path}"), tensor) for path, tensor in tensors)
        if self._asked is None:
            self._asked = list(self._small())
        for name, callback in self._asked:
            yield from _tensors(name, callback)

    def _callbacks(self) -> Iterator[tuple[str, pl.Callback]]:
        """Yield the user's callbacks that may have such state, each with a name made of its class and index."""
        left_out = (*either(Checkpoint), *either(EarlyStopping), *either(ProgressBar), type(self._own))
        known = dict[str, int]()
        for callback in vars(self._trainer)["callbacks"]:
            if not isinstance(callback, left_out):
                name = type(callback).__qualname__
                known[name] = number = known.get(name, -1) + 1
                yield f"{name} {number}" if number else name, callback

    def _averages(self, callback: pl.Callback) -> Iterator[tuple[str, nn.Module]]:
        """Yield the weight averages that a callback holds, by attribute."""
        module, is_stochastic = self._trainer.lightning_module, isinstance(callback, either(StochasticWeightAveraging))
        stochastic: Any = callback
        if is_stochastic and self._trainer.current_epoch < stochastic.swa_start:
            return  # until then it holds a copy of the first weights, to be overwritten
        for attribute, value in vars(callback).items():
            is_copy = is_stochastic and type(value) is type(module) and value is not module
            if isinstance(value, AveragedModel) or is_copy:
                yield attribute.lstrip("_"), value

    def _small(self) -> Iterator[tuple[str, pl.Callback]]:
        """Yield the callbacks whose ``state_dict`` is read at each step."""
        for name, callback in self._callbacks():
            base = [vars(one)["state_dict"] for one in either(pl.Callback)]
            is_other = getattr(type(callback), "state_dict", None) not in base
            if not is_other or isinstance(callback, either(StochasticWeightAveraging)):
                continue
            num_bytes = sum(value.nbytes for _, value in _tensors(name, callback) if isinstance(value, Tensor))
            if num_bytes <= MAX_BYTES:
                yield name, callback
            elif not self._trainer.global_rank:
                self._print_line(
                    f"det_callbacks: the state of {name} has {num_bytes / (1 << 20):.0f} MiB, too much to compare at "
                    "each step; the checkpoint digests include it"
                )


def _tensors(name: str, callback: pl.Callback) -> Iterator[tuple[str, Tensor]]:
    found: Any = callback.state_dict()
    for path, value in flatten(found, ""):
        if isinstance(value, Tensor) and holds_data(value):
            yield further_name(name, path), value
