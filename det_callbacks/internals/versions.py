"""The versions of torch and Lightning that the tests have passed on."""

from collections.abc import Mapping
from importlib.metadata import version

TESTED: Mapping[str, tuple[str, str]] = {"torch": ("2.11", "2.15"), "lightning": ("2.5", "2.6")}
"""Package -> the oldest and the newest minor version."""


def newer_than_tested(lightning: str = "lightning") -> list[str]:
    """Return what to say of each installed package that is of a later minor version than any that was tested.

    Lightning is the distribution that trains: it may be ``pytorch_lightning``, which has the versions of ``lightning``.
    """
    packages = {"torch": "torch", "lightning": lightning}
    return [
        f"{package} {version(package)} is newer than any version that det_callbacks was tested with ({newest})"
        for package, (_, newest) in ((packages[name], versions) for name, versions in TESTED.items())
        if _minor(version(package)) > _minor(newest)
    ]


def _minor(text: str) -> tuple[int, int]:
    major, minor, *_ = text.split(".")
    return int(major), int(minor)
