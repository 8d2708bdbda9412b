"""A process that is waited for, and that does not outlive the one that started it."""

import contextlib
import os
import signal
import subprocess
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

GRACE_SECONDS = 20.0
"""For a process to end by itself once it was interrupted; a second Ctrl-C ends the wait."""

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def run_process(words: Sequence[str], *, folder: Path, variables: Mapping[str, str], output: int | None = None) -> int:
    """Run a program to its end and return its status, negative for the signal that ended it.

    It has a session of its own, so that what it started ends with it, and no standard input. Where this process is
    interrupted (Ctrl-C), asked to end or hung up on, the program is interrupted, and killed when it does not end.

    Args:
        words: program and arguments; no shell reads them.
        folder: to start it in.
        variables: all of its environment.
        output: file descriptor for its standard output; None for that of this process.

    Raises:
        KeyboardInterrupt: this process was interrupted.
        SystemExit: it was asked to end, or hung up on: 128 and the signal's number.
        OSError: the program cannot be started.
    """
    with _Signals() as signals:
        process = subprocess.Popen(
            words, cwd=folder, env=dict(variables), stdin=subprocess.DEVNULL, stdout=output, start_new_session=True
        )
        try:
            signals.arm()
            status = process.wait()
        except _Interrupted:
            _end(process, signals)
        finally:
            signals.disarm()
        if signals.received is None:
            if status < 0:
                _kill_group(process.pid)  # what it had started is nobody's now
            return status
    if signals.received == signal.SIGINT:
        raise KeyboardInterrupt
    raise SystemExit(128 + signals.received)


class _Interrupted(BaseException):
    """Raised by a handler while a process is waited for."""


class _Signals:
    """Handlers of the signals that ask this process to end, for the time that another one runs.

    What arrives before ``arm`` is kept, so that no process is started and forgotten.
    """

    def __init__(self) -> None:
        self.received: int | None = None
        self.count = 0
        self._is_armed = False
        self._before: dict[int, Any] = {}

    def __enter__(self) -> "_Signals":
        if threading.current_thread() is threading.main_thread():  # Python lets no other thread set handlers
            for number in _SIGNALS:
                if signal.getsignal(number) != signal.SIG_IGN:  # nohup, or started in the background
                    self._before[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def arm(self) -> None:
        """Raise ``_Interrupted`` from now on, and for what came before."""
        self._is_armed = True
        if self.received is not None:
            raise _Interrupted

    def disarm(self) -> None:
        """Only count from now on."""
        self._is_armed = False

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self.received = number
        self.count += 1
        if self._is_armed:
            self._is_armed = False
            raise _Interrupted


def _end(process: "subprocess.Popen[bytes]", signals: _Signals) -> None:
    """Interrupt a program, wait for it as long as nobody insists, and kill what is left of its session."""
    insisted = signals.count + 1
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGINT)
    for _ in range(int(GRACE_SECONDS / 0.1)):
        if signals.count >= insisted:
            break
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(0.1)
            break
    _kill_group(process.pid)
    process.wait()


def _kill_group(group: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):  # nobody is left, or (macOS) only zombies
        os.killpg(group, signal.SIGKILL)
