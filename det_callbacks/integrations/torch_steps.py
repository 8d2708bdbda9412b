"""Finds where the steps of any training begin and end, without changes to the script.

A step begins when a module that holds parameters of an optimizer is called with gradients enabled.
Once an optimizer has stepped, the step ends before a ``DataLoader`` draws the next batch, before a
module is called in evaluation mode without gradients, or before the next call of a module. While a
``DataLoader`` is iterated over, that call ends a step only if every optimizer has stepped: GANs
take one step for each batch. Without one, each update ends a step,
so that none mixes two iterations.

Once a module was called in training mode, a call in evaluation mode may be a validation without
``torch.no_grad``: its step is dropped at the next call of the module, unless a backward pass came
first.

In a script without an optimizer and without a backward pass, each outermost call of a module with
parameters is a step. If the script then trains, the run of these steps is removed.

If an optimizer updates parameters although no call of a module began a step, each step begins where
the last update of an iteration ended. Before training, this costs 0.1 s once, and 0.2 microseconds
for each call of a module.
"""

import os
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
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
from torch.utils.data import DataLoader, get_worker_info

from det_callbacks.integrations.command import give_workers
from det_callbacks.integrations.seen import Seen, report_seen
from det_callbacks.internals.replaced import ReplacedMethods
from det_callbacks.internals.torch import TORCH, DataLoaderIter, graph_task_id, keywords_of_call
from det_callbacks.observers.observations import REGISTRY
from det_callbacks.trace.dispatch import runs_uncompiled
from det_callbacks.trace.optimizers import parameters_of
from det_callbacks.training.loading import DrawnLoader

if TYPE_CHECKING:
    from det_callbacks.integrations.followed import FollowedLoop

_OWN_RUN = "the script has its own run"


class TorchSteps:
    def __init__(self, asked: str) -> None:
        self._asked = asked
        self._run: FollowedLoop | None = None
        self._is_off = False
        self._recorder = ""  # what records instead
        self._awaits_module = True  # a call of a module may begin or end a step
        self._first_called: nn.Module | None = None  # its call began the step
        self._num_calls = 0  # of that module since then
        self._stepped: set[int] = set()  # optimizers that stepped in this step, by identity
        # called when all hooks of an update have run
        self._after_hooks: Callable[[Optimizer], None] | None = None
        self._last_to_step = 0  # of an iteration that no call of a module announces; 0 if calls do
        self._num_backwards = 0  # before the step
        self._has_trained = False  # whether a module was called in training mode
        self._may_validate = False  # the step that began is perhaps a validation
        self._of_last_step: DrawnLoader | None = None  # source of its batch
        self._optimizers: list[ref[Optimizer]] = []
        self._used: set[int] = set()
        self._trained: WeakKeyDictionary[nn.Module, bool] = WeakKeyDictionary()
        self._loaders: WeakKeyDictionary[Any, DrawnLoader] = WeakKeyDictionary()
        self._loader_of: WeakKeyDictionary[Any, DrawnLoader] = WeakKeyDictionary()
        self._drawn: DrawnLoader | None = None  # source of the last batch
        self._has_drawn = False  # since the last step ended
        # a weak reference to the source's iterator
        self._iterator: Callable[[], Any] = lambda: None
        self._last_loader: Any = None  # alive, since a script may keep only its iterator
        self._begun: DrawnLoader | None = None  # whose iterator is being made
        self._replaced = ReplacedMethods()
        self._owner: int | None = None  # process of the run, or that gave way
        self._watched: int | None = None  # process that tells the command what it saw
        self._seen = Seen()

    def begin(self) -> None:
        TORCH.require()
        # harmless: torch calls the hooks again for the wrapper of a compiled module
        warnings.filterwarnings(
            "ignore", r"Using `torch\.compile\(module\)` when there are global hooks", UserWarning
        )
        register_module_forward_pre_hook(self._before_module)
        register_optimizer_step_post_hook(self._after_update)
        around = self._replaced.around
        around(Optimizer, "__init__", self._note_optimizer)
        self._replaced.put(torch.autograd, "backward", self._counting)
        around(DataLoader, "__iter__", self._begin_iteration)
        around(DataLoaderIter, "__init__", self._make_iterator)
        around(DataLoaderIter, "__next__", self._draw)
        around(torch.inference_mode, "__enter__", self._enter_inference)
        around(dist, "destroy_process_group", self._part)
        self._watch_process()

    def _watch_process(self) -> None:
        """Call ``end_process`` when this process ends; a fork begins with nothing seen."""
        if self._watched != os.getpid():
            self._watched, self._seen = os.getpid(), Seen()
            # Not atexit, which forked processes skip. Runs before the finalizers of
            # training/recording.py, which have 0.
            Finalize(None, self.end_process, exitpriority=10)

    def give_way(self) -> None:
        """Stop, because the script builds a Lightning Trainer, which gets a callback."""
        self._drop_evaluation()
        if self._run is not None and self._run.num_steps and not self._is_off:
            from det_callbacks.errors import SelectionError  # noqa: PLC0415  # only here

            raise SelectionError(
                "This script trains in its own loop and then builds a Lightning Trainer, but "
                "det-callbacks follows only one of them. Split the script in two."
            )
        self._is_off, self._owner = True, os.getpid()
        self._recorder = "a Trainer of Lightning was built, but det-callbacks recorded no fit of it"

    def _note_optimizer(
        self, init: Callable[..., None], optimizer: Optimizer, *args: Any, **kwargs: Any
    ) -> None:
        init(optimizer, *args, **kwargs)
        self._watch_process()
        self._seen.made[type(optimizer).__name__] += 1
        self._optimizers.append(ref(optimizer))
        self._trained.clear()
        self._follow_own_calls()
        self._leave_trial(optimizer)
        owner = next(kind for kind in type(optimizer).__mro__ if "step" in vars(kind))
        if not self._replaced.has_replaced(owner, "step"):
            self._replaced.around(owner, "step", self._update)

    def _leave_trial(self, optimizer: Optimizer) -> None:
        """Drop the run if the script builds its optimizer anew before any update:
        it only tried a batch size, say.
        """
        run = self._run
        if run is None or self._is_elsewhere() or not run.is_alone:
            return
        if run.is_in_step and not (run.num_steps or self._stepped or self._last_to_step):
            updated = {id(parameter) for one in run.optimizers for parameter in parameters_of(one)}
            if any(id(parameter) in updated for parameter in parameters_of(optimizer)):
                self._end_fit()
                self._awaits_module = True

    def _update(
        self, step: Callable[..., Any], optimizer: Optimizer, *args: Any, **kwargs: Any
    ) -> Any:
        result = step(optimizer, *args, **kwargs)
        # not in the hook: a run that begins here adds more hooks
        if not torch.compiler.is_compiling() and self._after_hooks is not None:
            act, self._after_hooks = self._after_hooks, None
            act(optimizer)
        return result

    def _follow_own_calls(self) -> bool:
        """See calls of modules whose class has a ``__call__`` that is not torch's;
        return whether any is new.
        """
        found, kinds = False, type.__subclasses__(nn.Module)
        while kinds:
            kind = kinds.pop()
            kinds += type.__subclasses__(kind)
            is_of_torch = kind.__module__.partition(".")[0] == "torch"
            if (
                "__call__" in vars(kind)
                and not is_of_torch
                and not self._replaced.has_replaced(kind, "__call__")
            ):
                self._replaced.around(kind, "__call__", self._call_module)
                found = True
        return found

    def _call_module(
        self, call: Callable[..., Any], module: nn.Module, *args: Any, **kwargs: Any
    ) -> Any:
        if not torch.compiler.is_compiling():
            self._before_module(module, args, kwargs)
        return call(module, *args, **kwargs)

    def _counting(self, backward: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(backward)
        @runs_uncompiled
        def counted(*args: Any, **kwargs: Any) -> Any:
            if graph_task_id() == -1:  # activation checkpointing calls it inside a backward pass
                self._watch_process()
                self._drop_evaluation()
                self._seen.note_backward((Optimizer, nn.Module))
            return backward(*args, **kwargs)

        return counted

    def _begin_iteration(self, iterate: Callable[[Any], Any], loader: Any) -> Any:
        if self._is_elsewhere():
            return iterate(loader)
        self._begun = known = self._begin_loader(loader)
        try:
            with self._loading():
                iterator = iterate(loader)
        finally:
            self._begun = None
        self._loader_of[iterator] = known
        return iterator

    def _make_iterator(
        self, init: Callable[..., None], iterator: Any, loader: Any, *args: Any, **kwargs: Any
    ) -> None:
        """Begin an iteration here if the loader's class overrides ``__iter__``,
        as torchdata's does.
        """
        if self._begun is not None or not isinstance(loader, DataLoader) or self._is_elsewhere():
            init(iterator, loader, *args, **kwargs)
            return
        known = self._begin_loader(loader)
        with self._loading():
            init(iterator, loader, *args, **kwargs)  # may skip batches
        known.draws.waiting.clear()
        self._loader_of[iterator] = known

    def _begin_loader(self, loader: Any) -> DrawnLoader:
        self._end_if_stepped()
        known = self._loaders.get(loader)
        if known is None:
            give_workers(loader)
            known = self._loaders[loader] = DrawnLoader(loader)
        self._last_loader = loader
        known.num_iterations += 1
        known.draws.waiting.clear()
        if self._run is not None:
            self._run.mark_iteration(known)
        return known

    def _draw(self, draw: Callable[[Any], Any], iterator: Any) -> Any:
        known = None if self._is_elsewhere() else self._loader_of.get(iterator)
        if known is None:
            return draw(iterator)
        self._end_if_stepped()
        self._has_drawn = True
        if self._drawn is not None and self._drawn is not known:
            self._drawn.draws.waiting.clear()
        self._drawn, self._iterator = known, ref(iterator)
        if self._run is not None:
            self._run.mark_draw(known)
        try:
            with self._loading():
                batch = draw(iterator)
        except StopIteration:
            self._iterator = lambda: None
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
    def _before_module(
        self, module: nn.Module, args: tuple[Any, ...], keywords: Mapping[str, Any] | None = None
    ) -> None:
        if torch.compiler.is_compiling():
            return
        if not self._awaits_module:
            is_again = module is self._first_called
            self._num_calls += is_again
            if is_again and torch.is_grad_enabled() and self._has_only_validated():
                self._drop_step()
                self._begin_step(module, args, keywords)
            return
        if graph_task_id() != -1 or self._is_elsewhere():
            return
        has_gradients = torch.is_grad_enabled()
        if self._last_to_step:
            if not has_gradients or not self._may_announce() or not self._is_trained(module):
                return
            self._drop_step()
            self._last_to_step = 0
        if self._stepped:
            if not has_gradients:
                if not module.training or self._ends_at_call():
                    self._end_step()
                return
            if not self._ends_at_call() or not self._is_trained(module):
                return
            self._end_step()
        elif not has_gradients or not self._is_trained(module):
            if self._is_evaluated(module):
                self._begin_step(module, args, keywords, is_evaluation=True)
            return
        # a script that never calls train() trains in whatever mode its model has; one that
        # validates with gradients draws from another loader
        if module.training or not self._has_trained or self._drawn is self._of_last_step:
            self._begin_step(module, args, keywords)

    def _has_only_validated(self) -> bool:
        """Return whether the step so far may be a validation whose gradients nobody computes."""
        return (
            self._may_validate
            and not self._stepped
            and self._seen.num_backwards == self._num_backwards
            and graph_task_id() == -1
            and not self._is_elsewhere()
        )

    def _is_evaluated(self, module: nn.Module) -> bool:
        """Return whether a call is a step of an evaluation: nothing has been trained so far."""
        seen = self._seen
        if self._run is None and REGISTRY.sink is not None:
            self._recorder = _OWN_RUN
        if self._run is None and (
            self._recorder or seen.made or seen.num_backwards or seen.updates
        ):
            return False
        # loads what records
        from det_callbacks.integrations.followed import may_evaluate  # noqa: PLC0415

        return may_evaluate(self._asked, self._run, module, seen)

    def _end_call(self, has_raised: bool) -> None:
        if has_raised:
            self._drop_step()
        else:
            self._end_step()
        self._awaits_module = True

    def _drop_evaluation(self) -> None:
        """Remove the run of an evaluation, because the script trains."""
        if self._run is not None and self._run.is_evaluation and not self._is_elsewhere():
            run, self._run, self._owner, self._awaits_module = self._run, None, None, True
            run.withdraw()

    def _give_way_to_script(self) -> None:
        self._drop_evaluation()
        self._recorder = _OWN_RUN

    @runs_uncompiled
    def _after_update(self, optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
        self._watch_process()
        self._drop_evaluation()
        if self._is_elsewhere():
            self._note_elsewhere(optimizer)
        elif self._run is None or not self._run.is_in_step:
            self._seen.note_update(type(optimizer).__name__, len(parameters_of(optimizer)))
            self._after_hooks = self._begin_after
        elif self._last_to_step:
            self._after_hooks = self._end_after
        else:
            self._stepped.add(id(optimizer))
            self._awaits_module = True

    def _begin_after(self, optimizer: Optimizer) -> None:
        """Begin a step if the optimizer has updated a parameter although no
        call of a module began one.
        """
        is_expected = (
            self._follow_own_calls() or self._run is not None or get_ident() != main_thread().ident
        )
        if not is_expected and any(
            parameter.grad is not None for parameter in parameters_of(optimizer)
        ):
            self._last_to_step = id(optimizer)
            self._begin_step(None, (), {})

    def _end_after(self, optimizer: Optimizer) -> None:
        """End a step that no call began, and begin the next,
        if the optimizer is the last one of an iteration.
        """
        assert self._run is not None, "it is in a step"
        # so the update belongs to the first iteration
        if self._seen.num_backwards and self._may_announce():
            self._last_to_step = id(optimizer)
            self._seen.note_update(type(optimizer).__name__, len(parameters_of(optimizer)))
            self._drop_step()
            self._begin_step(None, (), {})
        elif id(optimizer) == self._last_to_step or id(optimizer) in self._stepped:
            self._last_to_step = id(optimizer)
            self._stepped.add(id(optimizer))
            self._end_step()
            self._begin_step(None, (), {})
        else:
            self._stepped.add(id(optimizer))

    def _may_announce(self) -> bool:
        """Return whether the script may still call a module first: no step has ended,
        and none had a backward pass.
        """
        assert self._run is not None, "it is in a step"
        return not self._run.num_steps and self._seen.num_backwards == self._num_backwards

    def _note_elsewhere(self, optimizer: Optimizer) -> None:
        """Note an update that no step holds; a fork of the process that has
        claimed the run is refused.
        """
        if get_worker_info() is not None:
            return  # what a data set optimises to make a sample is no training
        if self._owner not in (None, os.getpid()):
            # loads what records
            from det_callbacks.integrations.command import claim_run  # noqa: PLC0415

            # else a Trainer records it, in a rank that was forked
            if self._run is not None or REGISTRY.sink is None:
                claim_run()
        elif not self._is_off:
            self._seen.updates_elsewhere[type(optimizer).__name__] += 1

    def _is_elsewhere(self) -> bool:
        """Return whether this call comes from another thread, from a worker,
        or from a fork of the run's process.
        """
        if self._is_off or self._owner not in (None, os.getpid()) or get_worker_info() is not None:
            return True
        return get_ident() != main_thread().ident and graph_task_id() == -1

    def _is_trained(self, module: nn.Module) -> bool:
        known = self._trained.get(module)
        if known is None:
            owned = {
                id(parameter)
                for optimizer in self._alive()
                for parameter in parameters_of(optimizer)
            }
            known = self._trained[module] = any(
                id(parameter) in owned for parameter in module.parameters()
            )
        return known

    def _alive(self) -> list[Optimizer]:
        return [optimizer for known in self._optimizers if (optimizer := known()) is not None]

    def _ends_at_call(self) -> bool:
        """Return whether the next call of a module ends the step;
        else only the next batch of a loader does.
        """
        assert self._run is not None, "an optimizer has stepped"
        return self._iterator() is None or all(
            id(one) in self._stepped for one in self._run.optimizers
        )

    def _begin_step(
        self,
        module: nn.Module | None,
        args: tuple[Any, ...],
        keywords: Mapping[str, Any] | None,
        *,
        is_evaluation: bool = False,
    ) -> None:
        """Begin a step at the call of a module, or where the last one ended."""
        # loads what records
        from det_callbacks.integrations.command import print_errors_plainly  # noqa: PLC0415
        from det_callbacks.integrations.followed import FollowedLoop  # noqa: PLC0415  # likewise

        if not is_evaluation:
            self._drop_evaluation()
        if self._run is None and FollowedLoop.gives_way_to_script():
            self._is_off, self._owner = True, os.getpid()
            self._recorder = _OWN_RUN
            return
        self._watch_process()
        is_in_training = module is None or module.training
        self._may_validate = not is_evaluation and self._has_trained and not is_in_training
        self._has_trained |= not is_evaluation and module is not None and is_in_training
        self._awaits_module = module is None
        self._first_called, self._num_calls = module, 1
        self._num_backwards = self._seen.num_backwards
        with self._failing_once():
            if self._run is None:
                print_errors_plainly(self.fail)
                self._owner = os.getpid()
                optimizers = [] if is_evaluation else self._optimizers_with(module)
                self._run = FollowedLoop(self._asked, module, optimizers)
                self._run.begin_fit(self._give_way_to_script)
            elif module is not None and not self._run.holds(module):
                self._run.end(self._seen)
                self._run.take(module, [] if is_evaluation else self._optimizers_with(module))
                self._run.begin_fit(self._give_way_to_script)
            given = keywords_of_call() if keywords is None else keywords
            self._run.begin_step(args, given, self._drawn, has_drawn=self._has_drawn)
            if keywords is None and module is not None:
                self._run.enter_call(module)
            if is_evaluation and module is not None:
                self._run.await_return(module, self._end_call)

    def _optimizers_with(self, module: nn.Module | None) -> list[Optimizer]:
        import gc  # noqa: PLC0415  # only where training begins

        gc.collect()  # schedulers keep unused optimizers in reference cycles
        own = set() if module is None else {id(parameter) for parameter in module.parameters()}
        alive = self._alive()
        chosen = [
            one
            for one in alive
            if id(one) not in self._used
            or any(id(parameter) in own for parameter in parameters_of(one))
        ]
        self._used = {id(one) for one in alive}
        return chosen

    def _end_if_stepped(self) -> None:
        if self._stepped and not self._last_to_step:
            self._end_step()

    def _end_step(self) -> None:
        num_updates = len(self._stepped)
        self._of_last_step = self._drawn
        self._stepped.clear()
        self._awaits_module, self._has_drawn = True, False
        if self._run is not None:
            with self._failing_once():
                self._run.end_step(self._seen, num_updates=num_updates)

    def _drop_step(self) -> None:
        assert self._run is not None, "it is in a step"
        with self._failing_once():
            self._run.drop_step()

    def _end_fit(self) -> None:
        if self._run is not None and not self._is_elsewhere():
            if self._stepped:
                self._end_step()
            with self._failing_once():
                if self._last_loader is None:
                    give_workers(None)  # raises if workers were asked for
                is_known = self._first_called is not None and not self._has_only_validated()
                num_calls = self._num_calls if is_known else 0
                num_backwards = self._seen.num_backwards - self._num_backwards
                self._run.end(self._seen, num_calls=num_calls, num_backwards=num_backwards)

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
        """End the run, or tell the command what this process did instead."""
        is_owner = self._run is not None and self._owner == os.getpid()
        if self._run is not None and is_owner:
            try:
                self._end_fit()
            except BaseException as error:  # noqa: BLE001  # exit handlers ignore exceptions
                sys.excepthook(type(error), error, error.__traceback__)
            self._run.end_process(self._seen)
        if not is_owner or self._run is None or not self._run.has_recorded:
            report_seen(self._recorder or self._seen.text())


@cache
def follow_torch(asked: str) -> TorchSteps:
    steps = TorchSteps(asked)
    steps.begin()
    return steps
