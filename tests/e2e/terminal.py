"""A body that runs in a forked process at a terminal of its own."""

import fcntl
import os
import pty
import struct
import termios
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from forks import end_with


def written_by(body: Callable[[], Any]) -> str:
    """Return what a body writes to its terminal of 60 rows and 600 columns, control characters included."""
    process, terminal = pty.fork()
    if process == 0:
        end_with(lambda: _run(body))
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 60, 600, 0, 0))
    written = bytearray()
    with suppress(OSError):  # the process has ended (Linux says so in this way)
        while content := os.read(terminal, 65536):
            written += content
    os.close(terminal)
    os.waitpid(process, 0)
    return written.decode()


def _run(body: Callable[[], Any]) -> None:
    time.sleep(0.2)  # until the terminal has its size
    for name in ("COLUMNS", "LINES", "NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE"):
        os.environ.pop(name, None)
    os.environ["TERM"] = "xterm-256color"
    body()
