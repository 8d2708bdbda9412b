"""Going on as if a training had never been interrupted: what to save beside a checkpoint, and when to put it back.

Lightning restores weights, optimizers, schedulers and its loops. Generators, the position in the data and gradients
that are being accumulated it does not, and some of its counters it restores to other values than an uninterrupted run
has. The loops are reached into by the methods that stand at those moments (read at Lightning 2.6.6):

* ``_FitLoop.setup_data`` begins a fit's run, and may have been called before for a scheduler that asks for the steps;
* ``_FitLoop._load_combined_loader_states`` runs just before the loader is first iterated over;
* ``_TrainingEpochLoop.on_run_start`` begins the batches of an epoch, after its hooks.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import lightning.pytorch as pl
import safetensors.torch
import torch
from lightning.pytorch.loops.fetchers import _PrefetchDataFetcher

from det_callbacks.callback.data_watch import DataWatch
from det_callbacks.callback.fit_state import FitState
from det_callbacks.callback.rank_state import RankState
from det_callbacks.callback.restoring import Restoring, Resume, differing
from det_callbacks.resume import ResumeState
from det_callbacks.resume.state import Moment, buffers_file, gradients_file, state_file


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
        resume: "exact", "warn" or "plain", see ``Restoring``; "plain" saves nothing either.
        amend: called with (path, files: name -> content) when a checkpoint that was saved can be completed.

    Attributes:
        restoring: what was loaded, and puts it back.
    """

    def __init__(self, resume: Resume, amend: Callable[[str, Mapping[str, bytes]], object]) -> None:
        self.restoring = Restoring(resume)
        self._resume = resume
        self._amend = amend
        self._trainer: pl.Trainer | None = None
        self._watch = DataWatch()
        self._fit: FitState | None = None
        self._ranks: RankState | None = None
        self._incomplete: dict[str, _Saved] = {}
        self._undo: list[Callable[[], object]] = []

    # the moments of a fit

    def attach(self, trainer: pl.Trainer) -> None:
        """Follow a fit that is about to begin, before its data is set up, and put back what is loaded for it."""
        self.detach()
        self.restoring.forget()
        if self._resume == "plain":
            return
        self._trainer = trainer
        self._watch = DataWatch()
        self._watch.before_draw = self._complete
        self._ranks = RankState(trainer)
        self._fit = FitState(trainer, self._watch, self._ranks)
        self.restoring.begin(trainer, self._watch, self._fit, self._ranks)
        if self._ranks.buckets.is_ddp:
            # makes the DDP module, before its communication hooks are registered
            self._wrap(trainer.strategy, "_setup_model", self.restoring.setup_model)
        loop = trainer.fit_loop
        self._wrap(loop, "setup_data", self.restoring.at_setup)
        self._wrap(loop, "_load_combined_loader_states", self._before_iteration)
        self._wrap(loop.epoch_loop, "on_run_start", self._at_epoch)

    def detach(self) -> None:
        """Leave loops and loaders as they were; what was read stays, for a checkpoint saved after the fit."""
        for undo in self._undo:
            undo()
        self._undo.clear()
        self._watch.detach()
        self._incomplete.clear()
        self.restoring.end()

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
        return self._files_of(state, gradients)

    def _complete(self) -> None:
        """Complete the checkpoints saved since the last batch: the next one is about to be drawn."""
        if self._watch.keeps_last and self._fit is not None:
            self._fit.begin_batch()  # an exception may have a checkpoint saved in its middle
        incomplete, self._incomplete = self._incomplete, {}
        for path, saved in incomplete.items():
            self._amend_with(path, saved, "draw")

    def _amend_with(self, path: str, saved: _Saved, moment: Moment, *, is_settled: bool = False) -> None:
        assert self._fit is not None
        assert self._ranks is not None
        # what follows a batch may clear the gradients: a validation does, unless they are being accumulated
        is_same = self._fit.gradient_versions() == saved.versions
        state, gradients = self._fit.read(
            moment, num_gradients=saved.num_gradients if is_same else None, is_settled=is_settled
        )
        now = {} if saved.values is None else {**state.values, **self._fit.callback_states()}
        own = self._ranks.buffers()  # saved anew: DDP's validation makes them those of rank 0
        before = {name: value for name, value in (saved.values or {}).items() if name not in own}
        if changed := differing(before, {name: value for name, value in now.items() if name not in own}):
            problem = "a validation or an end of epoch after it, which Lightning leaves out when it resumes, changed"
            state = replace(state, problems=(*state.problems, f"{problem} {changed}"))
        self._amend(path, self._files_of(state, gradients))

    def _files_of(self, state: ResumeState, gradients: Mapping[str, torch.Tensor]) -> dict[str, bytes]:
        assert self._ranks is not None
        files = {state_file(state.rank): state.to_bytes()}
        if gradients:
            files[gradients_file(state.rank)] = safetensors.torch.save(dict(gradients))
        if buffers := self._ranks.buffers():
            files[buffers_file(state.rank)] = safetensors.torch.save(buffers)
        return files

    # what the loops call

    def _before_iteration(self, original: Callable[[], None]) -> None:
        assert self._trainer is not None
        assert self._fit is not None
        original()
        loader = self._trainer.fit_loop._combined_loader
        assert loader is not None, "Lightning has just made it"
        self.restoring.put_sampler_seeds()
        self._watch.held = self._fit.generators()
        self._watch.attach(loader)

    def _at_epoch(self, original: Callable[[Any], None], fetcher: Any) -> None:
        assert self._fit is not None
        self._watch.keeps_last = isinstance(fetcher, _PrefetchDataFetcher) or self._fit.saves_on_exceptions()
        self._watch.held = self._fit.generators()
        self.restoring.at_epoch(original, fetcher)

    def _wrap(self, owner: Any, name: str, wrapper: Callable[..., Any]) -> None:
        original = getattr(owner, name)
        setattr(owner, name, lambda *args: wrapper(original, *args))
        self._undo.append(lambda: vars(owner).pop(name, None))
