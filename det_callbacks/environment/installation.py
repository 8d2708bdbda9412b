"""Inspects the installation: versions, broken imports, and missing private names."""

import platform
import re
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

from det_callbacks.internals.versions import (
    OPTIONAL,
    TESTED,
    installed_version,
    malicious,
    newer_than_tested,
)

_PACKAGES = (
    "det_callbacks",
    *TESTED,
    "pytorch_lightning",
    *OPTIONAL,
    "hydra-core",
    "numpy",
    "pyarrow",
    "triton",
)
# the folders of a path, but not its file: they name users and machines
_FOLDERS = re.compile(r"(?<![\w.])(?:~|[A-Za-z]:)?[\\/](?:[^\s\\/'\":;,]+[\\/])*")


@dataclass(frozen=True, slots=True, kw_only=True)
class Installation:
    """Problems with the installed versions of torch and Lightning.

    Attributes:
        versions: of Python and of the packages that matter here;
            None for one that is not installed.
        untested: a sentence for each package newer than any tested version.
        broken: a sentence for each package with malware, else for each import that fails.
        missing: a sentence for each missing private name, with what to install.
    """

    versions: Mapping[str, str | None]
    untested: tuple[str, ...]
    broken: tuple[str, ...]
    missing: tuple[str, ...]


def look_at_installation() -> Installation:
    """Import everything public, and look up each private name; takes a few seconds."""
    broken = tuple(malicious()) or _broken()  # the malware runs when it is imported
    return Installation(
        versions={"python": platform.python_version()}
        | {name: installed_version(name) for name in _PACKAGES},
        untested=tuple(newer_than_tested()),
        broken=broken,
        missing=() if broken else _missing(),
    )


def without_folders(text: str) -> str:
    """Return a text whose paths are only the names of their files,
    so that it can go into a public report.
    """
    return _FOLDERS.sub("", text.replace(str(Path.home()), "~"))


def _broken() -> tuple[str, ...]:
    package = import_module("det_callbacks")
    names = defaultdict[str, list[str]](list)
    for name in package.__all__:
        try:
            getattr(package, name)
        except Exception as error:  # noqa: BLE001  # an import may raise anything
            names[without_folders(f"{type(error).__name__}: {error}")].append(name)
    return tuple(f"{', '.join(several)}: {error}" for error, several in names.items())


def _missing() -> tuple[str, ...]:
    # torch may be broken; Dynamo's names are registered with torch's
    from det_callbacks.internals import dynamo, lightning, torch  # noqa: F401, PLC0415

    return (*torch.TORCH.all_missing(), *lightning.all_missing())
