"""Saving beside checkpoints, and putting back, what makes a resumed training the one that was interrupted.

Lightning restores weights, optimizers, schedulers and its loops. Generators, the position in the data and gradients
that are being accumulated it does not, and some of its counters it restores to other values than an uninterrupted run
has. The loops are reached into by the methods that stand at those moments (read at Lightning 2.6.6):

* ``_FitLoop.setup_data`` begins a fit's run, and may have been called before for a scheduler that asks for the steps;
* ``_FitLoop._load_combined_loader_states`` runs just before the loader is first iterated over;
* ``_TrainingEpochLoop.on_run_start`` begins the batches of an epoch, after its hooks.
"""

import warnings
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import lightning.pytorch as pl
import torch
from lightning.pytorch.loops.fetchers import _DataLoaderIterDataFetcher
from lightning.pytorch.utilities import rank_zero_warn

from det_callbacks.checkpoint.parts import Part, holds_part, part_path, read_part, write_part
from det_callbacks.checkpoint.sidecar import Sidecar, resolved
from det_callbacks.errors import CheckpointFormatError, CoverageWarning, NotResumableError
from det_callbacks.ranks import RankGroup
from det_callbacks.report.checkpoints import unrestored_line
from det_callbacks.report.fits import print_closing_line
from det_callbacks.resume.buckets import BucketsError, GradientBuckets
from det_callbacks.resume.fit import BUFFER, GRADIENT, FitReader, align_progress, is_stateful, local_part
from det_callbacks.resume.loaders import DataWatch
from det_callbacks.resume.state import ResumeState, problems_of
from det_callbacks.runs.peers import ALONE, Peers

Resume = Literal["exact", "warn", "plain"]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Saved:
    """A checkpoint that the next batch has not followed yet.

    Attributes:
        id: of the save.
        values: what the checkpoint brings back.
        callbacks: the states of callbacks in it.
    """

    id: str
    values: Mapping[str, Any]
    callbacks: Mapping[str, str]


class Resuming:
    """Saves and restores, for the fits of one callback, what Lightning's checkpoints leave out.

    Costs 1 to 5 microseconds and a digest of the batch a step.

    Args:
        resume: "exact" raises where the resumed run cannot be the same run, "warn" does what can be done and says what
            not, "plain" saves and restores nothing.
    """

    def __init__(self, resume: Resume) -> None:
        self._resume = resume
        self._trainer: pl.Trainer | None = None
        self._undo: list[Callable[[], object]] = []
        self._saved: dict[str, _Saved] = {}
        self._group: RankGroup | None = None
        self._peers: Peers = ALONE
        self._watch = DataWatch()
        self._forget()

    def _forget(self) -> None:
        """Nothing was loaded (any more)."""
        self._path = ""
        self._pending: ResumeState | None = None
        self._is_aligned = False
        self._tensors: dict[str, torch.Tensor] = {}
        self._sampler_seeds: tuple[int | None, ...] = ()
        self._part_from()

    def attach(self, trainer: pl.Trainer) -> None:
        """Follow a fit that is about to begin, before its data is set up, and put back what is loaded for it."""
        self.detach()
        self._forget()
        if self._resume == "plain":
            return
        self._trainer = trainer
        self._watch = DataWatch()
        self._watch.before_draw = self._complete
        self._buckets = GradientBuckets(trainer)
        self._fit = FitReader(trainer, self._watch, self._buckets)
        if self._buckets.is_ddp:
            # makes the DDP module, before its communication hooks are registered
            self._wrap(trainer.strategy, "_setup_model", self._setup_model)
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
        self._saved.clear()
        self._part_from()

    def _part_from(self) -> None:
        """Give back what the ranks talk by."""
        group, self._group, self._peers = self._group, None, ALONE
        if group is not None:
            group.close()

    def _wrap(self, owner: Any, name: str, wrapper: Callable[..., Any]) -> None:
        original = getattr(owner, name)
        setattr(owner, name, lambda *args: wrapper(original, *args))
        self._undo.append(lambda: vars(owner).pop(name, None))

    # saving

    def keep(self, path: str, id: str) -> bool:
        """Write what this rank keeps beside a checkpoint that is about to be saved; return whether it keeps any."""
        if self._trainer is None or self._resume == "plain":
            return False
        state = self._fit.read("save")
        self._write(path, id, state)
        if self._undo:
            self._saved[path] = _Saved(id=id, values=state.values, callbacks=self._fit.callback_states())
        return True

    def _complete(self) -> None:
        """Keep anew what belongs to the checkpoints saved since the last batch: the next one is about to be drawn.

        What came in between, such as a validation, Lightning leaves out when it resumes: it may have changed
        generators, and must not have changed anything else.
        """
        saved, self._saved = self._saved, {}
        assert self._trainer is not None
        for path, one in saved.items():
            if not holds_part(Path(path), self._trainer.global_rank, one.id):
                continue  # it was removed, or saved anew by somebody else
            state = self._fit.read("draw")
            before = {**one.values, **one.callbacks}
            now = {**state.values, **self._fit.callback_states()}
            own = self._fit.own_buffers()  # DDP's validation makes them those of rank 0
            if changed := _differing(before, now, own):
                problem = (
                    "a validation or an end of epoch after it, which Lightning leaves out when it resumes, changed"
                )
                state = replace(state, problems=(*state.problems, f"{problem} {changed}"))
            self._write(path, one.id, state)

    def _write(self, path: str, id: str, state: ResumeState) -> None:
        trainer = self._trainer
        assert trainer is not None
        ranks = {"rank": trainer.global_rank, "num_ranks": trainer.world_size}
        write_part(Path(path), Part(id=id, **ranks, state=state.to_dict(), tensors=self._fit.tensors(state)))

    # what was loaded

    def loaded(self, path: str, sidecar: Sidecar | None) -> None:
        """Take over what stands beside a checkpoint that was loaded for a fit; all ranks do, or none.

        Raises:
            CheckpointFormatError: a file is damaged.
            NotResumableError: the run cannot go on as the same run (``resume="exact"``); on all ranks.
            RankError: another rank raised one of the others.
        """
        trainer = self._trainer
        self._forget()
        if trainer is None or self._resume == "plain":
            return
        self._path = path
        rank, num_ranks = trainer.global_rank, trainer.world_size
        if num_ranks > 1:
            self._peers = self._group = RankGroup().open()

        def take() -> dict[str, Any]:
            num_saved = 0 if sidecar is None else sidecar.num_ranks
            place = resolved(path)
            part = None if sidecar is None or num_saved != num_ranks else read_part(place, sidecar, rank)
            if part is None:
                return {"num_saved": num_saved, "state": None}
            self._pending = ResumeState.from_dict(part.state, str(part_path(place, rank)))
            self._tensors = dict(part.tensors)
            return {"num_saved": num_saved, "state": self._pending.row()}

        told = self._peers.agree(take, task="reading what stands beside it")
        num_saved = max(one["num_saved"] for one in told)
        rows = [one["state"] for one in told]
        problems: list[str] = []
        if missing := [rank for rank, row in enumerate(rows) if row is None]:
            self._pending, self._tensors = None, {}
            if num_saved not in (0, num_ranks):
                saved = f"{num_saved} process{'es' * (num_saved != 1)}"
                problems = [f"it was saved by {saved}, and there are {num_ranks} now"]
            elif num_saved:
                ranks = ", ".join(map(str, missing))
                problems = [f"the state of rank {ranks} of {num_ranks}, which was saved beside it, is missing"]
            else:
                print_closing_line(unrestored_line(path))
        else:
            problems = problems_of(rows)
        if problems:
            self._refuse(problems, is_lost=self._pending is None)
        if self._pending is not None:
            self._buckets.wanted = self._pending.reduction
            self._sampler_seeds = self._pending.sampler_seeds

    def _refuse(self, problems: list[str], *, is_lost: bool = False) -> None:
        """Raise, or say what is not the same where the run goes on.

        Args:
            problems: why it is not the same run.
            is_lost: nothing can be put back, with ``resume="warn"`` neither.
        """
        text = f"{self._path} cannot be resumed to the same run: {'; '.join(problems)}."
        if self._resume == "exact":
            how = "plain" if is_lost else "warn"
            does = "goes on as Lightning does and promises nothing" if is_lost else "does what can be done"
            raise NotResumableError(
                f'{text} Resume from another checkpoint, or with resume="{how}", which {does}.', tuple(problems)
            )
        text += " Going on as Lightning does." if is_lost else " Going on with what can be restored."
        if self._trainer is None or self._trainer.global_rank == 0:
            rank_zero_warn(text, category=CoverageWarning)
        elif self._peers is ALONE:  # rank 0 has not heard of it
            warnings.warn(f"Rank {self._trainer.global_rank}: {text}", CoverageWarning, stacklevel=2)

    # what Lightning calls

    def begin_epoch(self) -> None:
        """Put generators back before the hooks of a new epoch run, where that is their moment."""
        state = self._pending
        if state is not None and state.is_epoch_over and state.moment == "save":
            self._put_buffers()
            self._restore_generators(state)

    def _setup_model(self, original: Callable[[torch.nn.Module], torch.nn.Module], model: torch.nn.Module) -> Any:
        """Make the DDP module, with the buckets that the uninterrupted run had."""
        try:
            return self._buckets.setup_model(original, model)
        except BucketsError as error:
            self._refuse([str(error)])
            self._buckets.wanted = None
            return self._buckets.setup_model(original, model)

    def _at_setup(self, original: Callable[[], None]) -> None:
        """Set the data of a fit up, with the counts of the loops as they have to be."""
        # Also called before the loops are restored: a scheduler may ask for the number of steps.
        assert self._trainer is not None
        if self._pending is not None and not self._is_aligned and self._trainer.fit_loop.is_resuming:
            self._is_aligned = True
            align_progress(self._trainer, self._pending)
        original()

    def _before_iteration(self, original: Callable[[], None]) -> None:
        original()
        assert self._trainer is not None
        loader = self._trainer.fit_loop._combined_loader
        assert loader is not None, "Lightning has just made it"
        self._fit.put_sampler_seeds(self._sampler_seeds)
        self._watch.held = self._fit.generators()
        self._watch.attach(loader)

    def _at_epoch(self, original: Callable[[Any], None], fetcher: Any) -> None:
        """Begin the batches of an epoch, and where something was loaded go to the place that it is of."""
        assert self._trainer is not None
        self._watch.looks_ahead = fetcher.length is None
        self._watch.held = self._fit.generators()
        num_before = self._watch.num_iterations
        original(fetcher)
        if self._pending is None or self._trainer.fit_loop.epoch_loop.done:
            return
        state, self._pending = self._pending, None
        is_new = self._watch.num_iterations > num_before
        self._peers.do(lambda: self._go_on(state, fetcher, is_new), task="going to the place that it is of")
        self._part_from()

    # putting back

    def _go_on(self, state: ResumeState, fetcher: Any, is_new_iteration: bool) -> None:
        is_at_start = state.is_epoch_over and state.moment == "save"
        if not is_at_start:
            self._put_buffers()
        if state.reduction is not None:
            self._buckets.put_sync(state.reduction)
        # at an epoch's start hooks of the user's came in between, which may change what was loaded
        if not is_at_start and (changed := _differing(state.values, self._fit.values(), ())):
            self._refuse([f"Lightning restored it, and {changed} is not what it was then"])
        if state.is_epoch_over:
            self._start_epoch(state, fetcher, is_new_iteration=is_new_iteration)
        else:
            self._go_back_into_epoch(state, fetcher)

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
        assert self._trainer is not None
        self._trainer.accumulate_grad_batches = state.accumulates
        # else Lightning would leave out the plateau schedulers' update at the end of this epoch
        self._trainer.fit_loop._restarting = False
        loaders = self._fit.loaders()
        if loaders and all(map(is_stateful, loaders)):
            self._watch.position = replace(self._watch.position, num_drawn=state.position.num_drawn)
        elif not isinstance(fetcher, _DataLoaderIterDataFetcher):
            self._draw_again(state, fetcher)
        # now, and once more before the draw: Lightning may go through a validation first that it has no need to run
        self._watch.pending = partial(self._before_draw, state)
        self._restore_generators(state)
        self._put_gradients()

    def _draw_again(self, state: ResumeState, fetcher: Any) -> None:
        num_consumed, is_same = state.position.num_consumed, False
        fetcher.combined_loader.reset()  # without workers of the iterator that Lightning made
        self._watch.begin_repeat(state.position)
        try:
            iter(fetcher)
            for _ in range(num_consumed):
                next(fetcher)
        except StopIteration:
            self._watch.end_repeat()
        else:
            is_same = self._watch.end_repeat() is not False
        if not is_same:
            drawn = "batch" if num_consumed == 1 else f"{num_consumed} batches"
            verb, those = ("is", "the one") if num_consumed == 1 else ("are", "those")
            self._refuse(
                [
                    f"the first {drawn} of the epoch, drawn again, {verb} not {those} that it was trained "
                    "on: the data, or the order in which it is drawn, is another"
                ]
            )

    def _restore_generators(self, state: ResumeState) -> None:
        if missing := state.generators.restore(self._watch.held):
            self._refuse([f"generators whose saved state cannot be put back, or are not there: {', '.join(missing)}"])

    def _before_draw(self, state: ResumeState) -> None:
        """Put back, once more, what a validation may have changed that Lightning had no need to run."""
        state.generators.restore(self._watch.held)
        if state.reduction is not None:
            self._buckets.put_sync(state.reduction)
        self._put_buffers()
        self._tensors = {}

    def _put_buffers(self) -> None:
        assert self._trainer is not None
        buffers = dict(self._trainer.lightning_module.named_buffers())
        with torch.no_grad():
            for name, tensor in self._kept(BUFFER, buffers).items():
                buffers[name].copy_(tensor)

    def _put_gradients(self) -> None:
        assert self._trainer is not None
        parameters = dict(self._trainer.lightning_module.named_parameters())
        for name, gradient in self._kept(GRADIENT, parameters).items():
            parameter = parameters[name]
            parameter.grad = torch.empty_like(parameter, dtype=gradient.dtype)
            local_part(parameter.grad).copy_(gradient)
        self._tensors = {name: one for name, one in self._tensors.items() if not name.startswith(GRADIENT)}

    def _kept(self, kind: str, there: Collection[str]) -> dict[str, torch.Tensor]:
        """Return the tensors of a kind that were kept, by name."""
        found = {name.removeprefix(kind): one for name, one in self._tensors.items() if name.startswith(kind)}
        if unknown := [name for name in found if name not in there]:
            raise CheckpointFormatError(
                f"Beside {self._path} is kept the {kind}of what the module has not: {', '.join(unknown[:5])}. Resume "
                "with the module that was trained.",
                self._path,
            )
        return found


def _differing(before: Mapping[str, Any], after: Mapping[str, Any], leaving: Collection[str]) -> str | None:
    """Return the first name whose value differs, and how many more do; None when none does."""
    names = [name for name in {**before, **after} if name not in leaving and before.get(name) != after.get(name)]
    if not names:
        return None
    return names[0] + (f" and {len(names) - 1} more" if len(names) > 1 else "")
