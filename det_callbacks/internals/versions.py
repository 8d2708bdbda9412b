"""The versions of torch and Lightning that the tests have passed on."""

import re
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version

TESTED: Mapping[str, tuple[str, str]] = {"torch": ("2.11", "2.15"), "lightning": ("2.5", "2.6")}
"""Package -> the oldest and the newest minor version."""


def newer_than_tested() -> list[str]:
    """Return what to say of each installed package that is of a later minor version than any that was tested."""
    installed = {package: installed_version(package) for package in TESTED}
    return [
        f"{package} {found} is newer than any version that det_callbacks was tested with ({TESTED[package][1]})"
        for package, found in installed.items()
        if found is not None and _minor(found) > _minor(TESTED[package][1])
    ]


def installed_version(package: str) -> str | None:
    """Return the version of an installed package, None where pip knows none: not installed, or a source tree."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _minor(text: str) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", text)[:2]))
