"""What a command that starts a script asked for (``SCRIPT_COMMANDS``), and what it hears."""

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

from det_callbacks.environment.variables import REFUSAL, launch_request
from det_callbacks.errors import (
    DetCallbacksError,
    DivergenceError,
    SelectionError,
    SettingsError,
    WriteError,
)
from det_callbacks.report.console import print_error
from det_callbacks.runs.files import writing
from det_callbacks.settings import DeterminismSettings

_ANOTHER_TMPDIR = "set TMPDIR to a writable folder"


def read_arguments(asked: str) -> dict[str, Any]:
    """Return the arguments, with settings, of the run that the command requested."""
    arguments, settings = (json.loads(asked)[name] for name in ("arguments", "settings"))
    if settings and sys.flags.ignore_environment:
        raise SettingsError(
            "--seed and --deterministic reach the script through PYTHONPATH, which this Python "
            "ignores (-E or -I). Start it without these flags, or set seed and settings in the "
            "script."
        )
    return {**arguments, "settings": DeterminismSettings.choose(**settings) if settings else None}


def request() -> dict[str, Any]:
    asked: dict[str, Any] = json.loads(launch_request() or "null")
    return asked


def claim_run() -> None:
    """Claim the run for this process; raise ``SelectionError`` in a second process
    that is not a rank of it.

    The first process creates the claim file. A second process, whose verdict would replace the
    first, writes its error into the file, where the command reads it.
    """
    claim = Path(request()["claim"])
    with writing(claim, instead=_ANOTHER_TMPDIR):
        try:
            claim.touch(exist_ok=False)
        except FileExistsError as error:
            text = "The command trains in several processes that are not ranks of one run"
            claim.write_text(text, encoding="utf-8")
            raise SelectionError(f"{text}. Start det-callbacks for each of them.") from error


def withdraw_claim() -> None:
    """Let another process claim the run, because nothing was trained in this one."""
    claim = Path(request()["claim"])
    with writing(claim, instead=_ANOTHER_TMPDIR):
        claim.unlink()


def report_to_command(error: BaseException) -> bool:
    """Write why det_callbacks ends the script, for the command;
    return whether the command prints it.
    """
    asked = request()
    if not isinstance(error, DetCallbacksError):
        return False
    if asked["arguments"]["mode"] == "verify" and isinstance(error, DivergenceError):
        return True  # the command prints the verdict
    refusal, text = Path(asked["claim"]).with_name(REFUSAL), str(error)
    try:
        with (
            writing(refusal),
            refusal.open("x", encoding="utf-8", errors="backslashreplace") as file,
        ):
            file.write(text)
    except WriteError as failure:
        # the file exists, from this error or the first rank's, or the disk is full
        return (
            isinstance(failure.__cause__, FileExistsError)
            and refusal.read_text(encoding="utf-8") == text
        )
    return True


def print_errors_plainly(
    before_printing: Callable[[BaseException], object] = lambda error: None,
) -> None:
    """From now on print det_callbacks' errors without a traceback;
    call the function with every error first.
    """
    before = sys.excepthook

    def print_plainly(
        kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        before_printing(error)
        if not isinstance(error, DetCallbacksError):
            before(kind, error, trace)
        elif not report_to_command(error):
            print_error(error)

    sys.excepthook = print_plainly


def give_workers(loader: Any) -> None:
    """Let a loader that begins have as many workers as the command asked for, if it did."""
    # only where a loader begins
    from det_callbacks.environment.variables import NUM_WORKERS  # noqa: PLC0415

    if NUM_WORKERS in os.environ:
        # loads all that records
        from det_callbacks.training.evidence import set_workers  # noqa: PLC0415

        set_workers([loader], os.environ[NUM_WORKERS])
