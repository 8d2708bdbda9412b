"""The sentences of a verdict: what differs, where it starts, and why there; ``advice.py`` says what can be done."""

from collections.abc import Iterable, Sequence

from det_callbacks.compare.cause import Facts, Judgement
from det_callbacks.compare.collectives import Classification, CollectiveCall
from det_callbacks.compare.metrics import FIRST_BATCH, GENERATOR, LENGTH, MetricDifference
from det_callbacks.compare.ranks import WholeSteps
from det_callbacks.compare.record import Tally
from det_callbacks.compare.step import Finding
from det_callbacks.runs.metrics import Metric
from det_callbacks.runs.program import IN_FLIGHT, REGION, TensorLayout
from det_callbacks.verdict import Divergence, EnvironmentDifference

MAX_NAMED = 3
"""Sources, arguments and choices that a sentence names; the others are counted."""
MAX_MOMENTS = 4
"""Steps since which ranks differ that a sentence names; the others are counted."""

# a site


def describe(finding: Finding) -> str:
    """Return what differs at a site, and why it starts there or not."""
    divergence = finding.divergence
    what = f"{_site(divergence)} {_what_differs(finding)}"
    if divergence.is_origin:
        if divergence.kind in ("missing", "extra"):
            return f"{what}, and what it reads agrees, so it starts here"
        if finding.role == "graph":
            return f"{what}; what goes into it agrees, so it starts here"
        if divergence.op.startswith(REGION):
            return f"{what}; what went into the compiled region agrees, so it starts inside"
        if finding.is_rewired:
            return f"{what}; it reads other tensors than in the reference, and those agree, so it starts here"
        return f"{what}; the inputs agree, so it starts here"
    if divergence.is_origin is False:
        return f"{what}; the difference came in through what it reads"
    if finding.is_inside_region:
        return f"{what}; it ran inside a compiled region, of which only the whole can be told to be the origin"
    if finding.is_written_unseen and not divergence.op:
        return (
            f"{what}; what wrote it agrees, so something that the trace did not see (NumPy, a raw kernel) has changed "
            "it since"
        )
    return f"{what}; {_why_unproven(finding)}, so where it starts cannot be proven"


def _why_unproven(finding: Finding) -> str:
    divergence = finding.divergence
    if finding.arguments is not None and not finding.arguments.is_known:
        return "the two runs kept digests of other arguments of it"
    if finding.is_passed_on and finding.unread:
        return f"the batch holds a {finding.unread}, which cannot be looked into, and Python may have read it"
    if finding.is_passed_on:
        return "a shape, or a number that Python could read, differs before it, and Python may have passed that on"
    if finding.role == "delivered":
        if any(entry is not None and entry.detail == IN_FLIGHT for entry in finding.layouts or ()):
            return "it was read before anybody had waited for the collective, which is a race"
        return "what this rank put in agrees, and it came from another rank or from the collective itself"
    if finding.role == "left":
        return "a CUDA graph, of which nothing is seen inside, may have written it"
    if finding.role == "entering":
        return "something that the trace did not see wrote what goes into the compiled region"
    if divergence.op.startswith(REGION):
        return "the parameters that the compiled region reads have no digest at this level"
    return (
        "something that the trace did not see wrote what it reads"
        if divergence.op
        else "what wrote it was not recorded"
    )


def _what_differs(finding: Finding) -> str:
    divergence = finding.divergence
    if divergence.kind == "argument" and finding.arguments is not None:
        values = list(finding.arguments.values.items())
        shown = "; ".join(f"{name}: {ours} -> {theirs}" for name, (ours, theirs) in values[:MAX_NAMED])
        layouts = f" and gave {_layouts(finding.layouts)}" if finding.layouts else ""
        return f"was called with other arguments ({shown}{_and_more(len(values))}){layouts}"
    if divergence.kind == "structure" and finding.role == "graph":
        return "is another graph, by a recompilation, a graph break or other code"
    if divergence.kind == "structure" and finding.layouts is not None:
        return f"gave another structure: {_layouts(finding.layouts)}"
    if divergence.kind in ("missing", "extra"):
        return f"is only in the {_side(divergence)}"
    verbs = {
        "inside": "gave other bits inside",
        "entering": "is given other bits",
        "left": "holds other bits",
        "sent": "was given other bits",
        "delivered": "delivered other bits",
    }
    if finding.role in verbs and divergence.kind == "content":
        return verbs[finding.role]
    return "gave other bits" if divergence.op else "holds other bits"


def _site(divergence: Divergence) -> str:
    source = _source(divergence)
    if not divergence.op:
        owner = f" of {_module(divergence.module)}" if divergence.module else ""
        return f"{divergence.name or 'a tensor'}{owner}{source}"
    number = f" (number {divergence.occurrence + 1} there)" if divergence.occurrence else ""
    output = f", output {divergence.output}," if divergence.output else ""
    name = f" on {divergence.name}" if divergence.name else ""
    return f"{divergence.op}{number}{name} in {_module(divergence.module)}{source}{output}"


def _source(divergence: Divergence) -> str:
    return f" at {divergence.source[0]}" if divergence.source else ""


def _module(module: str) -> str:
    return {"": "no module", "?": "a module that cannot be told"}.get(module, module)


def source_name(finding: Finding) -> str:
    """Return the name of what entered a step, or where it was read."""
    divergence = finding.divergence
    return divergence.name or f"of {_module(divergence.module)}{_source(divergence)}"


def _layouts(layouts: tuple[TensorLayout | None, TensorLayout | None]) -> str:
    ours, theirs = layouts
    is_detailed = ours is not None and theirs is not None and (ours.dtype, ours.shape) == (theirs.dtype, theirs.shape)
    return f"{_layout(ours, is_detailed)} in the reference, {_layout(theirs, is_detailed)} now"


def _layout(layout: TensorLayout | None, is_detailed: bool) -> str:
    if layout is None:
        return "no tensor"
    detail = f" with strides {list(layout.stride)}" if is_detailed else ""
    return f"{layout.dtype} {list(layout.shape)}{detail}{' ' + layout.detail if layout.detail else ''}"


def _side(divergence: Divergence) -> str:
    return "reference" if divergence.kind == "missing" else "current run"


# a step

_CHECKPOINT_ADVICE = (
    "no op is to blame. Compare the checkpoint with the one that was saved there, and look at what changes this state "
    "between loading it and the step"
)
_SOURCES = {
    "state": "the initial state",
    "data": "the batch",
    "rng": "the state of the generator",
    "input": "an input from outside the trace,",
}


def explain_step(facts: Facts, judgement: Judgement, *, show_rank: bool) -> str:
    """Return one sentence on a differing step, without its final stop: where it starts, with what, and why there."""
    difference, first = facts.difference, facts.first
    place = f"Step {difference.step}" + (f" of rank {difference.rank}" if show_rank else "")
    if facts.is_resumed:
        place += ", the first after resuming"
    if judgement.rule == "restored state":
        return f"{place}: {_explain_restored(facts)}; {_CHECKPOINT_ADVICE}"
    if first.is_source:
        text = f"{place}: {_explain_sources(facts)}"
        return text if facts.origin is None else f"{text} for it; besides, {_in_phase(facts.origin)}"
    text = f"{place}, {_in_phase(first)}"
    if judgement.rule == "choice" and (choice := facts.explaining_choice) is not None:
        text = f"{show_differences([choice])}, and that is what differs first: {text[0].lower()}{text[1:]}"
    if facts.origin is not None and facts.origin is not first:
        text += f"; an origin is {_in_phase(facts.origin)}"
    num_alike = sum(one.op == first.divergence.op for one in difference.origins) - 1
    if first.divergence.is_origin and num_alike > 0:
        text += f" (so do {count(num_alike, 'more call')} of it)"
    return text


def _in_phase(finding: Finding) -> str:
    return f"{finding.divergence.phase}: {describe(finding)}"


def _explain_restored(facts: Facts) -> str:
    restored = facts.difference.restored
    if not restored:
        names = _listed(facts.unrestored)
        return f"{names} is not what the reference ended step {facts.difference.step - 1} with{_also(facts)}"
    kinds = {finding.divergence.kind for finding in restored}
    what = "came out of the checkpoint with other bits"
    if kinds == {"missing"}:
        what = "did not come out of the checkpoint"
    elif kinds == {"extra"}:
        what = "came out of the checkpoint, and the reference has no such state there"
    return f"{_listed(map(source_name, restored))} {what}{_also(facts)}"


def _also(facts: Facts, *phases: str) -> str:
    """Return which sources differ besides, in brackets."""
    others = [phase for phase in dict.fromkeys(one.divergence.phase for one in facts.sources) if phase not in phases]
    others = [phase for phase in others if phases or phase in ("data", "rng")]
    return f" ({' and '.join(_SOURCES[other] for other in others)} differs too)" if others else ""


def _explain_sources(facts: Facts) -> str:
    sources = facts.sources
    phase = sources[0].divergence.phase
    alike = [finding for finding in sources if finding.divergence.phase == phase and finding.role != "samples"]
    alike = alike or [sources[0]]
    layouts = next((finding.layouts for finding in alike if finding.divergence.kind == "structure"), None)
    if phase == "data" and all(finding.has_equal_samples for finding in alike):
        what = "holds the same samples in another order"
    elif phase == "data" and facts.data_change == "other step" and not facts.batch_size:
        what = f"is the one that the reference had at step {facts.batch_of}"
    elif layouts is not None:
        what = f"has another structure: {_layouts(layouts)}"
    elif alike[0].divergence.kind in ("missing", "extra"):
        what = f"is only in the {_side(alike[0].divergence)}"
    else:
        what = "differs"
    if phase == "state" and (num_initial := facts.difference.num_initial) > 1:
        number = len(dict.fromkeys(map(source_name, alike)))
        what += f" ({f'all {number}' if number >= num_initial else f'{number} of {num_initial}'} tensors)"
    names = _listed(map(source_name, alike))
    return (
        f"{_SOURCES[phase]} {names} {what}{_also(facts, phase)}; the difference came in through it, and no op is to "
        "blame"
    )


# ranks, whole steps, metrics, environments


def explain_ranks(ranks: Classification) -> str:
    """Return a clause on where a difference started among the ranks, and since when which differ; "" for no ranks."""
    texts = []
    origins, receivers, unknown = ranks.origins, ranks.receivers, ranks.unknown
    if origins:
        texts.append(f"it started on {_ranks(origins)}")
    if ranks.collective is not None:
        texts.append(
            f"what went into {_call(ranks.collective)} agrees on all ranks and what came out differs, so "
            f"the collective itself is {'an origin too' if origins else 'the origin'}"
        )
    if receivers and ranks.through is not None:
        texts.append(
            f"{_ranks(receivers)} put in what the reference did and received the difference through "
            f"{_call(ranks.through)}"
        )
    elif receivers and ranks.collective is None:
        texts.append(f"{_ranks(receivers)} received the difference")
    if unknown:
        texts.append(f"whether {_ranks(unknown)} started a difference or received it cannot be told")
    by_moment: dict[tuple[int, int], list[int]] = {}
    for rank, moment in enumerate(ranks.since):
        if moment is not None:
            by_moment.setdefault(moment, []).append(rank)
    if by_moment:
        shown = [
            f"{_ranks(those)} from step {step}{f' of fit {segment}' if segment else ''} on"
            for (segment, step), those in sorted(by_moment.items())
        ]
        more = f", and so on ({len(shown)} such steps)" if len(shown) > MAX_MOMENTS else ""
        number = sum(map(len, by_moment.values()))
        texts.append(f"{number} of {len(ranks.since)} ranks differ ({', '.join(shown[:MAX_MOMENTS])}{more})")
    return "; ".join(texts)


def _call(call: CollectiveCall) -> str:
    number = f" (number {call.number + 1} there)" if call.number else ""
    source = f" at {call.source[0]}" if call.source else ""
    return f"{call.op}{number} in the group of ranks {call.group} ({call.num_bytes} bytes){source}"


def _ranks(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, ranks[:8])) + (f" and {len(ranks) - 8} more" if len(ranks) > 8 else "")
    return f"rank{'s' * (len(ranks) > 1)} {shown}"


def explain_whole_steps(steps: Iterable[WholeSteps], *, show_rank: bool) -> str:
    """Return which steps only one run has, to go on with a sentence."""
    texts = []
    for whole in sorted(steps, key=lambda one: one.order):
        fit = f" of fit {whole.segment}" if whole.segment else ""
        rank = f" of rank {whole.rank}" if show_rank else ""
        number = f"step {whole.first} is" if whole.count == 1 else f"steps {whole.first} to {whole.last}"
        number += f" ({whole.count} of them) are" if whole.count > 1 else ""
        side = "the reference" if whole.kind == "missing" else "the current run"
        texts.append(f"{number} only in {side}{fit}{rank}")
    return "; ".join(texts[:4]) + (f" and so on ({len(texts)} such ranges)" if len(texts) > 4 else "")


def steps_agree(num_equal: int) -> str:
    """Return how many steps agree, as the end of a sentence; "" where there are none."""
    shared = "step that both have agrees" if num_equal == 1 else "steps that both have agree"
    return f"; the {num_equal} {shared}" if num_equal else ""


def explain_match(tally: Tally, *, num_ranks: int) -> str:
    """Return how much agrees, "" where nothing was compared."""
    found = []
    if tally.num_sites:
        found.append(f"all {count(tally.num_sites, 'site')} of {count(tally.num_steps, 'step')}")
    if tally.num_metrics:
        found.append(("all " if not found else "") + count(tally.num_metrics, "metric"))
    if not found:
        return ""
    ranks = f" of {num_ranks} ranks" if num_ranks > 1 else ""
    return capitalised(f"{' and '.join(found)}{ranks} agree, bit for bit")


def explain_metric(metric: MetricDifference) -> str:
    """Return what is said of the first metric that differs, without its final stop."""
    left, right = metric.values
    where = _reading(metric)
    if left is None or right is None:
        return f"metric {metric.name} {where} is only in the {'current run' if left is None else 'reference'}"
    return f"metric {metric.name} {where} differs: {_metric_values(left, right)}"


def advise_metric(metric: MetricDifference) -> str:
    """Return what can be done about it; "" where there is nothing to add."""
    if metric.kind != "content":
        return ""
    found = metric.reason[1]
    if found.startswith(LENGTH):
        return f"The data are others: {found} are not as many"
    if found.startswith(GENERATOR):
        return f"Seed the evaluation alike: the {found} is in another state after it"
    if found.startswith(FIRST_BATCH):
        return f"Look at the data that it is computed from: the {found} differs"
    return (
        "Look at how it is computed, and from what: the generators agree, and what is known of the data of evaluations "
        '(their number, the first batch). What can never repeat, such as a wall clock, is left out by modules=["*", '
        f'"!metric/{metric.name}"]'
    )


def metric_lines(metric: MetricDifference) -> tuple[str, ...]:
    """Return the evidence of a metric, one line a finding."""
    where = _reading(metric)
    return tuple(f"{name}, {where}: {ours} in the reference, {theirs} now" for name, ours, theirs in metric.evidence)


def _reading(metric: MetricDifference) -> str:
    return metric.readings[1].place + (f" of fit {metric.segment}" if metric.segment else "")


def _metric_values(left: Metric, right: Metric) -> str:
    is_alike = left.value == right.value
    shown = [
        f"{metric.value} ({metric.dtype} {list(metric.shape)}, {metric.digest})" if is_alike else metric.value
        for metric in (left, right)
    ]
    return f"{shown[0]} in the reference, {shown[1]} now"


def show_differences(entries: Sequence[EnvironmentDifference]) -> str:
    """Return entries of the environment in both runs, "" when there are none."""
    shown = [f"{entry.name}: {entry.reference} in the reference, {entry.current} now" for entry in entries[:MAX_NAMED]]
    return "; ".join(shown) + _and_more(len(entries))


# words


def count(number: int, noun: str) -> str:
    """Return "1 step", "1234 steps"."""
    return f"{number} {noun}" + ("" if number == 1 else "s")


def capitalised(text: str) -> str:
    """Return a sentence with a capital at its beginning."""
    return f"{text[:1].upper()}{text[1:]}"


def _listed(names: Iterable[str]) -> str:
    known = list(dict.fromkeys(names))
    return ", ".join(known[:MAX_NAMED]) + _and_more(len(known))


def _and_more(number: int) -> str:
    return f" and {number - MAX_NAMED} more" if number > MAX_NAMED else ""
