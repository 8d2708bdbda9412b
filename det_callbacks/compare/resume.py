"""Where a run continues its reference, by the state that it begins with, and what it restored."""

from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from det_callbacks.compare.differences import num_leading_sites
from det_callbacks.compare.record import FitRecord
from det_callbacks.compare.step import compare_steps
from det_callbacks.errors import SelectionError
from det_callbacks.runs.program import Program, Site
from det_callbacks.runs.store import Run
from det_callbacks.text import listed
from det_callbacks.verdict import Restored, Resume

MAX_NAMED = 4  # steps in a message


def find_resumed_step(
    run: Run, rank: int, segment: int, state: Mapping[str, int], batch: Mapping[str, int]
) -> int | None:
    """Return the step that continues where a step of the reference left its state, or None if none did.

    A fit that begins with the state that the reference began with is not resumed. Parameters and buffers have to be
    equal. If several steps left the same ones, the optimizer state and the batch of the following step tell which it
    was. Reads the digests of each step of the fit once.

    Args:
        run: the reference.
        rank: number of the process.
        segment: number of the fit.
        state: digests of the parameters, buffers and optimizer state with which the run begins, by name.
        batch: digests of the tensors of its first batch, by name.

    Raises:
        SelectionError: several steps left this state, and their next batches do not tell which it was.
    """
    steps = run.rank(rank).steps(segment).tolist()
    if not steps or _matches(_began_with(run, rank, segment, steps[0]), state):
        return None
    found = [step for step in _left_by(run, rank, segment, steps, state) if step + 1 in steps]
    whole = [step for step in found if _matches(_left(run, rank, segment, step), state, is_whole=True)]
    found = whole or found
    if len(found) > 1:
        given = [step for step in found if _batch_of(run, rank, segment, step + 1).items() >= batch.items()]
        found = given if batch and given else found
    if len(found) > 1:
        raise SelectionError(
            f"The run begins with the parameters that steps {listed(map(str, found), limit=MAX_NAMED)} of {run.path} "
            "left, so it is unknown where it resumed. Pass the number of its first step: resume_from(step) of a "
            "TrainingRun."
        )
    return found[0] + 1 if found else None


def _left_by(run: Run, rank: int, segment: int, steps: list[int], state: Mapping[str, int]) -> Iterator[int]:
    """Yield the steps after which parameters and buffers have these digests."""
    expected: dict[int, tuple[np.ndarray, np.ndarray] | None] = {}
    for step in steps:
        record = run.rank(rank).read(segment, step)
        if record.program_id not in expected:
            program = run.view(rank, segment, step).program
            expected[record.program_id] = _expected(program, state)
        positions_and_bits = expected[record.program_id]
        if positions_and_bits is not None:
            positions, bits = positions_and_bits
            if np.array_equal(record.digests[positions], bits):
                yield step


def _expected(program: Program, state: Mapping[str, int]) -> tuple[np.ndarray, np.ndarray] | None:
    """Return the positions of a program's parameters and buffers at the end, and their digests in ``state``."""
    left = {site.of: position for position, site in state_at_end(program) if site.subject == "tensor"}
    names = [name for name in left if name in state]
    if not names or any(name not in left for name in _tensors_of(state, left)):
        return None
    positions = np.array([left[name] for name in names], dtype=np.int64)
    return positions, np.array([state[name] for name in names], dtype=np.uint64)


def _tensors_of(state: Mapping[str, int], left: Mapping[str, int]) -> list[str]:
    """Return the names of a state without those of optimizers: "exp_avg of net.weight"."""
    owners = tuple(f" of {name}" for name in left)
    return [name for name in state if name in left or not name.endswith(owners)]


def state_at_end(program: Program) -> Iterator[tuple[int, Site]]:
    """Yield the parameters, buffers and optimizer state that a step left, with their positions."""
    first = num_leading_sites(program)
    for position, site in enumerate(program.sites[first:], start=first):
        if site.phase == "state" and site.role == "named":
            yield position, site


def _left(run: Run, rank: int, segment: int, step: int) -> dict[str, int]:
    view = run.view(rank, segment, step)
    return {str(site.name): int(view.record.digests[at]) for at, site in state_at_end(view.program)}


def _began_with(run: Run, rank: int, segment: int, step: int) -> dict[str, int]:
    view = run.view(rank, segment, step)
    sites = enumerate(view.program.sites[: num_leading_sites(view.program)])
    return {str(site.name): int(view.record.digests[at]) for at, site in sites if site.phase == "state"}


def _batch_of(run: Run, rank: int, segment: int, step: int) -> dict[str, int]:
    view = run.view(rank, segment, step)
    sites = enumerate(view.program.sites)
    of_batch = ((at, site) for at, site in sites if site.phase == "data" and site.role == "named")
    return {site.of: int(view.record.digests[at]) for at, site in of_batch}


def _matches(known: Mapping[str, int], state: Mapping[str, int], *, is_whole: bool = False) -> bool:
    """Return whether the names that both have, or with ``is_whole`` all of ``state``, have equal digests."""
    names = [name for name in state if is_whole or name in known]
    return bool(names) and all(known.get(name) == state[name] for name in names)


def resume_of(reference: Run, current: Run, fit: FitRecord) -> Resume | None:
    """Return where a verified fit resumed on rank 0, and what it restored; None if it did not."""
    steps = fit.compared | fit.extra
    if not fit.is_resumed or not steps:
        return None
    step, rank, segment = min(steps), 0, fit.segment
    known = reference.rank(rank).steps(segment).tolist()
    restored: dict[str, Restored | Mapping[str, Restored]] = {}
    if step - 1 in known:
        before = reference.view(rank, segment, step - 1)
        sites = [site for _, site in state_at_end(before.program)]
        trained = {site.of for site in before.program.sites if site.phase == "gradient" and not site.op}
        began = _began_with(reference, rank, segment, known[0])
        # the step also recorded what it returned, such as the loss
        tensors = [site for site in sites if site.subject == "tensor" and (site.of in trained or site.of in began)]
        parts = {
            "parameters": [site for site in tensors if site.of in trained],
            "buffers": [site for site in tensors if site.of not in trained],
            "optimizer": [site for site in sites if site.subject == "state"],
        }
        restored |= {part: _restored(fit, found) for part, found in parts.items() if found}
    if step in fit.compared:
        differing: set[tuple[str, str]] = set()
        if step in fit.differing:
            difference = compare_steps(reference.view(rank, segment, step), current.view(rank, segment, step))
            rows = [difference.site(row) for row in difference.kinds if difference.is_leading[row]]
            differing = {(site.phase, site.of) for site in rows}
        of_step = reference.view(rank, segment, step).program
        leading = of_step.sites[: num_leading_sites(of_step)]
        generators = [site.of for site in leading if site.subject == "generator" and not site.part]
        if generators:
            restored["generators"] = {of: "differs" if ("rng", of) in differing else "restored" for of in generators}
        if any(site.phase == "data" for site in leading):
            is_other = any(phase == "data" for phase, _ in differing)
            restored["data"] = "differs" if is_other else "restored"
    return Resume(step=step, how="found" if fit.was_found else "given", restored=restored)


def _restored(fit: FitRecord, sites: Sequence[Site]) -> Restored:
    names = {site.name for site in sites}
    if names <= {*fit.lacking}:
        return "missing"
    return "restored" if names.isdisjoint(fit.unrestored) else "differs"
