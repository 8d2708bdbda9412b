"""The versions of torch and Lightning that the tests have passed on."""

from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version

TESTED: Mapping[str, tuple[str, str]] = {"torch": ("2.11", "2.15"), "lightning": ("2.5", "2.6")}
"""Package -> the oldest and the newest minor version."""


def newer_than_tested(lightning: str = "lightning") -> list[str]:
    """Return what to say of each installed package that is of a later minor version than any that was tested.

    Lightning is the distribution that trains: it may be ``pytorch_lightning``, which has the versions of ``lightning``.
    """
    packages = {"torch": "torch", "lightning": lightning}
    tested = {packages[name]: newest for name, (_, newest) in TESTED.items()}
    installed = {package: found for package in tested if (found := _version(package)) is not None}
    return [
        f"{package} {found} is newer than any version that det_callbacks was tested with ({tested[package]})"
        for package, found in installed.items()
        if _minor(found) > _minor(tested[package])
    ]


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _minor(text: str) -> tuple[int, int]:
    major, minor, *_ = text.split(".")
    return int(major), int(minor)
