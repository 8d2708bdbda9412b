"""What commands print besides their reports."""

import json
import sys
from typing import Any

from det_callbacks.errors import DetCallbacksError
from det_callbacks.report.tables import make_console


def print_error(error: DetCallbacksError) -> None:
    """Print an error's message to standard error."""
    make_console(stderr=True).print(f"det-callbacks: {error}", markup=False, soft_wrap=True)


def print_json(content: dict[str, Any]) -> None:
    """Print one JSON object to standard output."""
    sys.stdout.write(json.dumps(content, indent=1) + "\n")
