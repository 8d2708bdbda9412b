"""What a resumed recording runs again has to be what the run holds already."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from det_callbacks.compare.answer import EvidenceFinder
from det_callbacks.compare.batches import find_batch
from det_callbacks.compare.evidence import LiveEvidence, RunEvidence
from det_callbacks.compare.rank_findings import RankFindings
from det_callbacks.compare.traced import add_traced_step, compare_restored
from det_callbacks.compare.verdict_builder import VerdictBuilder
from det_callbacks.runs.environment import Environment, compare_environments
from det_callbacks.runs.evidence import Row
from det_callbacks.runs.program import Program, StepView
from det_callbacks.runs.steps import Expectation, StepTrace
from det_callbacks.runs.store import Run
from det_callbacks.verdict import Counts, Verdict

LAST_STEPS = 16
"""Steps whose programs are looked up for a resumed fit: as many as one accumulation is likely to have."""


class Agreement:
    """Compares the steps of a resumed attempt with those that earlier attempts of the same fit recorded.

    Each costs what a step of a verification does: one read, and one comparison of two arrays where it is equal.

    Args:
        earlier: the run, opened before the attempt began.
        rank: of this process.
        segment: fit that goes on.
        manifest: of the attempt: its environment tells which differences the machine may have made.

    Attributes:
        num_steps: steps compared so far.

    Example:
        >>> agreement = Agreement(Run.open("refs/run1"), rank=0, segment=0, manifest=manifest)  # doctest: +SKIP
        >>> agreement.add(trace, step=4, epoch=1)  # doctest: +SKIP
        False
    """

    def __init__(self, earlier: Run, *, rank: int, segment: int, manifest: Mapping[str, Any]) -> None:
        self.earlier = earlier
        self.num_steps = 0
        self._rank = rank
        self._segment = segment
        self._known = frozenset(earlier.rank(rank).steps(segment).tolist())
        self._is_begun = False
        self._view: StepView | None = None
        self._builder = VerdictBuilder(str(earlier.path), str(earlier.path))
        self._builder.set_world_size(earlier.world_size)
        self._builder.set_batches(partial(find_batch, earlier))
        self._evidence = LiveEvidence(rank)
        self._builder.set_evidence(EvidenceFinder(RunEvidence(earlier), self._evidence))
        self._builder.set_environment(
            compare_environments(earlier.environment, Environment.from_dict(manifest["environment"]))
        )

    @property
    def counts(self) -> Counts:
        """How much was compared so far."""
        return self._builder.counts

    def holds(self, step: int) -> bool:
        """Return whether an earlier attempt recorded a step."""
        return step in self._known

    def last_programs(self) -> tuple[Program, ...]:
        """Return the programs of the last steps that an earlier attempt recorded, each once."""
        run = self.earlier
        records = (run.rank(self._rank).read(self._segment, step) for step in sorted(self._known)[-LAST_STEPS:])
        return tuple(run.program(identity) for identity in dict.fromkeys(record.program_id for record in records))

    def compare_state(self, step: int, digest_state: Callable[[], Mapping[str, int]]) -> None:
        """Compare the restored state with what the run ended the step before with, for the explanation."""
        compare_restored(self._builder, self.earlier, self._rank, self._segment, step, digest_state)

    def expectation(self, step: int) -> Expectation | None:
        """Return what a step held then, None when it was not recorded."""
        if step not in self._known:
            return None
        self._view = self.earlier.view(self._rank, self._segment, step)
        return Expectation.of(self._view.record.digests, self._view.program)

    def chain(self, step: int) -> int:
        """Return the chain that the run holds at a step."""
        return self.earlier.rank(self._rank).chain(self._segment, step)

    def put_evidence(self, rows: Sequence[Row]) -> None:
        """Take what explains the step that ends."""
        self._evidence.add(rows)

    def begin(self) -> None:
        """Note that the attempt has run a step: what differs after it need not come from the checkpoint."""
        self._is_begun = True

    def add(self, trace: StepTrace, *, step: int, epoch: int) -> bool:
        """Compare a step that an earlier attempt recorded; return whether it differs."""
        is_resumed = not self._is_begun
        self.begin()
        view = self._view
        if view is None or view.record.step != step:
            view = self.earlier.view(self._rank, self._segment, step)
        self.num_steps += 1
        differs = add_traced_step(self._builder, view, trace, epoch=epoch, is_resumed=is_resumed)
        self._evidence.end_step(self._segment, step, differs=differs)
        return differs

    def findings(self) -> RankFindings:
        """Return what this rank found, for the others; raise as ``verdict`` does."""
        return self._builder.findings(self._rank)

    def verdict(self) -> Verdict:
        """Return the verdict on the steps compared so far.

        Raises:
            NothingComparedError: there was none.
        """
        return self._builder.finish()
