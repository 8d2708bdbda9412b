"""Prints the result of a command."""

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
