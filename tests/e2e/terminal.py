"""A body that runs in a forked process at a terminal of its own, and what a person then sees there."""

import fcntl
import os
import pty
import re
import select
import signal
import struct
import termios
import time
from collections.abc import Callable
from typing import Any

from forks import end_with

COLUMNS = 600  # a line of ours in one line
ROWS = 60
SECONDS = 120.0

_CONTROL = re.compile(r"\x1b\[(\??[\d;]*)([A-Za-z])|\x1b\]8;[^\x1b]*\x1b\\|([\r\n])|([^\x1b\r\n]+)")


def see(body: Callable[[], Any]) -> list[str]:
    """Run a body and return the lines that are on the terminal when it has ended, those that scrolled away included."""
    process, terminal = pty.fork()
    if process == 0:
        end_with(lambda: _run(body))
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
    written = bytearray()
    deadline = time.monotonic() + SECONDS
    try:
        while select.select([terminal], [], [], max(0.0, deadline - time.monotonic()))[0]:
            try:
                written += os.read(terminal, 65536)
            except OSError:  # the process has ended (Linux says so in this way)
                break
        else:
            os.kill(process, signal.SIGKILL)
            raise AssertionError("it did not end:\n" + written.decode(errors="replace"))
    finally:
        os.close(terminal)
        os.waitpid(process, 0)
    return shown(written.decode())


def shown(written: str) -> list[str]:
    """Return the lines that a terminal shows of what was written to it; ValueError for what is not known here."""
    lines = [""]
    row = column = at = 0
    while at < len(written):
        found = _CONTROL.match(written, at)
        if found is None:
            raise ValueError(f"not known of terminals here: {written[at : at + 20]!r}")
        at = found.end()
        number, command, ending, text = found.groups()
        count = int(number) if number and number.isdecimal() else 1
        if text:
            line = lines[row].ljust(column)
            lines[row] = line[:column] + text + line[column + len(text) :]
            column += len(text)
            if column > COLUMNS:
                raise ValueError(f"it goes on in the next line: {lines[row]!r}")
        elif ending == "\r":
            column = 0
        elif ending == "\n":
            row += 1
            lines += [""] * (row + 1 - len(lines))
        elif command == "A":
            row -= min(row, count)
        elif command == "B":
            row += count
            lines += [""] * (row + 1 - len(lines))
        elif command == "K":
            lines[row] = "" if number == "2" else lines[row][:column]
        elif command not in ("m", "h", "l", None):  # colours, the cursor, and links change no text
            raise ValueError(f"not known of terminals here: {found.group()!r}")
    return [line.rstrip() for line in lines]


def _run(body: Callable[[], Any]) -> None:
    time.sleep(0.2)  # until the terminal has its size
    for name in ("COLUMNS", "LINES", "NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE"):
        os.environ.pop(name, None)
    os.environ["TERM"] = "xterm-256color"
    body()
