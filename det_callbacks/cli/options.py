"""What record, verify and check may be asked for, on the command line and in ``[tool.det_callbacks]``."""

import argparse
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec

from det_callbacks.errors import CheckError, DetCallbacksError
from det_callbacks.patterns import as_patterns
from det_callbacks.runs.selection import Selection

Number = Annotated[int, msgspec.Meta(ge=0)]

OPTIONS: Mapping[str, tuple[Any, str, str]] = {
    # name -> type of its value, a word for it, help; in the order of --help
    "level": (Literal["op", "module", "state"], "LEVEL", "op (default), module or state"),
    "modules": (list[str], "PATTERNS", "fnmatch patterns of modules, separated by commas"),
    "every-n-steps": (Number, "N", "record every n-th batch"),
    "only-steps": (list[Number], "N,N", "record these batches, by number"),
    "replay": (list[str], "OPS", "ops whose outputs are saved and put back: patterns, or a YAML file"),
    "keep": (list[str], "OPS", "ops whose tensors are kept, to say by how much they differ"),
    "steps": (
        Literal["all", "common"],
        "WHICH",
        "verify: all (default) demands the reference's steps, common compares those of both",
    ),
    "on-divergence": (
        Literal["raise", "collect", "warn"],
        "WHAT",
        "verify: raise (default) stops there, collect and warn go on",
    ),
    "seed": (Number, "N", "seed of all generators, set before the script's first line"),
    "deterministic": (bool, "FLAG", "set the defaults of DeterminismSettings before the script's first line"),
}
_SETTINGS = ("seed", "deterministic")


def add_options(parser: argparse.ArgumentParser) -> None:
    """Give a command the options."""
    for name, (kind, word, text) in OPTIONS.items():
        more: Any = {"action": argparse.BooleanOptionalAction} if kind is bool else {"metavar": word}
        parser.add_argument(f"--{name}", help=text, **more)


def read_options(given: argparse.Namespace) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return arguments of ``DeterminismCallback`` and settings: the command line's, else those of the project.

    Raises:
        CheckError: an option that there is not, or a value that is not allowed.
    """
    file, table = _project_options()
    values: dict[str, Any] = {}
    for name in OPTIONS:
        value, place = getattr(given, name.replace("-", "_")), f"--{name}"
        if value is None and name in table:
            value, place = table[name], f"{name} in [tool.det_callbacks] of {file}"
        if value is not None:
            values[name.replace("-", "_")] = _read(name, value, place, is_text=place.startswith("--"))
    settings = {name: value for name in _SETTINGS if (value := values.pop(name, False)) is not False}
    if "keep" in values:
        values["keep_tensors"] = values.pop("keep")
    Selection(**{name: value for name, value in values.items() if name in Selection.__dataclass_fields__})
    return values, settings


def _read(name: str, value: Any, place: str, *, is_text: bool) -> Any:
    kind, word, text = OPTIONS[name]
    if name == "replay" and isinstance(value, str) and value.endswith((".yaml", ".yml")):
        return str(Path(value).absolute())  # the script may go elsewhere
    if isinstance(value, str) and kind in (list[str], list[Number]):
        value = value.split(",")
    try:
        read = msgspec.convert(value, kind, strict=not is_text)
        return list(as_patterns(name, read)) if name in ("replay", "keep") else read
    except DetCallbacksError as error:
        raise CheckError(f"{place}: {error}") from error
    except msgspec.ValidationError as error:
        raise CheckError(f"{place} takes {word}: {text}; got {value!r}.") from error


def _project_options() -> tuple[Path | None, dict[str, Any]]:
    """Return ``[tool.det_callbacks]`` of the pyproject.toml that the working directory belongs to."""
    folder = Path.cwd()
    file = next((path for path in (it / "pyproject.toml" for it in (folder, *folder.parents)) if path.is_file()), None)
    if file is None:
        return None, {}
    try:
        table = tomllib.loads(file.read_text(encoding="utf-8")).get("tool", {}).get("det_callbacks", {})
    except ValueError as error:
        raise CheckError(f"{file} cannot be read: {error}") from error
    options = {name.replace("_", "-"): value for name, value in table.items()}
    if unknown := sorted(set(options) - set(OPTIONS)):
        raise CheckError(f"[tool.det_callbacks] of {file} has no option {unknown[0]}; there are {', '.join(OPTIONS)}.")
    return file, options
