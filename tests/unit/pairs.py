"""Two runs of a few hand-made steps, recorded or verified, and the verdict on them."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from step_builder import StepBuilder, reducing_step, training_step
from stored_runs import OneOf

from det_callbacks.judge import compare_runs
from det_callbacks.runs.manifest import Attempt, read_manifest
from det_callbacks.runs.program import StepView
from det_callbacks.runs.selection import Selection
from det_callbacks.runs.store import Run
from det_callbacks.runs.writer import RunWriter
from det_callbacks.verdict import EnvironmentDifference, Verdict
from det_callbacks.verification import Verification, write_step

Steps = Mapping[int, StepBuilder]
Pair = tuple[StepBuilder, StepBuilder]


def manifest_of(environment: Mapping[str, Any] | None = None, selection: Selection | None = None) -> dict[str, Any]:
    chosen = (selection or Selection()).to_dict()
    return {"selection": chosen, "environment": dict(environment or {}), "settings": {}}


def record(
    path: Path,
    steps: Steps | Sequence[Steps],
    *,
    complete: bool = True,
    others: Sequence[Steps | Sequence[Steps]] = (),
    selection: Selection | None = None,
    environment: Mapping[str, Any] | None = None,
    resumed: int | None = None,
    **options: Any,
) -> Path:
    """Write a run; ``steps`` is {step: builder}, or a list of these, one a fit; ``others`` those of further ranks."""
    manifest = manifest_of(environment, selection)
    for rank, known in enumerate((steps, *others)):
        peers = OneOf(rank, 1 + len(others))
        if rank:
            writer = RunWriter(path, peers, replace(read_manifest(path), attempts=(Attempt(),)), attempt=0, segment=0)
        else:
            writer = RunWriter.create(path, peers=peers, manifest=manifest, **options)
        if not rank and resumed is not None:
            writer.note_resumed(resumed)
        for number, fit in enumerate(known if isinstance(known, list) else [known]):
            if number:
                writer.start_segment()
            for step, builder in fit.items():
                write_step(writer, builder.view(step=step, rank=rank, ops_seen=3))
        writer.close(complete=complete)
    return path


def steps_of(numbers: Iterable[int], **changes: Any) -> dict[int, StepBuilder]:
    """Return a run's steps; ``changes`` is {"s5": {...}} for what is planted in step 5."""
    numbers = list(numbers)
    return {
        step: training_step(rows=(step, 2, 3, 4), is_first=step == numbers[0], **changes.get(f"s{step}", {}))
        for step in numbers
    }


def environments(entries: Iterable[EnvironmentDifference]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return two environments that differ so."""
    rows = [(one, {"changes_bits": one.changes_bits, "is_machine": one.is_machine}) for one in entries]
    return tuple(
        {one.name: {**row, "value": getattr(one, side)} for one, row in rows} for side in ("reference", "current")
    )


def judge(
    folder: Path,
    *pairs: Pair | None,
    step: int = 7,
    steps: Mapping[int, int] | None = None,
    environment: Iterable[EnvironmentDifference] = (),
    is_resumed: bool = False,
    begins_before: bool = False,
    selection: Selection | None = None,
) -> Verdict:
    """Return the verdict on ranks each of which ran one step in two ways, in the reference and in the current run.

    A pair of None is the same step; ``steps`` has another number for some ranks, and ``environment`` what differs
    besides. ``is_resumed``: the current run has gone on with the step; ``begins_before``: an equal one comes before it.
    """
    number, before, runs = len(list(folder.iterdir())), {0: training_step()} if begins_before else {}, []
    for side, entries in enumerate(environments(environment)):
        ranks = [
            {**before, (steps or {}).get(rank, step): reducing_step() if pair is None else pair[side]}
            for rank, pair in enumerate(pairs)
        ]
        options = {"environment": entries, "resumed": step if side and is_resumed else None, "selection": selection}
        runs.append(record(folder / f"{number}-{side}", ranks[0], others=ranks[1:], **options))
    return compare_runs(*runs)


def trace_of(builder: StepBuilder) -> Any:
    """Return a hand-made step as the trace hands it over."""
    seen = builder.view(ops_seen=3)

    def view(*, epoch: int = 0, **place: int) -> StepView:
        return builder.view(**place, ops_seen=3)

    parts = {"program": seen.program, "layout": seen.layout, "layout_id": seen.layout.id}
    return SimpleNamespace(**parts, digests=seen.record.digests, view=view)


def detector(reference: Path, current: Path, *, environment: Any = None, **options: Any) -> Verification:
    """Return a verification that has not begun."""
    return Verification(Run.open(reference), current, manifest=manifest_of(environment), **options)


def run_fits(verification: Verification, fits: Sequence[Steps], *, ends: bool = True) -> None:
    """Let a verification see the steps of some fits, of which the last may not come to its end."""
    for number, fit in enumerate(fits):
        if number:
            verification.close(complete=True)
        verification.begin_fit(number)
        for step, builder in fit.items():
            verification.add(trace_of(builder), step=step, epoch=0)
        if ends or number < len(fits) - 1:
            verification.end_fit()
