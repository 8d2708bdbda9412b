"""The command line: what each command is given, and how one is started and ends.

Exit status: 0 match or fine, 1 diverged, 2 could not do it (usage, unreadable), 3 not comparable. What a command needs
is loaded when it runs.
"""

import argparse
import os
import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.metadata import version
from typing import Any

from det_callbacks.cli.options import add_options
from det_callbacks.errors import DetCallbacksError
from det_callbacks.report.console import print_error

INTERRUPTED = 130


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return its exit status.

    Args:
        argv: arguments; None takes those of the process.
    """
    given = list(sys.argv[1:] if argv is None else argv)
    has_script = given[:1] in (["record"], ["verify"], ["check"]) and "--" in given
    end = given.index("--") if has_script else len(given)
    options = _parser().parse_args(given[:end])
    options.words = given[end + 1 :]
    module, _, command = options.run.partition(".")
    try:
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


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="det-callbacks",
        description="Look into recorded training runs and compare them, bit for bit.",
        epilog="Exit status: 0 match or fine, 1 diverged, 2 could not do it, 3 not comparable.",
    )
    parser.add_argument("--version", action="version", version=f"det-callbacks {version('det_callbacks')}")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    as_json: dict[str, Any] = {"action": "store_true", "help": "JSON on standard output"}

    show = commands.add_parser("show", help="what a run holds", description="Show what a run holds.")
    show.add_argument("run_folder", metavar="RUN", help="folder of the run")
    show.add_argument("--step", type=_number, metavar="N", help="the sites of this step")
    show.add_argument("--rank", type=_number, default=0, metavar="R", help="of this process (default 0)")
    show.add_argument("--segment", type=_number, default=0, metavar="S", help="of this fit of the run (default 0)")
    show.add_argument("--json", **as_json)
    show.set_defaults(run="commands.show")

    diff = commands.add_parser("diff", help="compare two runs", description="Compare a run with its reference.")
    diff.add_argument("reference", metavar="REFERENCE", help="folder of the reference")
    diff.add_argument("current", metavar="CURRENT", help="folder of the run to compare")
    diff.add_argument(
        "--steps",
        choices=("all", "common"),
        default="all",
        help="all: other steps than the reference's are a divergence (default); common: those that both have",
    )
    diff.add_argument(
        "--check-files",
        action="store_true",
        help="read every step of both runs, also of large ones, where chains say that they agree",
    )
    diff.add_argument("--json", **as_json)
    diff.add_argument("--html", metavar="FILE", help="write a report to look at, too: one file that loads nothing")
    diff.set_defaults(run="commands.diff")

    record = _script_parser(
        commands,
        "record",
        usage="RUN",
        help="run a script, and record its training",
        description="Run any script that trains with a Lightning Trainer, as it is, and record its training.",
    )
    record.add_argument("run_folder", metavar="RUN", help="folder to record to")
    record.add_argument("--overwrite", action="store_true", help="replace a run that is there")
    record.set_defaults(run="check.record")

    verify = _script_parser(
        commands,
        "verify",
        usage="RUN",
        help="run a script, and verify its training against a run",
        description="Run a script as it is, and verify its training against a recorded one.",
    )
    verify.add_argument("reference", metavar="RUN", help="folder of the reference")
    current = "folder for the verdict, the report and what differs (default: a new one in determinism-verify)"
    verify.add_argument("--current", metavar="DIR", help=current)
    verify.set_defaults(run="check.verify")

    check = _script_parser(
        commands,
        "check",
        usage="[--vary FACTORS] [--to DIR] [-v]",
        help="run a script twice, and say what differs",
        description="Run a script twice in fresh processes, recording and then verifying, and say what differs.",
    )
    vary = "what must not matter, changed in one further run each: any of workers,threads,hash-seed"
    check.add_argument("--vary", metavar="FACTORS", help=vary)
    to = "folder for the runs, kept (default: a new one in determinism-check)"
    check.add_argument("--to", metavar="DIR", help=to)
    check.add_argument("-v", "--verbose", action="store_true", help="print what the script prints, also on success")
    check.set_defaults(run="check.check")

    doctor = commands.add_parser(
        "doctor",
        help="which settings are in force here",
        description="Show which determinism settings are in force in a new process here, what is missing or too late, "
        "and the line to add for each. Exit 1 when something asked for is not in force.",
    )
    against = "ask for what was in force in this run, and show how this machine differs"
    doctor.add_argument("--against", metavar="RUN", help=against)
    doctor.add_argument("--json", **as_json)
    doctor.set_defaults(run="commands.doctor")

    ops = commands.add_parser(
        "ops",
        help="which ops are not deterministic",
        description="Show what the installed torch says of its ops: which are not deterministic, and which draw.",
    )
    ops.add_argument("--used-by", metavar="RUN", help="only those that this run uses, with their modules")
    ops.add_argument("--json", **as_json)
    ops.set_defaults(run="commands.ops")

    export = commands.add_parser(
        "export",
        help="a Parquet data set of a run",
        description="Write the sites of a run as a Parquet data set, one folder a rank, that DuckDB, Polars and Spark "
        "query as it is. The run is read once and checked; what an interrupted export wrote is removed.",
    )
    export.add_argument("run_folder", metavar="RUN", help="folder of the run")
    export.add_argument("--to", required=True, metavar="DIR", help="folder to make, or an empty one")
    export.set_defaults(run="commands.export")

    checkpoint = commands.add_parser(
        "check-checkpoint",
        help="whether a checkpoint is what was saved",
        description="Compare a checkpoint with the digests that stand beside it, or with another checkpoint. "
        "Exit 1 when something differs, 2 when it cannot be told.",
    )
    place = "file or folder; the reference, where OTHER is given"
    checkpoint.add_argument("checkpoint", metavar="CHECKPOINT", help=place)
    checkpoint.add_argument("other", metavar="OTHER", nargs="?", help="say how this one differs from CHECKPOINT")
    checkpoint.add_argument("--json", **as_json)
    checkpoint.set_defaults(run="commands.check_checkpoint")
    return parser


def _script_parser(commands: Any, name: str, *, usage: str, help: str, description: str) -> argparse.ArgumentParser:
    """Return the parser of a command that starts a script."""
    parser: argparse.ArgumentParser = commands.add_parser(
        name,
        help=help,
        usage=f"det-callbacks {name} {usage} [OPTIONS] -- PROGRAM ARGUMENT ...",
        description=f"{description} Options may also stand in [tool.det_callbacks] of pyproject.toml, by the same "
        "names; the command line wins. Without --seed and --deterministic no setting is changed.",
        epilog="Exit status: 0 match or recorded, 1 diverged, 2 it could not be done, 3 not comparable.",
    )
    add_options(parser)
    return parser


def _number(text: str, *, least: int = 0) -> int:
    if not text.isdecimal() or int(text) < least:
        raise argparse.ArgumentTypeError(f"must be a whole number from {least} on; got {text!r}")
    return int(text)
