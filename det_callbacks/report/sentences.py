"""The sentences of a verdict: what differs, where it starts, and why there; ``advice.py`` says what can be done."""

from collections.abc import Iterable, Mapping, Sequence

from det_callbacks.compare.cause import CHOSEN, Facts
from det_callbacks.compare.collectives import Classification, CollectiveCall
from det_callbacks.compare.differences import Finding, Start
from det_callbacks.compare.metrics import MetricDifference
from det_callbacks.compare.ranks import WholeSteps
from det_callbacks.compare.record import Tally
from det_callbacks.report.console import count, listed, ranks_text
from det_callbacks.report.run import describe_tensor
from det_callbacks.runs.program import READS, REGION, TensorLayout
from det_callbacks.verdict import Divergence, EnvironmentDifference

MAX_RANGES = 4  # of steps that a sentence names; the others are counted


def _describe(finding: Finding) -> str:
    return f"{finding.divergence.phase}: {_site(finding.divergence)} {_what_differs(finding)}{_where_from(finding)}"


def _where_from(finding: Finding) -> str:
    divergence = finding.divergence
    if divergence.is_origin is False:
        return "; the difference came in through what it reads"
    if divergence.is_origin is None:
        return f"; {_UNPROVEN[finding.start]}, so where it starts cannot be proven"
    if divergence.op.startswith(REGION):
        return "; what went into the compiled region agrees, so it starts inside"
    if finding.is_rewired:
        return "; it reads other tensors than in the reference, and those agree, so it starts here"
    return "; the inputs agree, so it starts here"


_UNPROVEN: Mapping[Start, str] = {
    "inside a region": "it ran inside a compiled region, whose inside is not seen",
    "written since": "what wrote it agrees, and what came in between left no row (a view, NumPy, a raw kernel)",
    "other arguments": "the two runs kept digests of other arguments of it",
    "unread batch": "the batch holds what cannot be looked into, and Python may have read it",
    "passed on": "a shape, or a number that Python could read, differs before it, and Python may have passed that on",
    "race": "it was read before anybody had waited for the collective, which is a race",
    "collective": "what this rank put in agrees, and it came from another rank or from the collective itself",
    "graph replay": "a CUDA graph, of which nothing is seen inside, may have written it",
    "not recorded": "what wrote it was not recorded",
    "region parameters": "the parameters that the compiled region reads have no digest at this level",
    "unseen writer": "what it reads was written by nothing that the trace saw (NumPy, a raw kernel, torch.empty)",
}


def _what_differs(finding: Finding) -> str:
    divergence = finding.divergence
    if divergence.kind == "argument" and finding.arguments is not None:
        shown = [f"{name}: {ours} -> {theirs}" for name, (ours, theirs) in finding.arguments.items()]
        layouts = f" and {_structure(finding.layouts, verbs=('gave', 'read'))}" if finding.layouts else ""
        return f"was called with other arguments ({listed(shown, '; ')}){layouts}"
    if divergence.kind == "structure" and finding.role == "graph":
        return "is another graph, by a recompilation, a graph break or other code"
    if divergence.kind == "structure" and finding.layouts is not None:
        return _structure(finding.layouts, verbs=("gave another structure", "read another part of what it was given"))
    if divergence.kind in ("missing", "extra"):
        return f"is only in the {_side(divergence)}"
    verbs = {"region_input": "is given", "graph_output": "holds", "sent": "was given", "delivered": "delivered"}
    usual = "gave" if divergence.op else "holds"
    return f"{verbs.get(finding.role, usual) if divergence.kind == 'content' else usual} other bits"


def _site(divergence: Divergence) -> str:
    source = _source(divergence.source)
    if not divergence.op:
        owner = f" of {_module(divergence.module)}" if divergence.module else ""
        return f"{divergence.name or 'a tensor'}{owner}{source}"
    output = f", output {divergence.output}," if divergence.output else ""
    name = f" on {divergence.name}" if divergence.name else ""
    return f"{divergence.op}{_number(divergence.occurrence)}{name} in {_module(divergence.module)}{source}{output}"


def _source(lines: Sequence[str]) -> str:
    return f" at {lines[0]}" if lines else ""


def _number(index: int) -> str:
    return f" #{index}" if index else ""


def _module(module: str) -> str:
    return {"": "no module", "?": "a module that cannot be told"}.get(module, module)


def source_name(finding: Finding) -> str:
    """Return the name of what entered a step, to follow a word for what it is, or where it was read."""
    divergence, line = finding.divergence, _source(finding.divergence.source)
    if divergence.name is not None:
        is_passed = finding.role == "generator" and divergence.name.startswith("generator ")
        return divergence.name.removeprefix("generator ") + line if is_passed else divergence.name
    where = f"in {_module(divergence.module)}" if divergence.module else "outside any module"
    return f"a tensor read {where}{line}"


def _structure(layouts: tuple[TensorLayout | None, TensorLayout | None], *, verbs: tuple[str, str]) -> str:
    """Return that a tensor was read in another part (the second verb), or how else its layout differs."""
    ours, theirs = layouts
    verb, shown = verbs[0], ["no tensor" if one is None else describe_tensor(one) for one in layouts]
    if ours is not None and theirs is not None and (ours.dtype, ours.shape) == (theirs.dtype, theirs.shape):
        if ours.detail != theirs.detail and f"{ours.detail}{theirs.detail}".startswith(READS):
            verb = verbs[1]
            shown = [one.detail.removeprefix(READS) or "in order from element 0" for one in (ours, theirs)]
        else:
            shown = [f"{describe_tensor(one)} with strides {list(one.stride)}" for one in (ours, theirs)]
    return f"{verb}: {shown[0]} in the reference, {shown[1]} now"


def _side(only: Divergence | WholeSteps) -> str:
    return "reference" if only.kind == "missing" else "current run"


_SOURCES = {
    "restored": "the state after the checkpoint was loaded,",
    "state": "the initial state",
    "data": "the batch",
    "rng": "the state of the generator",
    "input": "an input from outside the trace,",
}


def explain_step(facts: Facts, rule: str, *, show_rank: bool) -> str:
    """Return one sentence on a differing step, without its final stop: where it starts, with what, and why there."""
    difference, first, origin = facts.difference, facts.first, facts.origin
    of_rank = f" of rank {difference.rank}" if show_rank else ""
    resumed = ", the first after resuming" if facts.is_resumed else ""
    place = f"Step {difference.step}{_in_segment(difference.segment)}{of_rank}{resumed}"
    if rule == "restored state":
        return f"{place}: {_explain_sources(facts, facts.restored, 'restored')}; no op is to blame"
    if rule == "other gradients":
        ours, theirs = map(set, facts.gradients)
        what = f"{len(ours)} gradients in the reference, {len(theirs)} now: {listed(sorted(ours ^ theirs))} in one run"
        return f"{place}: the optimizer was given {what if ours != theirs else 'the same gradients in another order'}"
    is_outside = first.start == "outside"
    text = f"{place}, {_describe(first)}"
    if is_outside:
        text = f"{place}: {_explain_sources(facts, facts.sources, facts.sources[0].divergence.phase)}; "
        text += f"the difference came in through it, and {_who_wrote(facts)}"
    if rule in CHOSEN and (choice := facts.explaining_choice) is not None:
        text = explain_choice(choice, text)
    if origin is not None and origin.row != first.row:
        text += f"; {'besides,' if is_outside else 'an origin is'} {_describe(origin)}"
    return text


def _who_wrote(facts: Facts) -> str:
    if facts.sources[0].divergence.phase == "input" and "unselected" in facts.difference.current.program.ops_skipped:
        return "an op that is not recorded (modules, phases) may have written it"
    return "no op is to blame for it" if facts.origin is not None else "no op is to blame"


def _explain_sources(facts: Facts, sources: Sequence[Finding], phase: str) -> str:
    """Return how what entered a step differs, of which one phase is named, and what else does."""
    alike = [one for one in sources if phase in ("restored", one.divergence.phase) and one.role != "samples"]
    alike = sorted(alike or sources[:1], key=lambda one: one.divergence.name is None)
    names = list(dict.fromkeys(map(source_name, alike))) or facts.unrestored
    kinds, layouts = {one.divergence.kind for one in alike}, [one.layouts for one in alike if one.layouts is not None]
    what = "differs"
    if phase == "data" and facts.has_equal_samples:
        what = "holds the same samples in another order"
    elif "structure" in kinds and layouts:
        what = _structure(layouts[0], verbs=("has another structure", "was read in another part"))
    elif kinds and kinds <= {"missing", "extra"}:
        what = f"is only in {'one run' if len(kinds) > 1 else 'the ' + _side(alike[0].divergence)}"
    elif not sources:
        what = f"is not what the reference ended step {facts.difference.step - 1} with"
    if phase == "state" and (num_initial := facts.num_initial) > 1:
        what += f" ({len(names)} of {num_initial} tensors)"
    hidden = ("state", "input") if phase == "restored" else (phase,)
    others = [one for one in dict.fromkeys(one.divergence.phase for one in facts.sources) if one not in hidden]
    also = f" ({' and '.join(_SOURCES[one] for one in others)} differ{'s' * (len(others) == 1)} too)" if others else ""
    return f"{_SOURCES[phase]} {listed(names)} {what}{also}"


def explain_choice(choice: EnvironmentDifference, text: str) -> str:
    """Return a sentence on what differs first with the choice that explains it as its head."""
    return f"{show_differences([choice])}, and that is what differs first: {text[0].lower()}{text[1:]}"


def explain_ranks(ranks: Classification) -> str:
    """Return a clause on where a difference started among the ranks, and since when which differ; "" for no ranks."""
    origins, receivers, unknown = (ranks.ranks(side) for side in ("origin", "receiver", "unknown"))
    texts = [f"it started on {ranks_text(origins)}"] if origins else []
    if ranks.collective is not None:
        texts.append(
            f"what went into {_call(ranks.collective)} agrees on all ranks and what came out differs, so "
            f"the collective itself is {'an origin too' if origins else 'the origin'}"
        )
    if receivers and ranks.through is not None:
        through = f"put in what the reference did and received the difference through {_call(ranks.through)}"
        texts.append(f"{ranks_text(receivers)} {through}")
    elif receivers and ranks.collective is None:
        texts.append(f"{ranks_text(receivers)} received the difference")
    if unknown:
        texts.append(f"whether {ranks_text(unknown)} started a difference or received it cannot be told")
    moments = sorted({at for at in ranks.since if at is not None})
    since = {at: [rank for rank, moment in enumerate(ranks.since) if moment == at] for at in moments}
    shown = [f"{ranks_text(since[at])} from step {at[1]}{_in_segment(at[0])} on" for at in moments]
    if shown:
        number = sum(map(len, since.values()))
        texts.append(f"{number} of {len(ranks.since)} ranks differ ({listed(shown, limit=MAX_RANGES)})")
    return "; ".join(texts)


def _call(call: CollectiveCall) -> str:
    return f"{call.op}{_number(call.number)} in the group of ranks {call.group}{_source(call.source)}"


def _in_segment(segment: int) -> str:
    return f" of segment {segment}" if segment else ""


def explain_whole_steps(steps: Iterable[WholeSteps], *, show_rank: bool) -> str:
    """Return which steps only one run has, to go on with a sentence."""
    texts = []
    for whole in sorted(steps, key=lambda one: one.order):
        rank, place = f" of rank {whole.rank}" if show_rank else "", _in_segment(whole.segment)
        which = f"step {whole.first}{place} is"
        if whole.count > 1:
            which = f"steps {whole.first} to {whole.last}{place} ({whole.count} of them) are"
        texts.append(f"{which} only in the {_side(whole)}{rank}")
    return listed(texts, "; ", limit=MAX_RANGES)


def steps_agree(num_equal: int) -> str:
    """Return how many steps agree, as the end of a sentence; "" where there are none."""
    shared = "step that both have agrees" if num_equal == 1 else "steps that both have agree"
    return f"; the {num_equal} {shared}" if num_equal else ""


def explain_match(tally: Tally, *, num_ranks: int) -> str:
    """Return how much agrees, "" where nothing was compared."""
    sites = [f"{count(tally.num_sites, 'site')} of {count(tally.num_steps, 'step')}"] if tally.num_sites else []
    found = [*sites, *([count(tally.num_metrics, "metric")] if tally.num_metrics else [])]
    ranks = f" of {num_ranks} ranks" if num_ranks > 1 else ""
    return f"All {' and '.join(found)}{ranks} agree, bit for bit" if found else ""


def explain_metric(metric: MetricDifference) -> str:
    """Return what is said of the first metric that differs, without its final stop."""
    left, right = metric.values
    what = f"metric {metric.name} {_reading(metric)}"
    if left is None or right is None:
        return f"{what} is only in the {'current run' if left is None else 'reference'}"
    ours, theirs = (f"{one.value} ({one.dtype} {list(one.shape)}, {one.digest})" for one in (left, right))
    if left.value != right.value:
        ours, theirs = left.value, right.value
    return f"{what} differs: {ours} in the reference, {theirs} now"


def metric_lines(metric: MetricDifference) -> tuple[str, ...]:
    """Return the evidence of a metric, one line a finding."""
    where = _reading(metric)
    return tuple(f"{name}, {where}: {ours} in the reference, {theirs} now" for name, ours, theirs in metric.evidence)


def _reading(metric: MetricDifference) -> str:
    return metric.readings[1].place + _in_segment(metric.segment)


def show_differences(entries: Sequence[EnvironmentDifference]) -> str:
    """Return entries of the environment in both runs, "" when there are none."""
    return listed((f"{one.name}: {one.reference} in the reference, {one.current} now" for one in entries), "; ")
