"""What tests of observations have in common."""

from pathlib import Path
from typing import Any

from det_callbacks import ObserverContext, observe
from det_callbacks.runs.program import Site
from det_callbacks.runs.store import Run


def sites(folder: Path, step: int = 0) -> tuple[Site, ...]:
    return Run.open(folder).view(0, 0, step).program.sites


def names(folder: Path, step: int = 0) -> list[str]:
    return [site.name or site.op for site in sites(folder, step)]


def record(folder: Path, *values: tuple[str, Any], name: str = "reference") -> Path:
    with ObserverContext(folder, name):
        for key, value in values:
            observe(key, value)
    return folder / name


def mismatches(folder: Path, reference: Path, *values: tuple[str, Any]) -> list[tuple[str | None, str]]:
    """Return name and kind of what differs when these values are observed."""
    with ObserverContext(folder, "current", reference) as observer:
        for key, value in values:
            observe(key, value)
    assert observer.verdict is not None
    return [(found.name, found.kind) for found in observer.mismatches]
