"""Sentences of a verdict that belong to no cause, and on a metric that differs."""

from collections.abc import Collection, Iterable, Mapping, Sequence

from det_callbacks.causes.sentences import both_values, number_text, of_segment, source_text
from det_callbacks.causes.settings import begun_before
from det_callbacks.compare.metrics import MetricDifference
from det_callbacks.compare.ranks import Classification, CollectiveCall, UnpairedSteps
from det_callbacks.compare.record import RankRecord, Tally
from det_callbacks.runs.manifest import (
    AS_COMMITTED,
    CHANGED_FILE,
    COMMIT,
    GENERATOR,
    NOT_RECORDED,
    SETTINGS,
    item_of,
)
from det_callbacks.text import MAX_RANKS, count, listed, ranks_text
from det_callbacks.verdict import EnvironmentDifference, VerdictName

_IN_ORDER = {
    "data": "the entries of the batch",
    "state": "parameters, buffers or optimizer state",
    "forward": "outputs of modules",
    "gradient": "the optimizer's parameters",
    "optimizer": "the optimizer's parameters",
}
"""By the phases of ``Alignment.reordered``."""

MAX_RANGES = 4  # of steps that a sentence names; the others are counted


def explain_ranks(ranks: Classification) -> str:
    """Return a clause on where a difference started among the ranks, and which differ."""
    origins, receivers, unknown = (ranks.ranks(side) for side in ("origin", "receiver", "unknown"))
    texts = [f"it started on {ranks_text(origins)}"] if origins else []
    if ranks.collective is not None:
        texts.append(
            f"the inputs of {_call(ranks.collective)} match on all ranks and its outputs differ, "
            f"so the collective itself is {'also an origin' if origins else 'the origin'}"
        )
    if receivers and ranks.through is not None:
        through = (
            "sent the same data as in the reference and received the difference through "
            f"{_call(ranks.through)}"
        )
        texts.append(f"{ranks_text(receivers)} {through}")
    elif receivers and ranks.collective is None:
        texts.append(f"{ranks_text(receivers)} received the difference")
    if unknown:
        texts.append(
            f"it is unknown whether {ranks_text(unknown)} started the difference or received it"
        )
    moments = sorted({at for at in ranks.since if at is not None})
    since = {
        at: [rank for rank, moment in enumerate(ranks.since) if moment == at] for at in moments
    }
    shown = [f"{ranks_text(since[at])} from step {at[1]}{of_segment(at[0])} on" for at in moments]
    if shown:
        number = sum(map(len, since.values()))
        texts.append(
            f"{number} of {len(ranks.since)} ranks differ ({listed(shown, limit=MAX_RANGES)})"
        )
    return "; ".join(texts)


def _call(call: CollectiveCall) -> str:
    return (
        f"{call.op}{number_text(call.number)} in the group of ranks "
        f"{call.group}{source_text(call.source)}"
    )


def explain_unpaired_steps(steps: Iterable[UnpairedSteps], *, show_rank: bool) -> str:
    """Return which steps only one run has, as a part of a sentence."""
    texts = []
    for span in sorted(steps, key=lambda span: span.order):
        rank, place = f" of rank {span.rank}" if show_rank else "", of_segment(span.segment)
        which = f"step {span.first}{place} is"
        if span.count > 1:
            which = f"steps {span.first} to {span.last}{place} ({span.count} of them) are"
        side = "reference" if span.kind == "missing" else "current run"
        texts.append(f"{which} only in the {side}{rank}")
    return listed(texts, "; ", limit=MAX_RANGES)


def steps_agree(num_equal: int) -> str:
    """Return how many steps match, as the end of a sentence."""
    shared = "common step matches" if num_equal == 1 else f"{num_equal} common steps match"
    return f"; the {shared}" if num_equal else ""


def explain_match(tally: Tally, *, num_ranks: int, unrecorded: Sequence[str] = ()) -> str:
    """Return how much matches, and what else of the run was not compared;
    "" if nothing was compared.
    """
    found = []
    if tally.num_sites:
        found.append(f"{count(tally.num_sites, 'site')} of {count(tally.num_steps, 'step')}")
    if tally.num_metrics:
        found.append(count(tally.num_metrics, "metric"))
    ranks = f" of {num_ranks} ranks" if num_ranks > 1 else ""
    if not found:
        return ""
    text = f"ll {' and '.join(found)}{ranks} agree, bit for bit"
    if not unrecorded:
        return f"A{text}"
    return (
        f"The recorded part matches: a{text}. Not recorded, so not compared: "
        f"{'; '.join(unrecorded)}"
    )


def order_lines(phases: Collection[str]) -> list[str]:
    """Return which tensors come in a different order than in the reference."""
    names = [_IN_ORDER[phase] for phase in _IN_ORDER if phase in phases]
    if not names:
        return []
    return [
        "In a different order from the reference, and compared by name: "
        f"{listed(dict.fromkeys(names))}"
    ]


_CODE = (  # suffixes of files that a program imports, compiles, or is configured by
    *(
        ".py",
        ".pyx",
        ".pxd",
        ".ipynb",
        ".so",
        ".c",
        ".cc",
        ".cpp",
        ".cu",
        ".cuh",
        ".h",
        ".hpp",
        ".rs",
        ".sh",
    ),
    *(".cfg", ".ini", ".json", ".toml", ".yaml", ".yml"),
)


def code_lines(environment: Sequence[EnvironmentDifference]) -> list[str]:
    """Return which commit and which files of the code differ for certain."""
    commit = next((difference for difference in environment if difference.name == COMMIT), None)
    files = [difference for difference in environment if item_of(difference.name, CHANGED_FILE)]
    if commit is not None:  # a change in one run may have been committed for the other
        files = [file for file in files if AS_COMMITTED not in (file.reference, file.current)]
    lines = []
    if commit is not None and not {None, NOT_RECORDED} & {commit.reference, commit.current}:
        lines.append(
            f"The commit differs: {commit.reference[:9]} in the reference, {commit.current[:9]} in "
            "the current run"
        )
    names = [str(item_of(file.name, CHANGED_FILE)) for file in files]
    code = [name for name in names if name.lower().endswith(_CODE)]
    if code:
        lines.append(f"{listed(code)} changed since the reference was recorded")
    if len(code) < len(names):
        others = [name for name in names if name not in code]
        lines.append(
            f"{count(len(others), 'other file')} of the repository changed too, which may have no "
            "effect"
        )
    return lines


def without_starts(environment: Sequence[EnvironmentDifference]) -> list[EnvironmentDifference]:
    return [entry for entry in environment if not item_of(entry.name, GENERATOR)]


def environment_notes(
    environment: Sequence[EnvironmentDifference], verdict: VerdictName
) -> list[str]:
    """Return sentences on differences in code, settings and machine."""
    changing = [entry for entry in environment if entry.changes_bits]
    changing.sort(key=lambda entry: not item_of(entry.name, SETTINGS))
    choices = both_values([entry for entry in changing if not entry.is_machine])
    machine = both_values([entry for entry in changing if entry.is_machine])
    too = " too, so nothing is proven either way" if verdict == "not_comparable" else ""
    found = (item_of(entry.name, GENERATOR) for entry in environment)
    starts = [name for name in found if name is not None]
    notes = []
    if verdict != "match":
        notes += code_lines(environment)
        if choices:
            notes.append(f"Settings differ: {choices}")
    elif starts:
        notes.append(
            "Generators that had a different state at the start of the fit and changed no bit: "
            f"{listed(starts)}"
        )
    if machine:
        notes.append(f"The machine differs{too}: {machine}")
    return notes


def explain_metric(metric: MetricDifference) -> str:
    """Return how a metric differs, without a final stop."""
    reference, current = metric.values
    what = f"metric {metric.name} {_reading(metric)}"
    if reference is None or current is None:
        return f"{what} is only in the {'current run' if reference is None else 'reference'}"
    shown = [
        f"{one.value} ({one.dtype} {list(one.shape)}, {one.digest})" for one in (reference, current)
    ]
    if reference.value != current.value:
        shown = [reference.value, current.value]
    return f"{what} differs: {shown[0]} in the reference, {shown[1]} in the current run"


def metric_lines(metric: MetricDifference) -> tuple[str, ...]:
    where = _reading(metric)
    return tuple(
        f"{row.shown}, {where}: {reference} in the reference, {current} in the current run"
        for row, reference, current in metric.differing_reads
    )


def advise_metric(metric: MetricDifference) -> str:
    """Return what to do about a metric, without a final stop; may be ""."""
    reading = metric.readings[1]
    if metric.explaining_choice is not None:
        return ""
    if metric.kind != "content":
        todo = "Check where epochs end: limit_train_batches, drop_last, the length of the data"
        return todo if metric.is_read_in_one else ""
    if metric.root is not None:
        row = metric.root[0]
        seeds = row.kind == "generator"
        todo = (
            "seed the code that computes the metric"
            if seeds
            else "check the data that the metric is computed from"
        )
        differs = "differ" if row.kind == "length" else "differs"
        return f"The {row.shown} {differs}, so {todo}"
    if metric.is_after_gap:
        return begun_before("The difference may have started", reading.step + 1, metric.choices)
    later = (
        "" if reading.where == "epoch" else ", and only the first batch of each loader is compared"
    )
    todo = f"The recorded generators and data match{later}, so check how the metric is computed"
    left_out = (
        f'modules=["*", "!metric/{metric.name}"] (on the command line: --modules '
        f"'*,!metric/{metric.name}')"
    )
    return (
        f"{todo}. To leave out a metric that cannot repeat, such as a wall clock, record again "
        f"with {left_out}"
    )


def _reading(metric: MetricDifference) -> str:
    return metric.readings[1].place + of_segment(metric.segment)


def explain_unfinished(records: Mapping[int, RankRecord]) -> str:
    """Return what was compared if a rank of the verification did not end, else ""."""
    last = []
    for rank, record in records.items():
        if record.is_unfinished and (stop := record.stopped) is not None:
            known = f"steps until {stop.step}" if stop.step >= 0 else "no step that it had noted"
            last.append(known + (f" on rank {rank}" if len(records) > 1 else ""))
    if not last:
        return ""
    return (
        "The verification was killed, or is still running: it compared "
        f"{listed(last, limit=MAX_RANKS)}"
    )
