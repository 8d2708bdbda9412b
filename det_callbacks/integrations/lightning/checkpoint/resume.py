"""Exact resume: saves and restores what Lightning's checkpoints omit.

These are generators, the position in the data, accumulated gradients,
and some counters of the loops.

DDP's gradient buckets, read when a checkpoint is saved and rebuilt on resume.

A new DDP starts with one bucket, and rebuilds its buckets after the first backward pass. Different
buckets add in a different order, which changes the bits of sums over three or more ranks.
"""

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import lightning.pytorch as pl
import torch
from lightning.pytorch.strategies import DDPStrategy
from torch.nn.parallel import DistributedDataParallel

from det_callbacks.checkpoint.files import (
    DataPosition,
    Part,
    Sidecar,
    entries_of,
    part_path,
    read_part,
    write_part,
)
from det_callbacks.checkpoint.messages import unrestored_line
from det_callbacks.digest.host import digest_bytes, format_digest
from det_callbacks.digest.unobserved import unobserved
from det_callbacks.errors import NotResumableError
from det_callbacks.integrations.lightning.checkpoint import fit
from det_callbacks.integrations.lightning.trainer import follow
from det_callbacks.internals.lightning import (
    LOAD_LOADER_STATES,
    Loop,
    combined_loader,
    ddp_hook_state,
    either,
    end_restart,
    own_class,
)
from det_callbacks.internals.replaced import ReplacedMethods
from det_callbacks.internals.torch import (
    ddp_facts,
    ddp_parameters,
    gradient_buckets,
    mark_gradient,
    rebuild_buckets,
)
from det_callbacks.report.console import print_closing_line
from det_callbacks.runs.peers import Peers
from det_callbacks.settings.generators import GeneratorStates, Held
from det_callbacks.trace.generators import GeneratorReader
from det_callbacks.trace.leaves import leaves

_ENDED = (
    "it was saved before a validation or the end of an epoch, which Lightning skips on resume, and "
    "the run stopped before the next batch; save after that"
)
_CHANGED = (
    "code that ran between it and the next batch (hooks of callbacks, a validation, an end of "
    "epoch), which Lightning skips on resume, changed {}; save with ModelCheckpoint, or from the "
    "last callback"
)

Buckets = tuple[tuple[str, ...], ...]
"""Names of the parameters in each bucket."""


@dataclass(frozen=True, slots=True)
class _Save:
    """What a checkpoint was saved with."""

    part: Part
    states: Mapping[str, str]  # of callbacks
    is_at_end: bool  # whether the epoch had ended
    # what code that does not run again after a resume has changed; None: not known yet
    changed: str | None = None


class Resuming:
    """Saves and restores the state of one fit that Lightning's checkpoints omit.

    It follows the loading of batches (1 to 5 microseconds per batch);
    a save takes a pass over the weights.
    """

    def __init__(self, trainer: pl.Trainer, peers: Peers, *, is_exact: bool) -> None:
        self._trainer = trainer
        self._peers = peers
        self._is_exact = is_exact
        self._buckets: Buckets = ()  # buckets of the resumed checkpoint
        self._replaced = ReplacedMethods()
        self._let_go: Callable[[], object] = lambda: None
        self._saved: dict[str, _Save] = {}  # since the last batch, by path
        self._path = ""
        self._pending: Part | None = None
        self._tensors: dict[str, torch.Tensor] = {}
        self._position: DataPosition | None = None
        self._held: Mapping[str, Held] = {}
        self.reader: GeneratorReader | None = None  # reader of the open fit
        self.idle: tuple[str, ...] | None = None  # generators unused when the checkpoint was saved
        self._restore_at_draw: Callable[[], object] | None = None
        if is_exact:
            loop, around = trainer.fit_loop, self._replaced.around
            around(loop, "setup_data", partial(self._at_setup, loop))
            around(loop, LOAD_LOADER_STATES, partial(self._before_iteration, loop))
            around(loop.epoch_loop, "on_run_start", partial(self._at_epoch, loop))

    def detach(self) -> None:
        """Restore loops and loaders; later checkpoints can still be saved."""
        self._replaced.restore()
        self._let_go()
        self._saved.clear()

    def save(self, path: str, id: str) -> bool:
        """Write this rank's part next to a checkpoint before it is saved; return whether it did."""
        if not self._is_exact:
            return False
        is_over = fit.is_epoch_over(self._trainer)
        problems = tuple(fit.problems(self._trainer))
        if of_ddp := problem(self._trainer, self._buckets):
            problems += (of_ddp,)
        if self._pending is not None:  # the position in the data is unknown
            problems += (
                "it was saved before the first batch after a resume; save at the end of a batch",
            )
        part = self._read(
            id, is_over=is_over, position=None if is_over else self._position, problems=problems
        )
        if not problems:
            epochs: Any = self._trainer.fit_loop.epoch_progress.current
            is_at_end = is_over and epochs.started == epochs.processed
            self._saved[path] = _Save(part, fit.saved_states(self._trainer), is_at_end)
            if fit.has_more_to_come(self._trainer):
                part = replace(part, problems=(_ENDED,))
        write_part(Path(path), part, fit.tensors_to_save(self._trainer))
        return True

    def _complete(self, *, is_end: bool = False) -> None:
        """Rewrite the parts saved since the last batch: a validation, say,
        may have advanced generators.
        """
        saved, self._saved = self._saved, {}
        for path, save in saved.items():
            before = save.part
            # the checkpoint may be deleted; a longer fit does not end this epoch here
            if not part_path(Path(path), before.rank).exists() or (is_end and not save.is_at_end):
                continue
            position = None if is_end else self._position
            part = self._read(before.id, is_over=before.is_epoch_over, position=position)
            changed = self._changed_since(save) if save.changed is None else save.changed
            if changed:
                part = replace(part, problems=(_CHANGED.format(changed),))
            write_part(Path(path), part, fit.tensors_to_save(self._trainer))

    def _changed_since(self, save: "_Save") -> str:
        now = {**fit.values(self._trainer), **fit.saved_states(self._trainer)}
        return _differing({**save.part.values, **save.states}, now)

    def _read(
        self,
        id: str,
        *,
        is_over: bool,
        position: DataPosition | None,
        problems: tuple[str, ...] = (),
    ) -> Part:
        trainer, ddp = self._trainer, ddp_of(self._trainer)
        return Part(
            id=id,
            rank=trainer.global_rank,
            is_epoch_over=is_over,
            generators=GeneratorStates.capture(self._held),
            idle=None if self.reader is None else self.reader.idle(),
            position=position,
            values=fit.values(trainer),
            plateaus={
                index: (
                    scheduler.state_dict(),
                    [group["lr"] for group in scheduler.optimizer.param_groups],
                )
                for index, scheduler in fit.plateaus(trainer).items()
            },
            buckets=() if problems else read(ddp, self._buckets),
            syncs_buffers=ddp is None or ddp.require_forward_param_sync,
            problems=problems,
        )

    def loaded(self, path: str, sidecar: Sidecar | None) -> None:
        """Read the parts next to a loaded checkpoint; all ranks succeed, or all raise."""
        if not self._is_exact:
            return
        self._path = path
        rank, num_ranks = self._trainer.global_rank, self._trainer.world_size

        def take() -> bool:
            if sidecar is None or not sidecar.num_ranks:
                return False
            if (saved := sidecar.num_ranks) != num_ranks:
                self._refuse(
                    f"it was saved by {saved} process{'es' * (saved > 1)}, but this run has "
                    f"{num_ranks}"
                )
            found = read_part(Path(path).resolve(), sidecar, rank)
            if found is None:
                who = f"rank {rank} of {num_ranks}"
                self._refuse(
                    f"the state of {who}, saved next to it, is missing or from a different save"
                )
            self._pending, self._tensors = found
            self._buckets, self.idle = self._pending.buckets, self._pending.idle
            if self._pending.problems:
                self._refuse(*self._pending.problems)
            return True

        if not all(self._peers.gather(take, task="reading the state saved next to it")):
            self._pending = None
            lacks_digests = sidecar is None and part_path(Path(path).resolve(), rank).exists()
            print_closing_line(unrestored_line(path, lacks_digests=lacks_digests))

    def _refuse(self, *problems: str) -> NoReturn:
        self._pending = None
        raise NotResumableError(
            f"{self._path} cannot be resumed to the same run: {'; '.join(problems)}. Resume from "
            'another checkpoint, or with DeterminismCallback(..., resume="plain"): Lightning\'s '
            "resume, which may give different bits.",
            problems,
        )

    def begin_iteration(self) -> None:
        self._position = DataPosition(before_iteration=GeneratorStates.capture(self._held))

    def begin_draw(self) -> None:
        """Restore the state that the next batch needs, and keep the
        generators before the first batch.
        """
        restore, self._restore_at_draw = self._restore_at_draw, None
        if restore is not None:
            restore()
        self._complete()
        if self._position is not None and not self._position.num_drawn:
            self._position = replace(
                self._position, before_first=GeneratorStates.capture(self._held)
            )

    def end_draw(self, batch: Any) -> None:
        position = self._position
        if position is not None:
            digest = position.first_digest or _digest_batch(batch)
            self._position = replace(
                position, num_drawn=position.num_drawn + 1, first_digest=digest
            )

    def begin_fit(self) -> None:
        """Give the strategy, which is now set up, the gradient buckets of the checkpoint."""
        ddp = ddp_of(self._trainer)
        if self._pending is not None and (problem := make(ddp, self._buckets)):
            self._refuse(problem)

    def begin_epoch(self) -> None:
        """Restore the state that the hooks of a new epoch need;
        the same hooks run again after a resume.
        """
        self._saved = {
            path: replace(save, changed=self._changed_since(save))
            for path, save in self._saved.items()
        }
        # on all ranks: a killed save may leave parts of different steps
        if (state := self._pending) is not None:
            restore = (
                partial(self._restore, state, self._tensors)
                if state.position is None
                else lambda: None
            )
            self._peers.run_on_all(restore, task="beginning an epoch")

    def end_training(self) -> None:
        self._complete(is_end=True)

    def _at_setup(self, loop: Any, original: Callable[[], None]) -> None:
        """Set up the data of a fit, with corrected counts of the loops."""
        epochs, state = loop.epoch_progress, self._pending
        # Lightning calls it earlier if a scheduler asks for the number of steps
        if state is not None and epochs.current.processed == epochs.current.ready > 0:
            if state.is_epoch_over:
                # with max_steps Lightning considers the epoch unfinished, and would train a batch
                # too many not the property of the fit loop
                own_class(loop, Loop).restarting.fset(loop, False)
            else:
                # Lightning counts an epoch as processed if a fit stopped inside it
                for progress in (epochs.current, epochs.total):
                    progress.processed -= 1
                    progress.completed = min(progress.completed, progress.processed)
                loop.restarting = True
        original()

    def _before_iteration(self, loop: Any, original: Callable[[], None]) -> None:
        original()
        self._held = fit.generators(self._trainer)
        self._let_go()
        self._let_go = follow(combined_loader(loop), self)

    def _at_epoch(self, loop: Any, original: Callable[[Any], None], fetcher: Any) -> None:
        """Begin the batches of an epoch; after a load, skip to the position of the checkpoint."""
        self._held, before = fit.generators(self._trainer), self._position
        original(fetcher)
        if self._pending is None or loop.epoch_loop.done:
            return
        is_new = self._position is not before
        seek = partial(self._seek, loop, self._pending, fetcher, is_new_iteration=is_new)
        self._peers.run_on_all(seek, task="skipping to its position in the data")
        self._pending = None

    def _seek(self, loop: Any, state: Part, fetcher: Any, *, is_new_iteration: bool) -> None:
        tensors, self._tensors = self._tensors, {}
        if state.position is not None:
            # else Lightning skips the plateau schedulers at the end of this epoch
            end_restart(loop)
            self._restore(state, tensors)
            if changed := _differing(state.values, fit.values(self._trainer)):
                self._refuse(f"Lightning restored it, but {changed} does not match")
            self._draw_again(state.position, fetcher)
            # again before the draw: a validation may precede it
            self._restore_at_draw = partial(self._restore, state, tensors)
        elif not is_new_iteration:
            fetcher.combined_loader.reset()
            iter(fetcher)
        for name, parameter in self._trainer.lightning_module.named_parameters():
            if (gradient := tensors.get(fit.GRADIENT + name)) is not None:
                if parameter.grad is None:  # a user's hook may have made it a view of a flat buffer
                    parameter.grad = torch.empty_like(parameter, dtype=gradient.dtype)
                fit.local_part(parameter.grad).copy_(gradient)

    def _draw_again(self, position: DataPosition, fetcher: Any) -> None:
        """Draw the trained batches again, and compare their number and the first
        batch with the checkpoint.
        """
        fetcher.combined_loader.reset()  # without the workers that Lightning started
        position.before_iteration.restore(self._held)
        with suppress(StopIteration):
            iter(fetcher)
            if position.before_first is not None:
                position.before_first.restore(self._held)
            for _ in range(position.num_drawn):
                next(fetcher)
        drawn = self._position
        assert drawn is not None, "the loader was iterated over"
        if (drawn.num_drawn, drawn.first_digest) != (position.num_drawn, position.first_digest):
            self._refuse(
                f"the first {position.num_drawn} batches of the epoch differ when they are loaded "
                "again: the data or its order changed"
            )

    def _restore(self, state: Part, tensors: Mapping[str, torch.Tensor]) -> None:
        with torch.no_grad():
            for name, buffer in self._trainer.lightning_module.named_buffers():
                if fit.BUFFER + name in tensors:
                    buffer.copy_(tensors[fit.BUFFER + name])
        for index, scheduler in fit.plateaus(self._trainer).items():
            if index in state.plateaus:
                content, rates = state.plateaus[index]
                scheduler.load_state_dict(content)
                for group, rate in zip(scheduler.optimizer.param_groups, rates, strict=True):
                    group["lr"] = rate
        if (ddp := ddp_of(self._trainer)) is not None:
            ddp.require_forward_param_sync = state.syncs_buffers
        if missing := state.generators.restore(self._held):
            self._refuse(
                "generators are missing, or their saved state cannot be restored: "
                f"{', '.join(missing)}"
            )


def _digest_batch(batch: Any) -> str:
    with unobserved():
        found = entries_of({"batch": dict(leaves(batch, "batch", is_whole=True))})
    return format_digest(digest_bytes(repr(found).encode()))


def _differing(before: Mapping[str, Any], after: Mapping[str, Any]) -> str:
    """Return the first name whose value differs, and the number of further ones."""
    names = [name for name in {**before, **after} if before.get(name) != after.get(name)]
    return names[0] + (f" and {len(names) - 1} more" if len(names) > 1 else "") if names else ""


def ddp_of(trainer: pl.Trainer) -> Any:
    model = trainer.strategy.model
    return model if isinstance(model, DistributedDataParallel) else None


def problem(trainer: pl.Trainer, wanted: Buckets) -> str | None:
    """Return why the state of DDP cannot be saved, or None if it can."""
    ddp = ddp_of(trainer)
    if ddp is None:
        return None
    if ddp.static_graph or _has_hook_state(trainer.strategy):
        return (
            "DDP(static_graph=True) and communication hooks with a state keep unsaved state; omit "
            "them"
        )
    # in this order: reading the buckets makes DDP log its first step
    is_first = not ddp.find_unused_parameters and not read(ddp, wanted)
    if is_first and ddp_facts(ddp).get("prev_iteration_grad_ready_order_indices"):
        return "DDP was about to rebuild its buckets, as in its second step; save after that step"
    return None


def read(ddp: Any, wanted: Buckets) -> Buckets:
    """Return the buckets that DDP rebuilt after its first step, or got from ``make``."""
    if wanted or ddp is None or ddp.find_unused_parameters:
        return wanted
    if not ddp_facts(ddp).get("has_rebuilt_buckets"):
        ddp.logger.set_runtime_stats_and_log()  # else DDP reports them a forward pass later
    told, names = ddp_facts(ddp), _names(ddp)
    buckets = (
        told["rebuilt_per_bucket_param_indices"].split(",")
        if told.get("has_rebuilt_buckets")
        else ()
    )
    return tuple(tuple(names[int(index)] for index in bucket.split()) for bucket in buckets)


def make(ddp: Any, wanted: Buckets) -> str:
    """Give a new DDP module these buckets; return why that is impossible, or "".

    It runs a backward pass of zeros, whose gradients become ready in their old order.
    """
    if ddp is None or not wanted:
        return ""
    order = [name for bucket in wanted for name in bucket]
    number = {name: index for index, name in enumerate(_names(ddp))}
    made: Buckets = ()
    if sorted(order) == sorted(number):
        end = torch.zeros((), requires_grad=True) * 1
        # the rebuild needs the autograd engine, so it runs in a backward pass
        end.register_hook(
            lambda _: [mark_gradient(ddp.reducer, number[name]) for name in order] and None
        )
        ddp.reducer.prepare_for_backward([])
        end.backward()
        ddp.module.zero_grad(set_to_none=True)
        rebuild_buckets(ddp.reducer)
        names = {id(parameter): name for name, parameter in ddp.module.named_parameters()}
        buckets = gradient_buckets(ddp.reducer)
        made = tuple(
            tuple(names[id(parameter)] for parameter in bucket.parameters()) for bucket in buckets
        )
    if made == wanted:
        return ""
    return (
        "DDP puts the gradients in different buckets than before: freeze the same parameters, and "
        "give it the same bucket_cap_mb"
    )


def _has_hook_state(strategy: Any) -> bool:
    return isinstance(strategy, either(DDPStrategy)) and ddp_hook_state(strategy) is not None


def _names(ddp: Any) -> list[str]:
    names = {id(parameter): name for name, parameter in ddp.module.named_parameters()}
    return [names[id(parameter)] for parameter in ddp_parameters(ddp)[0]]
