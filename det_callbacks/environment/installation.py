"""Inspects the installation: versions, broken imports, and missing private names."""

from collections import defaultdict
from dataclasses import dataclass
from importlib import import_module

from det_callbacks.internals.versions import TESTED, installed_version, newer_than_tested


@dataclass(frozen=True, slots=True, kw_only=True)
class Installation:
    """Problems with the installed versions of torch and Lightning.

    Attributes:
        untested: a sentence for each package newer than any tested version.
        broken: a sentence for each import that fails.
        missing: missing private names, each with what is lost without it.
    """

    versions: dict[str, str | None]
    untested: tuple[str, ...]
    broken: tuple[str, ...]
    missing: tuple[str, ...]


def look_at_installation() -> Installation:
    """Import everything public, and look up each private name; takes a few seconds."""
    broken = _broken()
    return Installation(
        versions={package: installed_version(package) for package in TESTED},
        untested=tuple(newer_than_tested()),
        broken=broken,
        missing=() if broken else _missing(),
    )


def _broken() -> tuple[str, ...]:
    package = import_module("det_callbacks")
    names = defaultdict[str, list[str]](list)
    for name in package.__all__:
        try:
            getattr(package, name)
        except Exception as error:  # noqa: BLE001  # an import may raise anything
            names[f"{type(error).__name__}: {error}"].append(name)
    return tuple(f"{', '.join(several)}: {error}" for error, several in names.items())


def _missing() -> tuple[str, ...]:
    # torch may be broken; Dynamo's names are registered with torch's
    from det_callbacks.internals import dynamo, lightning, torch  # noqa: F401, PLC0415

    return (*torch.TORCH.all_missing(), *lightning.all_missing())
