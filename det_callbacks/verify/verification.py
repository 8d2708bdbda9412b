"""A run that is verified while it trains: it stores differing steps,
which the judge reads at the end.
"""

import json
import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from functools import lru_cache, partial
from itertools import count
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

import numpy as np

from det_callbacks.compare.differences import compare_steps
from det_callbacks.compare.evidence import from_batch_start
from det_callbacks.compare.metrics import MetricComparison
from det_callbacks.compare.ranks import StepCounter
from det_callbacks.compare.record import (
    REPORT_FILE,
    TOGETHER,
    UNFINISHED,
    VERDICT_FILE,
    FitRecord,
    RankRecord,
    Stop,
    Tally,
    write_record,
)
from det_callbacks.compare.resume import exchanged, find_resumed_step, state_at_end
from det_callbacks.errors import NotComparableError, RankError, SelectionError
from det_callbacks.runs.evidence import LASTING, EvidenceRow, NondeterministicOp
from det_callbacks.runs.files import replace_atomically, writing
from det_callbacks.runs.manifest import Environment, Manifest, compare_environments
from det_callbacks.runs.metrics import Reading, Readings, read_metrics
from det_callbacks.runs.peers import ALONE, END_OF_FIT, Peers
from det_callbacks.runs.program import AT_END, IDLE, StepView
from det_callbacks.runs.steps import Expectation, StepTrace
from det_callbacks.runs.store import Run
from det_callbacks.runs.writer import RunWriter
from det_callbacks.verdict import Divergence, EnvironmentDifference, Verdict
from det_callbacks.verify.comparable import other_world_size, require_reference
from det_callbacks.verify.judge import compare_runs

STORED_STEPS = 100
"""How many diverging steps of a rank are stored; each is as large as in a recording."""

STEPS_BETWEEN_RECORDS = 1000
"""After so many compared steps the record is written again,
so that a kill loses no more of them.
"""


def open_reference(
    path: Path, asked: Mapping[str, Any] = MappingProxyType({}), *, steps: str, peers: Peers = ALONE
) -> Run:
    """Open the reference of a verification; raise if it does not fit what this run asks for.

    ``asked`` has fields of a Selection, ``replay`` and ``keep_tensors``; the rest comes from the
    reference.
    """
    run = Run.open(path, ranks=(peers.rank,))
    if run.manifest.world_size != peers.world_size:
        text = f"{other_world_size(run, peers.world_size)} Nothing was trained."
        raise NotComparableError(text, Verdict.refused(str(run.path), "", text))
    require_reference(run, steps)
    manifest = run.manifest
    recorded = {
        **asdict(manifest.selection),
        "replay": manifest.replay,
        "keep_tensors": manifest.keep_tensors,
    }
    others = [
        name for name, value in asked.items() if _unordered(value) != _unordered(recorded[name])
    ]
    if others:
        raise SelectionError(
            f"The reference {path} was recorded with {_shown(recorded, others)}, and this run asks "
            f"for {_shown(asked, others)}. Leave that out to use the reference's, or record again."
        )
    for segment in run.segments if not peers.rank else ():
        read_metrics(run, segment)  # so that damage is reported before the training
    return run


def _unordered(value: Any) -> Any:
    return frozenset(value) if isinstance(value, tuple) else value


def _shown(values: Mapping[str, Any], names: Sequence[str]) -> str:
    shown = {
        name: list(value) if isinstance(value := values[name], tuple) else value for name in names
    }
    return ", ".join(f"{name}={value!r}" for name, value in shown.items())


class Verification:
    """Compares the steps of this process with a reference while it trains;
    the judge says what differs.

    The diverging steps and ``verdict.json`` go to ``current``,
    and replace those of an earlier verification.
    """

    def __init__(
        self,
        reference: Run,
        current: Path,
        *,
        manifest: Mapping[str, Any],
        peers: Peers = ALONE,
        steps: Literal["all", "common"] = "all",
    ) -> None:
        self.reference, self.current, self.rank = reference, current, peers.rank
        self.tally = Tally()
        self.fit = FitRecord(segment=0)  # the current one
        self.is_resuming = False  # the next step is the first after a restored checkpoint
        self.differs_anywhere = False  # any rank differed at the last ``finish``
        # called before a step is stored
        self.keep_tensors: Callable[[StepTrace, int], None] = lambda trace, step: None
        self._steps, self._peers = steps, peers
        self._ranks = reference.rank(peers.rank)
        self._writer = RunWriter.create(current, manifest=manifest, peers=peers, purpose="verify")
        self._machine = self._compare_machines()
        self.metrics = MetricComparison(is_common=steps == "common")
        self.metrics.begin(0, self._readings(0))
        self._fits: list[FitRecord] = []
        self._reference_steps: frozenset[int] = frozenset()
        self._reference_step = lru_cache(1)(partial(reference.view, peers.rank))
        self._rows: list[EvidenceRow] = []  # of the steps since the last one that matches began
        self._lasting: dict[tuple[str, ...], EvidenceRow] = {}  # settings of earlier steps
        self._is_explained = False  # the evidence of the first step that differs is stored
        self._lacks_steps = False
        # the last step with its epoch and its number of differences, if only its end differs; only
        # common steps are compared
        self._held: tuple[StepTrace, int, int, int] | None = None
        self._num_stored = self._num_unwritten = 0
        self._counter = StepCounter()

    @property
    def manifest(self) -> Manifest:
        """run.json of the current run."""
        return self._writer.manifest

    @property
    def segment(self) -> int:
        """Number of the current fit."""
        return self.fit.segment

    @property
    def num_segments(self) -> int:
        """Number of fits in the reference."""
        return sum(len(self._ranks.steps(segment)) > 0 for segment in self._ranks.segments)

    @property
    def num_differing(self) -> int:
        """Sites, metrics and whole steps that differ so far on this rank."""
        return self.tally.num_differing + self.metrics.num_differing

    @property
    def has_divergence(self) -> bool:
        """Whether anything differed so far."""
        return self._lacks_steps or self.num_differing > 0

    def put_nondeterministic_ops(self, ops: Sequence[NondeterministicOp]) -> None:
        """Write the list of called ops without a deterministic implementation."""
        self._writer.put_nondeterministic_ops(ops)

    # fits

    def withdraw_verdict(self) -> None:
        """Remove the files of an outdated verdict, because the comparison continues."""
        self._write_record(UNFINISHED)
        if self.rank == 0:
            with writing(self.current):
                for name in (VERDICT_FILE, REPORT_FILE):
                    (self.current / name).unlink(missing_ok=True)

    def reopen(self, manifest: Mapping[str, Any]) -> None:
        """Prepare for the first fit after a test, in the environment of the fit."""
        self._writer.reopen(manifest)
        self._machine = self._compare_machines()

    def note(self, name: str, value: Any) -> None:
        """Put a fact into run.json of the current run, as ``RunWriter.note`` does."""
        self._writer.note(name, value)

    def add_environment(self, entries: Environment) -> None:
        """Put entries into run.json of the current run, as ``RunWriter.add_environment`` does."""
        self._writer.add_environment(entries)

    def discard(self) -> None:
        """Remove the current run, which has no step."""
        self._writer.discard()

    def _compare_machines(self) -> tuple[EnvironmentDifference, ...]:
        differences = compare_environments(
            self.reference.manifest.environment, self._writer.manifest.environment
        )
        return tuple(difference for difference in differences if difference.is_machine)

    def begin_fit(
        self, segment: int, *, is_resumed: bool = False, is_every_step: bool = True
    ) -> None:
        """Start a fit; a verdict on earlier fits is outdated."""
        self.fit = FitRecord(segment=segment, is_resumed=is_resumed)
        self._fits.append(self.fit)
        try:
            self.withdraw_verdict()
        except BaseException:  # such as a full disk, or Ctrl-C
            self.close(complete=False)
            raise
        self.is_resuming = is_resumed and is_every_step
        self._reference_steps = frozenset(
            self._ranks.steps(segment).tolist() if segment in self._ranks.segments else ()
        )
        self._rows.clear()
        self._lasting.clear()
        self._held = None
        if segment:
            self.metrics.begin(segment, self._readings(segment))
            self._writer.start_segment()

    def end_fit(self) -> None:
        """Record which steps and metrics the fit lacks."""
        self._lacks_steps |= self._steps == "all" and bool(self.fit.missing(self._reference_steps))
        self.metrics.end(with_calls=False)

    # steps

    def holds(self, step: int) -> bool:
        """Return whether the reference has a step of this fit."""
        return step in self._reference_steps

    def has_later_step(self, step: int) -> bool:
        """Return whether the reference has a later step of this fit."""
        return max(self._reference_steps, default=-1) > step

    def expectation(self, step: int) -> Expectation | None:
        """Return the reference's step, if it has it."""
        if step not in self._reference_steps:
            return None
        record = self._reference_step(self.segment, step).record
        return Expectation.of(record.digests, record.program_id)

    def chain(self, step: int) -> int | None:
        """Return the reference's chain at a step as long as nothing differs, else None."""
        if self.has_divergence or step not in self._reference_steps:
            return None
        return self._ranks.chain(self.segment, step)

    def find_resumed(self, state: Mapping[str, int], batch: Mapping[str, int]) -> int | None:
        """Return the step from which a run continues the reference, by the state with which it
        begins, and note it.
        """
        if not self._reference_steps:
            return None
        step = find_resumed_step(self.reference, self.rank, self.segment, state, batch)
        if step is not None:
            self.fit.is_resumed = self.fit.was_found = self.is_resuming = True
        return step

    def compare_state(self, step: int, digest_state: Callable[[], Mapping[str, int]]) -> None:
        """Note state that a checkpoint did not restore as the reference's
        previous step had left it.
        """
        if step - 1 not in self._reference_steps:
            return
        previous = self.reference.view(self.rank, self.segment, step - 1)
        current_state = digest_state()
        sites = [
            (site, int(previous.record.digests[at])) for at, site in state_at_end(previous.program)
        ]
        reference_state = {str(site.name): bits for site, bits in sites}
        changed = [
            name for name, bits in current_state.items() if reference_state.get(name) != bits
        ]
        # the step also recorded what training_step returned
        lacking = [
            str(site.name)
            for site, _ in sites
            if site.name not in current_state and site.of in current_state
        ]
        self.fit.unrestored, self.fit.lacking = (*changed, *lacking), tuple(lacking)
        self.fit.exchanged = exchanged(changed, reference_state, current_state)

    def idle_generators(self, step: int) -> frozenset[str] | None:
        """Return the generators that the reference had not drawn from by the last
        recorded step before this.
        """
        before = max((at for at in self._reference_steps if at < step), default=None)
        if before is None:
            return None
        view = self.reference.view(self.rank, self.segment, before)
        states = zip(view.program.sites, view.record.digests.tolist(), strict=True)
        return frozenset(site.of for site, bits in states if site.part == AT_END and bits == IDLE)

    def put_evidence(self, rows: Iterable[EvidenceRow]) -> None:
        """Keep the evidence of the step that ends, as long as it may be the first that differs."""
        if not self._is_explained:
            self._rows.extend(rows)

    def differences(self, trace: StepTrace, *, step: int) -> tuple[Divergence, ...]:
        """Return how a step differs, without counting it."""
        return (
            compare_steps(*self._views(trace, step)).divergences
            if step in self._reference_steps
            else ()
        )

    def add(self, trace: StepTrace, *, step: int, epoch: int) -> bool:
        """Compare a step; return whether it differs."""
        num_stored = self._num_stored
        differs = self._count_held() | self._compare(trace, step, epoch)
        self._num_unwritten += 1
        if self._num_stored > num_stored or self._num_unwritten == STEPS_BETWEEN_RECORDS:
            self._write_record(UNFINISHED)
        return differs

    def _compare(self, trace: StepTrace, step: int, epoch: int) -> bool:
        if self.is_resuming:
            self._writer.note_resumed(step)
        fit, self.is_resuming = self.fit, False
        if step not in self._reference_steps:
            if self._steps == "common":
                return False
            fit.extra.add(step)
            self.tally.num_differing += 1
            self._store(trace, step, epoch)
            return True
        fit.compared.add(step)
        num_compared, num_differing = self._count(trace, step, epoch)
        self.tally.count([step], trace.program, num_compared)
        if not num_differing:
            # a later step that is stored needs them, and the text of numbers
            self._lasting.update(
                (row[2:5], row)
                for row in self._rows
                if row.kind in LASTING or (row.kind == "number" and row.text)
            )
            self._rows = [*from_batch_start(row for row in self._rows if row.step == step)]
            return False
        self._count_differing(trace, step, epoch, num_differing)
        return True

    def _count(self, trace: StepTrace, step: int, epoch: int) -> tuple[int, int]:
        """Return how many sites both steps have, and how many divergences; none if the current run,
        or the reference, may have ended in a common step.
        """
        record = self._reference_step(self.segment, step).record
        is_same = record.program_id == trace.program.id and record.layout_id == trace.layout_id
        if is_same and np.array_equal(record.digests, trace.digests):
            return len(trace.digests), 0
        views = self._views(trace, step)
        num_compared, num_differing = self._counter.count(*views)
        self.tally.reordered |= self._counter.reordered
        if num_differing and self._steps == "common":
            ends_early = compare_steps(*views).ends_early
            if ends_early == "current":  # unless a step follows
                self._held = trace, step, epoch, num_differing
            is_last = step == max(self._reference_steps)
            if ends_early == "current" or (ends_early == "reference" and is_last):
                num_differing = 0
        return num_compared, num_differing

    def _count_held(self) -> bool:
        """Count the step before as differing that only the end of the run would have explained."""
        if self._held is None:
            return False
        held, self._held = self._held, None
        self._count_differing(*held)
        return True

    def _count_differing(self, trace: StepTrace, step: int, epoch: int, number: int) -> None:
        self.tally.num_differing += number
        self.fit.differing.add(step)
        self._store(trace, step, epoch, is_first=not self._is_explained)
        self._is_explained = True

    def _views(self, trace: StepTrace, step: int) -> tuple[StepView, StepView]:
        return self._reference_step(self.segment, step), trace.view(
            rank=self.rank, step=step, segment=self.segment
        )

    def _store(self, trace: StepTrace, step: int, epoch: int, *, is_first: bool = False) -> None:
        """Store a step that differs or is extra; after ``STORED_STEPS``
        only the first that differs.
        """
        if self._num_stored >= STORED_STEPS and not is_first:
            return
        self._num_stored += 1
        self.fit.num_stored += 1
        if is_first and (rows := [*self._lasting.values(), *self._rows]):
            self._writer.put_evidence(rows)
        self.keep_tensors(trace, step)
        write_step(
            self._writer, trace.view(rank=self.rank, step=step, epoch=epoch, segment=self.segment)
        )

    # what the module logs

    def _readings(self, segment: int) -> Readings:
        return Readings() if self.rank else read_metrics(self.reference, segment)

    def add_metrics(self, reading: Reading) -> bool:
        """Compare logged metrics, on rank 0; return whether they differ."""
        self._writer.put_reading(reading)
        return self.metrics.add(reading)

    def resume_metrics(self, reading: Reading, *, is_first: bool) -> None:
        """Ignore readings that a resumed fit may lack; with ``is_first`` also all before it."""
        self._writer.put_reading(reading)
        self.metrics.resume(reading.step, is_first=is_first)
        if is_first:
            self.fit.metrics_since = reading.step

    # the end

    def finish(self, *, is_pending: bool = False, is_early: bool = False) -> Verdict:
        """Close the files, and return the judge's verdict; all ranks call it after every fit.

        No verdict is written while fits or tests are pending.
        Steps after an early end are not missing.
        """
        try:
            return self._finish(TOGETHER if is_early else "", is_pending=is_pending)
        finally:
            self._writer.release()

    def _finish(self, reason: str, *, is_pending: bool) -> Verdict:
        self.differs_anywhere = any(self._peers.gather(lambda: self._seal(reason), task=END_OF_FIT))
        try:
            content = self._peers.broadcast(
                lambda: self._judge().to_dict(), task="judging the two runs"
            )
            verdict = Verdict.from_dict(content)
        except RankError as error:
            raise RankError(
                f"No verdict: {error} All ranks have closed their files, so you can get the "
                f"verdict later: {self.diff_command}",
                error.rank,
                error.exit_code,
            ) from error
        if not is_pending or self.differs_anywhere:
            self.write(verdict)
        return verdict

    @property
    def diff_command(self) -> str:
        """The command that compares the two runs, for a shell."""
        return shlex.join(["det-callbacks", "diff", str(self.reference.path), str(self.current)])

    def stop(self, reason: str) -> Verdict | None:
        """Close the files after an exception; return the verdict of a lone process that differs."""
        try:
            if not self._seal(reason, complete=False) or self._peers.world_size > 1:
                return None
            verdict = self._judge()
            self.write(verdict)
            return verdict
        finally:
            self._writer.release()

    def _judge(self) -> Verdict:
        verdict = compare_runs(self.reference.path, self.current)
        self._writer.require_own()  # without locks, the files may be those of another verification
        return verdict

    def _seal(self, reason: str, *, complete: bool = True) -> bool:
        """Close the files of this rank and write its record; return whether it differs."""
        self._writer.close(complete=complete)
        self._write_record(reason)
        return self.has_divergence

    def _write_record(self, reason: str) -> None:
        last = max(self.fit.compared | self.fit.extra, default=-1)
        stop = Stop(segment=self.segment, step=last, reason=reason) if reason else None
        record = RankRecord(
            run_id=self.manifest.run_id,
            reference_id=self.reference.manifest.run_id,
            rank=self.rank,
            steps=self._steps,
            fits=tuple(self._fits),
            tally=self.tally,
            machine=self._machine,
            stopped=stop,
        )
        write_record(self.current, record)
        self._num_unwritten = 0

    def write(self, verdict: Verdict) -> None:
        """Write a verdict into the current run's folder."""
        if self.rank == 0:
            write_verdict(self.current, verdict)

    def close(self, *, complete: bool) -> None:
        """Close the current run's files; a second call does nothing."""
        self._writer.close(complete=complete)
        self._writer.release()


def write_step(writer: RunWriter, view: StepView) -> None:
    """Store a step, with the sites that cannot be origins."""
    record = view.record
    writer.put_program(view.program)
    writer.put_layout(view.layout)
    writer.append(record.step, record.epoch, record.program_id, record.layout_id, record.digests)
    writer.put_values(record.step, view.read_values())
    if view.unseen_writes:
        writer.put_evidence(
            [
                EvidenceRow(record.step, "", "unseen_write", value=at)
                for at in sorted(view.unseen_writes)
            ]
        )
    if view.checked is not None:
        writer.put_evidence(
            [EvidenceRow(record.step, "", "checked", text=json.dumps(sorted(view.checked)))]
        )
    writer.flush_evidence()


def write_verdict(folder: Path, verdict: Verdict) -> None:
    """Write a verdict as JSON, atomically."""
    replace_atomically(folder / VERDICT_FILE, json.dumps(verdict.to_dict(), indent=1).encode())


def free_folder(root: Path, *, kind: str = "verify") -> Path:
    """Return the first unused folder of this kind below ``root``."""
    folders = (root / "determinism" / f"{kind}-{number:03d}" for number in count())
    return next(folder for folder in folders if not folder.exists())
