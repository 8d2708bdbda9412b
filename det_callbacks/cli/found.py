"""How a command prints what it found."""

import argparse
import json
import sys
from collections.abc import Callable
from typing import Any

from det_callbacks.cli.parser import silence_output
from det_callbacks.report.console import Section, print_report


def print_found(
    options: argparse.Namespace,
    data: Callable[[], dict[str, Any]],
    report: Callable[[], list[Section]],
    status: int = 0,
) -> int:
    """Print what was found, in words or as JSON; return the status, which a reader who has gone does not change."""
    try:
        if options.json:
            sys.stdout.write(json.dumps(data(), indent=1) + "\n")
        else:
            print_report(report())
        sys.stdout.flush()
    except (BrokenPipeError, SystemExit):  # rich makes the one into the other
        silence_output()
    return status
