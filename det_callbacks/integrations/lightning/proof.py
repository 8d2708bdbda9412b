"""Proves that a resumed run matches an uninterrupted one."""

from collections.abc import Callable
from contextlib import closing, suppress
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from typing_extensions import override

from det_callbacks.errors import DivergenceError, NothingComparedError, SelectionError
from det_callbacks.integrations.lightning.determinism import DeterminismCallback
from det_callbacks.internals.lightning import MultiProcessingLauncher, either, is_out_of_batches
from det_callbacks.ranks.group import RankGroup
from det_callbacks.runs.selection import Level
from det_callbacks.settings.generators import RewindPoint
from det_callbacks.text import count
from det_callbacks.training.arguments import Resume
from det_callbacks.verdict import Verdict
from det_callbacks.verify.judge import compare_runs
from det_callbacks.verify.verification import free_folder


def prove_resume(
    make_trainer: Callable[[], pl.Trainer],
    make_model: Callable[[], pl.LightningModule],
    make_data: Callable[[], Any],
    *,
    stop_at: int,
    steps: int,
    folder: str | Path | None = None,
    level: Level = "op",
    resume: Resume = "exact",
) -> Verdict:
    """Prove that a resumed run has the same bits as an uninterrupted one.

    Three runs start from the current generator states. The first trains ``steps`` steps and is
    recorded. The second saves a checkpoint after ``stop_at`` steps (at an epoch's end in
    ``on_train_epoch_end``), and is interrupted after it loads the next batch. The third resumes
    from the checkpoint, and is verified. This costs slightly more than two traced runs. The
    generators are restored at the end.

    With several processes, each must run the program: use ``strategy="ddp"``, a
    ``ModelParallelStrategy`` or torchrun, not strategies that spawn.
    Each process gets the verdict for all ranks.

    Args:
        make_trainer: returns a new Trainer, which must train for at least ``steps`` steps.
        make_model: returns a new model, built the same way each time.
        make_data: returns the argument of ``Trainer.fit`` after the model, or a tuple of training
            and validation loaders.
        stop_at: training batches before the interruption, at least 1.
        steps: total number of training batches, more than ``stop_at``.
        folder: for the runs and the checkpoint; by default ``determinism/resume-NNN`` below the
            working directory.
        level: level of the digests: "op", "module" or "state".
        resume: as for DeterminismCallback; use "plain" to see the proof fail.

    Returns:
        The verdict on the resumed run, or on the interrupted one if that already differs.

    Raises:
        SelectionError: ``stop_at`` or ``steps`` is out of range, the training ends too early, or
            the strategy spawns processes.
        NotResumableError: the checkpoint cannot be resumed exactly; the message has the reasons.

    Examples:
        >>> def make_trainer():
        ...     return Trainer(max_steps=4, **quiet)
        >>> loader = BoringModel().train_dataloader
        >>> with enforce_determinism({"seed": 0}):
        ...     verdict = prove_resume(make_trainer, BoringModel, loader, stop_at=2, steps=4)
        det_callbacks: recorded 4 steps, ...
        >>> verdict.verdict
        'match'
    """
    if type(stop_at) is not int or type(steps) is not int or not 0 < stop_at < steps:
        raise SelectionError(
            f"stop_at must be at least 1 and less than steps; got stop_at={stop_at!r} and "
            f"steps={steps!r}."
        )
    place = (free_folder(Path(), kind="resume") if folder is None else Path(folder)).absolute()
    checkpoint = place / "interrupted.ckpt"
    recorded = partial(DeterminismCallback, mode="record", level=level, resume=resume)

    def train(callback: DeterminismCallback, end: _End, ckpt_path: Path | None = None) -> None:
        generators = RewindPoint()
        trainer = make_trainer()
        if isinstance(trainer.strategy.launcher, either(MultiProcessingLauncher)):
            raise SelectionError(
                'Spawned processes return nothing: use strategy="ddp", or torchrun.'
            )
        callbacks: list[pl.Callback] = vars(trainer)["callbacks"]
        callbacks[:] = [callback, *callbacks, end]
        model, data = make_model(), make_data()
        training, validation = data if isinstance(data, tuple) and len(data) == 2 else (data, None)
        try:
            trainer.fit(model, training, validation, ckpt_path=ckpt_path)
        finally:
            generators.put_back(restarts_new=True)  # including those of devices first used in it

    end = _End(steps)
    train(recorded(place / "reference"), end)
    if end.num_done < steps:
        raise SelectionError(
            f"The training ended after {end.num_done} of {count(steps, 'step')}. Let its Trainer "
            "train longer (max_epochs, max_steps), or pass fewer steps."
        )
    with suppress(TrainingInterruptedError):
        train(recorded(place / "interrupted"), _End(stop_at, checkpoint))
    with closing(RankGroup().open()) as group:  # after all ranks have written their files
        group.gather(lambda: None, task="proving a resume")
    before = compare_runs(place / "reference", place / "interrupted", steps="common")
    if before.verdict != "match":
        return before
    resumed = DeterminismCallback(place / "reference", current=place / "resumed", resume=resume)
    try:
        train(resumed, _End(steps), checkpoint)
    except DivergenceError as error:
        if error.verdict is None:
            raise
        return error.verdict
    verdict = resumed.verdict
    steps_compared = None if verdict is None else verdict.coverage.steps
    if verdict is None or steps_compared is None or steps_compared[0] != stop_at:
        raise NothingComparedError(
            f"The resumed run was not verified from step {stop_at} to its end."
        )
    return verdict


class TrainingInterruptedError(Exception):
    """Interrupts a fit between two batches, as Ctrl-C would."""


class _End(pl.Callback):
    """Ends a fit after some batches; given a checkpoint's path,
    saves there and interrupts the fit.
    """

    def __init__(self, num_steps: int, checkpoint: Path | None = None) -> None:
        self._num_steps, self._checkpoint = num_steps, checkpoint
        self.num_done, self._is_saved = 0, False

    @override
    def on_train_batch_start(self, trainer: pl.Trainer, *_: Any, **__: Any) -> None:
        if self._is_saved:
            trainer.strategy.barrier()
            raise TrainingInterruptedError

    @override
    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any, **__: Any) -> None:
        epoch_loop = trainer.fit_loop.epoch_loop
        self.num_done = epoch_loop.total_batch_idx + 1
        if self._checkpoint is None:
            trainer.should_stop |= self.num_done >= self._num_steps
        elif not is_out_of_batches(epoch_loop)():
            self.on_train_epoch_end(trainer, trainer.lightning_module)

    @override
    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self._checkpoint is not None and self.num_done == self._num_steps and not self._is_saved:
            trainer.save_checkpoint(self._checkpoint)
            self._is_saved = True
