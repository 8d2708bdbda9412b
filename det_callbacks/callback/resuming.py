"""Going on as if a training had never been interrupted: what to save beside a checkpoint, and when to put it back.

Lightning restores weights, optimizers, schedulers and its loops. Generators, the position in the data and gradients
that are being accumulated it does not, and some of its counters it restores to other values than an uninterrupted run
has. The loops are reached into by the methods that stand at those moments (read at Lightning 2.6.6):

* ``_FitLoop.setup_data`` begins a fit's run, and may have been called before for a scheduler that asks for the steps;
* ``_FitLoop._load_combined_loader_states`` runs just before the loader is first iterated over;
* ``_TrainingEpochLoop.on_run_start`` begins the batches of an epoch, after its hooks.
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import lightning.pytorch as pl
import safetensors
import safetensors.torch
import torch
from lightning.pytorch.loops.fetchers import _DataLoaderIterDataFetcher, _PrefetchDataFetcher
from lightning.pytorch.loops.loop import _Loop
from lightning.pytorch.utilities import rank_zero_warn

from det_callbacks.callback.data_watch import DataWatch
from det_callbacks.callback.fit_state import FitState, is_stateful
from det_callbacks.errors import CheckpointFormatError, CoverageWarning, NotResumableError
from det_callbacks.report import print_closing_line, unrestored_line
from det_callbacks.resume import ResumeState
from det_callbacks.resume.state import Moment

Resume = Literal["exact", "warn", "plain"]


def state_file(rank: int) -> str:
    """Return the name of the file, beside a checkpoint, of a rank's generators and position."""
    return f"rank-{rank:05d}.json"


def gradients_file(rank: int) -> str:
    """Return the name of the file, beside a checkpoint, of a rank's accumulated gradients."""
    return f"rank-{rank:05d}.safetensors"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Saved:
    """A checkpoint that the next batch has not followed yet.

    Attributes:
        num_gradients: saved with it.
        versions: of the gradients then.
        is_at_last_batch: the epoch's batches were done, and the hooks of its end not.
        values: what hooks must not change that follow, and that Lightning leaves out when it resumes; None without.
    """

    num_gradients: int
    versions: list[int]
    is_at_last_batch: bool
    values: Mapping[str, Any] | None


class Resuming:
    """Saves and restores, for the fits of one callback, what Lightning's checkpoints leave out.

    Costs 1 to 5 microseconds and a digest of the batch a step; 50 more where a callback saves on exceptions, or the
    data has no length.

    Args:
        resume: "exact" raises where the resumed run cannot be the same run, "warn" does what can be done and says what
            not, "plain" restores nothing.
        amend: called with (path, name of a file, content) when a checkpoint that was saved can be completed.
    """

    def __init__(self, resume: Resume, amend: Callable[[str, str, bytes], object]) -> None:
        self._resume = resume
        self._amend = amend
        self._path = ""
        self._pending: ResumeState | None = None
        self._is_aligned = False
        self._gradients: Mapping[str, torch.Tensor] = {}
        self._trainer: pl.Trainer | None = None
        self._watch = DataWatch()
        self._fit: FitState | None = None
        self._incomplete: dict[str, _Saved] = {}
        self._undo: list[Callable[[], object]] = []

    # the moments of a fit

    def attach(self, trainer: pl.Trainer) -> None:
        """Follow a fit that is about to begin, before its data is set up, and put back what is loaded for it."""
        self.detach()
        self.forget()
        if self._resume == "plain":
            return
        self._trainer = trainer
        self._watch = DataWatch()
        self._watch.before_draw = self._complete
        self._fit = FitState(trainer, self._watch)
        loop = trainer.fit_loop
        self._wrap(loop, "setup_data", self._at_setup)
        self._wrap(loop, "_load_combined_loader_states", self._before_iteration)
        self._wrap(loop.epoch_loop, "on_run_start", self._at_epoch)

    def detach(self) -> None:
        """Leave loops and loaders as they were; what was read stays, for a checkpoint saved after the fit."""
        for undo in self._undo:
            undo()
        self._undo.clear()
        self._watch.detach()
        self._incomplete.clear()

    def forget(self) -> None:
        """Nothing was loaded (any more)."""
        self._pending, self._gradients, self._is_aligned = None, {}, False

    def begin_epoch(self) -> None:
        """Put generators back before the hooks of a new epoch run, where that is their moment."""
        state = self._pending
        if state is not None and state.is_epoch_over and state.moment == "save":
            self._restore_generators(state)

    def end_epoch(self) -> None:
        """Complete the checkpoints of the epoch that ends: a validation may have followed them."""
        for path, saved in self._incomplete.items():
            if saved.is_at_last_batch:
                continue  # more than a validation follows: the hooks of the epoch's end
            self._amend_with(path, saved, "save", is_settled=True)

    # saving

    def files(self, path: str) -> dict[str, bytes]:
        """Return the files of this rank that belong beside a checkpoint which is being saved: name -> content."""
        if self._fit is None:
            return {}
        state, gradients = self._fit.read("save")
        if self._undo:
            callbacks = self._fit.callback_states() if self._fit.is_before_left_out_hooks() else None
            self._incomplete[path] = _Saved(
                num_gradients=state.num_gradients,
                versions=self._fit.gradient_versions(),
                is_at_last_batch=self._fit.is_at_last_batch(),
                values=None if callbacks is None else {**state.values, **callbacks},
            )
        files = {state_file(state.rank): state.to_bytes()}
        if gradients:
            files[gradients_file(state.rank)] = safetensors.torch.save(gradients)
        return files

    def _complete(self) -> None:
        """Complete the checkpoints saved since the last batch: the next one is about to be drawn."""
        if self._watch.keeps_last and self._fit is not None:
            self._fit.begin_batch()  # an exception may have a checkpoint saved in its middle
        incomplete, self._incomplete = self._incomplete, {}
        for path, saved in incomplete.items():
            self._amend_with(path, saved, "draw")

    def _amend_with(self, path: str, saved: _Saved, moment: Moment, *, is_settled: bool = False) -> None:
        assert self._fit is not None
        # what follows a batch may clear the gradients: a validation does, unless they are being accumulated
        is_same = self._fit.gradient_versions() == saved.versions
        state, gradients = self._fit.read(
            moment, num_gradients=saved.num_gradients if is_same else None, is_settled=is_settled
        )
        if gradients:
            self._amend(path, gradients_file(state.rank), safetensors.torch.save(gradients))
        now = {} if saved.values is None else {**state.values, **self._fit.callback_states()}
        if saved.values is not None and (changed := _differing(saved.values, now)):
            problem = "a validation or an end of epoch after it, which Lightning leaves out when it resumes, changed"
            state = replace(state, problems=(*state.problems, f"{problem} {changed}"))
        self._amend(path, state_file(state.rank), state.to_bytes())

    # restoring

    def loaded(
        self, path: str, files: Mapping[str, bytes], *, saved: Collection[str], rank: int, world_size: int
    ) -> None:
        """Take over what stands beside a checkpoint that was loaded for a fit.

        Args:
            path: of the checkpoint.
            files: name -> content.
            saved: names of the files that were saved with it.
            rank: of this process.
            world_size: of this run.

        Raises:
            CheckpointFormatError: a file is damaged.
            NotResumableError: the run cannot go on as the same run (``resume="exact"``).
        """
        self.forget()
        self._path = path
        if self._resume == "plain":
            return
        name = state_file(rank)
        content = files.get(name)
        # the same on every rank, so that all refuse together
        absent = [other for other in range(world_size) if state_file(other) not in files] if files else []
        if absent:
            self._refuse([f"the state of rank {', '.join(map(str, absent))} of {world_size} was not saved beside it"])
        if content is None:
            if name in saved:
                self._refuse([f"{name}, which was saved beside it, is missing"])
            print_closing_line(unrestored_line(path, rank=rank if files else None))
            return
        state = ResumeState.from_bytes(content, f"{path}.resume/{name}")
        problems = list(state.problems)
        if state.world_size != world_size:
            problems.append(f"it was saved by {state.world_size} processes, and there are {world_size} now")
        if problems:
            self._refuse(problems)
        if state.num_gradients:
            self._gradients = self._read_gradients(files.get(gradients_file(rank)), rank)
        self._pending = state

    def _read_gradients(self, content: bytes | None, rank: int) -> dict[str, torch.Tensor]:
        try:
            if content is not None:
                return safetensors.torch.load(content)
            found = "is missing"
        except safetensors.SafetensorError as error:
            found = f"is damaged ({error})"
        raise CheckpointFormatError(
            f"{self._path}.resume/{gradients_file(rank)}, the gradients accumulated so far, {found}. Resume from "
            'another checkpoint, or with resume="plain", which leaves generators, data and gradients to Lightning.',
            self._path,
        )

    def _refuse(self, problems: list[str]) -> None:
        text = f"{self._path} cannot be resumed to the same run: {'; '.join(problems)}."
        if self._resume == "exact":
            raise NotResumableError(
                f'{text} Resume from another checkpoint, or with resume="warn", which does what can be done.',
                tuple(problems),
            )
        rank_zero_warn(f"{text} Going on with what can be restored.", category=CoverageWarning)

    def _at_setup(self, original: Callable[[], None]) -> None:
        # Also called before the loops are restored: a scheduler may ask for the number of steps.
        assert self._trainer is not None
        if self._pending is not None and not self._is_aligned and self._trainer.fit_loop.is_resuming:
            self._is_aligned = True
            align_progress(self._trainer, self._pending)
        original()

    def _before_iteration(self, original: Callable[[], None]) -> None:
        assert self._trainer is not None
        assert self._fit is not None
        original()
        loader = self._trainer.fit_loop._combined_loader
        assert loader is not None, "Lightning has just made it"
        self._watch.held = self._fit.generators()
        self._watch.attach(loader)

    def _at_epoch(self, original: Callable[[Any], None], fetcher: Any) -> None:
        assert self._trainer is not None
        assert self._fit is not None
        watch = self._watch
        watch.keeps_last = isinstance(fetcher, _PrefetchDataFetcher) or self._fit.saves_on_exceptions()
        watch.held = self._fit.generators()
        num_before = watch.position.num_iterations
        original(fetcher)
        if self._pending is None or self._trainer.fit_loop.epoch_loop.done:
            return
        state, self._pending = self._pending, None
        self._require_values(state)
        loop = self._trainer.fit_loop
        if state.reload_epoch is not None:
            loop._last_train_dl_reload_epoch = state.reload_epoch
        if state.is_epoch_over:
            self._start_epoch(state, fetcher, is_new_iteration=watch.position.num_iterations > num_before)
        else:
            self._go_back_into_epoch(state, fetcher)

    def _require_values(self, state: ResumeState) -> None:
        """Refuse where Lightning did not bring back what was saved, and nothing of the user's comes in between."""
        if not state.values or (state.is_epoch_over and state.moment == "save"):
            return
        assert self._fit is not None
        if changed := _differing(state.values, self._fit.values()):
            self._refuse([f"Lightning restored it, and {changed} is not what it was then"])

    def _start_epoch(self, state: ResumeState, fetcher: Any, *, is_new_iteration: bool) -> None:
        if state.moment == "draw":
            assert state.position.before_iteration is not None, "a batch is drawn from an iterator"
            self._restore_generators(state)
            self._watch.pending = state.generators
            fetcher.combined_loader.reset()
            state.position.before_iteration.restore(self._watch.held)
            iter(fetcher)
        elif not is_new_iteration:
            fetcher.combined_loader.reset()
            iter(fetcher)
        self._put_gradients()

    def _go_back_into_epoch(self, state: ResumeState, fetcher: Any) -> None:
        assert self._fit is not None
        assert self._trainer is not None
        self._trainer.accumulate_grad_batches = state.accumulates
        # else Lightning would leave out the plateau schedulers' update at the end of this epoch
        self._trainer.fit_loop._restarting = False
        loaders = self._fit.loaders()
        if loaders and all(map(is_stateful, loaders)):
            num_drawn = state.position.num_drawn
            self._watch.position = replace(self._watch.position, num_drawn=num_drawn)
        else:
            self._draw_again(state, fetcher)
        # now, and once more before the draw: Lightning may go through a validation first that it has no need to run
        self._watch.pending = state.generators
        self._restore_generators(state)
        self._put_gradients()

    def _draw_again(self, state: ResumeState, fetcher: Any) -> None:
        watch, num_consumed = self._watch, state.position.num_consumed
        fetcher.combined_loader.reset()  # without workers of the iterator that Lightning made
        watch.begin_repeat(state.position)
        is_same: bool | None = False
        try:
            iter(fetcher)
            draw = fetcher.iterator_wrapper if isinstance(fetcher, _DataLoaderIterDataFetcher) else fetcher
            for _ in range(num_consumed):
                next(draw)
        except StopIteration:
            watch.end_repeat()
        else:
            is_same = watch.end_repeat()
        if is_same is False:
            self._refuse(
                [
                    f"the first {num_consumed} batches of the epoch, drawn again, are not those that it was trained "
                    "on: the data, or the order in which it is drawn, is another"
                ]
            )

    def _restore_generators(self, state: ResumeState) -> None:
        missing = state.generators.restore(self._watch.held)
        if missing:
            self._refuse([f"generators that a state was saved of are not there: {', '.join(missing)}"])

    def _put_gradients(self) -> None:
        assert self._trainer is not None
        parameters = dict(self._trainer.lightning_module.named_parameters())
        unknown = [name for name in self._gradients if name not in parameters]
        if unknown:
            raise CheckpointFormatError(
                f"{self._path} holds gradients of parameters that the module has not: {', '.join(unknown[:5])}. Resume "
                "with the module that was trained.",
                self._path,
            )
        for name, gradient in self._gradients.items():
            parameter = parameters[name]
            parameter.grad = torch.empty_like(parameter, dtype=gradient.dtype).copy_(gradient)
        self._gradients = {}

    def _wrap(self, owner: Any, name: str, wrapper: Callable[..., None]) -> None:
        original = getattr(owner, name)
        setattr(owner, name, lambda *args: wrapper(original, *args))
        self._undo.append(lambda: vars(owner).pop(name, None))


def align_progress(trainer: pl.Trainer, state: ResumeState) -> None:
    """Give Lightning's loops, just restored, the counts that the uninterrupted run had at the same place."""
    loop = trainer.fit_loop
    batches: Any = loop.epoch_loop.batch_progress  # here and below: the classes are wider than their declarations
    epochs: Any = loop.epoch_progress
    if state.is_mid_batch:
        # the batch under way is to be done again, and Lightning has counted it
        batches.total.reset_on_restart()
        batches.current.reset_on_restart()
    for progress in (epochs.current, epochs.total):
        progress.ready = progress.started  # an epoch that had only begun begins again
    has_ended = epochs.current.processed == epochs.current.ready and epochs.current.ready > 0
    if state.is_epoch_over and not has_ended and trainer.num_training_batches == float("inf"):
        # saved at the end of its last batch, which Lightning only knows of an epoch of known length
        for progress in (epochs.current, epochs.total):
            progress.processed = progress.ready
        loop.epoch_loop._batches_that_stepped += 1
        has_ended = True
    if state.is_epoch_over and has_ended:
        # With max_steps Lightning takes the epoch for unfinished, and would train one batch too many in it.
        _Loop.restarting.fset(loop, False)  # type: ignore[attr-defined]  # past the property of the fit loop itself
    elif not state.is_epoch_over and has_ended:
        # saved after a fit that stopped in the middle of an epoch, which Lightning counts as a whole one
        for progress in (epochs.current, epochs.total):
            progress.processed -= 1
            progress.completed = min(progress.completed, progress.processed)
        loop.restarting = True


def _differing(before: Mapping[str, Any], after: Mapping[str, Any]) -> str | None:
    """Return the first name whose value differs, and how many more do; None when none does."""
    names = [name for name in {**before, **after} if before.get(name) != after.get(name)]
    if not names:
        return None
    return names[0] + (f" and {len(names) - 1} more" if len(names) > 1 else "")
