"""Findings about generators: states that come back, and recomputations that differ."""

from collections.abc import Mapping

import numpy as np

from det_callbacks.compare.differences import recomputed_otherwise
from det_callbacks.findings.facts import FitSummary
from det_callbacks.findings.queries import place
from det_callbacks.findings.rule import Found, found_in, from_to, of_one_process
from det_callbacks.runs.evidence import BATCH_START
from det_callbacks.runs.program import HOST_GENERATORS, IDLE, PASSED, StepView

MIN_EQUAL = 3  # steps whose draws are all equal


@of_one_process("state")
def reseeded(fit: FitSummary) -> Found | None:
    """A generator returns to the state of an earlier step, because something seeds it inside the loop.

    Example:
        At step 8 the generator torch.cpu is back in its state of step 4, so both steps draw the
        same numbers (dropout masks, noise, augmentation). Seed once, before the training: look for
        seed_everything, manual_seed and set_rng_state in training_step, hooks, the data set and the
        validation code.
    """
    states = fit.generator_states(BATCH_START)
    for name, known in states.items():
        since: dict[int, int] = {}  # state -> the step that had it last
        before = None
        for step, state in known.items():
            if state != before and state in since:
                return _returned(fit, name, since[state], step)
            since[state] = step
            before = state
    # seeding inside a step shows in the states that its ops draw from
    for name, drawn in _drawn_states(fit).items():
        has_moved = len(set(states.get(name, {}).values())) > 1
        first, last = (_most_frequent({step: ends[at] for step, ends in drawn.items()}) for at in (1, 2))
        is_put_back = all(begin == end for begin, _, _, end in drawn.values())  # as fork_rng does
        if has_moved and not is_put_back and len(first) >= MIN_EQUAL and first == last:
            return _returned(fit, name, *first[:2])
    return None


def _drawn_states(fit: FitSummary) -> dict[str, dict[int, tuple[int, int, int, int]]]:
    """Return four states of each step that draws: at its begin, of its first and last draw, at its end.

    An op that may draw reads the state; it drew if the next reading of the step differs. Attention without
    dropout reads it and draws nothing.
    """
    found: dict[str, dict[int, tuple[int, int, int, int]]] = {}
    for program, records in fit.programs:
        readings: dict[str, list[int]] = {}
        for position, site in enumerate(program.sites):
            if site.role == "generator" and site.part != PASSED and site.of not in HOST_GENERATORS:
                readings.setdefault(site.of, []).append(position)
        for name, positions in readings.items():
            # the step itself reads the state first, and last
            of_ops = np.array([program.sites[at].occurrence > 0 for at in positions[:-1]], dtype=bool)
            for record in records:
                states = record.digests[positions]
                draws = states[:-1][of_ops & (states[1:] != states[:-1]) & (states[1:] != IDLE)]
                if len(draws):
                    begin = fit.generator_starts.get(name, IDLE) if states[0] == IDLE else states[0]
                    known = int(begin), int(draws[0]), int(draws[-1]), int(states[-1])
                    found.setdefault(name, {})[record.step] = known
    return found


def _most_frequent(states: Mapping[int, int]) -> list[int]:
    """Return the steps that have the most frequent state, ascending."""
    by_state: dict[int, list[int]] = {}
    for step, state in sorted(states.items()):
        by_state.setdefault(state, []).append(step)
    return max(by_state.values(), key=len)


def _returned(fit: FitSummary, name: str, first: int, again: int) -> Found:
    return found_in(
        fit,
        steps=(first, again),
        names=[name],
        explanation=f"At step {again} the generator {name} is back in its state of step {first}, so both steps draw "
        "the same numbers (dropout masks, noise, augmentation)",
        advice="Seed once, before the training: look for seed_everything, manual_seed and set_rng_state in "
        "training_step, hooks, the data set and the validation code",
    )


MAX_RECOMPUTED = 8  # steps of a program whose recomputations are compared: the first ones


@of_one_process("op")
def recomputation_differs(fit: FitSummary) -> Found | None:
    """An op that activation checkpointing ran again gave other bits than in its forward pass.

    Example:
        In all 8 examined steps, from step 0 to 7, activation checkpointing ran
        aten.bernoulli_.float again in hidden, at net.py:7 in attended, and it gave other bits than
        in the forward pass, so the gradients belong to another forward pass. Do not pass
        preserve_rng_state=False to torch.utils.checkpoint.
    """
    steps, ops = list[int](), dict[str, tuple[str, bool]]()
    num_examined = 0
    for program, records in fit.programs:
        if not any(site.recomputed for site in program.sites):
            continue
        for record in records[:MAX_RECOMPUTED]:
            num_examined += 1
            layout = fit.layout(record)
            at = recomputed_otherwise(StepView(rank=fit.rank, record=record, program=program, layout=layout))
            if at is not None:
                site = program.sites[at]
                draws = any(program.sites[one].role == "generator" for one in site.inputs)
                ops.setdefault(site.module or site.op, (f"{site.op} again{place(site)}", draws))
                steps.append(record.step)
    if not steps:
        return None
    op, draws = next(iter(ops.values()))
    examined = f"all {num_examined}" if len(steps) == num_examined else f"{len(steps)} of {num_examined}"
    return found_in(
        fit,
        steps=steps,
        names=ops,
        explanation=f"In {examined} examined steps, {from_to(steps)}, activation checkpointing ran {op}, and it gave "
        "other bits than in the forward pass, so the gradients belong to another forward pass",
        advice="Do not pass preserve_rng_state=False to torch.utils.checkpoint"
        if draws
        else "Check what the checkpointed function reads that changed since its forward pass: a cache, a buffer, or a "
        "tensor that was changed in place",
    )
