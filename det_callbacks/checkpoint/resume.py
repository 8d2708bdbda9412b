"""Saves beside checkpoints, and restores, what makes a resumed training the one that was interrupted.

Lightning restores weights, optimizers, schedulers and its loops. Generators, the position in the data and gradients
that are being accumulated it does not, and some of its counters it restores to other values than an uninterrupted run
has. The loops are reached into by the methods that stand at those moments (read at Lightning 2.6.6):

* ``_FitLoop.setup_data`` begins a fit's run, and may have been called before for a scheduler that asks for the steps;
* ``_FitLoop._load_combined_loader_states`` runs just before the loader is first iterated over;
* ``_TrainingEpochLoop.on_run_start`` begins the batches of an epoch, after its hooks.
"""

from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import lightning.pytorch as pl
import torch
from lightning.pytorch.loops.loop import _Loop

from det_callbacks.checkpoint.buckets import BucketsError, GradientBuckets
from det_callbacks.checkpoint.draws import DataWatch
from det_callbacks.checkpoint.files import Sidecar, has_part, read_part, resolved, write_part
from det_callbacks.checkpoint.fit import BUFFER, GRADIENT, FitReader, is_stateful, local_part
from det_callbacks.checkpoint.state import DataPosition, ResumeState, problems_of
from det_callbacks.errors import CheckpointFormatError, NotResumableError
from det_callbacks.replaced_in_lightning import ReplacedInLightning
from det_callbacks.report.checkpoints import unrestored_line
from det_callbacks.report.fits import print_closing_line
from det_callbacks.runs.peers import Peers

Resume = Literal["exact", "plain"]


class Resuming:
    """Saves and restores, for the fits of one callback, what Lightning's checkpoints leave out.

    Costs 1 to 5 microseconds a step, and a pass over the weights at each save.

    Args:
        resume: "exact" raises where the resumed run cannot be the same run, "plain" saves and restores nothing.
        peers: the processes of the Trainer, during a fit.
    """

    def __init__(self, resume: Resume, peers: Peers) -> None:
        self._is_exact = resume == "exact"
        self._peers = peers
        self._trainer: pl.Trainer | None = None
        self._replaced = ReplacedInLightning()
        self._is_attached = False
        self._watch = DataWatch(self._complete)
        # the checkpoints that the next batch has not followed yet: path -> identity, state and states of callbacks
        self._saved: dict[str, tuple[str, ResumeState, Mapping[str, str]]] = {}
        self._forget()

    def _forget(self) -> None:
        """Nothing was loaded (any more)."""
        self._path = ""
        self._pending: ResumeState | None = None
        self._tensors: dict[str, torch.Tensor] = {}

    def attach(self, trainer: pl.Trainer) -> None:
        """Follow a fit that is about to begin, before its data is set up, and restore what is loaded for it."""
        self.detach()
        self._forget()
        if not self._is_exact:
            return
        self._trainer = trainer
        self._watch = DataWatch(self._complete)
        self._buckets = GradientBuckets(trainer)
        self._fit = FitReader(trainer, self._watch, self._buckets)
        if self._buckets.is_ddp:
            # makes the DDP module, before its communication hooks are registered
            self._replaced.put(trainer.strategy, "_setup_model", lambda one: partial(self._setup_model, one))
        loop, put = trainer.fit_loop, self._replaced.put
        put(loop, "setup_data", lambda one: partial(self._at_setup, loop, one))
        put(loop, "_load_combined_loader_states", lambda one: partial(self._before_iteration, loop, one))
        put(loop.epoch_loop, "on_run_start", lambda one: partial(self._at_epoch, loop, one))
        self._is_attached = True

    def detach(self) -> None:
        """Leave loops and loaders as they were; what was read stays, for a checkpoint saved after the fit."""
        self._replaced.restore()
        self._is_attached = False
        self._watch.detach()
        self._saved.clear()

    # saving

    def save(self, path: str, id: str) -> bool:
        """Write the part of this rank beside a checkpoint that is about to be saved; return whether it writes any."""
        if self._trainer is None:
            return False
        problems, missed = tuple(self._fit.problems()), " and ".join(self._fit.missed())
        is_over = self._fit.is_epoch_over()
        state = self._fit.read(problems, is_epoch_over=is_over, begins_epoch=is_over)
        if self._is_attached and not problems:
            self._saved[path] = id, state, self._fit.callback_states()
        if missed and not problems:
            ended = "and the process ended before the next batch was drawn; save after that"
            problem = f"it was saved before {missed}, which Lightning leaves out when it resumes, {ended}"
            state = replace(state, problems=(problem,))
        self._write(path, id, state)
        return True

    def _complete(self) -> None:
        """Write the parts of the checkpoints saved since the last batch anew: the next one is about to be drawn.

        What came in between, such as a validation, Lightning leaves out when it resumes: it may have changed
        generators, and must not have changed anything else.
        """
        saved, self._saved = self._saved, {}
        for path, (id, before, callbacks) in saved.items():
            assert self._trainer is not None
            if not has_part(Path(path), self._trainer.global_rank, id):
                continue  # it was removed, or saved anew by somebody else
            state = self._fit.read((), is_epoch_over=before.is_epoch_over, begins_epoch=False)
            now = {**state.values, **self._fit.callback_states()}
            if changed := _differing({**before.values, **callbacks}, now):
                what = "a validation or an end of epoch after it, which Lightning leaves out when it resumes, changed"
                state = replace(state, problems=(f"{what} {changed}",))
            self._write(path, id, state)

    def _write(self, path: str, id: str, state: ResumeState) -> None:
        assert self._trainer is not None
        rank, num_ranks = self._trainer.global_rank, self._trainer.world_size
        write_part(Path(path), state, self._fit.tensors(state), id=id, rank=rank, num_ranks=num_ranks)

    # what was loaded

    def loaded(self, path: str, sidecar: Sidecar | None) -> None:
        """Take over what stands beside a checkpoint that was loaded for a fit; all ranks do, or none.

        Raises:
            CheckpointFormatError: a file is damaged.
            NotResumableError: the run cannot go on as the same run; on all ranks.
            RankError: another rank raised one of the others.
        """
        trainer = self._trainer
        self._forget()
        if trainer is None:
            return
        self._path = path
        rank, num_ranks = trainer.global_rank, trainer.world_size

        def take() -> dict[str, Any]:
            num_saved = 0 if sidecar is None else sidecar.num_ranks
            if sidecar is not None and num_saved == num_ranks:
                part = read_part(resolved(path), sidecar, rank)
                self._pending, self._tensors = (None, {}) if part is None else part
            return {"num_saved": num_saved, "state": None if self._pending is None else self._pending.row()}

        rows = self._peers.gather(take, task="reading what stands beside it")
        num_saved = max(row["num_saved"] for row in rows)
        states = [row["state"] for row in rows]
        missing = ", ".join(str(rank) for rank, state in enumerate(states) if state is None)
        if not num_saved:
            print_closing_line(unrestored_line(path))
        elif num_saved != num_ranks:
            saved = f"{num_saved} process{'es' * (num_saved != 1)}"
            self._refuse([f"it was saved by {saved}, and there are {num_ranks} now"])
        elif missing:
            self._refuse([f"the state of rank {missing} of {num_ranks}, which was saved beside it, is missing"])
        elif problems := problems_of(states):
            self._refuse(problems)
        if self._pending is not None and self._pending.reduction is not None:
            self._buckets.wanted = self._pending.reduction.buckets

    def _refuse(self, problems: list[str]) -> None:
        self._pending = None
        raise NotResumableError(
            f"{self._path} cannot be resumed to the same run: {'; '.join(problems)}. Resume from another checkpoint, "
            'or with resume="plain", which goes on as Lightning does and promises nothing.',
            tuple(problems),
        )

    # what Lightning calls

    def begin_epoch(self) -> None:
        """Restore what was saved before the hooks of a new epoch run, where that is its moment."""
        state = self._pending
        if state is not None:
            self._peers.run_on_all(partial(self._begin_epoch, state), task="beginning an epoch")

    def _begin_epoch(self, state: ResumeState) -> None:
        if state.position is None:
            self._restore(state, self._tensors)

    def _setup_model(self, original: Callable[[torch.nn.Module], torch.nn.Module], model: torch.nn.Module) -> Any:
        """Make the DDP module, with the buckets that the uninterrupted run had."""
        try:
            return self._buckets.setup_model(original, model)
        except BucketsError as error:
            return self._refuse([str(error)])

    def _at_setup(self, loop: Any, original: Callable[[], None]) -> None:
        """Set the data of a fit up, with the counts of the loops as they have to be."""
        epochs, state = loop.epoch_progress, self._pending
        # Also called before the loops are restored: a scheduler may ask for the number of steps.
        if state is not None and epochs.current.processed == epochs.current.ready > 0:
            if state.is_epoch_over:
                # With max_steps Lightning takes the epoch for unfinished, and would train one batch too many in it.
                _Loop.restarting.fset(loop, False)  # type: ignore[attr-defined]  # past the fit loop's own property
            else:
                # Where a fit stops in the middle of an epoch, Lightning counts the epoch as processed.
                for progress in (epochs.current, epochs.total):
                    progress.processed -= 1
                    progress.completed = min(progress.completed, progress.processed)
                loop.restarting = True
        original()

    def _before_iteration(self, loop: Any, original: Callable[[], None]) -> None:
        original()
        self._watch.held = self._fit.generators()
        self._watch.attach(loop._combined_loader)

    def _at_epoch(self, loop: Any, original: Callable[[Any], None], fetcher: Any) -> None:
        """Begin the batches of an epoch, and where something was loaded go to the place that it is of."""
        self._watch.held = self._fit.generators()
        num_before = self._watch.num_iterations
        original(fetcher)
        if self._pending is None or loop.epoch_loop.done:
            return
        state, self._pending = self._pending, None
        is_new = self._watch.num_iterations > num_before
        self._peers.run_on_all(
            lambda: self._go_on(loop, state, fetcher, is_new), task="going to the place that it is of"
        )

    # restoring

    def _go_on(self, loop: Any, state: ResumeState, fetcher: Any, is_new_iteration: bool) -> None:
        assert self._trainer is not None
        tensors, self._tensors = self._tensors, {}
        if state.position is not None:
            self._trainer.accumulate_grad_batches = state.accumulates
            # else Lightning would leave out the plateau schedulers' update at the end of this epoch
            loop._restarting = False
            self._restore(state, tensors)
            if changed := _differing(state.values, self._fit.values()):
                self._refuse([f"Lightning restored it, and {changed} is not what it was then"])
            if all(map(is_stateful, self._fit.loaders())):
                self._watch.position = state.position
            else:
                self._draw_again(state.position, fetcher)
            # once more before the draw: Lightning may go through a validation first that it has no need to run
            self._watch.restore = partial(self._restore, state, tensors)
        elif not is_new_iteration:
            fetcher.combined_loader.reset()
            iter(fetcher)
        parameters = dict(self._trainer.lightning_module.named_parameters())
        for name, gradient in self._of_kind(GRADIENT, tensors, parameters).items():
            parameter = parameters[name]
            parameter.grad = torch.empty_like(parameter, dtype=gradient.dtype)
            local_part(parameter.grad).copy_(gradient)

    def _draw_again(self, position: DataPosition, fetcher: Any) -> None:
        """Draw the batches again that training had; their order is decided before the first, which is compared."""
        fetcher.combined_loader.reset()  # without workers of the iterator that Lightning made
        position.before_iteration.restore(self._watch.held)
        with self._watch.repeating(), suppress(StopIteration):
            iter(fetcher)
            if position.before_first is not None:
                position.before_first.restore(self._watch.held)
            for _ in range(position.num_drawn):
                next(fetcher)
        drawn = self._watch.position
        assert drawn is not None, "the loader was iterated over"
        if (drawn.num_drawn, drawn.first_digest) != (position.num_drawn, position.first_digest):
            self._refuse(
                [
                    f"the first {position.num_drawn} batches of the epoch, drawn again, are not those that it was "
                    "trained on: the data, or the order in which it is drawn, is another"
                ]
            )

    def _restore(self, state: ResumeState, tensors: Mapping[str, torch.Tensor]) -> None:
        assert self._trainer is not None
        buffers = dict(self._trainer.lightning_module.named_buffers())
        with torch.no_grad():
            for name, tensor in self._of_kind(BUFFER, tensors, buffers).items():
                buffers[name].copy_(tensor)
        if state.reduction is not None:
            self._buckets.restore_sync(state.reduction)
        if missing := state.generators.restore(self._watch.held):
            self._refuse([f"generators whose saved state cannot be restored, or are not there: {', '.join(missing)}"])

    def _of_kind(
        self, kind: str, tensors: Mapping[str, torch.Tensor], there: Collection[str]
    ) -> dict[str, torch.Tensor]:
        """Return the tensors of a kind that were saved, by name."""
        found = {name.removeprefix(kind): one for name, one in tensors.items() if name.startswith(kind)}
        if unknown := [name for name in found if name not in there]:
            raise CheckpointFormatError(
                f"Beside {self._path} is the {kind}of what the module has not: {', '.join(unknown[:5])}. Resume with "
                "the module that was trained.",
                self._path,
            )
        return found


def _differing(before: Mapping[str, Any], after: Mapping[str, Any]) -> str:
    """Return the first name whose value differs, and how many more do; empty when none does."""
    names = [name for name in {**before, **after} if before.get(name) != after.get(name)]
    return names[0] + (f" and {len(names) - 1} more" if len(names) > 1 else "") if names else ""
