"""DeterminismCallback for Hugging Face's Trainer, whose loop drives a TrainingRun
(transformers 4.57 and 5.24).
"""

import inspect
import json
import uuid
from collections.abc import Callable, Iterator, Mapping
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn
from torch.optim import Optimizer
from transformers import Trainer, TrainerCallback, TrainerState, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint
from typing_extensions import override

from det_callbacks.audit.result import AuditReport
from det_callbacks.checkpoint.files import ANOTHER_PLACE, SIDECAR, write_sidecar
from det_callbacks.checkpoint.loaded import require_saved, unchecked_line
from det_callbacks.errors import SelectionError
from det_callbacks.integrations.loop import LoopTraining, TrainingRun
from det_callbacks.internals.replaced import ReplacedMethods
from det_callbacks.ranks.replicas import ReplicaReport
from det_callbacks.report.console import print_closing_line
from det_callbacks.runs.files import writing
from det_callbacks.training.following import FollowedRun
from det_callbacks.verdict import Verdict

# TrainingArguments that only affect output; all others may change bits
_CHANGES_NO_BITS = (
    *(
        "*_dir",
        "run_name",
        "project",
        "report_to",
        "disable_tqdm",
        "log_*",
        "logging_*",
        "save_*",
        "hub_*",
    ),
    *(
        "push_to_*",
        "trackio_*",
        "resume_from_checkpoint",
        "do_*",
        "local_rank",
        "ddp_timeout",
        "debug",
    ),
    "skip_memory_metrics",
)
_OF_A_CLOCK = ("epoch", "*_runtime", "*_per_second", "*_preparation_time", "*_mem_*", "*_memory*")
"""Metrics of an evaluation that measure time or memory."""


class _TrainerTraining(LoopTraining):
    framework = "transformers"

    def __init__(self, trainer: Trainer, model: nn.Module, optimizer: Optimizer) -> None:
        super().__init__(model, [optimizer])
        scheduler: Any = trainer.lr_scheduler
        self.schedulers = [(getattr(scheduler, "scheduler", scheduler), "step")]
        self.scaler = trainer.accelerator.scaler
        self.folder = Path(str(trainer.args.output_dir))
        self.choices = _choices(trainer.args, self.module)


class _TrainerRun(TrainingRun):
    called = "DeterminismCallback"
    _training: _TrainerTraining

    def __init__(
        self, reference: str | Path | None, *, resume: str = "plain", **arguments: Any
    ) -> None:
        if resume != "plain":
            raise SelectionError(
                f"resume={resume!r} is not supported with Hugging Face's Trainer, which restores "
                'checkpoints itself: omit resume, or pass "plain". The verdict names state that '
                "the Trainer does not restore."
            )
        if "log_metrics" in arguments:
            raise SelectionError(
                "log_metrics is for Lightning's Trainer: omit it, and log the verdict yourself."
            )
        if "stages" in arguments:
            raise SelectionError(
                "stages is for Lightning's Trainer: omit it, and record an evaluation with "
                "TrainingRun."
            )
        # model and optimizer exist only when the Trainer trains
        FollowedRun.__init__(self, reference, resume="plain", **arguments)
        self._of_trainer = ReplacedMethods()
        self._iterator: object = None
        self._drawn: list[Any] = []
        self._first_epoch_of_loader = 0

    @override
    def _make_training(self) -> _TrainerTraining:
        return _TrainerTraining(self._trainer, self._model, self._optimizers[0])

    def begin(self, trainer: Trainer, state: TrainerState, *, is_resumed: bool) -> None:
        self._trainer = trainer
        self._model = trainer.model_wrapped
        optimizer: Any = trainer.optimizer
        # accelerate wraps it
        while isinstance(inner := getattr(optimizer, "optimizer", None), Optimizer):
            optimizer = inner
        self._optimizers = [optimizer]
        self._iterator, self._drawn = None, []
        epoch = int(state.epoch or 0)
        self._first_epoch_of_loader = epoch + 1 if is_resumed else 0
        if is_resumed:
            self.resume_from(state.global_step, epoch=epoch)
        self.__enter__()
        self._stage.callback(self._of_trainer.restore)
        self._of_trainer.around(trainer, "get_batch_samples", self._draw)
        self._of_trainer.around(trainer, "training_step", self._train_step)
        self._of_trainer.around(trainer.accelerator, "clip_grad_norm_", self._clip)

    def begin_epoch(self, state: TrainerState, loader: Any) -> None:
        """Mark the start of an epoch, and follow the loader's sampler.

        It does not follow in the epoch of a resume, where the Trainer skips batches
        with a different sampler.
        """
        training, hooks = self._training, self._hooks
        training.epoch = int(state.epoch or 0)
        hooks.mark("epoch start")
        if training.epoch >= self._first_epoch_of_loader:
            training.begin_loader(loader)

    def end_epoch(self) -> None:
        """Mark the end of an epoch, which a callback may have ended inside a step."""
        if self._is_in_step:
            self._is_in_step = False
            self._hooks.drop_step()
        self._iterator = None
        self._hooks.mark("epoch end")

    def begin_step(self) -> None:
        batches, self._drawn = self._drawn, []
        self._training.num_batches = max(1, len(batches))
        self._enter_step(batches[0] if len(batches) == 1 else batches)

    def begin_update(self) -> None:
        self._hooks.unpause()

    def end_step(self) -> None:
        # accelerate has copied them to the device, whose memory may be scarce
        self._training.forget_drawn()
        self._leave_step(None)

    def log_evaluation(self, metrics: Mapping[str, Any]) -> None:
        for name, value in metrics.items():
            is_of_clock = any(fnmatchcase(name, pattern) for pattern in _OF_A_CLOCK)
            if isinstance(value, float | int) and not is_of_clock and name not in self._logged:
                self.log(name, value)

    def save(self, folder: Path, state: TrainerState) -> None:
        """Write the digests of a checkpoint next to its folder,
        and remove those of deleted folders.
        """
        # all ranks have written their parts
        self._group.run_on_all(lambda: None, task=f"saving {folder}")
        if self._training.rank:
            return
        place: dict[str, Any] = {"step": state.global_step - 1, "epoch": self._training.epoch}
        write_sidecar(folder, entries=dict, id=uuid.uuid4().hex, run=self._identity(), **place)
        for sidecar in folder.parent.glob(f"checkpoint-*{SIDECAR}"):
            if not sidecar.with_name(sidecar.name.removesuffix(SIDECAR)).exists():
                with writing(sidecar, instead=ANOTHER_PLACE):
                    sidecar.unlink(missing_ok=True)

    def end(self, error: BaseException | None = None) -> None:
        self._drawn, self._iterator = [], None
        self.__exit__(None, error, None)

    def _draw(
        self, draw: Callable[..., Any], iterator: Iterator[Any], *args: Any, **kwargs: Any
    ) -> Any:
        if iterator is not self._iterator:
            self._training.begin_iteration()
        self._iterator = iterator
        batches, num_items = draw(self._training.drawn(iterator), *args, **kwargs)
        self._drawn = list(batches)
        return batches, num_items

    def _train_step(self, train: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Record forward and backward, but not the loss sums that the Trainer logs and resets."""
        self._hooks.unpause()
        loss = train(*args, **kwargs)
        self._hooks.pause()
        return loss

    def _clip(self, clip: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self._hooks.unpause()
        return clip(*args, **kwargs)


class DeterminismCallback(TrainerCallback):
    """Record a run of Hugging Face's Trainer, or verify it bit for bit against a recorded one.

    A step is an optimizer step with all batches that it accumulates; its number is the
    ``state.global_step`` before it. Metrics of evaluations are compared by name. The callback
    changes no bits of the training, and costs the same as Lightning's ``DeterminismCallback``. It
    also works with subclasses of the Trainer, such as TRL's.

    Args:
        reference: as for Lightning's ``DeterminismCallback``. New folders go below ``output_dir``.
        arguments: as for Lightning's ``DeterminismCallback``, except ``log_metrics`` and
            ``stages``; ``resume`` can only be "plain".

    Attributes:
        verdict: the Verdict of a verification, or None before its end.
        audit_report: the AuditReport of an audit, or None before its end.
        replica_report: the ReplicaReport of the last audit of the replicas, or None.

    Raises:
        SelectionError: an argument is not allowed, the callback was added after the Trainer was
            made, or the Trainer trains in an unsupported way.
        CheckpointMismatchError: a checkpoint does not match its digests.
        Exception: any error of Lightning's ``DeterminismCallback``, such as DivergenceError.

    Examples:
        >>> callback = DeterminismCallback("refs/run1", mode="record")
        >>> result = Trainer(model, args, train_dataset=data, callbacks=[callback]).train()
        {'train_runtime': ...}
        det_callbacks: recorded 6 steps, ...
    """

    def __init__(self, reference: str | Path | None, **arguments: Any) -> None:
        self._run = _TrainerRun(reference, **arguments)
        self._replaced = ReplacedMethods()
        self._trainer: Trainer | None = None
        self._is_resumed = False

    @property
    def verdict(self) -> Verdict | None:
        return self._run.verdict

    @property
    def audit_report(self) -> AuditReport | None:
        return self._run.audit_report

    @property
    def replica_report(self) -> ReplicaReport | None:
        return self._run.replica_report

    @override
    def on_init_end(self, *_: Any, **__: Any) -> None:
        if self._run.mode != "disabled" and (trainer := _trainer_being_made(self)) is not None:
            self._replaced.restore()
            self._trainer = trainer
            self._replaced.around(trainer, "train", partial(self._train, trainer))

    def _train(
        self,
        trainer: Trainer,
        train: Callable[..., Any],
        resume_from_checkpoint: str | bool | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        place = resume_from_checkpoint
        if place is True:
            place = get_last_checkpoint(trainer.args.output_dir)
        self._is_resumed = bool(place)
        if self._is_resumed:
            _check_loaded(Path(str(place)), is_first_rank=trainer.is_world_process_zero())
        try:
            return train(resume_from_checkpoint, *args, **kwargs)
        except BaseException as error:
            self._run.end(error)
            raise

    @override
    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, *_: Any, **__: Any
    ) -> None:
        if self._run.mode == "disabled":
            return
        if self._trainer is None or self._trainer.args is not args:
            raise SelectionError(
                "The DeterminismCallback was added after the Trainer was made, so it cannot see a "
                "run that fails. Pass it to the constructor: Trainer(..., callbacks=[callback])."
            )
        _require_supported(self._trainer)
        self._run.begin(self._trainer, state, is_resumed=self._is_resumed)

    @override
    def on_epoch_begin(self, args: object, state: TrainerState, *_: Any, **kwargs: Any) -> None:
        if self._is_open:
            self._run.begin_epoch(state, kwargs["train_dataloader"])

    @override
    def on_epoch_end(self, *_: Any, **__: Any) -> None:
        if self._is_open:
            self._run.end_epoch()

    @override
    def on_step_begin(self, *_: Any, **__: Any) -> None:
        if self._is_open:
            self._run.begin_step()

    @override
    def on_pre_optimizer_step(self, *_: Any, **__: Any) -> None:
        if self._is_open:
            self._run.begin_update()

    @override
    def on_step_end(self, *_: Any, **__: Any) -> None:
        if self._is_open:
            self._run.end_step()

    @override
    def on_evaluate(self, *_: Any, **kwargs: Any) -> None:
        if self._is_open:
            self._run.log_evaluation(kwargs["metrics"])

    @override
    def on_save(self, args: TrainingArguments, state: TrainerState, *_: Any, **__: Any) -> None:
        folder = Path(str(args.output_dir), f"checkpoint-{state.global_step}")
        if self._is_open and folder.is_dir():  # a hyperparameter search saves elsewhere
            self._run.save(folder, state)

    @override
    def on_train_end(self, *_: Any, **__: Any) -> None:
        if self._is_open:
            self._run.end()

    @property
    def _is_open(self) -> bool:
        return TrainingRun.open_run is self._run


def _trainer_being_made(callback: TrainerCallback) -> Trainer | None:
    """Return the Trainer whose constructor calls ``on_init_end``, from the stack:
    hooks do not receive it.
    """
    frame = inspect.currentframe()
    while frame is not None:
        found = frame.f_locals.get("self")
        if isinstance(found, Trainer) and any(
            one is callback for one in found.callback_handler.callbacks
        ):
            return found
        frame = frame.f_back
    return None


def _require_supported(trainer: Trainer) -> None:
    instead = None
    if isinstance(trainer.model_wrapped, nn.DataParallel):
        instead = (
            "nn.DataParallel (several GPUs in one process): start one process a GPU with torchrun"
        )
    elif trainer.is_deepspeed_enabled:
        instead = "DeepSpeed, which replaces the backward pass and the update: use DDP or FSDP2"
    elif trainer.args.auto_find_batch_size:
        instead = (
            "auto_find_batch_size, which restarts the training after an error: set "
            "per_device_train_batch_size"
        )
    if instead is not None:
        raise SelectionError(f"DeterminismCallback does not support {instead}.")


def _check_loaded(place: Path, *, is_first_rank: bool) -> None:
    place = place.resolve()
    if not place.exists():
        return  # the Trainer reports it
    if require_saved(place) is None and is_first_rank:
        print_closing_line(unchecked_line(place))


def _choices(args: TrainingArguments, model: nn.Module) -> dict[str, Any]:
    """Return the TrainingArguments and the model's configuration that may change bits."""
    chosen = {
        name: value
        for name, value in args.to_dict().items()
        if not name.startswith("_") and not any(fnmatchcase(name, one) for one in _CHANGES_NO_BITS)
    }
    choices: dict[str, Any] = {"args": chosen, "world_size": args.world_size}
    config: Any = getattr(model, "config", None)
    if hasattr(config, "to_dict"):
        known = config.to_dict()
        left_out = {"_name_or_path", "transformers_version"}
        choices["config"] = {name: known[name] for name in known.keys() - left_out}
    plain: dict[str, Any] = json.loads(json.dumps(choices, default=str, sort_keys=True))
    return plain
