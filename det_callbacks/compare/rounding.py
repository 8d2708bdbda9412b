"""The error that rounding alone causes at each site of a run: the measured tolerance,
and its file.
"""

import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf
from operator import attrgetter
from pathlib import Path
from typing import Any

from det_callbacks.digest.numbers import epsilon
from det_callbacks.errors import SelectionError
from det_callbacks.runs.files import READ_ERRORS, damaged, read_file, replace_atomically
from det_callbacks.verdict import Divergence, Numerics, SiteNumerics

ROUNDING_FILE = "rounding.json"
"""The error that rounding alone causes at each site, in the folder of
``det-callbacks check --numerics``.
"""
MARGIN = 10.0
"""The tolerance is the error of the perturbed run times this:
another kernel rounds at every op, not only once.
"""

_SCHEMA = 1
Place = tuple[int, int, int, str, str, str, int, int]
"""Rank, segment, step, phase, module, op, occurrence and output of a site."""

_FIELDS = ("rank", "segment", "step", "phase", "module", "op", "occurrence", "output")
_KINDS = (int, int, int, str, str, str, int, int)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rounding:
    """The relative error that rounding causes at each site, as measured into ``path``."""

    path: Path
    bounds: Mapping[Place, float]

    @classmethod
    def read(cls, folder: str | Path) -> "Rounding":
        """Return what ``det-callbacks check --numerics`` wrote into a folder;
        its file may be given, too.
        """
        path = Path(folder)
        if path.name != ROUNDING_FILE:
            path /= ROUNDING_FILE
        try:
            content = json.loads(read_file(path))
            if content["schema"] != _SCHEMA:
                raise ValueError(
                    f"its schema is {content['schema']!r}, but this version reads {_SCHEMA}"
                )
            bounds = {
                _place_of_row(site[:8]): inf if site[8] is None else float(site[8])
                for site in content["sites"]
            }
            if any(bound != bound for bound in bounds.values()):
                raise ValueError("a bound is NaN")
        except FileNotFoundError as error:
            raise SelectionError(
                f"{folder} holds no measured tolerance ({ROUNDING_FILE}). Measure one: "
                f"det-callbacks check --numerics --to {shlex.quote(str(folder))} -- python train.py"
            ) from error
        except READ_ERRORS as error:
            raise damaged(path, f"it is not a measured tolerance ({error!r})") from error
        return cls(path=path, bounds=bounds)

    def bound(self, site: Divergence, dtype: str) -> float | None:
        """Return the relative error to tolerate at a site, or None if it was not measured."""
        measured = self.bounds.get(place_of(site))
        return None if measured is None else MARGIN * max(measured, epsilon(dtype))


def write_rounding(folder: Path, numerics: Numerics) -> None:
    """Write the relative error of each site between a run and its perturbed twin;
    null if it has no number.
    """
    content = json.dumps(
        {"schema": _SCHEMA, "sites": [[*place_of(site), site.relative] for site in numerics.sites]}
    )
    replace_atomically(
        folder / ROUNDING_FILE, content.encode(), instead="name another folder (--to)"
    )


def place_of(site: Divergence | SiteNumerics) -> Place:
    place: Place = attrgetter(*_FIELDS)(site)
    return place


def _place_of_row(values: Sequence[Any]) -> Place:
    place: Any = tuple(kind(value) for kind, value in zip(_KINDS, values, strict=True))
    return place  # type: ignore[no-any-return]
