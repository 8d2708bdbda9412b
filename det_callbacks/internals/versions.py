"""The tested versions of torch, Lightning and transformers."""

import re
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version

TESTED: Mapping[str, tuple[str, str]] = {"torch": ("2.11", "2.15"), "lightning": ("2.5", "2.6")}
"""Package -> its oldest and newest tested minor version."""


OPTIONAL: Mapping[str, tuple[str, str]] = {"transformers": ("4.57", "5.24")}
"""The same for a framework that det_callbacks does not install."""

MALICIOUS = ("2.6.2", "2.6.3")
"""Versions of Lightning that an attacker published (GHSA-w37p-236h-pfx3)."""


def malicious() -> list[str]:
    """Return a sentence for each installed package whose version contains malware."""
    return [
        f"{package} {found}: it contains malware (GHSA-w37p-236h-pfx3), so uninstall it, and "
        "replace all secrets that it could read"
        for package in ("lightning", "pytorch_lightning")
        if (found := installed_version(package)) in MALICIOUS
    ]


def newer_than_tested(framework: str = "lightning") -> list[str]:
    """Return a sentence for each installed package whose minor version is
    newer than any tested one.

    ``framework`` is the distribution that trains; ``pytorch_lightning`` has the
    versions of ``lightning``.
    """
    known = {**TESTED, "pytorch_lightning": TESTED["lightning"], **OPTIONAL}
    tested = {name: known[name] for name in ("torch", framework) if name in known}
    installed = {package: installed_version(package) for package in tested}
    return [
        f"{package} {found} is newer than any version that det_callbacks was tested with "
        f"({tested[package][1]})"
        for package, found in installed.items()
        if found is not None and _minor(found) > _minor(tested[package][1])
    ]


def installed_version(package: str) -> str | None:
    """Return the version of an installed package, None if pip knows none."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _minor(text: str) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", text)[:2]))
