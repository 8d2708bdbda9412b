"""The sentences on a metric that differs."""

from det_callbacks.causes.sentences import of_segment
from det_callbacks.causes.settings import begun_before
from det_callbacks.compare.metrics import GENERATOR, MetricDifference


def explain_metric(metric: MetricDifference) -> str:
    """Return how a metric differs, without a final stop."""
    reference, current = metric.values
    what = f"metric {metric.name} {_reading(metric)}"
    if reference is None or current is None:
        return f"{what} is only in the {'current run' if reference is None else 'reference'}"
    shown = [f"{one.value} ({one.dtype} {list(one.shape)}, {one.digest})" for one in (reference, current)]
    if reference.value != current.value:
        shown = [reference.value, current.value]
    return f"{what} differs: {shown[0]} in the reference, {shown[1]} in the current run"


def metric_lines(metric: MetricDifference) -> tuple[str, ...]:
    where = _reading(metric)
    return tuple(
        f"{name}, {where}: {reference} in the reference, {current} in the current run"
        for name, reference, current in metric.evidence
    )


def advise_metric(metric: MetricDifference) -> str:
    """Return what to do about a metric, without a final stop; may be ""."""
    _, found = metric.known_reason
    reading = metric.readings[1]
    if metric.explaining_choice is not None:
        return ""
    if metric.kind != "content":
        todo = "Check where epochs end: limit_train_batches, drop_last, the length of the data"
        return todo if metric.is_read_in_one else ""
    if found.startswith(GENERATOR):
        return f"The {found} differs, so seed the code that computes the metric"
    if found:
        return f"The {found} differs, so check the data that the metric is computed from"
    if metric.is_after_gap:
        return begun_before("The difference may have started", reading.step + 1, metric.choices)
    later = "" if reading.where == "epoch" else ", and only the first batch of each loader is compared"
    todo = f"The recorded generators and data match{later}, so check how the metric is computed"
    left_out = f"""modules=["*", "!metric/{metric.name}"] (on the command line: --modules '*,!metric/{metric.name}')"""
    return f"{todo}. To leave out a metric that cannot repeat, such as a wall clock, record again with {left_out}"


def _reading(metric: MetricDifference) -> str:
    return metric.readings[1].place + of_segment(metric.segment)
