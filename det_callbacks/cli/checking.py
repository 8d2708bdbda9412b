"""``det-callbacks check``: a script run twice, and what differs."""

import argparse
from collections.abc import Sequence
from typing import Any

from det_callbacks.check import FACTORS, Factor, check_script
from det_callbacks.report import announce_run, render_check
from det_callbacks.report.tables import make_console


def add_check(commands: "argparse._SubParsersAction[Any]") -> None:
    """Add the command to those there are."""
    check = commands.add_parser(
        "check",
        help="run a script twice, and say what differs",
        usage="det-callbacks check [--vary FACTORS] [--to DIR] -- PROGRAM ARGUMENT ...",
        description="Run a Hydra application twice in fresh processes, recording and then verifying, and say exactly "
        "what differs. It is started as given, with the overrides of the presets added: +determinism=record, "
        "+determinism=verify. Put your own, such as determinism.level=state, among its arguments.",
        epilog="Exit status: 0 match, 1 diverged, 2 it could not be checked, 3 not comparable.",
    )
    check.add_argument("words", metavar="PROGRAM", nargs="+", help="the program and its arguments, after --")
    check.add_argument(
        "--vary",
        type=_factors,
        default=(),
        metavar="FACTORS",
        help=f"what must not matter, changed in one further run each: any of {','.join(FACTORS)}",
    )
    check.add_argument(
        "--to", metavar="DIR", help="folder for the runs, kept (default: a new one in determinism-check)"
    )
    check.set_defaults(run=_check)


def _check(options: argparse.Namespace) -> int:
    console = make_console()

    def announce(title: str, words: Sequence[str]) -> None:
        announce_run(title, words, console)
        console.file.flush()  # before the process writes to the same place

    report = check_script(options.words, to=options.to, vary=options.vary, announce=announce)
    render_check(report, console)
    return report.exit_code


def _factors(text: str) -> tuple[Factor, ...]:
    asked = text.split(",")
    if unknown := [name for name in asked if name not in FACTORS]:
        raise argparse.ArgumentTypeError(f"there is no {unknown[0]!r} to vary; there are {', '.join(FACTORS)}")
    return tuple(factor for factor in FACTORS if factor in asked)
