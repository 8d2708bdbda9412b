"""TrainingRun: records or verifies your own training loop."""

import gc
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from types import TracebackType
from typing import Any, ClassVar, Self, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.optimizer import register_optimizer_step_pre_hook
from typing_extensions import override

from det_callbacks.digest.unobserved import unobserved
from det_callbacks.errors import NothingComparedError, SelectionError, SettingsError
from det_callbacks.internals.replaced import ReplacedMethods
from det_callbacks.internals.torch import (
    BACKWARD,
    BUFFERS,
    CHILDREN,
    MAKES_SCALE,
    PARAMETERS,
    graph_task_id,
)
from det_callbacks.observers.observations import REGISTRY
from det_callbacks.runs.metrics import LOG, RESUMED, Metric, Reading, ReadRow
from det_callbacks.runs.program import further_name
from det_callbacks.trace.dispatch import runs_uncompiled
from det_callbacks.trace.leaves import StateWalker
from det_callbacks.trace.optimizers import parameters_of
from det_callbacks.training.arguments import require_integer
from det_callbacks.training.evidence import generator_states, metric_of
from det_callbacks.training.following import FollowedRun
from det_callbacks.training.loading import Draws, find_generators
from det_callbacks.training.training import LoaderFollower, Training, inside, unwrapped

_Batch = TypeVar("_Batch")


def _is_average_of(module: nn.Module, wrapper: nn.Module) -> bool:
    """Return whether a wrapper holds a copy of a module, as ``AveragedModel`` does: parameters of
    the same names and shapes, none of which is the module's own.
    """
    copy = vars(wrapper).get(CHILDREN, {}).get("module")
    if copy is None:
        return False
    own, copied = (dict(one.named_parameters()) for one in (module, unwrapped(copy)))
    return (
        bool(own)
        and own.keys() == copied.keys()
        and all(own[name].shape == copied[name].shape for name in own)
        and not {*map(id, own.values())} & {*map(id, copied.values())}
        and not any(inner is copy for inner in module.modules())
    )


class LoopTraining(Training):
    base_phase = "forward"
    is_own_loop = True
    choices: Mapping[str, Any] = {}
    hooks: Mapping[tuple[str, str], str] = {}
    loaders = None
    _follower = LoaderFollower()
    _followed_loader: object = None

    def __init__(self, model: nn.Module, optimizers: Sequence[Optimizer]) -> None:
        self._ddp: DistributedDataParallel | None = None
        self.module, self.optimizers = unwrapped(model), optimizers
        self._average: tuple[str, StateWalker] | None = None  # of the weights, with its class
        self._find_helpers()
        while model is not self.module:
            if isinstance(model, DistributedDataParallel):
                self._ddp = model
            model = inside(model)
        if dist.is_available() and dist.is_initialized():
            self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self.folder = Path()

    def _find_helpers(self) -> None:
        """Find the optimizers' schedulers, and the newest gradient scaler and average of the
        weights: nothing of the loop says what they are, and older ones may be left of an earlier
        training. Takes some 100 milliseconds in a large process.
        """
        optimizers = [*self.optimizers]
        if not optimizers:
            return
        schedulers = list[LRScheduler]()
        gc.collect()  # schedulers that are no longer used may be in reference cycles
        for thing in gc.get_objects():  # oldest first; ``isinstance`` runs code of lazy objects
            kind = type(thing)
            if issubclass(kind, LRScheduler) and "optimizer" in vars(thing):
                schedulers.append(thing)
            elif issubclass(kind, GradScaler) and thing.is_enabled():
                self.scaler = thing
            elif issubclass(kind, nn.Module) and _is_average_of(self.module, thing):
                self._average = kind.__name__, StateWalker(thing)
        inner = {
            id(one)
            for scheduler in schedulers
            for one in vars(scheduler).get("_schedulers", ())  # of a SequentialLR and the like
        }
        places = {id(optimizer): at for at, optimizer in enumerate(optimizers)}
        used = [one for one in schedulers if id(one.optimizer) in places and id(one) not in inner]
        used.sort(key=lambda one: (places[id(one.optimizer)], type(one).__qualname__))
        self.schedulers = [(scheduler, "") for scheduler in used]

    @override
    def further_state(self) -> Iterator[tuple[str, Tensor | int | float | bool]]:
        yield from super().further_state()
        if self._average is not None:
            name, walker = self._average
            with unobserved():
                for path, tensor in walker.walk(PARAMETERS, BUFFERS):
                    yield further_name(name, path), tensor

    @override
    def follow_loaders(self, follower: LoaderFollower) -> None:
        self._follower = follower

    @override
    def leave(self) -> None:
        self._follower, self._followed_loader = LoaderFollower(), None

    def begin_loader(self, loader: Any, draws: Draws | None = None) -> bool:
        """Follow a loader; return whether it differs from the previous one."""
        is_other = loader is not self._followed_loader
        if is_other:
            self._followed_loader, loaders = loader, {_LOADER: loader}
            self._follower.begin_loaders(
                loaders, find_generators(loaders), is_in_turn=False, draws=draws
            )
        return is_other

    def begin_iteration(self) -> None:
        self._follower.begin_iteration()

    def begin_draw(self) -> None:
        self._follower.begin_draw()

    def drawn(self, iterator: Iterator[_Batch]) -> Iterator[_Batch]:
        while True:
            self._follower.begin_draw()
            try:
                batch = next(iterator)
            except StopIteration:
                return
            self._follower.end_draw(batch)
            yield batch

    def forget_drawn(self) -> None:
        self._follower.forget_drawn()

    @property
    @override
    def ddp(self) -> DistributedDataParallel | None:
        return self._ddp

    @override
    def require_replicas(self) -> None:
        has_shards = any(
            isinstance(parameter, DTensor)
            for _, parameter in StateWalker(self.module).walk(PARAMETERS)
        )
        if self.ddp is None and not has_shards:
            raise SettingsError(
                "The model is not a DistributedDataParallel and has no DTensors, so it is unknown "
                "which ranks hold the same parameters, and replicas cannot be compared. Pass the "
                "wrapped model to TrainingRun, or omit audit_replicas_every_n_steps."
            )


_LOADER = "train_dataloader"
_NO_BATCH: Any = object()


def _unrecorded(method: Callable[..., Any], *args: Any) -> None:
    with unobserved():
        method(*args)


class TrainingRun(FollowedRun):
    """Record your own training loop, or verify it bit for bit against a
    recorded run, without Lightning.

    The run is a ``with`` block, and so is each step. The phase of a step is ``forward`` until a
    backward pass begins, ``gradient`` after it, ``optimizer`` in an optimizer's step, and ``other``
    after that; a call of a module begins ``forward`` again. The loss is the tensor whose
    ``backward`` you call. It changes no bits of the training, and costs the same as
    ``DeterminismCallback``.

    Each ``with`` block is a fit, like a call of ``Trainer.fit``. Under ``torch.distributed`` all
    processes must enter and leave the block together.

    Args:
        reference: as for ``DeterminismCallback``.
        model: holds every trained parameter; names are relative to it. Put several models into an
            ``nn.ModuleDict``. It may be compiled, or wrapped by ``DistributedDataParallel``.
        optimizers: one or several: all that step in the loop; () for an evaluation.
        arguments: as for ``DeterminismCallback``, except ``resume``, ``log_metrics`` and
            ``stages``.

    Attributes:
        verdict: the Verdict of a verification, or None before the end of the block.
        audit_report: the AuditReport of an audit, or None before the end of the block.

    Raises:
        SelectionError: an argument is not allowed, a step begins inside a step, or an optimizer
            steps that was not passed.
        NothingComparedError: the block had no step, or the program caught
            the error of a failed step.
        Exception: at the end of a step or of the block, any error of ``DeterminismCallback``,
            such as DivergenceError.

    Examples:
        >>> model = torch.nn.Linear(4, 2)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> loader = [torch.ones(3, 4), torch.zeros(3, 4)]
        >>> with TrainingRun("refs/run3", mode="record", model=model, optimizers=optimizer) as run:
        ...     for batch in run.batches(loader):
        ...         with run.step(batch):
        ...             model(batch).square().mean().backward()
        ...             optimizer.step()
        ...             optimizer.zero_grad()
        det_callbacks: recorded 2 steps, ...
    """

    called = "TrainingRun"
    open_run: ClassVar["TrainingRun | None"] = None
    _training: LoopTraining

    def __init__(
        self,
        reference: str | Path | None,
        *,
        model: nn.Module,
        optimizers: Optimizer | Sequence[Optimizer] = (),
        **arguments: Any,
    ) -> None:
        if trainers := sorted({"resume", "log_metrics", "stages"} & arguments.keys()):
            raise SelectionError(
                f"TrainingRun has no argument {trainers[0]}, which is for Lightning's Trainer: use "
                "resume_from(step), log the verdict yourself, and record a test as a block of its "
                "own."
            )
        self._model = model
        one_or_several: Any = optimizers
        is_several = isinstance(optimizers, list | tuple)
        self._optimizers: Sequence[Optimizer] = one_or_several if is_several else [one_or_several]
        if not isinstance(model, nn.Module):
            raise SelectionError(f"model must be a torch.nn.Module; got {type(model).__name__}.")
        if not all(isinstance(one, Optimizer) for one in self._optimizers):
            kinds = ", ".join(type(one).__name__ for one in self._optimizers)
            raise SelectionError(
                f"optimizers must be one or several optimizers of torch.optim; got {kinds}."
            )
        super().__init__(reference, **arguments)

    @override
    def _reset(self) -> None:
        super()._reset()
        self._replaced = ReplacedMethods()
        self._is_in_step = self._has_batches = self._is_resumed = False
        self._has_differed = False  # whether a logged value has
        self._first_step = self._first_epoch = 0
        self._failed: BaseException | None = None
        self._logged: dict[str, Metric] = {}
        self._known: dict[int, Optimizer] = {}  # optimizers that may step, by identity

    def resume_from(self, step: int, *, epoch: int = 0) -> Self:
        """Let the next block begin at this step, if your loop continues from a checkpoint.

        A verification compares from that step on; a recording continues the run. The loop restores
        weights, optimizers, generators and the position in the data; the run only compares them.

        Args:
            step: number of the next step, counted from 0.
            epoch: number of the epoch of the first ``batches``.

        Returns:
            The run itself: ``with run.resume_from(100):``.
        """
        if self._is_open:
            raise SelectionError("Call resume_from before the with block, which counts the steps.")
        require_integer("step", step, 0)
        require_integer("epoch", epoch, 0)
        self._first_step, self._first_epoch, self._is_resumed = step, epoch, True
        return self

    def __enter__(self) -> Self:
        if self.mode == "disabled":
            return self
        self._require_alone()
        training = self._make_training()
        self._step, training.step = self._first_step - 1, self._first_step - 1
        training.epoch = self._first_epoch - 1
        self._is_in_step = self._has_batches = self._has_differed = False
        self._failed = None
        self._logged = {}
        TrainingRun.open_run = self
        try:
            self._open_stage(training, is_compared=True)
            self._known = {id(one): one for one in self._optimizers}
            self._stage.callback(register_optimizer_step_pre_hook(self._before_update).remove)
            self._begin_fit(is_resumed=self._is_resumed)
            self._follow()
            self._hooks.attach(training)
            self._stage.callback(self._replaced.restore)
            self._replaced.put(torch.autograd, BACKWARD, self._around_backward)
            self._replaced.around(GradScaler, MAKES_SCALE, _unrecorded)
            self._replicas.begin(training)
        except BaseException as error:
            self._leave(error)
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if TrainingRun.open_run is not self:
            return
        if error is not None:
            self._leave(error)
            return
        try:
            self._group.set_place("between")
            if self._failed is not None:
                raise self._went_on(self._failed)
            self._put_logged()
            self._end_training()
        except BaseException as caught:
            self._leave(caught)
            raise
        self._close()

    def _make_training(self) -> LoopTraining:
        return LoopTraining(self._model, self._optimizers)

    def batches(self, loader: Iterable[_Batch]) -> Iterator[_Batch]:
        """Yield the batches of a loader, and note which samples it drew; each call is an epoch.

        You may leave it in the middle. Without it, a verdict has less information about the data.
        """
        if self.mode == "disabled":
            yield from loader
            return
        self._require_open("batches")
        training, hooks = self._training, self._hooks
        training.epoch += 1
        self._has_batches = True
        hooks.mark("epoch start")
        training.begin_loader(loader)
        training.begin_iteration()
        try:
            with self.loading():
                batches = training.drawn(iter(loader))
            while True:
                with self.loading():
                    batch = next(batches, _NO_BATCH)
                if batch is _NO_BATCH:
                    break
                if self._is_in_step:  # an accumulation that draws its batches within a step
                    self._hooks.add_batch(batch)
                yield batch
            hooks.mark("epoch end")
        finally:
            self._group.set_place("between")  # a long validation or save may follow

    @contextmanager
    def loading(self) -> Iterator[None]:
        """Record no ops while a batch is loaded within a step: worker processes may
        load it, unseen by any step.
        """
        self._hooks.pause()
        try:
            yield
        finally:
            self._hooks.unpause()

    @contextmanager
    def step(self, batch: Any = None) -> Iterator[None]:
        """Enclose a step: ``with run.step(batch):`` around forward,
        backward and the optimizers' steps.

        Args:
            batch: a nested structure whose tensors are recorded; None records none.
        """
        self._enter_step(batch)
        try:
            yield
        except BaseException as error:
            self._leave_step(error)
            raise
        self._leave_step(None)

    def log(self, name: str, value: Tensor | float) -> None:
        """Record or compare a metric of the last step, such as a validation loss.

        Args:
            name: unique in a step.
            value: a number or a tensor, which is read now (on a GPU the host waits for it). Only
                the value of rank 0 is compared.
        """
        if self.mode == "disabled":
            return
        self._require_open("log")
        if not isinstance(value, Tensor | float | int):
            raise SelectionError(
                f"log takes a number or a tensor; {name!r} is a {type(value).__name__}."
            )
        if name in self._logged:
            raise SelectionError(
                f"{name!r} was logged twice after step {self._step}: use a different name."
            )
        if not self._training.rank and self.selection.selects_metric(name):
            with unobserved():  # log may be called inside a step
                self._logged[name] = metric_of(value)

    @override
    def _prepare(self) -> None:
        walker = StateWalker(self._training.module)
        owned = {id(tensor) for _, tensor in walker.walk(PARAMETERS, BUFFERS)}
        for number, optimizer in enumerate(self._optimizers):
            parameters = parameters_of(optimizer)
            if strange := sum(id(one) not in owned for one in parameters):
                raise SelectionError(
                    f"optimizers[{number}] ({type(optimizer).__name__}) updates {strange} of "
                    f"{len(parameters)} parameters that are not in model "
                    f"({type(self._training.module).__name__}). Pass a model that holds all "
                    'trained parameters, such as nn.ModuleDict({"generator": g, "critic": c}), and '
                    "make the optimizer after you move or shard the model."
                )
        super()._prepare()

    @override
    def _begin(self, **options: Any) -> None:
        super()._begin(**options)
        if self._is_resumed:
            self._note_resume()

    def _note_resume(self) -> None:
        if not self._training.rank:
            self._session.resume_metrics(self._reading(RESUMED, {}), is_first=True)

    def _enter_step(self, batch: Any) -> None:
        if self.mode == "disabled":
            return
        self._require_open("step")
        if self._is_in_step:
            raise SelectionError(
                "A step began inside a step. A step is one batch, from its forward pass to the "
                "optimizer's step: leave the previous step first, or accumulate several batches in "
                "one step."
            )
        if self._failed is not None:
            raise self._went_on(self._failed)
        self._put_logged()
        step = self._hooks.find_resumed(batch)
        if step is not None:
            self._step = step - 1
            self._note_resume()
        self._training.step = self._step + 1
        self._is_in_step = True
        self._begin_step(self._step + 1, batch)

    def _leave_step(self, error: BaseException | None) -> None:
        if not self._is_in_step:
            return
        self._is_in_step = False
        if error is not None:
            self._failed = error
            self._hooks.drop_step()
            self._watch_ops(is_on=False)
            return
        self._end_step(self._epoch, None)

    @override
    def _after_step(self) -> bool:
        if not self._has_batches:
            self._group.set_place("between")
        return self._has_differed

    def _around_backward(self, backward: Any) -> Any:
        @wraps(backward)
        @runs_uncompiled
        def followed(tensors: Any, *args: Any, accumulate_grad: bool = False, **kwargs: Any) -> Any:
            # torch.autograd.grad accumulates none; activation checkpointing calls
            # it inside a backward pass
            is_followed = accumulate_grad and self._is_in_step and graph_task_id() == -1
            if is_followed:
                self._hooks.note_loss(tensors[0] if len(tensors) == 1 else tensors)
            result = backward(tensors, *args, accumulate_grad=accumulate_grad, **kwargs)
            if is_followed:
                self._hooks.mark("after backward")
                self._hooks.begin_gradients()
            return result

        return followed

    @runs_uncompiled
    def _before_update(self, optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
        """Raise for an optimizer that was not passed, unless a passed one calls it."""
        kind = type(optimizer).__name__
        if id(optimizer) not in self._known:
            own = {id(parameter) for one in self._optimizers for parameter in parameters_of(one)}
            if not all(id(parameter) in own for parameter in parameters_of(optimizer)):
                if not self._is_in_step:
                    return  # the optimizer belongs to a different run
                raise SelectionError(
                    f"{kind} stepped, but was not passed to TrainingRun. Pass all optimizers at "
                    "the start (optimizers=[...]), or begin a new with block with a new "
                    "TrainingRun when you add one."
                )
            self._known[id(optimizer)] = optimizer
        if not self._is_in_step:
            raise SelectionError(
                f"{kind} stepped outside a step of the TrainingRun, which cannot record it. Put "
                "forward, backward and the optimizer's step into one `with run.step(batch):`."
            )

    def _put_logged(self) -> None:
        """Pass on what was logged since the last step; ranks stop for it
        together after their next step.
        """
        if self._logged:
            metrics, self._logged = self._logged, {}
            reading = self._reading(LOG, metrics, generator_states(self._session.reader))
            self._has_differed |= bool(self._session.put_metrics(reading))

    def _reading(
        self, where: str, metrics: dict[str, Metric], reads: tuple[ReadRow, ...] = ()
    ) -> Reading:
        step = self._step
        return Reading(
            where=where, number=step, step=step, epoch=self._epoch, metrics=metrics, reads=reads
        )

    @property
    def _epoch(self) -> int:
        return max(0, self._training.epoch)  # -1 without ``batches``

    def _require_open(self, what: str) -> None:
        if not self._is_open:
            raise SelectionError(
                f"Use {what} inside the block of its run: `with TrainingRun(...) as run:`."
            )

    def _require_alone(self) -> None:
        REGISTRY.make_room()
        other = TrainingRun.open_run
        owner = None if REGISTRY.sink is None else REGISTRY.sink.owner
        if other is not None:
            owner = (
                "this TrainingRun itself"
                if other is self
                else f"the TrainingRun of {other.reference}"
            )
        if owner is not None:
            raise SelectionError(
                f"{owner[0].upper()}{owner[1:]} is open already, and a process can have only one "
                "run at a time. Leave it first; to record and verify, train twice."
            )

    def _went_on(self, error: BaseException) -> NothingComparedError:
        return NothingComparedError(
            f"Step {self._step} ended with {type(error).__name__} ({error}), which the program "
            "caught, so the run lacks half a step. Let the error propagate, or move code that may "
            "fail out of the step."
        )

    def _leave(self, error: BaseException) -> None:
        try:
            self._stop(error)
        finally:
            self._close()

    def _close(self) -> None:
        TrainingRun.open_run = None
        self._is_resumed, self._first_step, self._first_epoch = False, 0, 0
        self._stage.close()
