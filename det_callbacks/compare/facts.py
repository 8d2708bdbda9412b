"""The facts of the first step that differs, for the rules in ``causes/``."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Literal

import numpy as np

from det_callbacks.compare.differences import Finding, StepDifference, recomputed_otherwise
from det_callbacks.compare.evidence import Evidence, GeneratorChange
from det_callbacks.runs.environment import CONFIGURATION, INDUCTOR, VARIABLE
from det_callbacks.runs.evidence import AFTER_BACKWARD, AFTER_FORWARD, BATCH_END, BATCH_START, DRAWING, LOADER
from det_callbacks.runs.program import Program, StepView, TensorLayout, is_further
from det_callbacks.verdict import EnvironmentDifference

LENGTHS = frozenset({"trainer.min_epochs", "trainer.max_epochs", "trainer.min_steps", "trainer.max_steps"})
"""Settings of the number of steps, which change nothing in common steps."""

DTYPES = ("trainer.precision", "torch.default_dtype")
"""Settings of the dtype that weights and batches have before anything is computed."""

VALIDATION = (
    "trainer.limit_val_batches",
    "trainer.val_check_interval",
    "trainer.check_val_every_n_epoch",
    "trainer.num_sanity_val_steps",
)
"""Settings that determine when a validation runs, and on which data."""

COLLECTIVES = ("c10d.", "_c10d_functional")

DataChange = Literal[
    "transformed",  # the loader's output matches
    "reordered",  # the same samples in a different order
    "other data set",  # of a different length
    "listed otherwise",  # the same indices, with samples of another step
    "made otherwise",  # the same indices, with samples that the reference never had
    "drawn",  # different indices, or samples of another step
    "other",  # unknown
]
"""How a batch differs."""

Side = Literal["reference", "current run"]

_DRAWING = (LOADER, DRAWING)
"""Points after which the sampler and the loader draw."""
_WITHIN_STEP = (AFTER_FORWARD, AFTER_BACKWARD, BATCH_END)
_VALIDATIONS = frozenset({"before the sanity check", "before validation"})
_TORCH_CPU = "torch.cpu"  # torch's generator of the process
_OF_MODEL = ("hparams.", CONFIGURATION)
_STARTS_BACKWARD = "aten.ones_like.default"
"""The gradient of a loss with respect to itself: ``torch.autograd`` makes it before its engine runs."""


@dataclass(frozen=True, kw_only=True)
class Facts:
    """The facts of the first step that differs."""

    difference: StepDifference
    choices: Sequence[EnvironmentDifference]  # that differ and can change bits of a step
    is_first_seen: bool  # whether the step is the first recorded one of its fit
    is_after_unrecorded: bool  # whether the previous step was not recorded, and the step is not the first of a resume
    is_resumed: bool  # one of the runs had just been resumed from a checkpoint
    unrestored: Sequence[str]  # restored state that differs from the state that the reference's previous step left
    evidence: Evidence
    shows_rank: bool  # several processes ran
    is_last: tuple[bool, bool]  # whether the reference, and the current run, recorded no later step of the fit

    @cached_property
    def first(self) -> Finding:
        return self.difference.finding(next(iter(self.difference.kinds)))

    @cached_property
    def origin(self) -> Finding | None:
        """The first proven origin."""
        rows = self.difference.starting("here")
        return self.difference.finding(rows[0]) if rows else None

    @property
    def leading(self) -> Finding:
        """The first proven origin, or else the first difference."""
        return self.origin or self.first

    @cached_property
    def sources(self) -> list[Finding]:
        """The differences that the step started with, before its first origin."""
        rows = [row for row in self.difference.starting("outside") if row not in self.drawn_within]
        return [self.difference.finding(row) for row in rows if self.origin is None or row < self.origin.row]

    @cached_property
    def drawn_within(self) -> list[int]:
        """The rows of generators that differ after the step, if other rows differ before them."""
        rows = [row for row in self.difference.rows_after_step if self.difference.start(row) == "outside"]
        return [row for row in rows if row != self.first.row]

    @cached_property
    def rows_after_update(self) -> list[int]:
        """The differing rows after the last op of an optimizer; empty unless they include an op."""
        found = [row for row in self.difference.kinds if self._is_after_update(row)]
        return found if any(self.difference.site(row).op for row in found) else []

    def _is_after_update(self, row: int) -> bool:
        program, position = self.difference.side(row)
        updates = [place for place, site in enumerate(program.sites) if site.op and site.phase == "optimizer"]
        is_generator_after = row in self.difference.rows_after_step
        return bool(updates) and position > updates[-1] and not is_generator_after

    @property
    def is_after_gap(self) -> bool:
        """Whether an unrecorded step may have changed what this step read."""
        return self.is_after_unrecorded and not self.num_initial

    @property
    def source_phases(self) -> tuple[str, ...]:
        """Phases of the sources, in their order in the step: state, data, rng, input."""
        return tuple(dict.fromkeys(finding.divergence.phase for finding in self.sources))

    @cached_property
    def restored(self) -> list[Finding]:
        """Parameters, buffers and optimizer state that differ when the step starts."""
        return [self.difference.finding(row) for row in self.difference.starts if self._is_state(row)]

    @cached_property
    def num_initial(self) -> int:
        """The number of initial tensors that both sides list; 0 except in a fit's first step."""
        return len(self._initial_names)

    @cached_property
    def _initial_names(self) -> list[str]:
        rows = np.flatnonzero(self.difference.is_leading & (self.difference.roles == "named")).tolist()
        names = [self.difference.site(row).name or "" for row in rows if self._is_state(row)]
        return [name for name in names if not is_further(name)]

    def _is_state(self, row: int) -> bool:
        """Return whether a row is a tensor of the state at the start of the step: listed before it, or read first."""
        site = self.difference.site(row)
        is_listed = site.role == "named" and site.phase == "state" and bool(self.difference.is_leading[row])
        return not site.op and site.name is not None and (site.role == "input" or is_listed)

    @cached_property
    def exchanged(self) -> dict[str, str]:
        """The differing tensors of the state at the start of the step that have the reference's bits of another one.

        By name, with the name of that one; constant tensors say nothing.
        """
        difference = self.difference
        rows = [row for row, (position, _) in enumerate(difference.pairs) if position >= 0 and self._is_state(row)]
        of_bits = {_bits_at(difference.reference, difference.pairs[row][0]): difference.site(row).name for row in rows}
        found: dict[str, str] = {}
        differing = {difference.site(row).name for row in rows if row in difference.kinds}
        for row in rows:
            name, position = difference.site(row).name, difference.pairs[row][1]
            if difference.kinds.get(row) != "content" or name is None or name in self.evidence.constants:
                continue
            bits = _bits_at(difference.current, position)
            other, entry = of_bits.get(bits), bits[1]
            if other in differing - {name, None} and entry is not None and prod(entry.shape) > 1:
                found[name] = other or ""
        return found if {*found} == {*found.values()} else {}

    @cached_property
    def has_reordered_inputs(self) -> bool:
        """Whether the unnamed tensors that differ are the reference's in a different order."""
        pairs = [self.difference.pairs[one.row] for one in self.sources if one.divergence.name is None]
        if len(pairs) < 2 or len(pairs) < len(self.sources) or min(map(min, pairs)) < 0:
            return False
        of_reference, of_current = zip(*pairs, strict=True)
        reference = Counter(_bits_at(self.difference.reference, position) for position in of_reference)
        return reference == Counter(_bits_at(self.difference.current, position) for position in of_current)

    @property
    def further(self) -> list[str]:
        """Names of differing state that belongs to neither model nor optimizers."""
        names = (finding.divergence.name or "" for finding in self.sources)
        return list(dict.fromkeys(filter(is_further, names)))

    # the state that a run starts with

    @property
    def initial_sources(self) -> list[str]:
        """Names, or modules, of the tensors of the initial state that differ."""
        found = (finding.divergence for finding in self.sources if finding.divergence.phase == "state")
        return list(dict.fromkeys(one.name or one.module for one in found))

    @property
    def random_initial(self) -> set[str]:
        """Names of the initial tensors that may depend on the seed: those that are not constant."""
        return {*self._initial_names} - self.evidence.constants

    # the data

    @property
    def has_other_data(self) -> bool:
        return "data" in self.source_phases

    @property
    def has_equal_samples(self) -> bool:
        """Whether all tensors of the batch that differ hold the same samples in a different order.

        If the sampler drew the same indices and only some tensors differ, labels were swapped.
        """
        difference = self.difference
        tensors = [item for item in self.sources if item.divergence.phase == "data" and item.role != "samples"]
        # a digest of its samples without their order follows each tensor
        after = [item.row + 1 for item in tensors]
        samples = [row < len(difference.roles) and difference.roles[row] == "samples" for row in after]
        are_content = all(item.divergence.kind == "content" for item in tensors)
        num_recorded = np.count_nonzero(difference.roles == "samples")
        if self.evidence.batch.indices == "same" and len(tensors) < num_recorded:
            return False
        return bool(tensors) and are_content and all(samples) and difference.kinds.keys().isdisjoint(after)

    @property
    def data_change(self) -> DataChange:
        batch = self.evidence.batch
        if batch.is_loaded_alike is True:
            return "transformed"
        if self.has_equal_samples or batch.indices == "reordered":
            return "reordered"
        if any(name.startswith("length of the data set") for name in batch.settings):
            return "other data set"
        if batch.indices == "same":
            return "made otherwise" if batch.found_at is None else "listed otherwise"
        return "other" if batch.indices is None and batch.found_at is None else "drawn"

    # the generators

    @property
    def consumed(self) -> GeneratorChange | None:
        """The generator from which something other than the data drew in only one run."""
        since = (one for one in self.evidence.generators if one.equal_at is not None and not one.is_reseeded)
        return next((one for one in since if one.points[0] not in _DRAWING and not one.has_other_start), None)

    @property
    def is_shuffle_unrestored(self) -> bool:
        """Whether a resume did not restore the generator that the shuffle draws from; both runs seeded it equally."""
        unrestored = (one for one in self.evidence.generators if one.equal_at is None and not one.is_reseeded)
        batch = self.evidence.batch
        is_other_shuffle = batch.is_process_shuffle and batch.indices != "same"
        return self.is_resumed and is_other_shuffle and any(one.name == _TORCH_CPU for one in unrestored)

    def draws(self, row: int) -> bool:
        """Return whether the op of a row draws from a generator."""
        return any(site.role == "generator" for site in self.difference.sites_read(row))

    @property
    def validation_choice(self) -> EnvironmentDifference | None:
        """The setting of the validation in which one run drew from a generator."""
        points = () if self.consumed is None else self.consumed.points
        if _VALIDATIONS.isdisjoint(points):
            return None
        return next((one for one in self.choices if one.name in VALIDATION), None)

    @property
    def is_set_in_step(self) -> bool:
        """Whether a generator that an op draws from matched when the step started."""
        if self.first.role == "generator" and self.difference.sites_read(self.first.row):
            return True  # an earlier state in the step matches
        names = {finding.divergence.name for finding in self.sources if finding.divergence.phase == "rng"}
        start = self.difference.step, BATCH_START
        return any(one.name in names and one.equal_at == start for one in self.evidence.generators)

    @cached_property
    def recomputed_otherwise(self) -> tuple[tuple[int, Side], ...]:
        """The row of each run that activation checkpointing first computed again with other bits, and the run."""
        difference = self.difference
        found: list[tuple[int, Side]] = []
        sides: tuple[tuple[Side, StepView], ...] = (
            ("reference", difference.reference),
            ("current run", difference.current),
        )
        for number, (side, view) in enumerate(sides):
            position = recomputed_otherwise(view)
            row = next((row for row, pair in enumerate(difference.pairs) if pair[number] == position), None)
            if position is not None and row is not None:
                found.append((row, side))
        return tuple(found)

    @property
    def starts_recomputed(self) -> bool:
        """Whether the first difference is of an op that activation checkpointing ran again, or what that drew from."""
        program, position = self.difference.side(self.first.row)
        readers, read = program.edges
        readers_of_first = [at for at in readers[read == position].tolist() if program.sites[at].op]
        is_state = self.first.role == "generator" and bool(readers_of_first)
        return program.sites[readers_of_first[0] if is_state else position].recomputed

    @property
    def has_only_recomputation(self) -> bool:
        """Whether all that differs are ops that activation checkpointing ran again in one run."""
        rows = [row for row in self.difference.kinds if row not in self.difference.rows_after_step]
        return bool(rows) and all(self.difference.site(row).recomputed for row in rows)

    @cached_property
    def lost_inputs(self) -> list[str]:
        """Names of the gradients to which the reference adds what they held before the step, and the current run not.

        A gradient from before is unnamed: its name is that of what the op writes.
        """
        difference = self.difference
        aligned = {position for position, _ in difference.pairs}
        found: dict[str, None] = {}
        for row in (row for row, kind in difference.kinds.items() if kind == "missing"):
            site = difference.site(row)
            sites = difference.reference.program.sites
            is_lost = any(sites[read].role == "input" and read not in aligned for read in site.inputs)
            if is_lost and site.op and site.name in self.gradients[0]:
                found[site.name or ""] = None
        return [*found]

    def is_before_step(self, change: GeneratorChange) -> bool:
        """Return whether a generator differed before the step's batch was loaded."""
        step, point = change.differs_at
        return step < self.difference.step or point not in _WITHIN_STEP

    # what is computed

    @property
    def starts_backward(self) -> bool:
        """Whether the first origin is the gradient that a backward pass starts with."""
        found = self.leading
        return found.divergence.op == _STARTS_BACKWARD and self.difference.first_reader(found.row) == "backward"

    @cached_property
    def gradients(self) -> list[list[str]]:
        """Names of the gradients that the optimizers got, in the reference and in the current run."""
        programs = self.difference.reference.program, self.difference.current.program
        return [_gradient_names(program) for program in programs]

    @cached_property
    def updates(self) -> list[list[str]]:
        """Numbers of the optimizers that got gradients, in order, in the reference and in the current run.

        Both lists are empty unless each gradient is known to belong to one optimizer.
        """
        trained = [name for names in self.evidence.optimizers.values() for name in names]
        owners = {f"grad of {name}": number for number, names in self.evidence.optimizers.items() for name in names}
        if len(owners) < len(trained) or not owners.keys() >= {name for names in self.gradients for name in names}:
            return [[], []]
        return [_updates_of(names, owners) for names in self.gradients]

    def is_of_update(self, row: int) -> bool:
        """Return whether a row is of an optimizer's update, which its options affect: an op of it, or what it leaves.

        Around an optimizer that takes a closure, its ops have phase gradient, and write parameters or their state.
        """
        site = self.difference.site(row)
        if not site.op:  # below level op only the updated state shows the update
            return site.phase in ("optimizer", "state")
        is_called_otherwise = self.difference.kinds.get(row) != "content"
        is_written = site.name is not None and site.name not in {*self.gradients[0], *self.gradients[1]}
        return is_called_otherwise and (site.phase == "optimizer" or (site.phase == "gradient" and is_written))

    @property
    def normed_gradient(self) -> str | None:
        """Name of the gradient whose norm differs first: clipping takes the norms of all, in order."""
        first = self.first.divergence
        if first.phase != "gradient" or not first.op.startswith("aten._foreach_norm."):
            return None
        program, position = self.difference.side(self.first.row)
        site = program.sites[position]
        call = (site.phase, site.module, site.op, site.occurrence, "output")
        num_outputs = sum((one.phase, one.module, one.op, one.occurrence, one.role) == call for one in program.sites)
        names = self.gradients[-1]
        return names[site.output] if num_outputs == len(names) else None

    @property
    def dtype_choice(self) -> EnvironmentDifference | None:
        """The setting that gave the first difference a different dtype."""
        reference, current = self.first.layouts or (None, None)
        if self.first.start != "outside" or reference is None or current is None:
            return None
        if reference.shape != current.shape or reference.dtype == current.dtype:
            return None
        chosen = (one for name in DTYPES for one in self.choices if one.name == name)
        return next(chosen, None)

    @property
    def model_choice(self) -> EnvironmentDifference | None:
        """The hyperparameter or configuration key that made the first difference a different call.

        A key with the values of another setting, such as a learning rate, explains no call of the model.
        """
        found = self.leading.divergence
        if found.phase not in ("forward", "backward") or not (self._is_other_call or self.draws_in_step):
            return None
        options = [(one.reference, one.current) for one in self.choices if not one.name.startswith(_OF_MODEL)]
        of_model = (one for one in self.choices if one.name.startswith(_OF_MODEL))
        return next((one for one in of_model if (one.reference, one.current) not in options), None)

    @property
    def _is_other_call(self) -> bool:
        found = self.leading
        return found.divergence.kind != "content" or found.layouts is not None

    @property
    def draws_in_step(self) -> bool:
        """Whether a generator started to differ in the step, and no recorded op may have drawn."""
        first = self.first.divergence
        if first.op or first.kind != "content":
            return False
        since_start = (one.equal_at == (first.step, BATCH_START) for one in self.evidence.generators)
        return bool(self.drawn_within) or (first.phase == "forward" and any(since_start))

    @property
    def explaining_choice(self) -> EnvironmentDifference | None:
        explaining = filter(self._is_explained_by, self.choices)
        return next(explaining, None) or self.model_choice

    def _is_explained_by(self, chosen: EnvironmentDifference) -> bool:
        choice = chosen.name
        found = self.leading
        divergence = found.divergence
        is_other_call = self._is_other_call
        is_between = divergence.phase == "other" and not self.starts_backward
        if choice.startswith("trainer.gradient_clip"):
            return divergence.phase == "gradient" or (divergence.phase == "other" and is_other_call)
        if choice == "trainer.precision":
            return is_other_call or not divergence.op
        if choice == "trainer.accumulate_grad_batches" and divergence.name == "loss":
            return True  # only level op records the op that divides it
        if choice.startswith("optimizer") and self._starts_with_further_state:
            return choice == "optimizer.lr_scheduler" or self._is_copied_from(choice)
        # in a loop of the user's own, the update of an optimizer that takes a closure counts as gradient
        update = ("gradient", "optimizer", "state") if choice.startswith("optimizer.LBFGS.") else ("optimizer", "state")
        if choice.startswith("optimizer") and divergence.phase in update:
            return is_other_call or not divergence.op
        if choice.startswith("optimizer") and divergence.phase == "forward" and divergence.kind in ("missing", "extra"):
            # an optimizer such as LBFGS decides how often the passes run
            return any(self.difference.site(row).phase == "gradient" for row in range(found.row))
        if choice == "torch.num_threads":
            return bool(divergence.op) and divergence.kind == "content"  # sums are split among threads
        if choice == "settings.seed" and None in (chosen.reference, chosen.current):
            # the process may have set the same seed
            return bool(self.evidence.other_starts)
        if choice.startswith("settings."):
            return not divergence.is_origin
        return is_between and not choice.startswith((VARIABLE, INDUCTOR))

    @property
    def _starts_with_further_state(self) -> bool:
        """Whether the first difference is the state of a scheduler, or other state of neither model nor optimizers."""
        first = self.first.divergence
        return first.phase == "state" and is_further(first.name or "")

    def _is_copied_from(self, option: str) -> bool:
        """Return whether the first difference is a value that a scheduler copied from an option: base_lrs from lr."""
        first = self.first.divergence
        _, _, value = (first.name or "").partition(": ")
        return first.kind == "content" and option.rpartition(".")[2] in value


def choices_of_steps(environment: Sequence[EnvironmentDifference]) -> list[EnvironmentDifference]:
    """Return the differing settings that can change the bits of a step."""
    return [one for one in environment if one.changes_bits and not one.is_machine and one.name not in LENGTHS]


def earlier_choice(choices: Sequence[EnvironmentDifference]) -> EnvironmentDifference | None:
    """Return a setting that changed the weights in earlier steps."""
    return next((one for one in choices if one.name.startswith(("optimizer", "trainer.", "settings."))), None)


def _updates_of(gradients: Sequence[str], owners: Mapping[str, str]) -> list[str]:
    """Return the owner of each run of gradients; an update has a gradient once."""
    updates, names = list[str](), set[str]()
    for name in gradients:
        if not updates or owners[name] != updates[-1] or name in names:
            updates.append(owners[name])
            names.clear()
        names.add(name)
    return updates


def _bits_at(view: StepView, position: int) -> tuple[int, TensorLayout | None]:
    return int(view.record.digests[position]), view.layout.entries[position]


def _gradient_names(program: Program) -> list[str]:
    return [site.name or "" for site in program.sites if site.phase == "gradient" and not site.op]
