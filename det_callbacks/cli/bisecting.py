"""``det-callbacks bisect``: its arguments and what it does."""

import argparse
import json
import sys
from typing import Any

from det_callbacks.bisect import bisect_runs
from det_callbacks.report import render_bisection
from det_callbacks.report.tables import make_console


def add_bisect(commands: "argparse._SubParsersAction[Any]") -> None:
    """Add the command to those of the command line."""
    parser = commands.add_parser(
        "bisect",
        help="the step in which two runs part",
        description="Find the first step that differs between two runs, by their chains (no other step is read), and "
        "print the commands that record just that step at level op on both sides. Exit 0 when no step differs, 1 when "
        "one does.",
    )
    parser.add_argument("reference", metavar="REFERENCE", help="folder of the reference, at any level")
    parser.add_argument("current", metavar="CURRENT", help="folder of the run to compare, or of a verification")
    parser.add_argument(
        "--checkpoints",
        metavar="DIR",
        action="append",
        help="look here, and in the folders below, for checkpoints of the runs to resume from (may be given again; "
        "default: the working directory)",
    )
    parser.add_argument("--json", action="store_true", help="JSON on standard output")
    parser.set_defaults(run=_bisect)


def _bisect(options: argparse.Namespace) -> int:
    bisection = bisect_runs(options.reference, options.current, checkpoints=options.checkpoints or ["."])
    if options.json:
        sys.stdout.write(json.dumps(bisection.to_dict(), indent=1) + "\n")
    else:
        render_bisection(bisection, make_console())
    return bisection.exit_code
