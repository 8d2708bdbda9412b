"""Putting back what Lightning's checkpoints leave out, where the uninterrupted run had it."""

import warnings
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, Literal

import lightning.pytorch as pl
import safetensors
import safetensors.torch
import torch
from lightning.pytorch.loops.fetchers import _DataLoaderIterDataFetcher
from lightning.pytorch.utilities import rank_zero_warn

from det_callbacks.callback.data_watch import DataWatch
from det_callbacks.callback.fit_state import FitState
from det_callbacks.callback.loading import Read
from det_callbacks.callback.loops import align_progress
from det_callbacks.callback.rank_state import RankState, is_stateful, local_part
from det_callbacks.callback.reduction import BucketsError
from det_callbacks.errors import CheckpointFormatError, CoverageWarning, NotResumableError
from det_callbacks.ranks import RankGroup
from det_callbacks.report import print_closing_line, unrestored_line
from det_callbacks.resume import ResumeState
from det_callbacks.resume.ranks import belong_together, problems_of, row_of
from det_callbacks.resume.state import buffers_file, gradients_file, state_file
from det_callbacks.runs.peers import ALONE, Peers

Resume = Literal["exact", "warn", "plain"]

PATIENCE_SECONDS = 1800.0
"""That ranks wait for each other in: one may load, and draw batches again, for longer than another. A rank that ends
is noticed all the same, since its connections close."""


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
        self._buffers: Mapping[str, torch.Tensor] = {}
        self._sampler_seeds: tuple[int | None, ...] = ()
        self._trainer: pl.Trainer | None = None
        self._watch = DataWatch()
        self._fit: FitState | None = None
        self._ranks: RankState | None = None
        self._group: RankGroup | None = None
        self._peers: Peers = ALONE

    def begin(self, trainer: pl.Trainer, watch: DataWatch, fit: FitState, ranks: RankState) -> None:
        """Belong to a fit that is about to begin."""
        self.forget()
        self._trainer, self._watch, self._fit, self._ranks = trainer, watch, fit, ranks

    def forget(self) -> None:
        """Nothing was loaded (any more)."""
        self._pending, self._is_aligned = None, False
        self._gradients, self._buffers, self._sampler_seeds = {}, {}, ()
        self.end()

    def begin_epoch(self) -> None:
        """Put generators back before the hooks of a new epoch run, where that is their moment."""
        state = self._pending
        if state is not None and state.is_epoch_over and state.moment == "save":
            self._put_buffers()
            self._restore_generators(state)

    def loaded(self, path: str, read: Read, *, is_saved: bool, rank: int, world_size: int) -> None:
        """Take over what stands beside a checkpoint that was loaded for a fit; all ranks do, or none.

        Args:
            path: of the checkpoint.
            read: returns the files of rank 0 and of a rank, by name.
            is_saved: whether files were saved with it.
            rank: of this process.
            world_size: of this run.

        Raises:
            CheckpointFormatError, CheckpointMismatchError: a file is damaged.
            NotResumableError: the run cannot go on as the same run (``resume="exact"``); on all ranks.
            RankError: another rank raised one of the others.
        """
        self.forget()
        self._path = path
        if self._resume == "plain":
            return
        if world_size > 1:
            self._peers = self._group = RankGroup(timeout_seconds=PATIENCE_SECONDS)

        def take() -> dict[str, Any]:
            files = read(rank)
            why = self._take(files, is_saved, rank, world_size)
            return {**row_of(self._pending, why=why), "has_files": bool(files)}

        rows = self._peers.agree(take, task="reading what stands beside it")
        if not any(row["is_there"] or row["why"] or row["has_files"] for row in rows):
            print_closing_line(unrestored_line(path))
            self.forget()
        elif apart := belong_together(rows):
            is_alone = world_size == 1 and self._pending is None
            self.forget()
            self._refuse(apart, is_lost=not is_alone)
        elif problems := problems_of(rows):
            self._refuse(problems)
        if self._pending is not None and self._ranks is not None:
            self._ranks.buckets.wanted = self._pending.reduction
            self._sampler_seeds = self._pending.sampler_seeds

    def _take(self, files: Mapping[str, bytes], is_saved: bool, rank: int, world_size: int) -> str | None:
        """Read the state of this rank; return why there is none, where it was saved."""
        name = state_file(rank)
        content = files.get(name)
        if content is None:
            return f"{name}, which was saved beside it, is missing" if is_saved and not files else None
        self._pending = ResumeState.from_bytes(content, f"{self._path}.resume/{name}")
        if self._pending.num_gradients and self._pending.world_size == world_size:
            name = gradients_file(rank)
            self._gradients = self._tensors(files.get(name), name, "the gradients accumulated so far")
        if (content := files.get(buffers_file(rank))) is not None:
            self._buffers = self._tensors(content, buffers_file(rank), "the buffers of this rank")
        return None

    def _tensors(self, content: bytes | None, name: str, what: str) -> dict[str, torch.Tensor]:
        try:
            if content is not None:
                return safetensors.torch.load(content)
            found = "is missing"
        except safetensors.SafetensorError as error:
            found = f"is damaged ({error})"
        raise CheckpointFormatError(
            f"{self._path}.resume/{name}, {what}, {found}. Resume from another checkpoint, or with "
            'resume="plain", which leaves generators, data and gradients to Lightning.',
            self._path,
        )

    def _refuse(self, problems: list[str], *, is_lost: bool = False) -> None:
        """Raise, or say what is not the same where the run goes on.

        Args:
            problems: why it is not the same run.
            is_lost: nothing can be put back, with ``resume="warn"`` neither.
        """
        text = f"{self._path} cannot be resumed to the same run: {'; '.join(problems)}."
        if self._resume == "exact":
            other = (
                'resume="plain", which goes on as Lightning does and promises nothing.'
                if is_lost
                else 'resume="warn", which does what can be done.'
            )
            raise NotResumableError(f"{text} Resume from another checkpoint, or with {other}", tuple(problems))
        text += " Going on as Lightning does." if is_lost else " Going on with what can be restored."
        if self._trainer is None or self._trainer.global_rank == 0:
            rank_zero_warn(text, category=CoverageWarning)
        elif self._peers is ALONE:  # rank 0 has not heard of it
            warnings.warn(f"Rank {self._trainer.global_rank}: {text}", CoverageWarning, stacklevel=2)

    def setup_model(self, original: Callable[[torch.nn.Module], torch.nn.Module], model: torch.nn.Module) -> Any:
        """Make the DDP module, with the buckets that the uninterrupted run had."""
        assert self._ranks is not None
        buckets = self._ranks.buckets
        try:
            return buckets.setup_model(original, model)
        except BucketsError as error:
            self._refuse([str(error)])
            buckets.wanted = None
            return buckets.setup_model(original, model)

    def at_setup(self, original: Callable[[], None]) -> None:
        """Set the data of a fit up, with the counts of the loops as they have to be."""
        # Also called before the loops are restored: a scheduler may ask for the number of steps.
        assert self._trainer is not None
        if self._pending is not None and not self._is_aligned and self._trainer.fit_loop.is_resuming:
            self._is_aligned = True
            align_progress(self._trainer, self._pending)
        original()

    def put_sampler_seeds(self) -> None:
        """Let the samplers of loaders that were just made deal out as they did; Lightning seeds them anew."""
        if self._ranks is not None and self._fit is not None:
            self._ranks.put_sampler_seeds(self._fit.loaders(), self._sampler_seeds)

    def at_epoch(self, original: Callable[[Any], None], fetcher: Any) -> None:
        """Begin the batches of an epoch, and where something was loaded go to the place that it is of."""
        assert self._trainer is not None
        num_before = self._watch.position.num_iterations
        original(fetcher)
        if self._pending is None or self._trainer.fit_loop.epoch_loop.done:
            return
        state, self._pending = self._pending, None
        is_new = self._watch.position.num_iterations > num_before
        self._peers.do(lambda: self._go_on(state, fetcher, is_new), task="going to the place that it is of")
        self.end()

    def end(self) -> None:
        """Give back what the ranks talk by; may be called more than once."""
        group, self._group, self._peers = self._group, None, ALONE
        if group is not None:
            group.close()

    def _go_on(self, state: ResumeState, fetcher: Any, is_new_iteration: bool) -> None:
        assert self._trainer is not None
        if not (state.is_epoch_over and state.moment == "save"):
            self._put_buffers()
        if state.reduction is not None and self._ranks is not None:
            self._ranks.buckets.put_sync(state.reduction)
        self._require_values(state)
        loop = self._trainer.fit_loop
        if state.reload_epoch is not None:
            loop._last_train_dl_reload_epoch = state.reload_epoch
        if state.is_epoch_over:
            self._start_epoch(state, fetcher, is_new_iteration=is_new_iteration)
        else:
            self._go_back_into_epoch(state, fetcher)

    def _require_values(self, state: ResumeState) -> None:
        """Refuse where Lightning did not bring back what was saved, and nothing of the user's comes in between."""
        if not state.values or (state.is_epoch_over and state.moment == "save"):
            return
        assert self._fit is not None
        # what a dcp checkpoint is made a file of has lists in place of an optimizer's tuples
        before, now = (_as_lists(values) for values in (state.values, self._fit.values()))
        if changed := differing(before, now):
            self._refuse([f"Lightning restored it, and {changed} is not what it was then"])

    def _start_epoch(self, state: ResumeState, fetcher: Any, *, is_new_iteration: bool) -> None:
        if state.moment == "draw":
            assert state.position.before_iteration is not None, "a batch is drawn from an iterator"
            self._restore_generators(state)
            self._watch.pending = partial(self._before_draw, state)
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
        self._watch.pending = partial(self._before_draw, state)
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
            drawn = "batch" if num_consumed == 1 else f"{num_consumed} batches"
            verb, those = ("is", "the one") if num_consumed == 1 else ("are", "those")
            self._refuse(
                [
                    f"the first {drawn} of the epoch, drawn again, {verb} not {those} that it was trained "
                    "on: the data, or the order in which it is drawn, is another"
                ]
            )

    def _restore_generators(self, state: ResumeState) -> None:
        missing = state.generators.restore(self._watch.held)
        if missing:
            self._refuse([f"generators whose saved state cannot be put back, or are not there: {', '.join(missing)}"])

    def _before_draw(self, state: ResumeState) -> None:
        """Put back, once more, what a validation may have changed that Lightning had no need to run."""
        state.generators.restore(self._watch.held)
        if state.reduction is not None and self._ranks is not None:
            self._ranks.buckets.put_sync(state.reduction)
        self._put_buffers()
        self._buffers = {}

    def _put_buffers(self) -> None:
        assert self._trainer is not None
        there = dict(self._trainer.lightning_module.named_buffers())
        self._require_names(self._buffers, there, "buffers")
        with torch.no_grad():
            for name, buffer in self._buffers.items():
                there[name].copy_(buffer)

    def _put_gradients(self) -> None:
        assert self._trainer is not None
        parameters = dict(self._trainer.lightning_module.named_parameters())
        self._require_names(self._gradients, parameters, "gradients of parameters")
        for name, gradient in self._gradients.items():
            parameter = parameters[name]
            parameter.grad = torch.empty_like(parameter, dtype=gradient.dtype)
            local_part(parameter.grad).copy_(gradient)
        self._gradients = {}

    def _require_names(self, names: Collection[str], there: Collection[str], what: str) -> None:
        unknown = [name for name in names if name not in there]
        if unknown:
            raise CheckpointFormatError(
                f"{self._path} holds {what} that the module has not: {', '.join(unknown[:5])}. Resume with the module "
                "that was trained.",
                self._path,
            )


def _as_lists(values: Mapping[str, Any]) -> dict[str, Any]:
    brackets = str.maketrans("()", "[]")
    return {name: value.translate(brackets) if isinstance(value, str) else value for name, value in values.items()}


def differing(before: Mapping[str, Any], after: Mapping[str, Any]) -> str | None:
    """Return the first name whose value differs, and how many more do; None when none does."""
    names = [name for name in {**before, **after} if before.get(name) != after.get(name)]
    if not names:
        return None
    return names[0] + (f" and {len(names) - 1} more" if len(names) > 1 else "")
