"""What record, verify and check may be asked for, on the command line and in ``[tool.det_callbacks]``."""

import argparse
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from det_callbacks.errors import CheckError, DetCallbacksError
from det_callbacks.patterns import as_patterns
from det_callbacks.runs.selection import Selection


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """One option, by its name on the command line, with an argument of ``DeterminismCallback`` or a setting.

    Attributes:
        argument: "" for a setting.
        read: of a text, or of what TOML holds; raises ValueError with what it must be.
    """

    help: str
    read: Callable[[Any], Any]
    argument: str = ""
    metavar: str | None = None


def _one_of(*allowed: str) -> Callable[[Any], str]:
    def read(value: Any) -> str:
        if value not in allowed:
            raise ValueError(f"must be one of {', '.join(allowed)}")
        return str(value)

    return read


def _names(value: Any) -> list[str]:
    names = value.split(",") if isinstance(value, str) else value
    if not isinstance(names, list) or not names or not all(isinstance(name, str) and name for name in names):
        raise ValueError("must be a list of texts (on the command line: separated by commas)")
    return names


def _number(value: Any) -> int:
    if isinstance(value, bool) or not str(value).isdecimal():
        raise ValueError("must be a whole number from 0 on")
    return int(value)


def _numbers(value: Any) -> list[int]:
    return [_number(number) for number in (value.split(",") if isinstance(value, str) else value)]


def _flag(value: Any) -> bool:
    if not isinstance(value, bool):
        raise ValueError("must be true or false")
    return value


def _replay(value: Any) -> str | list[str]:
    if isinstance(value, str) and value.endswith((".yaml", ".yml")):
        return str(Path(value).absolute())  # the script may go elsewhere
    return list(as_patterns("replay", _names(value)))


OPTIONS: Mapping[str, Option] = {
    "level": Option(
        argument="level", read=_one_of("op", "module", "state"), metavar="LEVEL", help="op (default), module or state"
    ),
    "modules": Option(
        argument="modules", read=_names, metavar="PATTERNS", help="fnmatch patterns of modules, separated by commas"
    ),
    "every-n-steps": Option(argument="every_n_steps", read=_number, metavar="N", help="record every n-th batch"),
    "only-steps": Option(argument="only_steps", read=_numbers, metavar="N,N", help="record these batches, by number"),
    "replay": Option(
        argument="replay",
        read=_replay,
        metavar="OPS",
        help="ops whose outputs are saved and put back: patterns, or a YAML file",
    ),
    "keep": Option(
        argument="keep_tensors",
        read=lambda value: list(as_patterns("keep", _names(value))),
        metavar="OPS",
        help="ops whose tensors are kept, to say by how much they differ",
    ),
    "steps": Option(
        argument="steps",
        read=_one_of("all", "common"),
        metavar="WHICH",
        help="verify: all (default) demands the reference's steps, common compares those of both",
    ),
    "on-divergence": Option(
        argument="on_divergence",
        read=_one_of("raise", "collect", "warn"),
        metavar="WHAT",
        help="verify: raise (default) stops there, collect and warn go on",
    ),
    "seed": Option(read=_number, metavar="N", help="seed of all generators, set before the script's first line"),
    "deterministic": Option(read=_flag, help="set the defaults of DeterminismSettings before the script's first line"),
}
"""In the order in which ``--help`` shows them."""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Give a command the options."""
    for name, option in OPTIONS.items():
        if option.metavar is None:
            parser.add_argument(f"--{name}", action=argparse.BooleanOptionalAction, help=option.help)
        else:
            parser.add_argument(f"--{name}", metavar=option.metavar, help=option.help)


def read_options(given: argparse.Namespace) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return arguments of ``DeterminismCallback`` and settings: those of the command line, else of pyproject.toml.

    Raises:
        CheckError: an option that there is not, or a value that is not allowed.
    """
    file, table = _project_options()
    arguments: dict[str, Any] = {}
    settings: dict[str, Any] = {}
    for name, option in OPTIONS.items():
        value, place = getattr(given, name.replace("-", "_")), f"--{name}"
        if value is None and name in table:
            value, place = table[name], f"{name} in [tool.det_callbacks] of {file}"
        if value is None:
            continue
        try:
            value = option.read(value)
        except (ValueError, DetCallbacksError) as error:
            raise CheckError(f"{place}: {error}; got {value!r}.") from error
        if option.argument:
            arguments[option.argument] = value
        elif value is not False:
            settings[name] = value
    Selection(**{name: value for name, value in arguments.items() if name in Selection.__dataclass_fields__})
    return arguments, settings


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
