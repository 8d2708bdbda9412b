"""Putting back what Lightning's checkpoints leave out, where the uninterrupted run had it."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from typing import Any, Literal

import lightning.pytorch as pl
import safetensors
import safetensors.torch
import torch
from lightning.pytorch.loops.fetchers import _DataLoaderIterDataFetcher
from lightning.pytorch.utilities import rank_zero_warn

from det_callbacks.callback.data_watch import DataWatch
from det_callbacks.callback.fit_state import FitState, is_stateful
from det_callbacks.callback.loops import align_progress
from det_callbacks.errors import CheckpointFormatError, CoverageWarning, NotResumableError
from det_callbacks.report import print_closing_line, unrestored_line
from det_callbacks.resume import ResumeState
from det_callbacks.resume.state import gradients_file, state_file

Resume = Literal["exact", "warn", "plain"]


class Restoring:
    """Takes over what stands beside a checkpoint that was loaded for a fit, and puts it back at its moments.

    Args:
        resume: "exact" raises where the resumed run cannot be the same run, "warn" does what can be done and says what
            not, "plain" restores nothing.
    """

    def __init__(self, resume: Resume) -> None:
        self._resume = resume
        self._path = ""
        self._pending: ResumeState | None = None
        self._is_aligned = False
        self._gradients: Mapping[str, torch.Tensor] = {}
        self._trainer: pl.Trainer | None = None
        self._watch = DataWatch()
        self._fit: FitState | None = None

    def begin(self, trainer: pl.Trainer, watch: DataWatch, fit: FitState) -> None:
        """Belong to a fit that is about to begin."""
        self.forget()
        self._trainer, self._watch, self._fit = trainer, watch, fit

    def forget(self) -> None:
        """Nothing was loaded (any more)."""
        self._pending, self._gradients, self._is_aligned = None, {}, False

    def begin_epoch(self) -> None:
        """Put generators back before the hooks of a new epoch run, where that is their moment."""
        state = self._pending
        if state is not None and state.is_epoch_over and state.moment == "save":
            self._restore_generators(state)

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

    def at_setup(self, original: Callable[[], None]) -> None:
        """Set the data of a fit up, with the counts of the loops as they have to be."""
        # Also called before the loops are restored: a scheduler may ask for the number of steps.
        assert self._trainer is not None
        if self._pending is not None and not self._is_aligned and self._trainer.fit_loop.is_resuming:
            self._is_aligned = True
            align_progress(self._trainer, self._pending)
        original()

    def at_epoch(self, original: Callable[[Any], None], fetcher: Any) -> None:
        """Begin the batches of an epoch, and where something was loaded go to the place that it is of."""
        assert self._trainer is not None
        num_before = self._watch.position.num_iterations
        original(fetcher)
        if self._pending is None or self._trainer.fit_loop.epoch_loop.done:
            return
        state, self._pending = self._pending, None
        self._require_values(state)
        loop = self._trainer.fit_loop
        if state.reload_epoch is not None:
            loop._last_train_dl_reload_epoch = state.reload_epoch
        if state.is_epoch_over:
            self._start_epoch(state, fetcher, is_new_iteration=self._watch.position.num_iterations > num_before)
        else:
            self._go_back_into_epoch(state, fetcher)

    def _require_values(self, state: ResumeState) -> None:
        """Refuse where Lightning did not bring back what was saved, and nothing of the user's comes in between."""
        if not state.values or (state.is_epoch_over and state.moment == "save"):
            return
        assert self._fit is not None
        if changed := differing(state.values, self._fit.values()):
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


def differing(before: Mapping[str, Any], after: Mapping[str, Any]) -> str | None:
    """Return the first name whose value differs, and how many more do; None when none does."""
    names = [name for name in {**before, **after} if before.get(name) != after.get(name)]
    if not names:
        return None
    return names[0] + (f" and {len(names) - 1} more" if len(names) > 1 else "")
