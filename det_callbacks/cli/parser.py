"""The command line: the arguments of each command, its start, its output and its end."""

import argparse
import json
import os
import shlex
import sys
import tomllib
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Any

from det_callbacks.errors import CheckError, DetCallbacksError
from det_callbacks.report.console import Section, print_error, print_report

_PATHS = (
    "run_folder",
    "reference",
    "current",
    "checkpoint",
    "other",
    "against",
    "used_by",
    "tolerance",
)
SCRIPT_COMMANDS = ("record", "verify", "check", "find")
_MODULES = {
    "doctor": "doctor",
    "native": "doctor",
    **dict.fromkeys(SCRIPT_COMMANDS, "check"),
    "find": "find",
}  # of other commands it is commands.py


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command, with these arguments or those of the process, and return its exit status."""
    status = DetCallbacksError.exit_code
    try:
        status = _run(list(sys.argv[1:] if argv is None else argv))
        sys.stdout.flush()
    except DetCallbacksError as error:
        print_error(error, name="det-callbacks")
        return error.exit_code
    except ModuleNotFoundError as error:
        # the commands that read runs need few packages, and others may be missing
        needed = (
            f"This command needs {error.name}, which is not installed: pip install det_callbacks"
        )
        print_error(CheckError(needed), name="det-callbacks")
        return CheckError.exit_code
    except BrokenPipeError:  # the reader has gone
        silence_output()
    except OSError as error:  # standard output, or a path; our files raise WriteError
        where = error.filename or "standard output"
        print_error(
            CheckError(f"{where} cannot be used: {error.strerror or error}."), name="det-callbacks"
        )
        silence_output()
        return CheckError.exit_code
    except KeyboardInterrupt:
        return 130
    return status


def _run(given: list[str]) -> int:
    is_of_script = given[:1] and given[0] in SCRIPT_COMMANDS
    has_script = is_of_script and "--" in given
    end = given.index("--") if has_script else len(given)
    project = _project_words() if has_script else []
    if given[:1] == ["find"]:
        # which steps to compare
        project = [word for word in project if not word.startswith("--steps=")]
    parser = _parser(
        f"[tool.det_callbacks] of pyproject.toml adds {shlex.join(project)}" if project else ""
    )
    # the command line wins
    options, unknown = parser.parse_known_args([*given[:1], *project, *given[1:end]])
    if unknown and is_of_script and not has_script and not unknown[0].startswith("-"):
        at = given.index(unknown[0])
        words = shlex.join(["det-callbacks", *given[:at], "--", *given[at:]])
        raise CheckError(f"The command that trains comes after --: {words}")
    if unknown:
        parser.error(f"unrecognized arguments: {' '.join(unknown)}")
    options.words = given[end + 1 :]
    if is_of_script and not options.words:
        words = shlex.join(["det-callbacks", *given[:end], "--"])
        raise CheckError(f"There is no command to run. Put it after --: {words} python train.py")
    module = import_module(f"det_callbacks.cli.{_MODULES.get(options.command, 'commands')}")
    try:
        return int(getattr(module, options.command.replace("-", "_"))(options))
    except (DetCallbacksError, OSError, ModuleNotFoundError):
        raise
    except Exception as error:  # status 1 of a traceback would say that runs differ
        raise _unreadable(
            error, [str(path) for name in _PATHS if (path := getattr(options, name, None))]
        ) from error


def _unreadable(error: Exception, paths: Sequence[str]) -> CheckError:
    """Return the error for content that no reader refused, and that a command cannot handle."""
    *_, (frame, line) = traceback.walk_tb(error.__traceback__)
    place = f"{Path(frame.f_code.co_filename).name}:{line}"
    return CheckError(
        f"{' or '.join(paths) or 'The input'} cannot be used: {type(error).__name__}: {error} "
        f"({place}). Either det_callbacks did not write it, or this is an error of det_callbacks: "
        "then please report it. Nothing is known about a difference."
    )


def silence_output() -> None:
    """Discard the rest of the output: the interpreter would report it at its end,
    with a different status.
    """
    with suppress(OSError, ValueError):  # standard output may have no file
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _project_words() -> list[str]:
    """Return ``[tool.det_callbacks]`` of the working directory's pyproject.toml, as words."""
    folders, words = [Path.cwd(), *Path.cwd().parents], []
    file = next((path for folder in folders if (path := folder / "pyproject.toml").is_file()), None)
    try:
        tables = {} if file is None else tomllib.loads(file.read_text(encoding="utf-8"))
        options = tables.get("tool", {}).get("det_callbacks", {}).items()
    except (ValueError, AttributeError) as error:
        raise CheckError(
            f"{file} cannot be read, or [tool.det_callbacks] is not a table of options: {error}"
        ) from error
    for key, value in options:
        if key == "ignore_findings":  # findings/table.py reads it
            continue
        option = f"--{key.replace('_', '-')}"
        if option not in SCRIPT_OPTIONS:
            known = ", ".join(SCRIPT_OPTIONS)
            raise CheckError(
                f"[tool.det_callbacks] of {file} has the unknown option {key}. Use {known}."
            )
        text = ",".join(map(str, value)) if isinstance(value, list) else value
        flag = option if value else "--no-deterministic"
        is_flag = isinstance(value, bool) and option == "--deterministic"
        words.append(flag if is_flag else f"{option}={text}")
    return words


def _names(text: str) -> list[str]:
    return [name for name in text.split(",") if name]


def _path(text: str) -> str:
    if not text:  # Path("") is the working directory
        raise argparse.ArgumentTypeError(
            "must be a path; got '' (is a variable of your shell unset?)"
        )
    return text


def _number(text: str) -> int:
    if not text.isdecimal() or int(text) >= 2**32:  # the largest seed
        raise argparse.ArgumentTypeError(f"must be an integer from 0 to 4294967295; got {text!r}")
    return int(text)


def _numbers(text: str) -> list[int]:
    return [*map(_number, _names(text))]


def _ops(text: str) -> str | list[str]:
    is_file = text.endswith((".yaml", ".yml"))
    # the script may change its directory
    return str(Path(text).absolute()) if is_file else _names(text)


_ARGUMENTS: Mapping[str, Mapping[str, Any]] = {
    # by name, the same for all commands
    "run_folder": {"type": _path, "metavar": "RUN", "help": "folder of the run"},
    "reference": {"type": _path, "metavar": "REFERENCE", "help": "folder of the reference"},
    "current": {"type": _path, "metavar": "CURRENT", "help": "folder of the run to compare"},
    "checkpoint": {
        "type": _path,
        "metavar": "CHECKPOINT",
        "help": "file or folder; the reference, if OTHER is given",
    },
    "other": {
        "type": _path,
        "metavar": "OTHER",
        "nargs": "?",
        "help": "show how this checkpoint differs from CHECKPOINT",
    },
    "build": {"choices": ("build",), "help": "build it, unless it is built"},
    "--json": {"action": "store_true", "help": "print JSON"},
    "--step": {"type": _number, "metavar": "N", "help": "show the sites of this step"},
    "--rank": {
        "type": _number,
        "default": 0,
        "metavar": "R",
        "help": "of this process (default 0)",
    },
    "--segment": {
        "type": _number,
        "default": 0,
        "metavar": "S",
        "help": "of this fit of the run (default 0)",
    },
    "--html": {
        "type": _path,
        "metavar": "FILE",
        "help": "also write an HTML report: one file that loads nothing",
    },
    "--numerics": {
        "action": "store_true",
        "help": "compare numbers, not bits: rounding, or a change? (check measures it)",
    },
    "--tolerance": {
        "type": _path,
        "metavar": "RUN",
        "help": "what rounding does, measured by check --numerics (--to RUN)",
    },
    "--names": {
        "type": _path,
        "metavar": "FILE",
        "help": "modules with different names in CURRENT: *.to_q, *.to_k -> *.qk, one a line",
    },
    "--against": {
        "type": _path,
        "metavar": "RUN",
        "help": "use the settings of this run; show how this machine differs",
    },
    "--used-by": {
        "type": _path,
        "metavar": "RUN",
        "help": "only those that this run uses, with their modules",
    },
    "--to": {"type": _path, "metavar": "DIR", "help": "new or empty folder to write to"},
    "--overwrite": {"action": "store_true", "help": "replace an existing run"},
    "--current": {
        "type": _path,
        "metavar": "DIR",
        "help": "folder for the results (default: a new one in determinism-verify)",
    },
    "--vary": {
        "metavar": "FACTORS",
        "help": "any of workers,threads,hash-seed,memory; each adds a run that changes it",
    },
    "--out": {
        "type": _path,
        "metavar": "DIR",
        "help": "folder for the answer (default: a new one in determinism-find)",
    },
    "--resume": {
        "metavar": "COMMAND",
        "help": (
            "record PROGRAM, and verify that this command, which resumes it from a checkpoint, "
            "goes on like it"
        ),
    },
    "--until": {"type": _number, "metavar": "STEP", "help": "end each run after this step"},
    "--tries": {
        "type": _number,
        "metavar": "N",
        "help": "pairs that look for a difference (1 at first, 3 once it came)",
    },
    "-v/--verbose": {"action": "store_true", "help": "print the script's output even on success"},
    "--level": {"choices": ("op", "module", "state"), "help": "op is the default"},
    "--modules": {
        "type": _names,
        "metavar": "PATTERNS",
        "help": "fnmatch patterns of modules, separated by commas",
    },
    "--every-n-steps": {"type": _number, "metavar": "N", "help": "record every n-th batch"},
    "--only-steps": {"type": _numbers, "metavar": "N,N", "help": "record these batches, by number"},
    "--compiled": {
        "choices": ("run", "eager"),
        "help": "eager: run compiled code as eager code, to see its ops",
    },
    "--replay": {
        "type": _ops,
        "metavar": "OPS",
        "help": "ops whose outputs are restored: patterns, or a YAML file",
    },
    "--keep": {
        "type": _ops,
        "metavar": "OPS",
        "help": "ops whose tensors are kept, to measure differences",
    },
    "--tensor-budget-mib": {
        "type": float,
        "metavar": "MIB",
        "help": "kept tensors per step; above it, samples",
    },
    "--steps": {
        "choices": ("all", "common"),
        "help": "all (default): exactly the reference's; common: those of both",
    },
    "--on-divergence": {
        "choices": ("raise", "collect", "warn"),
        "help": "raise (default) stops there; the others continue",
    },
    "--seed": {
        "type": _number,
        "metavar": "N",
        "help": "seed of all generators, set before the script's first line",
    },
    "--deterministic": {
        "action": argparse.BooleanOptionalAction,
        "help": "apply the default settings there, too",
    },
}
SCRIPT_OPTIONS = [*_ARGUMENTS][[*_ARGUMENTS].index("--level") :]
"""Options of commands that start a script, and of pyproject.toml:
``DeterminismCallback`` and settings.
"""
_OF_CHECK = "--vary --numerics --resume --until --to -v/--verbose"
_NUMBERS = "--numerics --tolerance --names"
_OWN_MEANING: Mapping[tuple[str, str], Mapping[str, Any]] = {
    ("find", "--steps"): {
        "type": _number,
        "metavar": "N",
        "help": "end each run after so many steps",
    },
    ("check", "--until"): {
        "type": _number,
        "metavar": "STEP",
        "help": "with --resume: before it, run PROGRAM again, and interrupt it after this step",
    },
    ("export", "--to"): {
        "type": _path,
        "metavar": "DIR",
        "help": (
            "new or empty folder to write to; perfetto writes a trace, RUN.perfetto.json, to this "
            "folder"
        ),
    },
}
_COMMANDS: Mapping[str, tuple[str, str]] = {
    # name -> what it does, and its arguments
    "show": ("Show the contents of a run.", "run_folder --json --step --rank --segment"),
    "findings": (
        "Find mistakes that a run repeats reliably; exit 1 if there are any.",
        "run_folder --json",
    ),
    "diff": (
        "Compare a run with its reference.",
        f"reference current --json --steps --html {_NUMBERS}",
    ),
    "record": (
        "Run a script that trains with torch, and record the run.",
        "run_folder --overwrite",
    ),
    "verify": ("Run a script, and verify its run against a recorded one.", "run_folder --current"),
    "check": ("Run a script twice, recording and then verifying, and say what differs.", _OF_CHECK),
    "find": (
        (
            "Run a script twice; if the runs differ, find the op and the numbers, and write a file "
            "that shows it."
        ),
        "reference? --out --json --vary --until --tries -v/--verbose",
    ),
    "doctor": (
        "Show which determinism settings are in force; exit 1 if a requested one is not.",
        "--json --against",
    ),
    "native": (
        "Build the native recorder for the installed torch (20 seconds); exit 2 if that fails.",
        "build",
    ),
    "ops": (
        "Show which ops of the installed torch are nondeterministic, or draw random numbers.",
        "--json --used-by",
    ),
    "export": (
        (
            "Write a run as a Parquet data set for DuckDB, Polars and Spark, or as a trace for "
            "Perfetto."
        ),
        "run_folder --to",
    ),
    "check-checkpoint": (
        "Compare a checkpoint with its digests, or with another checkpoint.",
        "checkpoint other --json",
    ),
}

_OF_SCRIPTS = (
    "You can also set options in [tool.det_callbacks] of pyproject.toml, by the same names; the "
    "command line wins. Without --seed and --deterministic, no setting changes. Exit status: 0 "
    "match or recorded, 1 diverged, 2 could not do it, 3 not comparable."
)


def _parser(more: str) -> argparse.ArgumentParser:
    """Return the parser; ``more`` ends the usage, which argparse prints before an error."""
    parser = argparse.ArgumentParser(
        prog="det-callbacks",
        description="Show recorded training runs, and compare them bit for bit.",
        epilog="Exit status: 0 match or fine, 1 diverged, 2 could not do it, 3 not comparable.",
    )
    parser.add_argument(
        "--version", action="version", version=f"det-callbacks {version('det_callbacks')}"
    )
    commands = parser.add_subparsers(
        title="commands", dest="command", required=True, metavar="COMMAND"
    )
    for name, (says, arguments) in _COMMANDS.items():
        names, of_script = arguments.split(), dict[str, Any]()
        if name in SCRIPT_COMMANDS:
            folder = (
                " RUN" if "run_folder" in names else " [REFERENCE]" if "reference?" in names else ""
            )
            names += SCRIPT_OPTIONS
            usage = f"det-callbacks {name}{folder} [OPTIONS] -- PROGRAM ARGUMENT ..."
            of_script = {
                "usage": "\n".join([usage, more]).strip().replace("%", "%%"),
                "epilog": _OF_SCRIPTS,
            }
        command = commands.add_parser(name, help=says.rstrip("."), description=says, **of_script)
        for argument in names:
            needed: dict[str, Any] = (
                {"required": True} if (name, argument) == ("export", "--to") else {}
            )
            if argument.endswith("?"):
                needed = {"nargs": "?"}
            argument = argument.rstrip("?")
            meaning = _OWN_MEANING.get((name, argument), _ARGUMENTS[argument])
            command.add_argument(*argument.split("/"), **meaning, **needed)
    return parser


def print_found(
    options: argparse.Namespace,
    data: Callable[[], dict[str, Any]],
    report: Callable[[], list[Section]],
    status: int = 0,
) -> int:
    """Print as text or JSON; a closed pipe does not change the status."""
    try:
        if options.json:
            sys.stdout.write(json.dumps(data(), indent=1) + "\n")
        else:
            print_report(report())
        sys.stdout.flush()
    except (BrokenPipeError, SystemExit):  # rich turns a BrokenPipeError into it
        silence_output()
    return status
