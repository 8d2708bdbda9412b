"""What the doctor reports of the installation; needs no package but rich."""

from collections.abc import Iterable
from dataclasses import asdict
from typing import Any

from det_callbacks.environment.installation import Installation
from det_callbacks.internals.versions import TESTED
from det_callbacks.report.console import Section


def broken_to_dict(here: Installation) -> dict[str, Any]:
    """Return the doctor's JSON if the installation cannot record."""
    return {"schema": 1, "is_well": False, "installation": asdict(here)}


def broken_report(here: Installation) -> list[Section]:
    """Return the doctor's report in that case."""
    title = versions_line(
        here, [name for name, found in here.versions.items() if found or name in TESTED]
    )
    return [Section(title=title, style="bold red", lines=installation_lines(here))]


def versions_line(here: Installation, names: Iterable[str]) -> str:
    return ", ".join(f"{name} {here.versions[name] or 'not installed'}" for name in names)


def installation_lines(here: Installation) -> list[str]:
    """Return which packages are untested, broken or missing, and what to do."""
    tested = ", ".join(
        f"{package} {oldest} to {newest}" for package, (oldest, newest) in TESTED.items()
    )
    lines = [f"Untested: {one}" for one in here.untested]
    lines += [f"Cannot be imported: {one}" for one in here.broken]
    lines += [f"Missing: {one}" for one in here.missing]
    if here.broken:
        return [*lines, f"Install versions that det_callbacks was tested with: {tested}."]
    return [*lines, f"Tested with {tested}"]
