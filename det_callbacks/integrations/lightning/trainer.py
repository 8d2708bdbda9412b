"""Reads the facts about the training from a Trainer (Lightning 2.5 and 2.6): its
loaders, and what it keeps.
"""

# properties implement attributes, because a Trainer sets them after it makes its callbacks
# mypy: disable-error-code="override"

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import (
    Checkpoint,
    EarlyStopping,
    ProgressBar,
    StochasticWeightAveraging,
)
from lightning.pytorch.loggers import Logger
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy, Strategy
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.swa_utils import AveragedModel
from typing_extensions import override

from det_callbacks.digest.unobserved import unobserved
from det_callbacks.errors import SettingsError
from det_callbacks.integrations.lightning.logged import print_beside_bar
from det_callbacks.internals.lightning import (
    LOAD_LOADER_STATES,
    Loop,
    PrefetchFetcher,
    combined_loader,
    data_fetcher,
    either,
    epoch_results,
    loader_mode,
    model_averager,
    own_class,
    package_of,
    results,
    validation_data,
)
from det_callbacks.internals.replaced import ReplacedMethods, subclass_of
from det_callbacks.internals.torch import BUFFERS, PARAMETERS
from det_callbacks.runs.evidence import AFTER, BEFORE
from det_callbacks.runs.program import further_name
from det_callbacks.settings.generators import Held
from det_callbacks.trace.components import holds_data
from det_callbacks.trace.leaves import StateWalker, flatten
from det_callbacks.training import loading
from det_callbacks.training.training import LoaderFollower, Training, Wrap

# limit on the tensors in the ``state_dict`` of a callback that is read at each step
MAX_BYTES = 1 << 20


class StateOfCallbacks:
    """Lists this state when a step begins, after all callbacks have finished the previous step.

    It omits callbacks that only decide when training stops or what is saved (EarlyStopping,
    ModelCheckpoint). It reads averaged weights in place, and the ``state_dict`` of other callbacks.
    """

    def __init__(
        self, trainer: pl.Trainer, own: pl.Callback, print_line: Callable[[str], None]
    ) -> None:
        self._trainer, self._own, self._print_line = trainer, own, print_line
        self._asked: list[tuple[str, pl.Callback]] | None = None
        self._walkers = dict[nn.Module, StateWalker]()

    def entries(self) -> Iterator[tuple[str, Tensor]]:
        for name, callback in self._callbacks():
            for attribute, average in self._averages(callback):
                walker = self._walkers.setdefault(average, StateWalker(average))
                tensors = walker.walk(PARAMETERS, BUFFERS)
                yield from (
                    (further_name(name, f"{attribute}.{path}"), tensor) for path, tensor in tensors
                )
        if self._asked is None:
            self._asked = list(self._small())
        for name, callback in self._asked:
            yield from _tensors(name, callback)

    def _callbacks(self) -> Iterator[tuple[str, pl.Callback]]:
        """Yield the user's callbacks that may have such state,
        each with a name made of its class and index.
        """
        left_out = (
            *either(Checkpoint),
            *either(EarlyStopping),
            *either(ProgressBar),
            type(self._own),
        )
        known = dict[str, int]()
        for callback in vars(self._trainer)["callbacks"]:
            if not isinstance(callback, left_out):
                name = type(callback).__qualname__
                known[name] = number = known.get(name, -1) + 1
                yield f"{name} {number}" if number else name, callback

    def _averages(self, callback: pl.Callback) -> Iterator[tuple[str, nn.Module]]:
        """Yield the weight averages that a callback holds, by attribute."""
        module, is_stochastic = (
            self._trainer.lightning_module,
            isinstance(callback, either(StochasticWeightAveraging)),
        )
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
            num_bytes = sum(
                value.nbytes for _, value in _tensors(name, callback) if isinstance(value, Tensor)
            )
            if num_bytes <= MAX_BYTES:
                yield name, callback
            elif not self._trainer.global_rank:
                self._print_line(
                    f"det_callbacks: the state of {name} has {num_bytes / (1 << 20):.0f} MiB, too "
                    "much to compare at each step; the checkpoint digests include it"
                )


def _tensors(name: str, callback: pl.Callback) -> Iterator[tuple[str, Tensor]]:
    found: Any = callback.state_dict()
    for path, value in flatten(found, ""):
        if isinstance(value, Tensor) and holds_data(value):
            yield further_name(name, path), value


_LEFT = (pl.Trainer, Logger, Strategy, Loop)
"""Types whose attributes reach everything."""


def find_generators(roots: Mapping[str, object], *, left: tuple[type, ...] = ()) -> dict[str, Held]:
    """Return path -> random generator for all that the roots reach,
    except via Lightning's loops and ``left``.
    """
    return loading.find_generators(roots, left=(*either(*_LEFT), *left))


def follow(loader: Any, follower: Any) -> Callable[[], object]:
    """Have a loader call ``begin_iteration()``, ``begin_draw()`` and ``end_draw(batch)``;
    return a function to end it.

    Several followers may end in any order. While it is followed,
    the loader's class is a subclass with the same name.
    """
    if not hasattr(loader, "det_callbacks_followers"):
        loader.__class__ = _followed(type(loader))
    followers = loader.det_callbacks_followers
    followers.append(follower)

    def end() -> None:
        if follower in followers:
            followers.remove(follower)
            if not followers:
                loader.__class__ = type(loader).__base__

    return end


def _followed(base: Any) -> Any:
    """Return a subclass of a CombinedLoader's class that calls followers in the
    order of their registration.

    The resume is first, and restores generators before the others read them.
    """
    followers: list[Any] = []

    def begin(loader: Any) -> Any:
        for follower in followers:
            follower.begin_iteration()
        return base.__iter__(loader)

    def draw(loader: Any) -> Any:
        for follower in followers:
            follower.begin_draw()
        drawn = base.__next__(loader)
        for follower in followers:
            follower.end_draw(drawn[0])
        return drawn

    return subclass_of(base, det_callbacks_followers=followers, __iter__=begin, __next__=draw)


class LightningTraining(Training):
    _loader = "train_dataloader"  # the name of its loader

    def __init__(self, trainer: pl.Trainer, own: pl.Callback) -> None:
        self.trainer, self._own = trainer, own
        self._replaced = ReplacedMethods()
        self._let_go: Callable[[], object] = lambda: None
        self._of_callbacks = StateOfCallbacks(trainer, own, self.print_line)
        self.rank, self.world_size = trainer.global_rank, trainer.world_size
        self.framework = package_of(trainer)

    @property
    def _loop(self) -> Any:
        """The loop that draws the batches."""
        return self.trainer.fit_loop

    @property
    def module(self) -> nn.Module:
        return self.trainer.lightning_module

    @property
    def optimizers(self) -> Sequence[Optimizer]:
        return self.trainer.optimizers

    @property
    def schedulers(self) -> Sequence[tuple[Any, str]]:
        return [(config.scheduler, config.interval) for config in self.trainer.lr_scheduler_configs]

    @property
    def scaler(self) -> Any:
        return getattr(self.trainer.precision_plugin, "scaler", None)

    @property
    def loaders(self) -> Mapping[str, Any] | None:
        """The loaders of the loop; a fit makes them after ``on_fit_start``."""
        loader = combined_loader(self._loop)
        if loader is None:
            return None
        inner = loader.flattened
        return {
            f"{self._loader}{f' {number}' * (len(inner) > 1)}": one
            for number, one in enumerate(inner)
        }

    @property
    def step(self) -> int:
        return self.trainer.fit_loop.epoch_loop.total_batch_idx

    @property
    def epoch(self) -> int:
        return self.trainer.current_epoch

    @property
    def folder(self) -> Path:
        """The log directory, which only rank 0 knows."""
        return Path(self.trainer.log_dir or self.trainer.default_root_dir)

    @property
    def num_drawn_ahead(self) -> int:
        """One if the data has no length: the fetcher then loads a batch ahead."""
        fetcher = data_fetcher(self._loop)
        return len(fetcher.batches) if isinstance(fetcher, either(PrefetchFetcher)) else 0

    @property
    def choices(self) -> Mapping[str, Any]:
        return {
            "trainer": _trainer_choices(self.trainer),
            "hparams": dict(self.trainer.lightning_module.hparams),
        }

    @property
    def hooks(self) -> Mapping[tuple[str, str], str]:
        """The classes whose hooks run before and after ours, the user's first;
        excludes progress bars.
        """
        callbacks: list[pl.Callback] = vars(self.trainer)["callbacks"]
        place, module = callbacks.index(self._own), self.trainer.lightning_module
        found: dict[tuple[str, str], str] = {}
        for order, neighbours in ((BEFORE, callbacks[:place]), (AFTER, callbacks[place + 1 :])):
            others = [one for one in neighbours if not isinstance(one, either(ProgressBar))]
            others.sort(
                key=lambda callback: type(callback).__module__.startswith(
                    ("lightning.", "pytorch_lightning.")
                )
            )
            for hook in (name for name in vars(pl.Callback) if name.startswith("on_")):
                inherited = [getattr(base, hook) for base in either(pl.Callback)]
                users = [one for one in others if getattr(type(one), hook, None) not in inherited]
                names = [type(one).__qualname__ for one in users]
                if order == AFTER and is_overridden(
                    hook, module, own_class(module, pl.LightningModule)
                ):
                    # the module's hooks run after those of all callbacks
                    names.insert(0, type(module).__qualname__)
                if names:
                    found[order, hook] = ", ".join(names)
        return found

    @override
    def print_line(self, text: str) -> None:
        print_beside_bar(self.trainer, text)

    @override
    def follow_loaders(self, follower: LoaderFollower) -> None:
        loop = self.trainer.fit_loop
        begin = partial(self._load_and_follow, follower)
        self._replaced.around(loop, LOAD_LOADER_STATES, begin)
        # made early, because a scheduler needs the number of steps
        if combined_loader(loop) is not None:
            begin(lambda: None)

    def _load_and_follow(self, follower: LoaderFollower, load: Callable[[], None]) -> None:
        load()
        self._let_go()
        loaders, loader = self.loaders, combined_loader(self._loop)
        assert loaders is not None, "they are loaded"
        inner = loader.flattened
        roots = {self._loader: inner[0] if len(inner) == 1 else inner}
        held = find_generators(roots, left=either(pl.LightningModule))
        self._let_go = follow(loader, follower)
        follower.begin_loaders(loaders, held, is_in_turn=loader_mode(loader) == "sequential")

    @override
    def further_state(self) -> Iterator[tuple[str, Tensor | int | float | bool]]:
        yield from super().further_state()
        with unobserved():
            yield from self._of_callbacks.entries()

    @override
    def mark_forward(self, mark: Wrap) -> None:
        self._replaced.put(self.trainer.strategy, "training_step", mark)

    @override
    def leave_out(self, wrap: Wrap) -> None:
        # Lightning creates sums when a name is first logged, and clears them in an epoch's first
        # batch, so the first step after a resume would have different ops
        results = epoch_results(self.trainer.fit_loop.epoch_loop)
        for name in ("log", "reset"):
            self._replaced.put(results, name, wrap)

    @override
    def leave(self) -> None:
        self._let_go()
        self._replaced.restore()

    @property
    @override
    def ddp(self) -> DistributedDataParallel | None:
        model = self.trainer.strategy.model
        return model if isinstance(model, DistributedDataParallel) else None

    @override
    def require_replicas(self) -> None:
        strategy = self.trainer.strategy
        if self.ddp is None and not isinstance(strategy, either(ModelParallelStrategy)):
            raise SettingsError(
                f"{type(strategy).__name__} does not define which ranks hold the same parameters, "
                "so its replicas cannot be compared. Use DDP or ModelParallelStrategy (FSDP2, "
                "tensor parallelism, meshes), or compare runs with DeterminismCallback."
            )
        # with post-local SGD (Lightning 2.6.6), replicas are equal only after an averaging
        if isinstance(strategy, either(DDPStrategy)) and model_averager(strategy) is not None:
            raise SettingsError(
                "With DDPStrategy(model_averaging_period=...) the replicas differ by design "
                "between two averagings, so they cannot be audited. Omit the audit or the "
                "averaging."
            )


class LightningEvaluation(LightningTraining):
    """The facts about a call of ``validate``, ``test`` or ``predict``, of which each batch is
    a step.
    """

    base_phase = "forward"
    optimizers: Sequence[Optimizer] = ()
    schedulers: Sequence[tuple[Any, str]] = ()
    scaler = None

    def __init__(self, trainer: pl.Trainer, own: pl.Callback, stage: str) -> None:
        super().__init__(trainer, own)
        self._stage, self._loader = stage, f"{stage}_dataloader"

    @property
    @override
    def _loop(self) -> Any:
        return getattr(self.trainer, f"{self._stage}_loop")

    @override
    def follow_loaders(self, follower: LoaderFollower) -> None:
        self._load_and_follow(follower, lambda: None)

    @override
    def mark_forward(self, mark: Wrap) -> None:
        pass

    @override
    def leave_out(self, wrap: Wrap) -> None:
        logged = results(self.trainer)
        for name in ("log", "reset") if logged is not None else ():  # predictions log nothing
            self._replaced.put(logged, name, wrap)


def _trainer_choices(trainer: pl.Trainer) -> dict[str, Any]:
    names = [
        "accumulate_grad_batches",
        "gradient_clip_val",
        "world_size",
        "limit_train_batches",
        "overfit_batches",
    ]
    names += ["min_epochs", "max_epochs", "min_steps", "max_steps"]
    # only if there is a validation (as in Trainer.enable_validation),
    # which may draw from generators
    if validation_data(trainer.fit_loop.epoch_loop.val_loop).is_defined():
        names += [
            "limit_val_batches",
            "val_check_interval",
            "check_val_every_n_epoch",
            "num_sanity_val_steps",
        ]
    algorithm = trainer.gradient_clip_algorithm
    choices = {name: getattr(trainer, name) for name in names}
    choices |= {name: type(getattr(trainer, name)).__name__ for name in ("strategy", "accelerator")}
    choices |= {
        "precision": str(trainer.precision),
        "gradient_clip_algorithm": algorithm and str(algorithm),
    }
    return choices
