"""The versions of torch and Lightning that the tests have passed on."""

from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version

TESTED: Mapping[str, tuple[str, str]] = {"torch": ("2.11", "2.15"), "lightning": ("2.5", "2.6")}
"""Package -> the oldest and the newest minor version."""


def newer_than_tested() -> list[str]:
    """Return what to say of each installed package that is of a later minor version than any that was tested."""
    installed = {package: found for package in TESTED if (found := _version(package)) is not None}
    return [
        f"{package} {installed[package]} is newer than any version that det_callbacks was tested with ({newest})"
        for package, (_, newest) in TESTED.items()
        if package in installed and _minor(installed[package]) > _minor(newest)
    ]


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _minor(text: str) -> tuple[int, int]:
    major, minor, *_ = text.split(".")
    return int(major), int(minor)
