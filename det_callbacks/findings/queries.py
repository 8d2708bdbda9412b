"""What several findings ask of the rows of a step."""

from collections.abc import Iterable, Iterator

from det_callbacks.findings.facts import FitSummary
from det_callbacks.runs.program import Program, Site

CASTS = ("aten._to_copy.default", "aten.clone.default")


def outputs_of(program: Program, *ops: str) -> Iterator[tuple[int, Site]]:
    """Yield the positions and sites of the outputs of ops, such as "aten._softmax."."""
    for at, site in enumerate(program.sites):
        if site.role == "output" and site.op.startswith(ops):
            yield at, site


def before_casts(program: Program, at: int) -> int:
    """Return the position of what casts and copies read first."""
    while (site := program.sites[at]).op in CASTS and len(site.inputs) == 1:
        (at,) = site.inputs
    return at


def ancestors(program: Program, positions: Iterable[int], *, phase: str) -> set[int]:
    """Return positions, and what they followed from: through ops of this phase, up to the first other site."""
    found, pending = set[int](), [*positions]
    while pending:
        at = pending.pop()
        if at not in found:
            found.add(at)
            site = program.sites[at]
            pending += site.inputs if site.phase == phase else ()
    return found


def forward_readers(program: Program) -> dict[str, list[Site]]:
    """Return the ops of the forward pass that read each named tensor as it was before the step, by its name."""
    found: dict[str, list[Site]] = {}
    for site in program.sites:
        if site.op and site.phase == "forward" and site.role == "output":
            for at in site.inputs:
                name = held_name(program.sites[at])
                if name is not None:
                    found.setdefault(name, []).append(site)
    return found


def held_name(site: Site) -> str | None:
    """Return the name of a tensor that was there before the step, and is read as it was then; or None."""
    is_first = site.phase == "state" and not site.inputs  # the first step begins with the state
    return site.name if is_first or site.role == "input" else None


def place(site: Site) -> str:
    """Return " in net.head, at train.py:7 in forward", with what is known of it."""
    module = f" in {site.module}" if site.module not in ("", "?") else ""
    return module + (f", at {site.source[0]}" if site.source else "")


def line_with(fit: FitSummary, site: Site, word: str) -> str:
    """Return the first line of a site's stack with this word, as "train.py:7 in forward"; "" if none has it."""
    for line in site.source:
        number = line.partition(" in ")[0].rpartition(":")[2]
        if any(str(at) == number and word in text for at, text in fit.run.source_text(line)):
            return line
    return ""
