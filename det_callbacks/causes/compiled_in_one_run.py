"""Only one run has compiled code in this step; the other run has eager ops instead.

Example:
    Step 0, forward: only the reference runs compiled code (compiled.Net_forward); the current
    run has eager ops instead, with different kernels. Compile both runs, or neither.
    compare_compiled measures how far a compiled module is from the module itself.
"""

from det_callbacks.causes.phrases.steps import place
from det_callbacks.causes.rule import Answer, Causes
from det_callbacks.compare.facts import Facts
from det_callbacks.runs.program import Program
from det_callbacks.text import listed

CAUSES: Causes = ("structure",)


def find(facts: Facts) -> Answer | None:
    difference, leading = facts.difference, facts.leading.divergence
    reference, current = _regions(difference.reference.program), _regions(difference.current.program)
    if bool(reference) == bool(current) or leading.kind not in ("missing", "extra"):
        return None
    # without eager ops or module outputs instead, the other run may have compiled before its recording: it has no sites
    eager = "extra" if reference else "missing"
    instead = [row for row, kind in difference.kinds.items() if kind == eager]
    if not any(difference.site(row).phase == "forward" for row in instead):
        return None
    sides = ("reference", "current run") if reference else ("current run", "reference")
    where, regions = f"{place(facts)}, {leading.phase}", listed(reference or current)
    return Answer(
        cause="structure",
        explanation=f"{where}: only the {sides[0]} runs compiled code ({regions}); the {sides[1]} has eager ops "
        "instead, with different kernels",
        advice="Compile both runs, or neither. compare_compiled measures how far a compiled module is from the module "
        "itself",
    )


def _regions(program: Program) -> list[str]:
    """Return the compiled regions of a step, whose graph it holds."""
    names = (site.op.removesuffix(".graph") for site in program.sites if site.role == "graph")
    return list(dict.fromkeys(names))
