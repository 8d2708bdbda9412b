"""The versions of torch and Lightning that the tests have passed on."""

import re
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version

TESTED: Mapping[str, tuple[str, str]] = {"torch": ("2.11", "2.15"), "lightning": ("2.5", "2.6")}
"""Package -> the oldest and the newest minor version."""


def newer_than_tested(lightning: str = "lightning") -> list[str]:
    """Return a sentence for each installed package whose minor version is later than any that was tested.

    Lightning is the distribution that trains: ``pytorch_lightning`` has the versions of ``lightning``.
    """
    packages = {"torch": "torch", "lightning": lightning}
    installed = {name: installed_version(package) for name, package in packages.items()}
    return [
        f"{packages[name]} {found} is newer than any version that det_callbacks was tested with ({TESTED[name][1]})"
        for name, found in installed.items()
        if found is not None and _minor(found) > _minor(TESTED[name][1])
    ]


def installed_version(package: str) -> str | None:
    """Return the version of an installed package, None where pip knows none: not installed, or a source tree."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _minor(text: str) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", text)[:2]))
