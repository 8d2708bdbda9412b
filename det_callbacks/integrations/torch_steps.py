"""Finds where the steps of any training begin and end, without changes to the script.

A step begins when a module that holds parameters of an optimizer is called with gradients enabled.
Once an optimizer has stepped, the step ends before a ``DataLoader`` draws the next batch, before a
module is called in evaluation mode without gradients, or, if every optimizer has stepped, before the
next call of a module.

Before training begins, this costs 0.1 s once, and 0.1 microseconds for each call of a module.
"""

import os
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
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

from det_callbacks.internals.replaced import ReplacedMethods
from det_callbacks.internals.torch import DataLoaderIter, keywords_of_call
from det_callbacks.trace.dispatch import runs_uncompiled
from det_callbacks.trace.state.optimizers import parameters_of
from det_callbacks.training.draws import DrawnLoader

if TYPE_CHECKING:
    from det_callbacks.integrations.followed import FollowedLoop


class TorchSteps:
    def __init__(self, asked: str) -> None:
        self._asked = asked
        self._run: FollowedLoop | None = None
        self._is_off = False
        self._awaits_module = True  # a call of a module may begin or end a step
        self._stepped: set[int] = set()  # optimizers that stepped in this step, by identity
        self._idle: set[int] = set()  # optimizers that need not step in a step
        self._has_drawn = False  # since the step began
        self._has_trained = False  # whether a module was called in training mode
        self._optimizers: list[ref[Optimizer]] = []
        self._used: set[int] = set()
        self._trained: WeakKeyDictionary[nn.Module, bool] = WeakKeyDictionary()
        self._loaders: WeakKeyDictionary[Any, DrawnLoader] = WeakKeyDictionary()
        self._loader_of: WeakKeyDictionary[Any, DrawnLoader] = WeakKeyDictionary()
        self._drawn: DrawnLoader | None = None  # source of the last batch
        self._last_loader: Any = None  # alive, since a script may keep only its iterator
        self._unfollowed: Counter[str] = Counter()
        self._pid = os.getpid()

    def begin(self) -> None:
        # harmless: torch calls the hooks again for the wrapper of a compiled module
        warnings.filterwarnings("ignore", r"Using `torch\.compile\(module\)` when there are global hooks", UserWarning)
        register_module_forward_pre_hook(self._before_module)
        register_optimizer_step_post_hook(self._after_update)
        around = ReplacedMethods().around
        around(Optimizer, "__init__", self._note_optimizer)
        around(DataLoader, "__iter__", self._begin_iteration)
        around(DataLoaderIter, "__next__", self._draw)
        around(torch.inference_mode, "__enter__", self._enter_inference)
        around(dist, "destroy_process_group", self._part)

    def give_way(self) -> None:
        """Stop, because the script builds a Lightning Trainer, which gets a callback."""
        if self._run is not None and not self._is_off:
            from det_callbacks.errors import SelectionError  # noqa: PLC0415  # only here

            raise SelectionError(
                "This script trains in its own loop and then builds a Lightning Trainer, but det-callbacks follows "
                "only one of them. Split the script in two."
            )
        self._is_off = True

    def _note_optimizer(self, init: Callable[..., None], optimizer: Optimizer, *args: Any, **kwargs: Any) -> None:
        init(optimizer, *args, **kwargs)
        self._optimizers.append(ref(optimizer))
        self._trained.clear()

    def _begin_iteration(self, iterate: Callable[[Any], Any], loader: Any) -> Any:
        if self._is_elsewhere():
            return iterate(loader)
        self._end_if_stepped()
        known = self._loaders.get(loader)
        if known is None:
            self._give_workers(loader)
            known = self._loaders[loader] = DrawnLoader(loader)
        self._last_loader = loader
        known.num_iterations += 1
        known.draws.waiting.clear()
        if self._run is not None:
            self._run.mark_iteration(known)
        with self._loading():
            iterator = iterate(loader)
        self._loader_of[iterator] = known
        return iterator

    def _draw(self, draw: Callable[[Any], Any], iterator: Any) -> Any:
        known = None if self._is_elsewhere() else self._loader_of.get(iterator)
        if known is None:
            return draw(iterator)
        self._end_if_stepped()
        self._has_drawn = True
        if self._drawn is not None and self._drawn is not known:
            self._drawn.draws.waiting.clear()
        self._drawn = known
        if self._run is not None:
            self._run.mark_draw(known)
        try:
            with self._loading():
                batch = draw(iterator)
        except StopIteration:
            if self._run is not None:
                self._run.mark_epoch_end(known)
            raise
        known.draws.add(batch)
        if self._run is not None:
            with self._failing_once():
                self._run.add_batch(known)
        return batch

    def _loading(self) -> AbstractContextManager[None]:
        return nullcontext() if self._run is None else self._run.loading()

    def _enter_inference(self, enter: Callable[[Any], None], context: Any) -> None:
        if not self._is_elsewhere():
            self._end_if_stepped()
        enter(context)

    def _part(self, part: Callable[[Any], None], group: Any = None) -> None:
        if group is None or group is dist.group.WORLD:
            self._end_fit()
        part(group)

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
        # a script that never calls train() trains in whatever mode its model has
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
            # the others belong to a different run, or are idle
            self._idle.update(id(one) for one in self._run.optimizers if id(one) not in self._stepped)
        self._stepped.add(id(optimizer))
        self._idle.discard(id(optimizer))
        self._awaits_module = True

    def _is_elsewhere(self) -> bool:
        """Return whether this call comes from another thread, a worker, or a process that is not followed."""
        if self._is_off or get_ident() != main_thread().ident:
            return True
        return self._run is not None and self._pid != os.getpid()

    def _is_trained(self, module: nn.Module) -> bool:
        known = self._trained.get(module)
        if known is None:
            owned = {id(parameter) for optimizer in self._alive() for parameter in parameters_of(optimizer)}
            known = self._trained[module] = any(id(parameter) in owned for parameter in module.parameters())
        return known

    def _alive(self) -> list[Optimizer]:
        return [optimizer for known in self._optimizers if (optimizer := known()) is not None]

    def _has_all_stepped(self) -> bool:
        assert self._run is not None, "an optimizer has stepped"
        return all(id(one) in self._stepped or id(one) in self._idle for one in self._run.optimizers)

    def _begin_step(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        from det_callbacks.integrations.command import print_errors_plainly  # noqa: PLC0415  # loads what records
        from det_callbacks.integrations.followed import FollowedLoop  # noqa: PLC0415  # likewise

        if self._run is None and FollowedLoop.is_replaced():
            self._is_off = True
            return
        self._has_trained |= module.training
        self._awaits_module = self._has_drawn = False
        with self._failing_once():
            if self._run is None:
                print_errors_plainly(self.fail)
                self._run = FollowedLoop(self._asked, module, self._optimizers_with(module))
                self._pid = os.getpid()
                # Not atexit, which forked processes skip. Runs before the finalizers of fits.py, which have 0.
                Finalize(None, self.end_process, exitpriority=10)
                self._run.begin_fit()
            elif not self._run.holds(module):
                self._run.end()
                self._run.take(module, self._optimizers_with(module))
                self._run.begin_fit()
                self._idle.clear()
            self._run.begin_step(args, keywords_of_call(), self._drawn)

    def _optimizers_with(self, module: nn.Module) -> list[Optimizer]:
        import gc  # noqa: PLC0415  # only where training begins

        gc.collect()  # schedulers keep unused optimizers in reference cycles
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
            with self._failing_once():
                self._run.end_step()

    def _end_fit(self) -> None:
        if self._run is not None and not self._is_elsewhere():
            self._end_if_stepped()
            with self._failing_once():
                if self._last_loader is None:
                    self._give_workers(None)  # raises if workers were asked for
                self._run.end()

    def fail(self, error: BaseException) -> None:
        is_off, self._is_off = self._is_off, True
        if self._run is not None and not is_off:
            self._run.fail(error)

    @contextmanager
    def _failing_once(self) -> Iterator[None]:
        try:
            yield
        except BaseException as error:
            self.fail(error)
            raise

    def end_process(self) -> None:
        if self._run is None or self._pid != os.getpid():
            return
        try:
            self._end_fit()
        except BaseException as error:  # noqa: BLE001  # exit handlers ignore exceptions
            sys.excepthook(type(error), error, error.__traceback__)
        self._run.end_process(self._unfollowed)

    def _give_workers(self, loader: Any) -> None:
        from det_callbacks.environment.variables import NUM_WORKERS  # noqa: PLC0415  # only where a loader begins

        if NUM_WORKERS in os.environ:
            from det_callbacks.training.evidence import set_workers  # noqa: PLC0415  # loads all that records

            set_workers([loader], os.environ[NUM_WORKERS])


@cache
def follow_torch(asked: str) -> TorchSteps:
    steps = TorchSteps(asked)
    steps.begin()
    return steps
