"""The run of an unmodified loop, whose steps ``torch_steps.py`` finds, and the model it trains."""

import gc
import inspect
import sys
from collections.abc import Callable, Mapping, Sequence, Set
from functools import cache
from pathlib import Path
from threading import get_ident
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import override

from det_callbacks.errors import DetCallbacksError, NothingComparedError, SelectionError
from det_callbacks.integrations.command import (
    claim_run,
    read_arguments,
    report_to_command,
    withdraw_claim,
)
from det_callbacks.integrations.loop import LoopTraining, TrainingRun
from det_callbacks.integrations.seen import Seen
from det_callbacks.internals.torch import (
    CHILDREN,
    always_called,
    global_hooks,
    global_pre_hooks,
    memory_address,
)
from det_callbacks.observers.observations import REGISTRY
from det_callbacks.report.closing_lines import after_last_update, unrecorded_updates
from det_callbacks.report.console import end_process, print_closing_line, print_error
from det_callbacks.runs.manifest import EACH_CALL, FOLLOWED, UNRECORDED
from det_callbacks.runs.store import Run
from det_callbacks.text import count, listed
from det_callbacks.trace.dispatch import runs_uncompiled
from det_callbacks.trace.leaves import flatten
from det_callbacks.trace.optimizers import parameters_of
from det_callbacks.training.loading import DrawnLoader
from det_callbacks.training.recording import take_unfinished
from det_callbacks.training.training import unwrapped

_AT_RETURN = -(1 << 30)  # key of hooks; a new key in each step would make Dynamo compile again


class SeveralModels(nn.Module):
    """Modules trained together, named by their classes, and trained tensors outside modules."""


def models_of(module: nn.Module | None, optimizers: Sequence[Optimizer]) -> nn.Module:
    """Return the called module, or a module that holds every parameter of the optimizers."""
    parameters: dict[int, torch.Tensor] = {}
    for optimizer in optimizers:
        parameters |= {id(tensor): tensor for tensor in parameters_of(optimizer)}
    if module is not None and parameters.keys() <= _owned(module):
        return module
    roots: list[nn.Module] = []
    known = _outermost(parameters.keys())
    in_none: list[torch.Tensor] = []
    while parameters:
        first = next(iter(parameters))
        holders = [root for root in known if first in known[root]]
        root = max(holders, key=lambda one: len(known[one]), default=None)
        if root is None:
            in_none.append(parameters.pop(first))
            continue
        roots.append(root)
        parameters = {key: tensor for key, tensor in parameters.items() if key not in known[root]}
    if len(roots) == 1 and not in_none:
        return roots[0]
    return _together(roots, in_none)


def evaluated_models() -> nn.Module:
    """Return the outermost module of this process that has parameters,
    or one that holds all of them.
    """
    gc.collect()  # modules that the script has dropped
    roots = [root for root in _roots() if _owned(root)]
    return roots[0] if len(roots) == 1 else _together(roots, [])


def _together(roots: Sequence[nn.Module], in_none: Sequence[torch.Tensor]) -> SeveralModels:
    several = SeveralModels()
    for model in map(unwrapped, roots):
        # beside tensors alone, the only model keeps its names
        name = "" if len(roots) == 1 else _free_name(several, type(model).__name__)
        getattr(several, CHILDREN)[name] = model
    for tensor in in_none:
        name = _free_name(several, "tensor")
        if isinstance(tensor, nn.Parameter):
            several.register_parameter(name, tensor)
        else:
            several.register_buffer(name, tensor)
    return several


def _owned(module: nn.Module) -> set[int]:
    return {id(parameter) for parameter in module.parameters()}


def _outermost(keys: Set[int]) -> dict[nn.Module, set[int]]:
    """Return the outermost modules of this process that hold some of the parameters."""
    owned = {one: _owned(one) & keys for one in _roots()}
    return {one: found for one, found in owned.items() if found}


def _roots() -> list[nn.Module]:
    """Return the outermost modules of this process, in the order in which they were made."""
    modules = [one for one in gc.get_objects() if issubclass(type(one), nn.Module)]
    modules = [
        one for one in modules if not isinstance(one, SeveralModels) and CHILDREN in vars(one)
    ]
    inner = {id(child) for one in modules for child in one.children()}
    return [one for one in modules if id(one) not in inner]


def _free_name(several: nn.Module, name: str) -> str:
    number, free = 1, name
    while hasattr(several, free):
        free, number = f"{name}_{number}", number + 1
    return free


class FollowedLoop(TrainingRun):
    """A TrainingRun driven by ``TorchSteps``; without optimizers it is an evaluation.

    The batch of a step is the one that a ``DataLoader`` returned if the model gets one of its
    tensors, else the model's arguments.
    """

    called = "run"
    is_of_command = True

    def __init__(
        self, asked: str, module: nn.Module | None, optimizers: Sequence[Optimizer]
    ) -> None:
        model = _followed_model(module, optimizers)
        super().__init__(**read_arguments(asked), model=model, optimizers=[*optimizers])
        self._ended_by: BaseException | None = None
        self._has_claimed = False
        self.num_steps = 0  # of all fits
        self._unrecorded: list[str] = []  # parts of the script's training that no step holds
        self._num_told = 0  # of them
        self._return: _Return | None = None

    @staticmethod
    def gives_way_to_script() -> bool:
        """Return whether the script has its own run; if so, print that."""
        if REGISTRY.sink is None:
            return False
        print_closing_line("det_callbacks: the script has its own run, which is used")
        return True

    @property
    def is_evaluation(self) -> bool:
        return not self._optimizers

    @property
    def is_in_step(self) -> bool:
        return self._is_in_step

    @property
    def is_alone(self) -> bool:
        """Whether this process is the only rank, which may drop a run without the others."""
        return self._training.world_size == 1

    @property
    def optimizers(self) -> Sequence[Optimizer]:
        return self._optimizers

    def take(self, module: nn.Module | None, optimizers: Sequence[Optimizer]) -> None:
        self._model, self._optimizers = _followed_model(module, optimizers), [*optimizers]

    def holds(self, module: nn.Module) -> bool:
        return self._is_open and any(
            id(parameter) in self._owned for parameter in module.parameters()
        )

    @override
    def _make_training(self) -> LoopTraining:
        training = super()._make_training()
        training.framework = _framework()
        return training

    def begin_fit(self, give_way: Callable[[], None]) -> None:
        """Begin a fit; if it is an evaluation, call ``give_way`` before the
        script begins its own run.
        """
        rank = dist.get_rank() if dist.is_available() and dist.is_initialized() else 0
        if not rank and not self._has_claimed:
            claim_run()
        self._has_claimed = True
        self._owned = {id(tensor) for tensor in (*self._model.parameters(), *self._model.buffers())}
        model = unwrapped(self._model)
        models = [*model.children()] if isinstance(model, SeveralModels) else [model]
        self._trained = listed([type(one).__name__ for one in models]) or "parameters"
        self._by = listed(dict.fromkeys(type(one).__name__ for one in self._optimizers))
        self._num_loaders = self._num_steps = self._num_drawn_steps = self._num_updates = 0
        self._num_batches = 0  # loaded since the last update
        self._iteration: tuple[DrawnLoader, int] | None = None
        self._drawn: DrawnLoader | None = None
        self.choices[FOLLOWED] = f"{self._trained}, {self._by}"
        if self.is_evaluation:
            self.choices[FOLLOWED] = f"{EACH_CALL}{self._trained} is a step"
        REGISTRY.make_room = _nothing
        self.__enter__()
        if self.is_evaluation:
            REGISTRY.make_room = give_way
        # which ends unsaid if the script trains
        if not self._training.rank and not self.is_evaluation:
            self._training.print_line(
                f"det_callbacks: follows torch's optimizers: each step of {self._by} ends a step "
                f"of {self._trained}"
            )

    def begin_step(
        self,
        args: Sequence[Any],
        keywords: Mapping[str, Any],
        drawn: DrawnLoader | None,
        *,
        has_drawn: bool,
    ) -> None:
        """Begin a step; ``has_drawn`` is whether a loader was drawn from since the last one."""
        self._num_drawn_steps += has_drawn
        given = [*args, dict(keywords)] if keywords else [*args]
        batch = given if drawn is None else self._drawn_for(given, drawn)
        self._num_batches = 0 if drawn is None else 1 + self._training.num_drawn_ahead
        self._enter_step(batch)

    def enter_call(self, module: nn.Module) -> None:
        """Note the call of a module in which the step begins."""
        self._hooks.enter_call(module)

    def await_return(self, module: nn.Module, call: Callable[[bool], None]) -> None:
        """Call a function when a module returns that was called now; pass whether it raised."""
        self._return = _Return(module, call)

    def _drawn_for(self, given: Any, drawn: DrawnLoader) -> Any:
        """Return the batch loaded for a step, else the arguments;
        a loader may have loaded batches ahead.
        """
        training, waiting = self._training, drawn.draws.waiting
        batch, num_ahead = given, training.num_drawn_ahead
        place = _place_of(given, [loaded for loaded, _ in waiting])
        if place is not None:
            batch, num_ahead = waiting[place][0], len(waiting) - 1 - place
        training.num_drawn_ahead = num_ahead
        while len(waiting) > num_ahead + 1:
            waiting.popleft()
        loader = drawn.loader
        if loader is not None and training.begin_loader(loader, drawn.draws):
            self._drawn = drawn
            self._num_loaders += 1
        if self._iteration != (drawn, drawn.num_iterations):
            self._iteration = drawn, drawn.num_iterations
            training.epoch += 1
            self._hooks.mark("epoch start")
        return batch

    def mark_iteration(self, drawn: DrawnLoader) -> None:
        if self._is_open and drawn is self._drawn:
            self._training.begin_iteration()

    def mark_epoch_end(self, drawn: DrawnLoader) -> None:
        if self._is_open and drawn is self._drawn:
            self._hooks.mark("epoch end")

    def mark_draw(self, drawn: DrawnLoader) -> None:
        if self._is_open and drawn is self._drawn:
            self._training.begin_draw()

    def add_batch(self, drawn: DrawnLoader) -> None:
        """Count a batch that a loader returned; within a step,
        record the batch that the training gets next.
        """
        if drawn is not self._drawn:
            return
        self._num_batches += 1
        waiting, num_ahead = drawn.draws.waiting, self._training.num_drawn_ahead
        if self._is_in_step and len(waiting) > num_ahead:
            self._hooks.add_batch(waiting[-1 - num_ahead][0])

    def end_step(self, seen: Seen, *, num_updates: int) -> None:
        if not self.num_steps:
            self._put_unrecorded(seen, num_iterations=seen.num_iterations)
        self._num_updates += num_updates
        self._num_steps += 1
        self.num_steps += 1
        self._leave_step(None)

    def drop_step(self) -> None:
        """Leave a step that has no update, so that the next one takes its number."""
        self._is_in_step = False
        self._hooks.drop_step()
        self._step -= 1

    def _put_unrecorded(self, seen: Seen, *, num_iterations: int | None = None) -> None:
        """Note updates outside all steps, which are those of the first iterations or came later."""
        if seen.updates:
            self._unrecorded.append(unrecorded_updates(seen.updates, num_iterations=num_iterations))
            seen.updates.clear()

    @property
    def has_recorded(self) -> bool:
        return self.num_steps > 0 or self._ended_by is not None

    def end(self, seen: Seen, *, num_calls: int = 0, num_backwards: int = 0) -> None:
        """End a fit, after whose last update the model was called, and gradients
        were computed, so many times.
        """
        if not self._is_open:
            return
        has_no_update = self._is_in_step and (num_calls or num_backwards)
        if self._is_in_step:
            self.drop_step()
        if seen.updates_elsewhere and self.num_steps:
            steps = listed(
                [
                    f"{count(number, 'step')} of {name}"
                    for name, number in seen.updates_elsewhere.items()
                ]
            )
            raise SelectionError(
                f"{steps} ran outside of the main thread, where det-callbacks follows nothing, so "
                "the run would lack a part of the training. Train in the main thread, or put the "
                "loop into a TrainingRun (docs/how-to/plain-loop.md)."
            )
        if not self.num_steps and self._training.world_size == 1:
            self.withdraw()
            return
        if not self._num_steps:
            raise NothingComparedError(
                f"{self._trained} was called, but no optimizer of torch stepped after it "
                f"({self._by}), so there is no step. If the script updates the parameters itself, "
                "put its loop into a TrainingRun (docs/how-to/plain-loop.md)."
            )
        steps = count(self._num_steps, "step")
        loaders = count(self._num_loaders, "DataLoader") if self._num_loaders else "no DataLoader"
        unit = ""
        if len(self._optimizers) > 1:
            unit = "; each update, or several in a row, is a step"
            if self._num_drawn_steps == self._num_steps:
                unit = "; each batch is a step"
            elif self._num_updates == self._num_steps:
                unit = "; each update is a step"
        self._put_unrecorded(seen)
        if has_no_update:
            self._unrecorded.append(
                after_last_update(
                    num_batches=self._num_batches,
                    num_calls=num_calls,
                    num_backwards=num_backwards,
                    model=self._trained,
                    optimizers=self._by,
                )
            )
        if not self._training.rank:
            text = (
                f"followed torch's optimizers: {steps} of {self._trained}, {self._by}, "
                f"{loaders}{unit}"
            )
            if self.is_evaluation:
                text = f"followed torch's optimizers: {self.choices[FOLLOWED]}: {steps}, {loaders}"
            for line in (
                text,
                *(f"not in the run: {part}" for part in self._unrecorded[self._num_told :]),
            ):
                self._training.print_line(f"det_callbacks: {line}")
            self._num_told = len(self._unrecorded)
        if self._unrecorded and self._session.run is not None:
            self._session.run.note(UNRECORDED, self._unrecorded)
        self.__exit__(None, None, None)

    def withdraw(self) -> None:
        """Remove the run, in which no optimizer stepped: a process may call a
        model without training it.
        """
        REGISTRY.make_room = _nothing
        if self._return is not None:
            self._return.forget()
        self._close_fit()
        self._session.withdraw()
        self._close()
        if self._has_claimed:
            withdraw_claim()
            self._has_claimed = False

    def fail(self, error: BaseException) -> None:
        self._ended_by = error
        report_to_command(error)
        self.__exit__(type(error), error, error.__traceback__)

    def end_process(self, seen: Seen) -> None:
        if seen.updates and self.num_steps and not self._training.rank:
            print_closing_line(f"det_callbacks: not in the run: {unrecorded_updates(seen.updates)}")
        error = self._ended_by
        unfinished = take_unfinished()
        if unfinished is not None:
            print_error(unfinished)
            error = unfinished
        if isinstance(error, DetCallbacksError):
            end_process(error.exit_code)

    @override
    @runs_uncompiled
    def _before_update(self, optimizer: Optimizer, args: Any, keywords: Any) -> None:
        closure = keywords.get("closure", args[1] if len(args) > 1 else None)
        if (
            self._is_in_step
            or self.is_evaluation
            or closure is not None
            or not any(id(one) in self._owned for one in parameters_of(optimizer))
        ):
            return
        error = SelectionError(
            f"{type(optimizer).__name__} stepped, but since its last step no module with its "
            "parameters was called with gradients enabled in train mode, so det-callbacks cannot "
            "tell where this step began. Call train() after a validation that called eval(), or "
            "put the loop into a TrainingRun (docs/how-to/plain-loop.md)."
        )
        self.fail(error)  # before the script can catch it
        raise error


def _framework() -> str:
    """Return the distribution that trains, whose Trainer is on the stack or
    whose Accelerator was made.
    """
    frame = inspect.currentframe()
    while frame is not None:
        if frame.f_globals.get("__name__") == "transformers.trainer":
            return "transformers"
        frame = frame.f_back
    state: Any = sys.modules.get("accelerate.state")
    return "accelerate" if state is not None and state.is_initialized() else LoopTraining.framework


def _nothing() -> None:
    """Make no room."""


class _Return:
    """Waits for the return of a module's call, behind the hooks of the step
    that began with the call.
    """

    def __init__(self, module: nn.Module, call: Callable[[bool], None]) -> None:
        self._module, self._call, self._depth, self._thread = module, call, 1, get_ident()
        self._error_before = sys.exc_info()[1]  # that is being handled
        global_pre_hooks[_AT_RETURN] = self._enter
        global_hooks[_AT_RETURN], always_called[_AT_RETURN] = self._leave, True

    def forget(self) -> None:
        for hooks in (global_pre_hooks, global_hooks, always_called):
            hooks.pop(_AT_RETURN, None)

    @runs_uncompiled
    def _enter(self, module: nn.Module, _args: Any) -> None:
        if not torch.compiler.is_compiling() and module is self._module:
            self._depth += get_ident() == self._thread

    @runs_uncompiled
    def _leave(self, module: nn.Module, _args: Any, _output: Any) -> None:
        if (
            torch.compiler.is_compiling()
            or module is not self._module
            or get_ident() != self._thread
        ):
            return
        self._depth -= 1
        if not self._depth:
            self.forget()
            self._call(sys.exc_info()[1] is not self._error_before)


def may_evaluate(asked: str, run: FollowedLoop | None, module: nn.Module, seen: Seen) -> bool:
    """Return whether a call is a step of an evaluation: the module has parameters,
    and no training is followed.
    """
    if not any(True for _ in module.parameters()):
        return False  # such as a loss
    if run is not None:
        return run.is_evaluation
    # one of several ranks may call its model alone before all train
    seen.is_parallel = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
    return not seen.is_parallel and _is_for_evaluation(asked)


@cache
def _is_for_evaluation(asked: str) -> bool:
    """Return whether a run may begin without an optimizer: a verification only
    if its reference has none.
    """
    arguments = read_arguments(asked)
    if arguments["mode"] != "verify":
        return True
    try:
        choice = Run.open(Path(arguments["reference"])).manifest.environment.get(FOLLOWED)
    except DetCallbacksError:
        return True  # the run itself says what is wrong with its reference
    return choice is not None and str(choice.value).startswith(EACH_CALL)


def _followed_model(module: nn.Module | None, optimizers: Sequence[Optimizer]) -> nn.Module:
    return models_of(module, optimizers) if optimizers or module is None else evaluated_models()


def _place_of(given: Any, batches: Sequence[Any]) -> int | None:
    """Return the index of the only batch with a tensor, or the base of a view,
    among a call's arguments.
    """
    for key, is_proof in (_identity, True), (_memory, False):
        own = set(key(given))
        places = [place for place, batch in enumerate(batches) if not own.isdisjoint(key(batch))]
        if places and (is_proof or len(places) == 1):
            return places[0]
    return None


def _identity(batch: Any) -> list[int]:
    return [
        id(value)
        for _, value in flatten(batch, "batch", is_whole=True)
        if isinstance(value, Tensor)
    ]


def _memory(batch: Any) -> list[int]:
    """Return the storages of a batch's tensors; a language model gets ``tokens[:, :-1]``."""
    tensors = (
        value for _, value in flatten(batch, "batch", is_whole=True) if type(value) is Tensor
    )
    dense = (value for value in tensors if value.layout is torch.strided)
    return [address for value in dense if (address := memory_address(value))]
