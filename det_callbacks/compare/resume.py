"""Where a run continues its reference, by the state that it begins with, and what it restored."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress

import numpy as np

from det_callbacks.compare.aligned_steps import num_leading_sites
from det_callbacks.compare.differences import RowDifference, StepDifference, compare_steps
from det_callbacks.compare.evidence import Evidence, find_evidence, rows_with_values
from det_callbacks.compare.record import FitRecord
from det_callbacks.errors import ReferenceFormatError, SelectionError
from det_callbacks.runs.manifest import framework_of
from det_callbacks.runs.program import IDLE, Program, Site, StepView
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
    if not steps:
        return None
    began = _began_with(run.view(rank, segment, steps[0]))
    if _are_equal_in_both(began, state):
        return None
    candidates = _left_by(run, rank, segment, steps, state)
    candidates = candidates or _mostly_left_by(run, rank, segment, steps[:-1], state, began)
    left_all = [
        step for step in candidates if _has_all(_left(run.view(rank, segment, step)), state)
    ]
    candidates = left_all or candidates
    if len(candidates) > 1 and batch:
        next_views = (
            (step, run.view(rank, segment, step + 1)) for step in candidates if step + 1 in steps
        )
        with_batch = [step for step, view in next_views if _has_all(_batch_of(view), batch)]
        candidates = with_batch or candidates
    if len(candidates) > 1:
        raise SelectionError(
            "The run begins with the parameters that steps "
            f"{listed(map(str, candidates), limit=MAX_NAMED)} of {run.path} left, so it is unknown "
            "where it resumed. In a loop, give a TrainingRun the number of its first step: "
            "resume_from(step); Lightning tells it if it restores the checkpoint itself "
            "(fit(ckpt_path=...))."
        )
    return candidates[0] + 1 if candidates else None


def _left_by(
    run: Run, rank: int, segment: int, steps: list[int], state: Mapping[str, int]
) -> list[int]:
    """Return the steps after which parameters and buffers have these digests."""
    left_by_step = _tensors_left(run, rank, segment, steps, state)
    return [step for step, left, (wanted,) in left_by_step if np.array_equal(left, wanted)]


def _mostly_left_by(
    run: Run,
    rank: int,
    segment: int,
    steps: list[int],
    state: Mapping[str, int],
    began: Mapping[str, int],
) -> list[int]:
    """Return the steps that left most of a state, where a resume restored at least half of what
    they had changed since the fit began.
    """
    shares: dict[int, float] = {}
    for step, left, (wanted, first) in _tensors_left(run, rank, segment, steps, state, began):
        is_changed = left != first
        if is_changed.any():
            shares[step] = float(np.mean(left[is_changed] == wanted[is_changed]))
    most = max(shares.values(), default=0.0)
    return [step for step, share in shares.items() if share == most] if most >= MIN_SHARE else []


def _tensors_left(
    run: Run, rank: int, segment: int, steps: list[int], *states: Mapping[str, int]
) -> Iterator[tuple[int, np.ndarray, Sequence[np.ndarray]]]:
    """Yield steps with the digests of the parameters and buffers that they left, and with those in
    each of ``states``; of the tensors that all of them have.

    A step that lacks a tensor of the first state is left out.
    """
    by_program: dict[int, tuple[list[int], list[np.ndarray]]] = {}
    for step in steps:
        record = run.rank(rank).read(segment, step)
        if record.program_id not in by_program:
            program = run.view(rank, segment, step).program
            by_program[record.program_id] = _places_and_digests(program, states)
        positions, digests = by_program[record.program_id]
        if positions:
            yield step, record.digests[positions], digests


def _places_and_digests(
    program: Program, states: Sequence[Mapping[str, int]]
) -> tuple[list[int], list[np.ndarray]]:
    """Return the positions of a program's parameters and buffers at the end that all states have,
    and their digests in each state; no positions if a tensor of the first state has none.
    """
    left = {site.of: at for at, site in state_at_end(program) if site.subject == "tensor"}
    # a state of an optimizer is "exp_avg of net.weight"
    owners = tuple(f" of {name}" for name in left)
    if any(name not in left and not name.endswith(owners) for name in states[0]):
        return [], []
    names = [name for name in left if all(name in state for state in states)]
    digests = [np.array([state[name] for name in names], dtype=np.uint64) for state in states]
    return [left[name] for name in names], digests


def state_at_end(program: Program) -> Iterator[tuple[int, Site]]:
    """Yield the parameters, buffers and optimizer state that a step left, with their positions."""
    first = num_leading_sites(program)
    for position, site in enumerate(program.sites[first:], start=first):
        if site.phase == "state" and site.role == "named":
            yield position, site


def _left(view: StepView) -> dict[str, int]:
    """Return the digests of the state that a step left, by name."""
    return _digests(view, state_at_end(view.program), lambda site: str(site.name))


def _began_with(view: StepView) -> dict[str, int]:
    """Return the digests of the state that a step began with, by name."""
    leading = ((at, site) for at, site in _leading(view) if site.phase == "state")
    return _digests(view, leading, lambda site: str(site.name))


def _batch_of(view: StepView) -> dict[str, int]:
    sites = enumerate(view.program.sites)
    tensors = ((at, site) for at, site in sites if site.phase == "data" and site.role == "named")
    return _digests(view, tensors, lambda site: site.of)


def _leading(view: StepView) -> list[tuple[int, Site]]:
    """Return the sites that come before everything that a step computed, with their positions."""
    return [*enumerate(view.program.sites[: num_leading_sites(view.program)])]


def _digests(
    view: StepView, sites: Iterable[tuple[int, Site]], name_of: Callable[[Site], str]
) -> dict[str, int]:
    return {name_of(site): int(view.record.digests[position]) for position, site in sites}


def _are_equal_in_both(first: Mapping[str, int], second: Mapping[str, int]) -> bool:
    names = first.keys() & second.keys()
    return bool(names) and all(first[name] == second[name] for name in names)


def _has_all(digests: Mapping[str, int], wanted: Mapping[str, int]) -> bool:
    return digests.items() >= wanted.items()


def exchanged(
    names: Sequence[str], reference: Mapping[str, int], current: Mapping[str, int]
) -> tuple[str, ...]:
    """Return the names whose current bits are the reference's of one another,
    as if a list had another order.
    """
    name_of_bits = {reference[name]: name for name in names if name in reference}
    partners = {
        name: name_of_bits[current[name]]
        for name in names
        if name in reference and current[name] in name_of_bits
    }
    return (*partners,) if {*partners} == {*partners.values()} else ()


def lost_gradients(difference: StepDifference) -> list[str]:
    """Return the gradients to which the reference adds what they held before the step, and the
    current run does not.

    A gradient from before is unnamed: its name is that of what the op writes.
    """
    aligned = {position for position, _ in difference.pairs}
    sites = difference.reference.program.sites
    names = {site.name for site in sites if site.phase == "gradient" and not site.op}
    missing = (difference.site(row) for row, kind in difference.kinds.items() if kind == "missing")
    lost = (
        site.name or ""
        for site in missing
        if site.op
        and site.name in names
        and any(sites[read].role == "input" and read not in aligned for read in site.inputs)
    )
    return [*dict.fromkeys(lost)]


def resume_of(reference: Run, current: Run, fit: FitRecord) -> Resume | None:
    """Return where a verified fit resumed on rank 0, and what it restored; None if it did not."""
    steps = fit.compared | fit.extra
    if not fit.is_resumed or not steps:
        return None
    step, of_step = min(steps), dict[str, int]()
    restored = _restored_state(reference, fit, step)
    if step in fit.compared:
        resumed = _ResumedStep(reference, current, fit, step)
        restored |= resumed.restored()
        of_step = resumed.of_step(reference)
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
    steps = reference.rank(rank).steps(segment).tolist()
    if step - 1 not in steps:
        return {}
    before = reference.view(rank, segment, step - 1)
    sites = [site for _, site in state_at_end(before.program)]
    trained = {site.of for site in before.program.sites if site.phase == "gradient" and not site.op}
    began = _began_with(reference.view(rank, segment, steps[0]))
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
        part: _restored(fit, of_part) for part, of_part in parts.items() if of_part
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
    differing = names & {*fit.unrestored}
    if not differing:
        return "restored"
    return "exchanged" if differing <= {*fit.exchanged} else "differs"


class _ResumedStep:
    """The first step after a resume: what it starts with, besides parameters and optimizer state.

    ``rows`` has what differs of it, by subject (or phase) and what it is of.
    """

    def __init__(self, reference: Run, current: Run, fit: FitRecord, step: int) -> None:
        self.view = reference.view(0, fit.segment, step)
        self.leading = _leading(self.view)
        self.rows: dict[tuple[str, str], RowDifference] = {}
        self.evidence = Evidence()
        self.has_lost_gradients = False
        if step in fit.differing:
            difference = compare_steps(self.view, current.view(0, fit.segment, step))
            for row in difference.kinds:
                if difference.is_leading[row]:
                    site = difference.site(row)
                    key = site.subject or site.phase, site.of
                    self.rows[key] = difference.row_difference(row)
            self.has_lost_gradients = bool(lost_gradients(difference))
            with suppress(ReferenceFormatError):  # the verdict says that it cannot be read
                self.evidence = find_evidence(reference, current, difference)

    @property
    def has_other_batch(self) -> bool:
        return any(row.site.phase == "data" for row in self.rows.values())

    def generators(self) -> dict[str, Restored]:
        """Return the generators from which something drew, or that differ."""
        reseeded = {change.name for change in self.evidence.generators if change.is_reseeded}
        restored: dict[str, Restored] = {}
        for position, site in self.leading:
            if site.subject != "generator" or site.part:
                continue
            if ("generator", site.of) in self.rows:
                restored[site.of] = "reseeded" if site.of in reseeded else "differs"
            elif self.view.record.digests[position] != IDLE:
                restored[site.of] = "restored"
        return restored

    def further(self) -> dict[str, Restored]:
        """Return the state that belongs to neither the model nor the optimizers."""
        owners = {site.of for _, site in self.leading if site.subject == "further"}
        owners |= {of for subject, of in self.rows if subject == "further"}
        return {
            of: "differs" if ("further", of) in self.rows else "restored" for of in sorted(owners)
        }

    def restored(self) -> dict[str, Restored | Mapping[str, Restored]]:
        restored: dict[str, Restored | Mapping[str, Restored]] = {}
        if self.evidence.options:
            restored["options"] = {option.name: "differs" for option in self.evidence.options}
        if further := self.further():
            restored["further"] = further
        if generators := self.generators():
            restored["generators"] = generators
        if self.has_lost_gradients:
            restored["gradients"] = "missing"
        if any(site.phase == "data" for _, site in self.leading):
            restored["data"] = "differs" if self.has_other_batch else "restored"
        return restored

    def of_step(self, reference: Run) -> dict[str, int]:
        """Return the reference's steps whose generators and data the differing ones are."""
        digests = {
            of: row.divergence.current_digest
            for of in self.generators()
            if (row := self.rows.get(("generator", of))) is not None
        }
        states = {of: int(digest, 16) for of, digest in digests.items() if digest is not None}
        of_step: dict[str, int] = {}
        record, batch = self.view.record, self.evidence.batch
        with suppress(ReferenceFormatError):
            of_step = _steps_of_states(reference, record.segment, record.step, states)
        if self.has_other_batch and batch.indices == "same":
            of_step["data"] = record.step
        elif self.has_other_batch and batch.source is not None and batch.source.has_all:
            of_step["data"] = batch.source.step
        return of_step


def _steps_of_states(
    run: Run, segment: int, step: int, states: Mapping[str, int]
) -> dict[str, int]:
    """Return the first step, of those up to this one, in which each generator
    had a state, if one had it.
    """
    first_steps: dict[str, int] = {}
    for row in rows_with_values(run, 0, segment, step, states.values()):
        if (
            row.kind in ("generator", "start")
            and row.step <= step
            and states.get(row.of) == row.value != IDLE
        ):
            first_steps.setdefault(row.of, row.step)
    return first_steps
