"""Why a step differs: one table of rules, asked in order, and the first that applies names the cause.

The order is that of time: what a run starts with, what it is given, what it draws, what it computes.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple

import numpy as np

from det_callbacks.compare.differences import Finding, StepDifference
from det_callbacks.compare.evidence import Evidence, GeneratorChange
from det_callbacks.verdict import Cause, EnvironmentDifference

LENGTHS = frozenset({"trainer.min_epochs", "trainer.max_epochs", "trainer.min_steps", "trainer.max_steps"})
"""Choices that say how many steps there are, and change nothing in one that both runs have."""

DTYPES = ("trainer.precision", "torch.default_dtype")
"""Choices of the dtype that weights and batches have before anything is computed."""

CHOSEN = ("dtype", "choice")
"""Rules whose explanation begins with the choice."""

COLLECTIVES = ("c10d.", "_c10d_functional")

DataChange = Literal[
    "transformed",  # what left the loader agrees
    "reordered",  # it holds the same samples in another order
    "other data set",  # of another length
    "listed otherwise",  # the sampler drew the same indices, and the samples behind them are those of another step
    "made otherwise",  # the sampler drew the same indices, and the samples are nowhere in the reference
    "drawn",  # the sampler drew other indices, or the samples are those of another step
    "other",  # nothing is known of it
]
"""How a batch came to be another one."""

_OTHER_CONTENT = ("transformed", "other data set", "made otherwise", "other")
_PHASE_CAUSES: Mapping[str, Cause] = {
    "forward": "forward",
    "backward": "backward",
    "gradient": "backward",
    "optimizer": "optimizer",
}
_DRAWING = ("before the loader starts", "before a batch is drawn")
"""What begins when the data draws for itself."""
_WITHIN_STEP = ("after forward", "after backward", "batch end")
_STARTS_BACKWARD = "aten.ones_like.default"
"""The gradient of a loss with respect to itself: ``torch.autograd`` makes it before its engine runs."""


@dataclass(frozen=True, kw_only=True)
class Facts:
    """What is known of the first step that differs."""

    difference: StepDifference
    choices: Sequence[EnvironmentDifference]  # that differ and can change the bits of a step
    is_first_seen: bool  # it is the first recorded step of its fit
    is_after_unrecorded: bool  # nor resumed: what it read may have changed in the step before it
    is_resumed: bool  # one of the runs had just been resumed from a checkpoint
    unrestored: Sequence[str]  # restored state that is not what the reference ended the step before with
    evidence: Evidence

    @cached_property
    def first(self) -> Finding:
        """What differs first."""
        return self.difference.finding(next(iter(self.difference.kinds)))

    @cached_property
    def origin(self) -> Finding | None:
        """The first finding that is proven to start the difference."""
        rows = self.difference.starting("here")
        return self.difference.finding(rows[0]) if rows else None

    @cached_property
    def sources(self) -> list[Finding]:
        """What entered the step with other bits before its first origin."""
        rows = [row for row in self.difference.starting("outside") if row not in self.drawn_within]
        return [self.difference.finding(row) for row in rows if self.origin is None or row < self.origin.row]

    @cached_property
    def drawn_within(self) -> list[int]:
        """The rows of generators from which the step drew otherwise, where other rows differ before them."""
        rows = [row for row in self.difference.rows_after_step if self.difference.start(row) == "outside"]
        return [row for row in rows if row != self.first.row]

    @property
    def is_after_gap(self) -> bool:
        """Whether a step that was not recorded may have changed what this one read."""
        return self.is_after_unrecorded and not self.num_initial

    @property
    def source_phases(self) -> set[str]:
        """Phases of the sources: state, data, rng, input."""
        return {finding.divergence.phase for finding in self.sources}

    @cached_property
    def restored(self) -> list[Finding]:
        """Parameters, buffers and optimizer state that differ as the step finds them, wherever its origins lie."""
        return [self.difference.finding(row) for row in self.difference.starts if self._is_state(row)]

    @cached_property
    def num_initial(self) -> int:
        """Tensors of the initial state that both sides list before the step; 0 unless it is a fit's first."""
        rows = np.flatnonzero(self.difference.is_leading & (self.difference.roles == "named")).tolist()
        return sum(map(self._is_state, rows))

    def _is_state(self, row: int) -> bool:
        """Return whether a row is a tensor of the state as the step finds it: listed before it, or read first."""
        site = self.difference.site(row)
        is_listed = site.role == "named" and site.phase == "state" and bool(self.difference.is_leading[row])
        return not site.op and site.name is not None and (site.role == "input" or is_listed)

    # the state that a run starts with

    @property
    def initial_sources(self) -> list[str]:
        """Names of the tensors of the initial state that differ, or where they are."""
        found = (finding.divergence for finding in self.sources if finding.divergence.phase == "state")
        return list(dict.fromkeys(one.name or one.module for one in found))

    @property
    def num_random(self) -> int:
        """Initial tensors that follow from the seed: the others hold one value, whatever it is."""
        return self.num_initial - self.evidence.num_constant

    # the data

    @property
    def has_other_data(self) -> bool:
        """Whether the batch differs."""
        return "data" in self.source_phases

    @property
    def has_equal_samples(self) -> bool:
        """Whether every tensor of the batch that differs holds the same samples in another order.

        Where the sampler drew the same indices and some did not move, it is no other order: labels were exchanged.
        """
        difference = self.difference
        tensors = [item for item in self.sources if item.divergence.phase == "data" and item.role != "samples"]
        # the order-free digest of a tensor's samples follows it
        after = [item.row + 1 for item in tensors]
        samples = [row < len(difference.roles) and difference.roles[row] == "samples" for row in after]
        are_content = all(item.divergence.kind == "content" for item in tensors)
        if self.evidence.batch.indices == "same" and len(tensors) < np.count_nonzero(difference.roles == "samples"):
            return False
        return bool(tensors) and are_content and all(samples) and difference.kinds.keys().isdisjoint(after)

    @property
    def data_change(self) -> DataChange:
        """How the batch came to be another one, as far as it is known."""
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
        """The generator that something drew from in one run only; not the data, when its batch was drawn."""
        since = (one for one in self.evidence.generators if one.equal_at is not None and not one.is_reseeded)
        return next((one for one in since if one.points[0] not in _DRAWING and not one.has_other_start), None)

    def is_before_step(self, change: GeneratorChange) -> bool:
        """Return whether a generator came to differ before the step's batch was drawn."""
        step, point = change.differs_at
        return step < self.difference.step or point not in _WITHIN_STEP

    # what is computed

    @property
    def starts_backward(self) -> bool:
        """Whether the origin, or what differs first, is the gradient that a backward pass starts with."""
        found = self.origin or self.first
        return found.divergence.op == _STARTS_BACKWARD and self.difference.first_reader(found.row) == "backward"

    @property
    def is_between_passes(self) -> bool:
        """Whether the origin, or what differs first, ran after a forward pass and before its backward pass."""
        program, position = self.difference.side((self.origin or self.first).row)
        before = (site.phase for site in reversed(program.sites[:position]) if site.op)
        after = (site.phase for site in program.sites[position:] if site.op)  # the loss has a row of its own there
        passes = [next((phase for phase in phases if phase in _PHASE_CAUSES), "") for phases in (before, after)]
        return program.sites[position].phase == "other" and passes == ["forward", "backward"]

    @cached_property
    def gradients(self) -> list[list[str]]:
        """Names of the gradients that optimizers were given in the reference and now, in their order."""
        programs = self.difference.reference.program, self.difference.current.program
        return [[site.name or "" for site in one.sites if site.phase == "gradient" and not site.op] for one in programs]

    @property
    def dtype_choice(self) -> EnvironmentDifference | None:
        """The choice that explains that what differs first entered the step with another dtype, and no other shape."""
        ours, theirs = self.first.layouts or (None, None)
        if self.first.start != "outside" or ours is None or theirs is None or ours.shape != theirs.shape:
            return None
        chosen = (one for name in DTYPES for one in self.choices if one.name == name)
        return next(chosen, None) if ours.dtype != theirs.dtype else None

    @property
    def explaining_choice(self) -> EnvironmentDifference | None:
        """The choice that explains what differs first: without it, the two runs would have done the same there."""
        return self.dtype_choice or next(filter(self._is_explained_by, self.choices), None)

    def _is_explained_by(self, chosen: EnvironmentDifference) -> bool:
        """Return whether a choice leads to what differs first."""
        choice, found = chosen.name, self.origin or self.first
        one = found.divergence
        is_other_call = one.kind != "content" or found.layouts is not None
        is_between = one.phase == "other" and not self.starts_backward
        if choice.startswith("trainer.gradient_clip"):
            return one.phase == "gradient" or (one.phase == "other" and is_other_call)
        if choice == "trainer.precision":
            return is_other_call or not one.op
        if choice == "trainer.accumulate_grad_batches" and one.name == "loss":
            return True  # divided between the passes, by an op that is recorded at level op only
        if choice.startswith("optimizer") and one.phase in ("optimizer", "state"):
            return is_other_call or not one.op
        if choice.startswith("optimizer") and one.phase == "forward" and one.kind in ("missing", "extra"):
            # an optimizer such as LBFGS decides how often the passes are run
            return any(self.difference.site(row).phase == "gradient" for row in range(found.row))
        if choice == "torch.num_threads":
            return bool(one.op) and one.kind == "content"  # sums are split among threads
        if choice == "settings.seed" and None in (chosen.reference, chosen.current):
            # what the process seeded before by itself may have been the same seed
            return bool(self.evidence.other_starts)
        return not one.is_origin if choice.startswith("settings.") else is_between


def choices_of_steps(environment: Sequence[EnvironmentDifference]) -> list[EnvironmentDifference]:
    """Return the choices that differ and can change the bits of a step: how many steps there are does not."""
    return [one for one in environment if one.changes_bits and not one.is_machine and one.name not in LENGTHS]


def earlier_choice(choices: Sequence[EnvironmentDifference]) -> EnvironmentDifference | None:
    """Return a choice with which steps that were not recorded left other weights."""
    return next((one for one in choices if one.name.startswith(("optimizer", "trainer.", "settings."))), None)


class Rule(NamedTuple):
    """One way to a cause, or to what finds the cause; the docs and ``report/advice.py`` know it by its name."""

    name: str
    applies: Callable[[Facts], bool]
    cause: Cause | Callable[[Facts], Cause]


def find_cause(facts: Facts) -> tuple[str, Cause]:
    """Return the name of the rule that applies to a differing step, from the earliest evidence, and the cause."""
    rule = next(rule for rule in RULES if rule.applies(facts))
    return rule.name, rule.cause(facts) if callable(rule.cause) else rule.cause


def _has_other_epochs(facts: Facts) -> bool:
    """Return whether an epoch ended, on the way to the step, in one run only."""
    return not {"data", "rng"}.isdisjoint(facts.source_phases) and any(
        {"epoch end", "epoch start"} & {*change.only_reference, *change.only_current}
        for change in facts.evidence.generators
        if facts.is_before_step(change)
    )


def _is_consumed_before_data(facts: Facts) -> bool:
    """Return whether a generator was drawn from before the batch was, or did not come back with a checkpoint."""
    if not facts.has_other_data:
        return False
    if facts.consumed is not None and facts.is_before_step(facts.consumed):
        return True
    # a generator that the checkpoint did not bring back draws other samples, and augments them otherwise
    is_same_data = facts.has_equal_samples or facts.evidence.batch.is_whole
    return facts.is_resumed and "rng" in facts.source_phases and not is_same_data


def _is_drawn(facts: Facts) -> bool:
    """Return whether a generator is what differs first, or what an op drew from that only one run has."""
    first = facts.first.divergence
    if "rng" in facts.source_phases:
        return True
    if facts.sources:
        # a tensor made of what NumPy or Python drew
        return bool(facts.drawn_within) and all(_is_made_outside(one) for one in facts.sources)
    within = [one for one in facts.evidence.generators if one.equal_at == (first.step, "batch start")]
    draws = any(site.role == "generator" for site in facts.difference.sites_read(facts.first.row))
    if (first.kind == "extra" and first.op and draws) or (facts.drawn_within and facts.first.start == "passed on"):
        return True
    # below level op no op is recorded, and so none is blamed
    is_drawn = bool(facts.drawn_within or (within and first.phase == "forward"))
    return not first.op and first.kind == "content" and is_drawn


def _is_made_outside(source: Finding) -> bool:
    """Return whether a source is a tensor that has no name and that no recorded op made."""
    return source.role == "input" and source.divergence.name is None


def _differs_since_before(facts: Facts) -> bool:
    """Return whether a step that nobody recorded may have changed the state that this one read."""
    if not facts.is_after_gap:
        return False
    first = facts.first.divergence
    if facts.sources:
        return facts.sources[0].divergence.phase == "input" and bool(facts.sources[0].divergence.name)
    # what it was computed from is not recorded
    return facts.origin is None and not first.op and first.kind == "content"


def _has_other_gradients(facts: Facts) -> bool:
    """Return whether what differs first is which gradients optimizers were given, or their order."""
    first, (ours, theirs) = facts.first.divergence, facts.gradients
    is_in_one = first.phase == "gradient" and not first.op and first.kind in ("missing", "extra")
    return is_in_one and ({*ours} != {*theirs} or len(ours) == len(theirs))


def _is_of_torchscript(facts: Facts) -> bool:
    """Return whether only one run has an op that a TorchScript executor may have chosen, or left out."""
    one, scripted = (facts.origin or facts.first).divergence, facts.evidence.scripted
    is_inside = one.module in scripted or one.module.startswith(tuple(f"{name}." for name in scripted))
    is_unknown = one.module == "?" and bool(scripted)  # the backward pass of a scripted module has no source
    return bool(one.op) and one.kind in ("missing", "extra") and (is_inside or is_unknown)


def _has_other_batch_size(facts: Facts) -> bool:
    return facts.has_other_data and any(name.startswith("batch_size") for name in facts.evidence.batch.settings)


def _cause_of_input(facts: Facts) -> Cause:
    """Return the cause of a tensor from outside the trace that differs."""
    source, name = facts.sources[0], facts.sources[0].divergence.name or ""
    if _is_of_parameter(source):
        return "unknown" if name.startswith("grad of ") else "optimizer"
    if facts.is_first_seen and not facts.is_after_gap and name:
        return "initial_weights"
    return _PHASE_CAUSES.get(facts.difference.first_reader(source.row), "unknown") if name else "unknown"


def _cause_of_origin(facts: Facts) -> Cause:
    found = facts.origin or facts.first
    if found.divergence.op.startswith(COLLECTIVES):
        return "collective"
    is_backward = facts.starts_backward or facts.is_between_passes
    return "backward" if is_backward else _PHASE_CAUSES.get(found.divergence.phase, "unknown")


def _cause_of_first(facts: Facts) -> Cause:
    """Return the cause of what differs first, where no op is proven to be the origin."""
    first = facts.first
    if first.role in ("delivered", "graph_output"):
        return "unknown"  # of a collective the other ranks know more: see ``compare/collectives.py``
    if first.role != "named" or first.divergence.phase != "state":
        return _cause_of_origin(facts)
    # state that only differs after the step: an optimizer owns what it has a gradient of
    gradients, name = {*facts.gradients[0], *facts.gradients[1]}, first.divergence.name or ""
    if _is_of_parameter(first) or f"grad of {name}" in gradients:
        return "optimizer"
    return "forward" if gradients else "unknown"  # an update without an optimizer runs anywhere


def _is_of_parameter(finding: Finding) -> bool:
    """Return whether a tensor is a gradient or a state of a parameter: its name does not begin with its module's."""
    name, module = finding.divergence.name or "", finding.divergence.module
    return not name.startswith(f"{module}.") if module and name else " of " in name


RULES: tuple[Rule, ...] = (
    Rule("dtype", lambda facts: facts.dtype_choice is not None, "settings"),
    Rule("restored state", lambda facts: facts.is_resumed and bool(facts.restored or facts.unrestored), "checkpoint"),
    Rule("initial state", lambda facts: "state" in facts.source_phases, "initial_weights"),
    Rule("another epoch", _has_other_epochs, "data_order"),
    Rule("generator before the data", _is_consumed_before_data, "rng"),
    Rule("batch size", _has_other_batch_size, "settings"),
    Rule(
        "batch",
        lambda facts: facts.has_other_data,
        lambda facts: "data_content" if facts.data_change in _OTHER_CONTENT else "data_order",
    ),
    Rule("generator", _is_drawn, "rng"),
    Rule(
        "steps that were not recorded",
        _differs_since_before,
        lambda facts: "settings" if earlier_choice(facts.choices) else "unknown",
    ),
    Rule("input from outside", lambda facts: bool(facts.sources), _cause_of_input),
    Rule("choice", lambda facts: facts.explaining_choice is not None, "settings"),
    Rule("other gradients", _has_other_gradients, "optimizer"),
    Rule("compiled graph", lambda facts: facts.origin is not None and facts.origin.role == "graph", "structure"),
    Rule("scripted module", _is_of_torchscript, "structure"),
    Rule("structure", lambda facts: not {"content", "argument"} & {*facts.difference.kinds.values()}, "structure"),
    Rule("origin", lambda facts: facts.origin is not None, _cause_of_origin),
    Rule("first difference", lambda facts: True, _cause_of_first),
)
