"""What ``det-callbacks record``, ``verify`` or ``check`` asked for, and what it hears."""

import gc
import json
import os
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

from det_callbacks.environment.variables import REFUSAL, SEEN, launch_request
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
from det_callbacks.text import count, listed

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


def report_seen(text: str, *, is_of_torch: bool = True) -> None:
    """Write what this process did into a file for the command, unless the command has ended."""
    folder = Path(json.loads(launch_request() or "null")["claim"]).parent
    if folder.is_dir():
        path = folder / f"{SEEN}{os.getpid()}"
        with writing(path):
            path.write_text(json.dumps([is_of_torch, text]), encoding="utf-8")


class Seen:
    """Counts what a process does with torch; updates are those that no step of the run holds."""

    def __init__(self) -> None:
        self.made = Counter[str]()  # optimizers of torch, by class
        self.updates = Counter[str]()
        # in another thread, or after a Trainer of Lightning
        self.updates_elsewhere = Counter[str]()
        self.num_parameters: dict[str, int] = {}
        # whether one of several ranks called a module and has trained none
        self.is_parallel = False
        # iterations with an update that no step of the run holds
        self.num_backwards = self.num_iterations = 0
        self._num_backwards_before = -1  # the last such update
        self._others: list[str] = []  # optimizers of other libraries

    def note_update(self, name: str, num_parameters: int) -> None:
        self.updates[name] += 1
        self.num_parameters[name] = num_parameters
        self.num_iterations += self.num_backwards != self._num_backwards_before
        self._num_backwards_before = self.num_backwards

    def note_backward(self, of_torch: tuple[type, ...]) -> None:
        self.num_backwards += 1
        if self.num_backwards == 1 and not self.made:
            self._others = _others(of_torch)

    def text(self) -> str:
        """Return what was seen in a process that recorded no step."""
        backwards = (
            f"backward() ran {_times(self.num_backwards)}"
            if self.num_backwards
            else "backward() did not run"
        )
        if self.updates or self.updates_elsewhere:
            parts = [
                f"{name} stepped {_times(number)}, and none of its "
                f"{count(self.num_parameters[name], 'parameter')} is in a module that was called "
                "with gradients enabled"
                for name, number in self.updates.items()
            ]
            parts += [
                f"{name} stepped {_times(number)} outside of the main thread, where det-callbacks "
                "follows nothing"
                for name, number in self.updates_elsewhere.items()
            ]
            return "; ".join(parts)
        if self.made:
            return f"{listed(self.made)} did not step, and {backwards}"
        others = f" (the script has {listed(self._others)})" if self._others else ""
        if not self.num_backwards:
            called = "no module with parameters was called"
            if self.is_parallel:
                called = "calls of a module in several ranks are not followed"
            return f"torch was imported, no optimizer of torch.optim was built, and {called}"
        return f"torch was imported, no optimizer of torch.optim was built{others}, and {backwards}"


def _times(number: int) -> str:
    return "once" if number == 1 else f"{number:,} times"


def _others(of_torch: tuple[type, ...]) -> list[str]:
    """Return the classes of objects that work as optimizers, and are none of torch's."""
    kinds = {kind for kind in map(type, gc.get_objects()) if not issubclass(kind, of_torch)}
    names = []
    for kind in kinds:
        methods = {name for base in kind.__mro__ for name in vars(base)}
        if {"step", "zero_grad"} <= methods or "apply_gradients" in methods:
            names.append(f"{kind.__module__}.{kind.__qualname__}")
    return sorted(names)
