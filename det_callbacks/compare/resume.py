"""Where a run continues its reference, by the state that it begins with, and what it restored."""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress

import numpy as np

from det_callbacks.compare.aligned_steps import num_leading_sites
from det_callbacks.compare.differences import RowDifference, StepDifference, compare_steps
from det_callbacks.compare.evidence import Evidence, find_evidence, read_rows
from det_callbacks.compare.record import FitRecord
from det_callbacks.errors import ReferenceFormatError, SelectionError
from det_callbacks.runs.manifest import framework_of
from det_callbacks.runs.program import IDLE, Program, Site
from det_callbacks.runs.store import Run
from det_callbacks.text import listed
from det_callbacks.verdict import Restored, Resume

MAX_NAMED = 4  # steps in a message
MIN_SHARE = 0.5  # of the changed parameters and buffers, in a run that resumed without all of them


def find_resumed_step(
    run: Run, rank: int, segment: int, state: Mapping[str, int], batch: Mapping[str, int]
) -> int | None:
    """Return the step that continues where a step of the reference left its state,
    or None if none did.

    A fit that begins with the state that the reference began with is not resumed. Parameters and
    buffers have to be equal, or else half of those that the steps until then have changed. If
    several steps left the same ones, the optimizer state and the batch of the following step tell
    which it was. Reads the digests of each step of the fit once, or twice.

    Args:
        run: the reference.
        rank: number of the process.
        segment: number of the fit.
        state: digests of the parameters, buffers and optimizer state with
            which the run begins, by name.
        batch: digests of the tensors of its first batch, by name.

    Raises:
        SelectionError: several steps left this state, and their next batches
            do not tell which it was.
    """
    steps = run.rank(rank).steps(segment).tolist()
    if not steps or _matches(_began_with(run, rank, segment, steps[0]), state):
        return None
    found = [*_left_by(run, rank, segment, steps, state)]
    found = found or _mostly_left_by(run, rank, segment, steps[:-1], state)
    whole = [
        step for step in found if _matches(_left(run, rank, segment, step), state, is_whole=True)
    ]
    found = whole or found
    if len(found) > 1:
        followed = [step for step in found if step + 1 in steps]
        given = [
            step
            for step in followed
            if _batch_of(run, rank, segment, step + 1).items() >= batch.items()
        ]
        found = given if batch and given else found
    if len(found) > 1:
        raise SelectionError(
            "The run begins with the parameters that steps "
            f"{listed(map(str, found), limit=MAX_NAMED)} of {run.path} left, so it is unknown "
            "where it resumed. Pass the number of its first step: resume_from(step) of a "
            "TrainingRun."
        )
    return found[0] + 1 if found else None


def _left_by(
    run: Run, rank: int, segment: int, steps: list[int], state: Mapping[str, int]
) -> Iterator[int]:
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


def _mostly_left_by(
    run: Run, rank: int, segment: int, steps: list[int], state: Mapping[str, int]
) -> list[int]:
    """Return the steps that left most of a state, where a resume restored at least half of what
    they had changed.
    """
    if not steps:
        return []
    began = _began_with(run, rank, segment, steps[0])
    places: dict[int, tuple[np.ndarray, ...]] = {}  # positions, and the bits of state and beginning
    shares: dict[int, float] = {}
    for step in steps:
        record = run.rank(rank).read(segment, step)
        if record.program_id not in places:
            left = _tensors_left(run.view(rank, segment, step).program)
            is_same = all(name in left for name in _tensors_of(state, left))
            names = [name for name in left if is_same and name in state and name in began]
            bits = ([known[name] for name in names] for known in (state, began))
            positions = np.array([left[name] for name in names], dtype=np.int64)
            places[record.program_id] = positions, *(np.array(one, dtype=np.uint64) for one in bits)
        positions, wanted, first = places[record.program_id]
        digests = record.digests[positions]
        changed = digests != first
        if changed.any():
            shares[step] = float(np.mean(digests[changed] == wanted[changed]))
    most = max(shares.values(), default=0.0)
    return [step for step, share in shares.items() if share == most] if most >= MIN_SHARE else []


def _tensors_left(program: Program) -> dict[str, int]:
    """Return the parameters and buffers that a step left, with their positions."""
    return {
        site.of: position for position, site in state_at_end(program) if site.subject == "tensor"
    }


def _expected(program: Program, state: Mapping[str, int]) -> tuple[np.ndarray, np.ndarray] | None:
    """Return the positions of a program's parameters and buffers at the end,
    and their digests in ``state``.
    """
    left = _tensors_left(program)
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
    return {
        str(site.name): int(view.record.digests[at]) for at, site in sites if site.phase == "state"
    }


def _batch_of(run: Run, rank: int, segment: int, step: int) -> dict[str, int]:
    view = run.view(rank, segment, step)
    sites = enumerate(view.program.sites)
    of_batch = ((at, site) for at, site in sites if site.phase == "data" and site.role == "named")
    return {site.of: int(view.record.digests[at]) for at, site in of_batch}


def _matches(known: Mapping[str, int], state: Mapping[str, int], *, is_whole: bool = False) -> bool:
    """Return whether the names that both have, or with ``is_whole`` all of
    ``state``, have equal digests.
    """
    names = [name for name in state if is_whole or name in known]
    return bool(names) and all(known.get(name) == state[name] for name in names)


def exchanged(
    names: Sequence[str], reference: Mapping[str, int], current: Mapping[str, int]
) -> tuple[str, ...]:
    """Return the names whose current bits are the reference's of one another,
    as if a list had another order.
    """
    of_bits = {reference[name]: name for name in names if name in reference}
    found = {
        name: of_bits[current[name]]
        for name in names
        if name in reference and current[name] in of_bits
    }
    return (*found,) if {*found} == {*found.values()} else ()


def lost_gradients(difference: StepDifference) -> list[str]:
    """Return the gradients to which the reference adds what they held before the step, and the
    current run does not.

    A gradient from before is unnamed: its name is that of what the op writes.
    """
    aligned, sites = (
        {position for position, _ in difference.pairs},
        difference.reference.program.sites,
    )
    names = {site.name for site in sites if site.phase == "gradient" and not site.op}
    missing = (difference.site(row) for row, kind in difference.kinds.items() if kind == "missing")
    found = (
        site.name or ""
        for site in missing
        if site.op
        and site.name in names
        and any(sites[read].role == "input" and read not in aligned for read in site.inputs)
    )
    return [*dict.fromkeys(found)]


def resume_of(reference: Run, current: Run, fit: FitRecord) -> Resume | None:
    """Return where a verified fit resumed on rank 0, and what it restored; None if it did not."""
    steps = fit.compared | fit.extra
    if not fit.is_resumed or not steps:
        return None
    step, of_step = min(steps), dict[str, int]()
    restored = _restored_state(reference, fit, step)
    if step in fit.compared:
        starts, of_step = _restored_starts(reference, current, fit, step)
        restored |= starts
    return Resume(
        step=step,
        how="found" if fit.was_found else "given",
        restored=restored,
        of_step=of_step,
        framework=framework_of(current.manifest.environment),
    )


def _restored_state(
    reference: Run, fit: FitRecord, step: int
) -> dict[str, Restored | Mapping[str, Restored]]:
    """Return what a resume restored of the state that the reference's previous step had left."""
    rank, segment = 0, fit.segment
    known = reference.rank(rank).steps(segment).tolist()
    if step - 1 not in known:
        return {}
    before = reference.view(rank, segment, step - 1)
    sites = [site for _, site in state_at_end(before.program)]
    trained = {site.of for site in before.program.sites if site.phase == "gradient" and not site.op}
    began = _began_with(reference, rank, segment, known[0])
    # the step also recorded what it returned, such as the loss
    tensors = [
        site
        for site in sites
        if site.subject == "tensor" and (site.of in trained or site.of in began)
    ]
    parts = {
        "parameters": [site for site in tensors if site.of in trained],
        "buffers": [site for site in tensors if site.of not in trained],
    }
    restored: dict[str, Restored | Mapping[str, Restored]] = {
        part: _restored(fit, found) for part, found in parts.items() if found
    }
    by_part: defaultdict[str, list[Site]] = defaultdict(list)
    for site in sites:
        if site.subject == "state":
            by_part[site.part].append(site)
    if by_part:
        restored["optimizer"] = {part: _restored(fit, of_part) for part, of_part in by_part.items()}
    return restored


def _restored(fit: FitRecord, sites: Sequence[Site]) -> Restored:
    names = {site.name for site in sites}
    if names <= {*fit.lacking}:
        return "missing"
    other = names & {*fit.unrestored}
    if not other:
        return "restored"
    return "exchanged" if other <= {*fit.exchanged} else "differs"


def _restored_starts(
    reference: Run, current: Run, fit: FitRecord, step: int
) -> tuple[dict[str, Restored | Mapping[str, Restored]], dict[str, int]]:
    """Return what a resume restored of all else with which its first step starts,
    and the steps of what differs.
    """
    view = reference.view(0, fit.segment, step)
    leading = [*enumerate(view.program.sites[: num_leading_sites(view.program)])]
    restored: dict[str, Restored | Mapping[str, Restored]] = {}
    difference, evidence = None, Evidence()
    rows: dict[tuple[str, str], RowDifference] = {}
    if step in fit.differing:
        difference = compare_steps(view, current.view(0, fit.segment, step))
        found = [
            difference.row_difference(row) for row in difference.kinds if difference.is_leading[row]
        ]
        rows = {(one.site.subject or one.site.phase, one.site.of): one for one in found}
        with suppress(ReferenceFormatError):  # the verdict says that it cannot be read
            evidence = find_evidence(reference, current, difference)
    if evidence.options:
        restored["options"] = {option.name: "differs" for option in evidence.options}
    owners = {site.of for _, site in leading if site.subject == "further"}
    owners |= {of for subject, of in rows if subject == "further"}
    if owners:
        restored["further"] = {
            of: "differs" if ("further", of) in rows else "restored" for of in sorted(owners)
        }
    reseeded = {change.name for change in evidence.generators if change.is_reseeded}
    generators: dict[str, Restored] = {}
    for position, site in leading:
        if site.subject == "generator" and not site.part and ("generator", site.of) in rows:
            generators[site.of] = "reseeded" if site.of in reseeded else "differs"
        elif (
            site.subject == "generator" and not site.part and view.record.digests[position] != IDLE
        ):
            generators[site.of] = "restored"
    if generators:
        restored["generators"] = generators
    if difference is not None and lost_gradients(difference):
        restored["gradients"] = "missing"
    is_other_batch = any(one.site.phase == "data" for one in rows.values())
    if any(site.phase == "data" for _, site in leading):
        restored["data"] = "differs" if is_other_batch else "restored"
    of_step: dict[str, int] = {}
    digests = {
        of: rows["generator", of].divergence.current_digest
        for of in generators
        if ("generator", of) in rows
    }
    states = {of: int(digest, 16) for of, digest in digests.items() if digest is not None}
    with suppress(ReferenceFormatError):
        of_step = _steps_of_states(reference, fit.segment, step, states)
    if is_other_batch and evidence.batch.indices == "same":
        of_step["data"] = step
    elif is_other_batch and evidence.batch.is_whole and evidence.batch.found_at is not None:
        of_step["data"] = evidence.batch.found_at
    return restored, of_step


def _steps_of_states(
    run: Run, segment: int, step: int, states: Mapping[str, int]
) -> dict[str, int]:
    """Return the first step, of those up to this one, in which each generator
    had a state, if one had it.
    """
    values = np.array([*states.values()], dtype=np.uint64)
    found: dict[str, int] = {}
    for row in read_rows(
        run, 0, segment, step, lambda batch: np.isin(batch.column("value").to_numpy(), values)
    ):
        if (
            row.kind in ("generator", "start")
            and row.step <= step
            and states.get(row.of) == row.value != IDLE
        ):
            found.setdefault(row.of, row.step)
    return found
