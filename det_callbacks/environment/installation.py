"""What is installed here: versions, what of the package cannot be imported, and private names that are missing."""

from collections import defaultdict
from dataclasses import dataclass
from importlib import import_module

from det_callbacks.internals.versions import TESTED, installed_version, newer_than_tested


@dataclass(frozen=True, slots=True, kw_only=True)
class Installation:
    """The versions of torch and Lightning, None where one is not installed, and what does not work with them.

    Attributes:
        untested: a sentence for each package that is newer than any that was tested.
        broken: a sentence for each error that the import of public names ends with.
        missing: a sentence for each private name that is missing, with what is refused or lost without it.
    """

    versions: dict[str, str | None]
    untested: tuple[str, ...]
    broken: tuple[str, ...]
    missing: tuple[str, ...]


def look_at_installation() -> Installation:
    """Import all that is public, and look up each private name; takes some seconds, since it loads Dynamo."""
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
        except Exception as error:  # noqa: BLE001  # whatever an import ends with is what is asked for here
            names[f"{type(error).__name__}: {error}"].append(name)
    return tuple(f"{', '.join(several)}: {error}" for error, several in names.items())


def _missing() -> tuple[str, ...]:
    # these load torch, which may be broken; Dynamo's names are torch's, too
    from det_callbacks.internals import dynamo, lightning, torch  # noqa: F401, PLC0415

    return (*torch.TORCH.all_missing(), *lightning.all_missing())
