"""The command line: what each command is given, and how one is started and ends.

Exit status: 0 match or fine, 1 diverged, 2 could not do it (usage, unreadable), 3 not comparable. What a command needs
is loaded when it runs.
"""

import argparse
import os
import shlex
import sys
import tomllib
from collections.abc import Sequence
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Any

from det_callbacks.errors import CheckError, DetCallbacksError
from det_callbacks.report.console import make_console, print_error, print_line

INTERRUPTED = 130


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return its exit status.

    Args:
        argv: arguments; None takes those of the process.
    """
    given = list(sys.argv[1:] if argv is None else argv)
    has_script = given[:1] in (["record"], ["verify"], ["check"]) and "--" in given
    end = given.index("--") if has_script else len(given)
    try:
        options = _parse(given[:end], _project_words() if has_script else [])
        options.words = given[end + 1 :]
        module, _, command = options.run.partition(".")
        return int(getattr(import_module(f"det_callbacks.cli.{module}"), command)(options))
    except DetCallbacksError as error:
        print_error(error, name="det-callbacks")
        return error.exit_code
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        # whoever read the output has gone; keep the interpreter from complaining about it at its end
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def _parse(given: Sequence[str], project: Sequence[str]) -> argparse.Namespace:
    """Return the options: those of the project stand before those of the command line, which win."""
    try:
        return _parser().parse_args([*given[:1], *project, *given[1:]])
    except SystemExit as ended:
        if ended.code and project:
            text = f"[tool.det_callbacks] of pyproject.toml adds {shlex.join(project)}"
            print_line(make_console(stderr=True), f"det-callbacks: {text}")
        raise


def _project_words() -> list[str]:
    """Return ``[tool.det_callbacks]`` of the pyproject.toml that the working directory belongs to, as words.

    Raises:
        CheckError: it is no TOML, or has an option that there is not.
    """
    folder = Path.cwd()
    file = next((path for path in (it / "pyproject.toml" for it in (folder, *folder.parents)) if path.is_file()), None)
    if file is None:
        return []
    try:
        table = tomllib.loads(file.read_text(encoding="utf-8")).get("tool", {}).get("det_callbacks", {})
    except ValueError as error:
        raise CheckError(f"{file} cannot be read: {error}") from error
    words = []
    for key, value in table.items():
        name, text = key.replace("_", "-"), ",".join(map(str, value)) if isinstance(value, list) else str(value)
        if name not in PROJECT_OPTIONS:
            known = ", ".join(PROJECT_OPTIONS)
            raise CheckError(f"[tool.det_callbacks] of {file} has no option {name}; there are {known}.")
        if isinstance(value, bool):
            words.append(f"--{name}" if value else f"--no-{name}")
        else:
            words.append(f"--{name}={text}")
    return words


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="det-callbacks",
        description="Look into recorded training runs and compare them, bit for bit.",
        epilog="Exit status: 0 match or fine, 1 diverged, 2 could not do it, 3 not comparable.",
    )
    parser.add_argument("--version", action="version", version=f"det-callbacks {version('det_callbacks')}")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")

    def command(run: str, name: str, *, help: str, says: str, json: bool = True) -> Any:
        """Add a command; return what adds an argument to it."""
        added = commands.add_parser(name, help=help, description=says)
        added.set_defaults(run=run)
        if json:
            added.add_argument("--json", action="store_true", help="JSON on standard output")
        return added.add_argument

    add = command("commands.show", "show", help="what a run holds", says="Show what a run holds.")
    add("run_folder", metavar="RUN", help="folder of the run")
    add("--step", type=_number, metavar="N", help="the sites of this step")
    add("--rank", type=_number, default=0, metavar="R", help="of this process (default 0)")
    add("--segment", type=_number, default=0, metavar="S", help="of this fit of the run (default 0)")

    add = command("commands.diff", "diff", help="compare two runs", says="Compare a run with its reference.")
    add("reference", metavar="REFERENCE", help="folder of the reference")
    add("current", metavar="CURRENT", help="folder of the run to compare")
    steps = "all: other steps than the reference's are a divergence (default); common: those that both have"
    add("--steps", choices=("all", "common"), default="all", help=steps)
    add("--html", metavar="FILE", help="write a report to look at, too: one file that loads nothing")

    record = "Run any script that trains with a Lightning Trainer, as it is, and record its training."
    add = _script_command(commands, "record", "RUN", help="run a script, and record its training", says=record)
    add("run_folder", metavar="RUN", help="folder to record to")
    add("--overwrite", action="store_true", help="replace a run that is there")

    verify = "Run a script as it is, and verify its training against a recorded one."
    help_verify = "run a script, and verify its training against a run"
    add = _script_command(commands, "verify", "RUN", help=help_verify, says=verify)
    add("reference", metavar="RUN", help="folder of the reference")
    current = "folder for the verdict, the report and what differs (default: a new one in determinism-verify)"
    add("--current", metavar="DIR", help=current)

    check = "Run a script twice in fresh processes, recording and then verifying, and say what differs."
    usage = "[--vary FACTORS] [--to DIR] [-v]"
    add = _script_command(commands, "check", usage, help="run a script twice, and say what differs", says=check)
    vary = "what must not matter, changed in one further run each: any of workers,threads,hash-seed"
    add("--vary", metavar="FACTORS", help=vary)
    add("--to", metavar="DIR", help="folder for the runs, kept (default: a new one in determinism-check)")
    add("-v", "--verbose", action="store_true", help="print what the script prints, also on success")

    doctor = (
        "Show which determinism settings are in force in a new process here, what is missing or too late, and the line "
        "to add for each. Exit 1 when something asked for is not in force."
    )
    add = command("commands.doctor", "doctor", help="which settings are in force here", says=doctor)
    against = "ask for what was in force in this run, and show how this machine differs"
    add("--against", metavar="RUN", help=against)

    ops = "Show what the installed torch says of its ops: which are not deterministic, and which draw."
    add = command("commands.ops", "ops", help="which ops are not deterministic", says=ops)
    add("--used-by", metavar="RUN", help="only those that this run uses, with their modules")

    export = (
        "Write the sites of a run as a Parquet data set, one folder a rank, that DuckDB, Polars and Spark query as it "
        "is. The run is read once and checked; what an interrupted export wrote is removed."
    )
    add = command("commands.export", "export", help="a Parquet data set of a run", says=export, json=False)
    add("run_folder", metavar="RUN", help="folder of the run")
    add("--to", required=True, metavar="DIR", help="folder to make, or an empty one")

    checkpoint = (
        "Compare a checkpoint with the digests that stand beside it, or with another checkpoint. Exit 1 when something "
        "differs, 2 when it cannot be told."
    )
    help_checkpoint = "whether a checkpoint is what was saved"
    add = command("commands.check_checkpoint", "check-checkpoint", help=help_checkpoint, says=checkpoint)
    add("checkpoint", metavar="CHECKPOINT", help="file or folder; the reference, where OTHER is given")
    add("other", metavar="OTHER", nargs="?", help="say how this one differs from CHECKPOINT")
    return parser


def _script_command(commands: Any, name: str, usage: str, *, help: str, says: str) -> Any:
    """Add a command that starts a script; return what adds an argument to it."""
    added: argparse.ArgumentParser = commands.add_parser(
        name,
        help=help,
        usage=f"det-callbacks {name} {usage} [OPTIONS] -- PROGRAM ARGUMENT ...",
        description=f"{says} Options may also stand in [tool.det_callbacks] of pyproject.toml, by the same names; the "
        "command line wins. Without --seed and --deterministic no setting is changed.",
        epilog="Exit status: 0 match or recorded, 1 diverged, 2 it could not be done, 3 not comparable.",
    )
    added.set_defaults(run=f"check.{name}")
    add = added.add_argument
    add("--level", choices=("op", "module", "state"), help="op is the default")
    add("--modules", type=_names, metavar="PATTERNS", help="fnmatch patterns of modules, separated by commas")
    add("--every-n-steps", type=_number, metavar="N", help="record every n-th batch")
    add("--only-steps", type=_numbers, metavar="N,N", help="record these batches, by number")
    replay = "ops whose outputs are saved and put back: patterns, or a YAML file"
    add("--replay", type=_ops, metavar="OPS", help=replay)
    keep = "ops whose tensors are kept, to say by how much they differ"
    add("--keep", type=_ops, metavar="OPS", help=keep, dest="keep_tensors")
    steps = "verify: all (default) demands the reference's steps, common compares those of both"
    add("--steps", choices=("all", "common"), help=steps)
    divergence = "verify: raise (default) stops there, collect and warn go on"
    add("--on-divergence", choices=("raise", "collect", "warn"), help=divergence)
    add("--seed", type=_number, metavar="N", help="seed of all generators, set before the script's first line")
    deterministic = "set the defaults of DeterminismSettings before the script's first line"
    add("--deterministic", action=argparse.BooleanOptionalAction, help=deterministic)
    return add


ARGUMENTS = ("level", "modules", "every_n_steps", "only_steps", "replay", "keep_tensors", "steps", "on_divergence")
"""Arguments of ``DeterminismCallback`` that a script's command may be given."""
SCRIPT_SETTINGS = ("seed", "deterministic")
"""Settings, likewise."""
PROJECT_OPTIONS = (
    "keep",
    *(name.replace("_", "-") for name in (*ARGUMENTS, *SCRIPT_SETTINGS) if name != "keep_tensors"),
)
"""Options by their names on the command line, as pyproject.toml may have them too."""


def _names(text: str) -> list[str]:
    return text.split(",")


def _number(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"must be a whole number from 0 on; got {text!r}")
    return int(text)


def _numbers(text: str) -> list[int]:
    return [_number(number) for number in text.split(",")]


def _ops(text: str) -> str | list[str]:
    if text.endswith((".yaml", ".yml")):
        return str(Path(text).absolute())  # the script may go elsewhere
    return _names(text)
