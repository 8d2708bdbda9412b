"""Where the steps of a training begin and end that torch alone tells of: any script, without a changed line.

A step begins when a module that holds parameters of an optimizer is called with gradients enabled. Once an optimizer
has stepped, the step ends before the next batch is drawn from a ``DataLoader``, before a module is called in evaluation
mode without gradients, or before the next call of a module where every optimizer has stepped.

Until a training is seen this costs a tenth of a second, and a tenth of a microsecond for each call of a module; what
records it is imported then.
"""

import os
import sys
import warnings
from collections import Counter
from collections.abc import Callable
from functools import cache, wraps
from multiprocessing.util import Finalize
from threading import get_ident, main_thread
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary, ref

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.data import DataLoader

from det_callbacks.internals.torch import DataLoaderIter, keywords_of_call
from det_callbacks.trace.dispatch import runs_uncompiled
from det_callbacks.trace.state.optimizers import parameters_of
from det_callbacks.training.draws import DrawnLoader

if TYPE_CHECKING:
    from det_callbacks.integrations.followed import FollowedLoop


class TorchSteps:
    """Follows optimizers, modules and loaders of this process, and tells a run where its steps begin and end."""

    def __init__(self, asked: str) -> None:
        self._asked = asked
        self._run: FollowedLoop | None = None  # from the first step on
        self._is_off = False
        self._awaits_module = True  # a call of a module may begin or end a step
        self._stepped: set[int] = set()  # optimizers that stepped in the step under way, by identity
        self._idle: set[int] = set()  # those that others do not wait for
        self._has_drawn = False  # since the step under way began
        self._has_trained = False  # a module was called in training mode
        self._optimizers: list[ref[Optimizer]] = []
        self._used: set[int] = set()
        self._trained: WeakKeyDictionary[nn.Module, bool] = WeakKeyDictionary()
        self._loaders: WeakKeyDictionary[Any, DrawnLoader] = WeakKeyDictionary()
        self._loader_of: WeakKeyDictionary[Any, DrawnLoader] = WeakKeyDictionary()
        self._drawn: DrawnLoader | None = None  # what the last batch came from
        self._unfollowed: Counter[str] = Counter()
        self._pid = os.getpid()

    def begin(self) -> None:
        """Follow torch from here on, until the process ends."""
        # torch warns that hooks are called once more for the wrapper of a compiled module: that changes nothing here
        warnings.filterwarnings("ignore", r"Using `torch\.compile\(module\)` when there are global hooks", UserWarning)
        register_module_forward_pre_hook(self._before_module)
        register_optimizer_step_post_hook(self._after_update)
        _replace(Optimizer, "__init__", self._around_new_optimizer)
        _replace(DataLoader, "__iter__", self._around_iteration)
        _replace(DataLoaderIter, "__next__", self._around_draw)
        _replace(torch.inference_mode, "__enter__", self._around_inference)
        _replace(dist, "destroy_process_group", self._around_parting)

    def give_way(self) -> None:
        """Follow no longer: a Trainer of Lightning is built, which has a callback of its own."""
        if self._run is not None and not self._is_off:
            from det_callbacks.errors import SelectionError  # noqa: PLC0415  # only here

            raise SelectionError(
                "This script trains in a loop of its own and then builds a Trainer of Lightning, and det-callbacks "
                "follows one or the other. Start it for a script that does one of them."
            )
        self._is_off = True

    # when torch calls

    def _around_new_optimizer(self, before: Callable[..., None]) -> Callable[..., None]:
        @wraps(before)
        def init(optimizer: Optimizer, *args: Any, **kwargs: Any) -> None:
            before(optimizer, *args, **kwargs)
            self._optimizers.append(ref(optimizer))
            self._trained.clear()

        return init

    def _around_iteration(self, before: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(before)
        def iterate(loader: Any) -> Any:
            if self._is_elsewhere():
                return before(loader)
            self._end_if_stepped()
            known = self._loaders.get(loader)
            if known is None:
                self._give_workers(loader)
                known = self._loaders[loader] = DrawnLoader(loader)
            known.num_iterations += 1
            known.draws.waiting.clear()
            iterator = before(loader)
            self._loader_of[iterator] = known
            return iterator

        return iterate

    def _around_draw(self, before: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(before)
        def draw(iterator: Any) -> Any:
            known = None if self._is_elsewhere() else self._loader_of.get(iterator)
            if known is None:
                return before(iterator)
            self._end_if_stepped()
            self._has_drawn = True
            if self._drawn is not None and self._drawn is not known:
                self._drawn.draws.waiting.clear()
            self._drawn = known
            if self._run is not None:
                self._run.mark_draw(known)
            batch = before(iterator)
            known.draws.add(batch)
            return batch

        return draw

    def _around_inference(self, before: Callable[..., None]) -> Callable[..., None]:
        """Return the function with the step ended first: a dispatch mode cannot be left inside this context."""

        @wraps(before)
        def enter(context: Any) -> None:
            if not self._is_elsewhere():
                self._end_if_stepped()
            before(context)

        return enter

    def _around_parting(self, before: Callable[..., None]) -> Callable[..., None]:
        @wraps(before)
        def part(group: Any = None) -> None:
            if group is None or group is dist.group.WORLD:
                self._end_fit()
            before(group)

        return part

    @runs_uncompiled
    def _before_module(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        if not self._awaits_module or torch.compiler.is_compiling() or self._is_elsewhere():
            return
        has_gradients = torch.is_grad_enabled()
        if self._stepped:
            if not has_gradients:
                if not module.training or self._has_all_stepped():
                    self._end_step()
                return
            if not self._has_all_stepped() or not self._is_trained(module):
                return
            self._end_step()
        elif not has_gradients or not self._is_trained(module):
            return
        # a script that never calls train() trains in the mode that its model came in
        if module.training or not self._has_trained:
            self._begin_step(module, args)

    @runs_uncompiled
    def _after_update(self, optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
        if self._is_elsewhere():
            return
        if self._run is None or not self._run.is_in_step:
            self._unfollowed[type(optimizer).__name__] += 1
            return
        if id(optimizer) in self._stepped and not self._has_drawn:
            # it went on to the next batch, or is not of this training
            self._idle.update(id(one) for one in self._run.optimizers if id(one) not in self._stepped)
        self._stepped.add(id(optimizer))
        self._idle.discard(id(optimizer))
        self._awaits_module = True

    # what follows from it

    def _is_elsewhere(self) -> bool:
        """Return whether this call is of another thread, of a worker, or of a process that is not followed."""
        if self._is_off or get_ident() != main_thread().ident:
            return True
        return self._run is not None and self._pid != os.getpid()

    def _is_trained(self, module: nn.Module) -> bool:
        """Return whether an optimizer has parameters of this module."""
        known = self._trained.get(module)
        if known is None:
            owned = {id(parameter) for optimizer in self._alive() for parameter in parameters_of(optimizer)}
            known = self._trained[module] = any(id(parameter) in owned for parameter in module.parameters())
        return known

    def _alive(self) -> list[Optimizer]:
        return [optimizer for known in self._optimizers if (optimizer := known()) is not None]

    def _has_all_stepped(self) -> bool:
        assert self._run is not None, "it is told by an optimizer's step"
        return all(id(one) in self._stepped or id(one) in self._idle for one in self._run.optimizers)

    def _begin_step(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        from det_callbacks.integrations.command import print_errors_plainly  # noqa: PLC0415  # loads what records
        from det_callbacks.integrations.followed import FollowedLoop  # noqa: PLC0415  # likewise

        if self._run is None and FollowedLoop.is_replaced():  # the script records itself
            self._is_off = True
            return
        self._has_trained |= module.training
        self._awaits_module = self._has_drawn = False
        with _RaisingOnce(self):
            if self._run is None:
                print_errors_plainly(self.fail)
                self._run, self._pid = FollowedLoop(self._asked, module, self._optimizers_with(module)), os.getpid()
                # Not atexit, which processes that multiprocessing forks do not run. Before those of fits.py, with 0.
                Finalize(None, self.end_process, exitpriority=10)
                self._run.begin_fit()
            elif not self._run.holds(module):
                self._run.end()
                self._run.take(module, self._optimizers_with(module))
                self._run.begin_fit()
                self._idle.clear()
            self._run.begin_step(args, keywords_of_call(), self._drawn)

    def _optimizers_with(self, module: nn.Module) -> list[Optimizer]:
        """Return the optimizers of the training in which a module is first called; they are used up with it."""
        import gc  # noqa: PLC0415  # only where a training begins

        gc.collect()  # an optimizer that nothing holds any more may be kept by its schedulers, in a circle
        own = {id(parameter) for parameter in module.parameters()}
        alive = self._alive()
        chosen = [
            one
            for one in alive
            if id(one) not in self._used or any(id(parameter) in own for parameter in parameters_of(one))
        ]
        self._used = {id(one) for one in alive}
        return chosen

    def _end_if_stepped(self) -> None:
        if self._stepped:
            self._end_step()

    def _end_step(self) -> None:
        self._stepped.clear()
        self._awaits_module = True
        if self._run is not None:
            with _RaisingOnce(self):
                self._run.end_step()

    def _end_fit(self) -> None:
        if self._run is not None and not self._is_elsewhere():
            self._end_if_stepped()
            with _RaisingOnce(self):
                self._run.end()

    def fail(self, error: BaseException) -> None:
        """End the run with an exception, once; nothing is followed after it."""
        is_off, self._is_off = self._is_off, True
        if self._run is not None and not is_off:
            self._run.fail(error)

    def end_process(self) -> None:
        """End the run with the process, which ends with the status of what is found then, or was caught before."""
        if self._run is None or self._pid != os.getpid():
            return
        try:
            self._end_fit()
        except BaseException as error:  # noqa: BLE001  # an exit handler, which nobody is above
            sys.excepthook(type(error), error, error.__traceback__)
        self._run.end_process(self._unfollowed)

    def _give_workers(self, loader: Any) -> None:
        from det_callbacks.environment.variables import NUM_WORKERS  # noqa: PLC0415  # only where a loader begins

        if NUM_WORKERS in os.environ:
            from det_callbacks.training.evidence import set_workers  # noqa: PLC0415  # loads all that records

            set_workers([loader], os.environ[NUM_WORKERS])


class _RaisingOnce:
    """Ends the run where something is raised, and lets it pass."""

    def __init__(self, steps: TorchSteps) -> None:
        self._steps = steps

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if error is not None:
            self._steps.fail(error)


@cache  # one of a process
def follow_torch(asked: str) -> TorchSteps:
    """Follow torch in this process from the first call on, for what a command asked."""
    steps = TorchSteps(asked)
    steps.begin()
    return steps


def _replace(owner: Any, name: str, make: Callable[[Any], Any]) -> None:
    setattr(owner, name, make(getattr(owner, name)))
