"""Which of the ops that torch says something of occur in a recorded run, and in which modules."""

import json
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from det_callbacks.errors import SelectionError
from det_callbacks.nondeterminism import OpFact, may_apply
from det_callbacks.report.closing import count
from det_callbacks.runs.program import Site
from det_callbacks.runs.store import Run


@dataclass(frozen=True, slots=True, kw_only=True)
class OpUse:
    """Where an op that torch says something of occurs in a run.

    Attributes:
        fact: what torch says.
        ops: the overloads that occur, sorted.
        sites: module -> sites in one step, tensors and values that the op wrote there; where the run's programs differ,
            the most in any. Sorted by module; "" is outside any module, "?" an unknown one.
    """

    fact: OpFact
    ops: tuple[str, ...]
    sites: dict[str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class OpUsage:
    """The ops of a run that torch says something of.

    Attributes:
        uses: one for each fact that occurs, in the order of the facts.
        num_ops: distinct ops in the run, overloads counted apart.
        num_programs: distinct programs that were read.
    """

    uses: tuple[OpUse, ...]
    num_ops: int
    num_programs: int


def find_op_usage(run: Run, facts: Sequence[OpFact]) -> OpUsage:
    """Return which facts may be about ops of a run; reads every step and program of every rank.

    An op that leaves no site is not found: what the selection excludes, views, ``resize_``, compiled regions.

    Raises:
        SelectionError: the run holds no ops, so that it cannot say.
        ReferenceFormatError: one of its files is damaged or missing.
    """
    identities = sorted({record.program_id for rank in run.ranks for record in run.rank(rank).iterate()})
    facts_of: dict[str, list[int]] = defaultdict(list)
    for index, fact in enumerate(facts):
        for name in fact.ops:
            facts_of[name].append(index)
    most: Counter[tuple[int, str]] = Counter()
    overloads: dict[int, set[str]] = defaultdict(set)
    ops: set[str] = set()
    for identity in identities:
        here: Counter[tuple[int, str]] = Counter()
        for site in run.program(identity).sites:
            if not site.op or site.role not in ("output", "value"):
                continue
            ops.add(site.op)
            for index in facts_of.get(site.op.rpartition(".")[0], ()):
                if _may_apply(facts[index], site):
                    here[index, site.module] += 1
                    overloads[index].add(site.op)
        most |= here  # the larger count of each
    if not ops:
        raise SelectionError(_no_ops(run))
    uses = tuple(
        OpUse(
            fact=facts[index],
            ops=tuple(sorted(overloads[index])),
            sites={module: most[index, module] for other, module in sorted(most) if other == index},
        )
        for index in sorted(overloads)
    )
    return OpUsage(uses=uses, num_ops=len(ops), num_programs=len(identities))


def _may_apply(fact: OpFact, site: Site) -> bool:
    return may_apply(fact, op=site.op, phase=site.phase, arguments=json.loads(site.arguments), varying=site.varying)


def _no_ops(run: Run) -> str:
    level = run.manifest.get("selection", {}).get("level")
    return (
        f"{run.path} holds no ops (level {level}, {count(run.rank(0).num_steps, 'step')} of rank 0), so it cannot say "
        'which it uses. Record a run of at least one step with level="op".'
    )
