"""The doctor's findings on one screen."""

from typing import TYPE_CHECKING

from rich.console import Console
from rich.text import Text

from det_callbacks.report.console import count, print_line, print_table

if TYPE_CHECKING:
    from det_callbacks.doctor import Diagnosis

_STYLES = {"in force": "green", "not in force": "bold red", "too late": "bold red", "no effect here": "dim"}


def render_diagnosis(diagnosis: "Diagnosis", console: Console) -> None:
    """Print what is in force, what is not with the line to add, and what differs from a reference."""
    facts = diagnosis.facts
    place = f"{facts['cpu.model']} ({facts['torch.cpu_capability']}), {facts['cuda']}"
    versions = ", ".join(f"{name} {facts[f'{name}.version']}" for name in ("python", "torch", "lightning"))
    print_line(console, f"{versions}; {count(facts['torch.num_threads'], 'thread')} on {place}")
    if "digest" in facts:
        print_line(console, f"Digests of tensors on {facts['digest']}")
    against = diagnosis.against
    asker = "the defaults of DeterminismSettings" if against is None else f"in force in {against}"
    print_line(console, f"\nAsked for ({asker})", "bold")
    asked = [finding for finding in diagnosis.settings if finding.state != "left alone"]
    for finding in asked:
        line = Text(f"  {finding.state:<16}", style=_STYLES[finding.state])
        line.append(f"{finding.name} = {finding.wanted!r}", style="default")
        if finding.state != "in force":
            line.append(f", here {finding.in_force!r}: {finding.effect}", style="default")
        console.print(line, soft_wrap=True)
        if finding.to_do:
            print_line(console, f"{' ' * 18}{finding.to_do}", "cyan")
    if others := [f"{one.name} {one.in_force!r}" for one in diagnosis.settings if one.state == "left alone"]:
        print_line(console, "\nLeft as they are", "bold")
        print_line(console, ", ".join(others))
    if against is not None:
        print_line(console, f"\nDifferent from {against}", "bold")
        rows = [
            (
                *(one.name, one.reference, one.current, "machine" if one.is_machine else "choice"),
                "can change bits" if one.changes_bits else "changes no bits by itself",
                finding.to_do or "-",
            )
            for finding in diagnosis.differences
            for one in (finding.difference,)
        ]
        if rows:
            print_table(console, ("name", "reference", "here", "kind", "effect", "to make it the reference's"), rows)
        else:
            print_line(console, "nothing")
    missing = diagnosis.missing
    if not missing:
        print_line(console, "\nall in force", "bold green")
        return
    print_line(console, f"\n{count(len(missing), 'setting')} not in force: {', '.join(missing)}", "bold red")
    print_line(
        console,
        "One call sets them all: det_callbacks.enforce_determinism(det_callbacks.DeterminismSettings(...)), "
        "before the model is built; the Hydra presets do.",
    )
