"""The doctor's findings on one screen."""

from typing import TYPE_CHECKING

from rich.console import Console
from rich.text import Text

from det_callbacks.report.closing import count
from det_callbacks.report.tables import print_table

if TYPE_CHECKING:
    from det_callbacks.doctor import Diagnosis, SettingFinding

_STYLES = {"in force": "green", "not in force": "bold red", "too late": "bold red", "no effect here": "dim"}


def render_diagnosis(diagnosis: "Diagnosis", console: Console) -> None:
    """Print what is in force, what is not with the line to add, and what differs from a reference."""
    facts = diagnosis.facts
    place = f"{facts['cpu.model']} ({facts['torch.cpu_capability']}), {facts['cuda']}"
    versions = ", ".join(f"{name} {facts[f'{name}.version']}" for name in ("python", "torch", "lightning"))
    console.print(Text(f"{versions}; {count(facts['torch.num_threads'], 'thread')} on {place}"), soft_wrap=True)
    if "digest" in facts:
        console.print(Text(f"Digests of tensors on {facts['digest']}"), soft_wrap=True)
    asked = [finding for finding in diagnosis.settings if finding.state != "left alone"]
    console.print(Text(f"\nAsked for ({_asker(diagnosis)})", style="bold"), soft_wrap=True)
    for finding in asked:
        _render_setting(finding, console)
    others = [finding for finding in diagnosis.settings if finding.state == "left alone"]
    if others:
        console.print(Text("\nLeft as they are", style="bold"))
        values = ", ".join(f"{finding.name} {finding.in_force!r}" for finding in others)
        console.print(Text(values), soft_wrap=True)
    if diagnosis.against is not None:
        _render_differences(diagnosis, console)
    missing = [finding.name for finding in asked if finding.state in ("not in force", "too late")]
    verdict = f"{count(len(missing), 'setting')} not in force: {', '.join(missing)}" if missing else "all in force"
    console.print(Text(f"\n{verdict}", style="bold red" if missing else "bold green"), soft_wrap=True)
    if missing:
        console.print(
            Text(
                "One call sets them all: det_callbacks.enforce_determinism(det_callbacks.DeterminismSettings(...)), "
                "before the model is built; the Hydra presets do."
            ),
            soft_wrap=True,
        )


def _asker(diagnosis: "Diagnosis") -> str:
    return "the defaults of DeterminismSettings" if diagnosis.against is None else f"in force in {diagnosis.against}"


def _render_setting(finding: "SettingFinding", console: Console) -> None:
    line = Text(f"  {finding.state:<16}", style=_STYLES[finding.state])
    line.append(f"{finding.name} = {finding.wanted!r}", style="default")
    if finding.state != "in force":
        line.append(f", here {finding.in_force!r}. {finding.why}", style="default")
    console.print(line, soft_wrap=True)
    if finding.to_do:
        console.print(Text(f"{' ' * 18}{finding.to_do}", style="cyan"), soft_wrap=True)


def _render_differences(diagnosis: "Diagnosis", console: Console) -> None:
    console.print(Text(f"\nDifferent from {diagnosis.against}", style="bold"), soft_wrap=True)
    if not diagnosis.differences:
        console.print(Text("nothing"))
        return
    rows = [
        (
            finding.name,
            finding.reference,
            finding.here,
            "machine" if finding.is_machine else "choice",
            "can change bits" if finding.changes_bits else "changes no bits by itself",
            finding.to_do or "-",
        )
        for finding in diagnosis.differences
    ]
    print_table(console, ("name", "reference", "here", "kind", "effect", "to make it the reference's"), rows)
