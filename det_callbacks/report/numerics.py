"""Reports whether runs differ by rounding or by a real change: one sentence,
the jumps, and every site.
"""

from math import ceil, inf, prod

from det_callbacks.compare.nonfinite import NonFinite
from det_callbacks.digest.numbers import epsilon
from det_callbacks.report.console import Section, Table
from det_callbacks.runs.program import Site, in_module
from det_callbacks.text import at_most, count, listed
from det_callbacks.verdict import Divergence, Numerics, SiteNumerics

PRINTED_SITES, PRINTED_JUMPS = 30, 5
_ONLY_IN = {"missing": "the reference", "extra": "the current run"}
COLUMNS = ("elements", "ULP", "relative", "absolute", "x tolerance")
"""Columns of a table of measures."""


def numerics_report(numerics: Numerics, *, lists_all: bool) -> list[Section]:
    """Return the conclusion, what was compared and how, the largest jumps,
    and the sites in order.
    """
    lines = [numerics_sentence(numerics), f"Compared: {_compared(numerics)}."]
    lines += [
        f"Not compared: {number:,} because {why}."
        for why, number in numerics.not_compared.items()
        if number
    ]
    report = [Section(title="Numerics", lines=lines)]
    if numerics.jumps:
        items = [_jump(site) for site in numerics.jumps]
        shown = items if lists_all else at_most(PRINTED_JUMPS, items)
        report.append(
            Section(title="Jumps, by how much the error grows, the largest first", items=shown)
        )
    listed = [site for site in numerics.sites if lists_all or site.kind != "equal"]
    if listed:
        rows = [(*_row(site), "yes" if site.within else "NO") for site in listed]
        table = Table(
            columns=("step", "phase", "module or name", "op", *COLUMNS, "within"),
            rows=rows,
            limit=len(rows) if lists_all else PRINTED_SITES,
        )
        report.append(
            Section(title=f"{'All' if lists_all else 'Differing'} sites, in order", table=table)
        )
    return report


def numerics_sentence(numerics: Numerics) -> str:
    jump, worst = numerics.first_jump, numerics.worst
    if worst is None:
        return f"No difference: the numbers of all {count(len(numerics.sites), 'site')} are equal."
    if jump is not None and jump.kind in _ONLY_IN:
        after = numerics.jumps[1]
        return (
            f"A real change starts at {_where(jump)}, which only {_ONLY_IN[jump.kind]} has; the "
            f"next op that both have differs: {_where(after)} ({ulps_text(after.ulp)})."
        )
    if jump is not None:
        return f"A real change starts at {_where(jump)} ({ulps_text(jump.ulp)}; {_reads(jump)})."
    if numerics.conclusion == "change":
        first = next(
            site
            for site in numerics.sites
            if not site.within and site.is_start and site.reads is None
        )
        return (
            f"Beyond the tolerance, first at {_where(first)} ({ulps_text(first.ulp)}); "
            f"{_reads(first)}, so it is unknown where the change starts. Compare the first step of "
            "both, from the same weights and batch."
        )
    rounding = (
        f"the worst is {multiple_text(worst.excess)} x the tolerance ({ulps_text(worst.ulp)}) at "
        f"{_where(worst)}"
    )
    if not numerics.num_beyond:
        return f"Rounding only: {rounding}."
    text = (
        "Rounding that adds up: no op adds more than rounding to the error of its inputs, but "
        f"{count(numerics.num_beyond, 'site')} are beyond the tolerance; {rounding}."
    )
    if numerics.tolerance == "torch.testing":
        text += " Measure how far rounding goes: det-callbacks check --numerics."
    return text


def nonfinite_sentence(found: NonFinite) -> str:
    """Return a sentence that names the op that made the first NaN or infinity, and its line."""
    parts = [
        f"{number:,} {what}"
        for number, what in ((found.num_nan, "NaN"), (found.num_inf, "infinite"))
        if number
    ]
    rank = f" of rank {found.rank}" if found.rank else ""
    site = found.site
    line = f" at {site.source[0]}" if site.source else ""
    known = "its inputs are finite"
    if found.num_unknown:
        known = f"no kept input has any, and {count(found.num_unknown, 'tensor')} were not kept"
    text = (
        f"The first number that is not finite comes from {site.op} in "
        f"{site.module or 'no submodule'}{line} (step {found.step}{rank}, {site.phase}): "
        f"{' and '.join(parts)} of {count(found.num_elements, 'element')}; {known}"
    )
    if found.first_nan is None:
        return text
    nan = found.first_nan
    line = f" at {nan.source[0]}" if nan.source else ""
    return f"{text}. {nan.op} in {nan.module or 'no submodule'}{line} turns it into the first NaN"


def rounding_sentence(numerics: Numerics) -> str:
    """Return a sentence that says how far the change of the last bit grew."""
    numbers = [site for site in numerics.sites if site.relative]
    far = max(numbers, key=lambda site: site.relative or 0.0, default=None)
    most = (
        ""
        if far is None
        else f"; the largest is {ulps_text(far.ulp)} ({far.relative:.2g} relative) at {_where(far)}"
    )
    return (
        f"Rounding: with the last bit of its first inputs changed, {numerics.num_differing:,} of "
        f"{count(len(numerics.sites), 'site')} differ{most}."
    )


def measured(
    ulp: int | None, relative: float | None, absolute: float | None, excess: float | None
) -> list[str]:
    """Return the cells of a table: ULPs, relative and absolute error, multiple of the tolerance."""
    return [
        "unknown" if ulp is None else f"{ulp:,}",
        *("-" if it is None else f"{it:.2g}" for it in (relative, absolute)),
        multiple_text(excess),
    ]


def multiple_text(excess: float | None) -> str:
    """Return a multiple of the tolerance as text: "0.25"; "inf" for a tolerance of 0."""
    return "inf" if excess is None or excess == inf else f"{excess:.3g}"


def _compared(numerics: Numerics) -> str:
    num_elements = sum(site.num_elements for site in numerics.sites)
    whole = sum(prod(site.shape or ()) for site in numerics.sites)
    of_all = "" if num_elements >= whole else f" of {whole:,}, an even sample"
    bound = f"within the tolerance of {numerics.tolerance}"
    if numerics.num_default:
        bound += f" ({numerics.num_default:,} of them by torch.testing, not measured)"
    return (
        f"{count(len(numerics.sites), 'site')} with {count(num_elements, 'element')}{of_all}; "
        f"{numerics.num_differing:,} differ, {len(numerics.sites) - numerics.num_beyond:,} are "
        f"{bound}"
    )


def output_text(site: Site | Divergence | SiteNumerics) -> str:
    """Return "aten.mm.default#3 output 1"."""
    output = f" output {site.output}" if site.output else ""
    return f"{site.op}#{site.occurrence}{output}"


def _row(site: SiteNumerics) -> tuple[object, ...]:
    whole = prod(site.shape or ())
    elements = f"{site.num_elements:,}" + (f" of {whole:,}" if site.num_elements < whole else "")
    place = (site.step, site.phase, site.module or site.name or "-", output_text(site))
    return (*place, elements, *measured(site.ulp, site.relative, site.absolute, site.excess))


def _where(site: SiteNumerics) -> str:
    line = f" at {site.source[0]}" if site.source else ""
    again = f" #{site.occurrence}" if site.occurrence else ""
    rank = f" of rank {site.rank}" if site.rank else ""
    place = in_module(site.module, site.op)
    if site.name and not site.module:
        place = f" of {site.name}"
    return f"{site.op}{again}{place}{line} (step {site.step}{rank}, {site.phase})"


def ulps_text(ulp: int | None) -> str:
    """Return "3 ULPs", or the reason why there is no number."""
    return "a NaN or an infinity on one side" if ulp is None else count(ulp, "ULP")


def _jump(site: SiteNumerics) -> str:
    if site.kind in _ONLY_IN:
        return f"{_where(site)}, which only {_ONLY_IN[site.kind]} has"
    grows = "" if site.growth is None else f", {site.growth:.3g} times what its inputs explain,"
    return f"{ulps_text(site.ulp)}{grows} at {_where(site)}; {_reads(site)}"


def _reads(site: SiteNumerics) -> str:
    if site.reads is None:
        return f"its inputs differ and were not kept ({listed(site.through)})"
    if site.through:  # their error is that of the compared sites before, and is not measured
        return f"its inputs come through {listed(site.through)}, whose outputs were not compared"
    if not site.reads:
        return "its inputs are equal"
    size = epsilon(site.dtype or "")
    by = count(ceil(site.reads / size), "ULP") if size else f"{site.reads:.2g}"
    return f"its inputs differ by {by}"
