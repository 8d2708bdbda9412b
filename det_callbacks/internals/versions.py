"""The versions of torch and Lightning that the tests have passed on."""

from collections.abc import Mapping

TESTED: Mapping[str, tuple[str, str]] = {"torch": ("2.11", "2.15"), "lightning": ("2.5", "2.6")}
"""Package -> the oldest and the newest minor version."""


def is_newer_than_tested(package: str, version: str) -> bool:
    """Return whether a version such as "2.16.0+cu130" is of a later minor version than any that was tested."""
    newest = TESTED[package][1]
    return _minor(version) > _minor(newest)


def _minor(version: str) -> tuple[int, int]:
    major, minor, *_ = version.split(".")
    return int(major), int(minor)
