"""What torch says of its ops, and which of them a run uses, in tables."""

from collections.abc import Sequence
from importlib.metadata import version

from rich.console import Console
from rich.text import Text

from det_callbacks.nondeterminism import BEHAVIOURS, OpFact
from det_callbacks.report.closing import count
from det_callbacks.report.op_usage import OpUsage
from det_callbacks.report.tables import print_table
from det_callbacks.runs.store import Run

_MEANINGS = {
    "alternate algorithm": "takes another algorithm under torch.use_deterministic_algorithms(True)",
    "error": "raises RuntimeError under torch.use_deterministic_algorithms(True)",
    "random": "draws from a random generator",
}


def render_op_facts(facts: Sequence[OpFact], console: Console) -> None:
    """Print a table of all that torch says of its ops."""
    _print_line(console, f"torch {version('torch')}: {_counts(facts)}")
    _print_meanings(console)
    rows = [
        (
            fact.name,
            fact.behaviour,
            fact.device,
            " ".join(fact.ops) or "(none found)",
            fact.condition or "-",
        )
        for fact in facts
    ]
    print_table(console, ("name", "behaviour", "device", "ops", "condition"), rows)


def render_op_usage(usage: OpUsage, facts: Sequence[OpFact], run: Run, console: Console) -> None:
    """Print a table of what torch says of the ops that a run uses, a row for each module."""
    selection = ", ".join(f"{name} {value}" for name, value in run.manifest.get("selection", {}).items())
    state = "complete" if run.is_complete else f"INCOMPLETE: {run.incomplete_reason}"
    _print_line(console, f"run {run.run_id} in {run.path}: {state}")
    _print_line(console, f"recorded: {selection}")
    _print_line(
        console,
        f"{count(usage.num_ops, 'op')} in {count(usage.num_programs, 'program')}; torch {version('torch')}: "
        f"{_counts(facts)}; {len(usage.uses)} may be about this run",
    )
    if not usage.uses:
        return
    _print_meanings(console)
    rows = [
        (
            use.fact.name,
            use.fact.behaviour,
            use.fact.device,
            module or "-",
            number,
            " ".join(use.ops),
            use.fact.condition or "-",
        )
        for use in usage.uses
        for module, number in use.sites.items()
    ]
    columns = ("name", "behaviour", "device", "module", "sites", "ops", "condition")
    print_table(console, columns, rows, numbers="sites")
    _print_line(
        console,
        "sites: in one step. Devices and conditions are torch's words; that they are met is not checked.",
    )


def _counts(facts: Sequence[OpFact]) -> str:
    numbers = {behaviour: sum(fact.behaviour == behaviour for fact in facts) for behaviour in BEHAVIOURS}
    listed = ", ".join(f"{number} {behaviour}" for behaviour, number in numbers.items())
    return f"{len(facts)} entries ({listed})"


def _print_meanings(console: Console) -> None:
    for behaviour in BEHAVIOURS:
        _print_line(console, f"  {behaviour}: {_MEANINGS[behaviour]}")


def _print_line(console: Console, line: str) -> None:
    console.print(Text(line), soft_wrap=True)
