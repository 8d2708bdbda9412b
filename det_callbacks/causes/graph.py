"""The first step that differs, as a graph: its rows, the rows that explain them,
and a walk from one to the other.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from det_callbacks.compare.differences import RowDifference, StepDifference
from det_callbacks.compare.evidence import Evidence, GeneratorChange
from det_callbacks.runs.evidence import AFTER_BACKWARD, AFTER_FORWARD, BATCH_END, BATCH_START
from det_callbacks.runs.program import Program
from det_callbacks.verdict import Cause, EnvironmentDifference, TrailKind

_AFTER_BATCH_START = (AFTER_FORWARD, AFTER_BACKWARD, BATCH_END)
_STARTS_BACKWARD = "aten.ones_like.default"
"""The gradient of a loss with respect to itself: ``torch.autograd`` makes
it before its engine runs.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """Something that a step depended on, in both runs.

    ``row`` is its row of the step, ``change`` how a generator changed;
    a node has at most one of them.
    """

    kind: TrailKind
    name: str
    step: int
    moment: str = ""
    values: tuple[str | None, str | None] = (None, None)  # in the reference and the current run
    row: int | None = None
    change: GeneratorChange | None = None
    is_proven: bool = True  # whether the node that led here certainly read it


@dataclass(frozen=True, slots=True, kw_only=True)
class Walk:
    """The nodes from the first difference back to what it came from,
    which reads nothing that differs.
    """

    nodes: tuple[Node, ...]

    @property
    def root(self) -> Node:
        return self.nodes[-1]

    @property
    def reached(self) -> Node:
        """The first compared row that the root reaches."""
        return next(node for node in reversed(self.nodes) if node.row is not None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """A cause, and what to do about it; the sentences have no final stop."""

    cause: Cause
    text: str = ""  # what differs and where it starts; "" for ``explain_first``
    advice: str = ""
    setting: str = ""  # name of the setting that the text begins with


@dataclass(frozen=True, kw_only=True)
class Graph:
    """The first step that differs, and what explains it."""

    difference: StepDifference
    # settings that differ and can change the bits of a step
    choices: Sequence[EnvironmentDifference]
    is_first_seen: bool  # whether the step is the first recorded one of its fit
    # whether the previous step was not recorded, and no resume came in between
    is_after_unrecorded: bool
    is_resumed: bool  # one of the runs had just been resumed from a checkpoint
    # restored state that differs from what the reference's previous step left
    unrestored: Sequence[str]
    evidence: Evidence
    shows_rank: bool  # several processes ran
    framework: str = "torch"  # what trained the current run, see ``framework_of``
    resumed_at: int | None = None  # the last step, up to this one, with which a run resumed
    # whether the reference, and the current run, recorded no later step of the fit
    is_last: tuple[bool, bool]

    # what differs

    @cached_property
    def first(self) -> RowDifference:
        return self.difference.row_difference(next(iter(self.difference.kinds)))

    @cached_property
    def origin(self) -> RowDifference | None:
        """The first proven origin."""
        rows = self.difference.starting("here")
        return self.difference.row_difference(rows[0]) if rows else None

    @property
    def leading(self) -> RowDifference:
        """The first proven origin, or else the first difference."""
        return self.origin or self.first

    @property
    def is_other_call(self) -> bool:
        """Whether the leading op was called differently, or gave another shape,
        or ran in one run only.
        """
        return self.leading.divergence.kind != "content" or self.leading.layouts is not None

    # what the step started with

    @cached_property
    def sources(self) -> list[RowDifference]:
        """The differences that the step started with, before its first origin."""
        rows = [row for row in self.difference.starting("outside") if row not in self.drawn_within]
        return [
            self.difference.row_difference(row)
            for row in rows
            if self.origin is None or row < self.origin.row
        ]

    @property
    def source_phases(self) -> tuple[str, ...]:
        """Phases of the sources, in their order in the step: state, data, rng, input."""
        return tuple(dict.fromkeys(source.divergence.phase for source in self.sources))

    @property
    def has_other_data(self) -> bool:
        return "data" in self.source_phases

    @property
    def loader_settings(self) -> dict[tuple[str, str], tuple[str, str]]:
        """The settings of loaders that differ; a resume may skip batches with a
        loader that is not followed.
        """
        settings = self.evidence.batch.settings.items()
        return {
            part: values for part, values in settings if not (self.is_resumed and "none" in values)
        }

    @cached_property
    def drawn_within(self) -> list[int]:
        """The rows of generators that differ after the step, if other rows differ before them."""
        rows = [
            row
            for row in self.difference.rows_after_step
            if self.difference.start(row) == "outside"
        ]
        return [row for row in rows if row != self.first.row]

    @property
    def draws_in_step(self) -> bool:
        """Whether a generator started to differ in the step, and no recorded op may have drawn."""
        first = self.first.divergence
        if first.op or first.kind != "content":
            return False
        since_start = (
            one.equal_at == (first.step, BATCH_START) for one in self.evidence.generators
        )
        return bool(self.drawn_within) or (first.phase == "forward" and any(since_start))

    @property
    def is_after_gap(self) -> bool:
        """Whether an unrecorded step may have changed what this step read."""
        return self.is_after_unrecorded and not self.num_initial

    def is_before_step(self, change: GeneratorChange) -> bool:
        """Return whether a generator differed before the step's batch was loaded."""
        step, point = change.differs_at
        return step < self.difference.step or point not in _AFTER_BATCH_START

    @cached_property
    def num_initial(self) -> int:
        """The number of initial tensors that both sides list; 0 except in a fit's first step."""
        return len(self.initial_names)

    @cached_property
    def initial_names(self) -> list[str]:
        rows = np.flatnonzero(
            self.difference.is_leading & (self.difference.roles == "named")
        ).tolist()
        sites = [self.difference.site(row) for row in rows if self.is_state(row)]
        return [site.name or "" for site in sites if site.subject != "further"]

    def is_state(self, row: int) -> bool:
        """Return whether a row is a tensor of the state as the step found it: listed
        before it, or read first.
        """
        site = self.difference.site(row)
        is_listed = (
            site.role == "named" and site.phase == "state" and bool(self.difference.is_leading[row])
        )
        return not site.op and site.name is not None and (site.role == "input" or is_listed)

    @property
    def further(self) -> list[str]:
        """Names of differing state that belongs to neither model nor optimizers."""
        names = (
            source.site.name or "" for source in self.sources if source.site.subject == "further"
        )
        return list(dict.fromkeys(names))

    @property
    def has_equal_samples(self) -> bool:
        """Whether all tensors of the batch that differ hold the same samples in a different order.

        If the sampler drew the same indices and only some tensors differ, labels were swapped.
        """
        difference = self.difference
        tensors = [
            one
            for one in self.sources
            if one.divergence.phase == "data" and one.site.role != "samples"
        ]
        # a digest of its samples without their order follows each tensor
        after = [tensor.row + 1 for tensor in tensors]
        samples = [
            row < len(difference.roles) and difference.roles[row] == "samples" for row in after
        ]
        are_content = all(tensor.divergence.kind == "content" for tensor in tensors)
        num_recorded = np.count_nonzero(difference.roles == "samples")
        if self.evidence.batch.indices == "same" and len(tensors) < num_recorded:
            return False
        return (
            bool(tensors)
            and are_content
            and all(samples)
            and difference.kinds.keys().isdisjoint(after)
        )

    # what the step computed

    @cached_property
    def gradients(self) -> list[list[str]]:
        """Names of the gradients that the optimizers got, in the reference and
        in the current run.
        """
        programs = self.difference.reference.program, self.difference.current.program
        return [_gradient_names(program) for program in programs]

    @property
    def starts_backward(self) -> bool:
        """Whether the leading difference is the gradient that a backward pass starts with."""
        op, row = self.leading.divergence.op, self.leading.row
        return op == _STARTS_BACKWARD and self.difference.first_reader(row) == "backward"

    def draws(self, row: int) -> bool:
        """Return whether the op of a row draws from a generator."""
        return any(site.role == "generator" for site in self.difference.sites_read(row))

    def is_of_update(self, row: int) -> bool:
        """Return whether a row is of an optimizer's update, which its options affect:
        an op of it, or what it leaves.

        Around an optimizer that takes a closure, its ops have phase gradient,
        and write parameters or their state.
        """
        site = self.difference.site(row)
        if not site.op:  # below level op only the updated state shows the update
            return site.phase in ("optimizer", "state")
        is_called_differently = self.difference.kinds.get(row) != "content"
        is_written = site.name is not None and site.name not in {
            *self.gradients[0],
            *self.gradients[1],
        }
        return is_called_differently and (
            site.phase == "optimizer" or (site.phase == "gradient" and is_written)
        )


def _gradient_names(program: Program) -> list[str]:
    return [site.name or "" for site in program.sites if site.phase == "gradient" and not site.op]
