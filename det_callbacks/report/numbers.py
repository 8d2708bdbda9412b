"""By how much two runs differ, in words."""

from rich.console import Console

from det_callbacks.report.console import count, print_line
from det_callbacks.verdict import Divergence, Numbers, TensorNumbers, Verdict

MAX_SHOWN = 5
"""Divergences with numbers that a verdict's text shows: the first one and origins."""


def how_much(tensor: TensorNumbers) -> str:
    """Return by how much a tensor differs: "1 of 320 elements differ, by 1 ULP, first at [3, 7]: ..."."""
    if tensor.problem:
        return tensor.problem
    total = count(tensor.num_elements, "element")
    if not tensor.num_differing:
        return f"equal bits ({total})"
    parts = [f"{tensor.num_differing:,} of {total} differ"]
    if tensor.max_ulps is not None:
        up_to = "" if tensor.num_differing == 1 else "up to "
        figures = (("absolute", tensor.max_absolute), ("relative", tensor.max_relative))
        sizes = ", ".join(f"{name} {value:.3g}" for name, value in figures if value is not None)
        parts.append(f"by {up_to}{count(tensor.max_ulps, 'ULP')}{sizes and f' ({sizes})'}")
    elif tensor.max_absolute is not None:
        parts.append(f"by up to {tensor.max_absolute:.3g}")
    parts += [f"{tensor.num_nan:,} with a NaN"] if tensor.num_nan else []
    parts += [f"{tensor.num_inf:,} with an infinity"] if tensor.num_inf else []
    text = ", ".join(parts)
    if tensor.first is not None and tensor.first_values is not None:
        text += f", first at {list(tensor.first)}: {_pair(tensor.first_values)}"
    if tensor.worst is not None and tensor.worst_values is not None and tensor.worst != tensor.first:
        text += f"; worst at {list(tensor.worst)}: {_pair(tensor.worst_values)}"
    return text


def _pair(values: tuple[str, str]) -> str:
    return f"{values[0]} in the reference, {values[1]} now"


def histogram(tensor: TensorNumbers) -> list[tuple[str, int]]:
    """Return how many elements lie in each range of distances ("0", "1", "2-3", ..., "NaN"), where any does."""
    if tensor.problem:
        return []
    labels = [
        str(index) if index < 2 else f"{2 ** (index - 1):,}-{2**index - 1:,}" for index in range(len(tensor.ulps))
    ]
    rows = [*zip(labels, tensor.ulps, strict=True), ("NaN", tensor.num_nan), ("Inf", tensor.num_inf)]
    return [(label, number) for label, number in rows if number]


def shown_numbers(verdict: Verdict) -> tuple[Divergence, ...]:
    """Return the divergences of a verdict whose numbers are shown: the first one, and the first origins."""
    first = verdict.first_divergence
    known = dict.fromkeys(() if first is None else (first,)) | dict.fromkeys(verdict.origins)
    return tuple(divergence for divergence in known if divergence.numbers is not None)[:MAX_SHOWN]


def place_of(divergence: Divergence) -> str:
    """Return where a divergence is, in a few words."""
    module = f" in {divergence.module}" if divergence.module else ""
    rank = f", rank {divergence.rank}" if divergence.rank else ""
    return f"{divergence.phase}: {divergence.op} #{divergence.occurrence}, output {divergence.output}{module}{rank}"


def tensor_lines(numbers: Numbers) -> list[tuple[str, str]]:
    """Return name and difference of each output and of what was read, and how many of these are not listed."""
    lines = [
        (f"{role}{tensor.tensor}{f' ({tensor.name})' if tensor.name else ''}", how_much(tensor))
        for role, tensors in (("", numbers.output), ("read: ", numbers.inputs))
        for tensor in tensors
    ]
    more = numbers.num_inputs - len(numbers.inputs)
    return [*lines, ("", f"and {count(more, 'further input')}")] if more > 0 else lines


def render_numbers(verdict: Verdict, console: Console) -> None:
    """Print by how much the first divergence and the first origins differ; nothing where nothing was to be kept."""
    for divergence in shown_numbers(verdict):
        numbers = divergence.numbers
        assert numbers is not None, "it was chosen by them"
        where = "" if divergence == verdict.first_divergence else f", {place_of(divergence)}"
        print_line(console)
        print_line(console, f"By how much{where}", "bold")
        if numbers.problem:
            print_line(console, f"  cannot be told: {numbers.problem}")
            continue
        lines = tensor_lines(numbers)
        width = max(len(name) for name, _ in lines)
        for name, text in lines:
            print_line(console, f"  {name:<{width}}  {text}")
        for tensor in numbers.output:
            if tensor.num_differing and (bins := histogram(tensor)):
                shown = ", ".join(f"{label}: {number:,}" for label, number in bins)
                print_line(console, f"  {'':<{width}}  elements at each distance in ULPs: {shown}")
