"""Lines and tables on a terminal and elsewhere, and the end of a process that may not look as if all were well."""

import io
import logging
import os
import sys
from collections.abc import Callable, Sequence
from typing import NoReturn

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

PLAIN_WIDTH, MAX_WIDTH = 240, 119


def make_console(*, stderr: bool = False) -> Console:
    """Return a console for standard output or error; plain and unwrapped when it is not a terminal."""
    console = Console(stderr=stderr, highlight=False)
    if console.is_terminal:
        return console
    return Console(stderr=stderr, highlight=False, width=PLAIN_WIDTH, soft_wrap=True, no_color=True)


def to_text(render: Callable[[Console], None]) -> str:
    """Return what a function renders, as plain text."""
    buffer = io.StringIO()
    render(Console(file=buffer, highlight=False, width=PLAIN_WIDTH, soft_wrap=True, no_color=True))
    return "\n".join(line.rstrip() for line in buffer.getvalue().splitlines()).strip("\n")


def print_line(console: Console, text: str = "", style: str = "") -> None:
    """Print a line in which nothing is markup."""
    console.print(Text(text, style=style), soft_wrap=True)


def print_table(
    console: Console,
    columns: Sequence[str],
    rows: Sequence[Sequence[object]],
    *,
    numbers: str = "",
    is_folded: bool = False,
) -> None:
    """Print rows below their headings: boxed on a terminal, aligned and unwrapped everywhere else.

    ``numbers`` are the headings of right-aligned columns, separated by spaces; with ``is_folded``, cells go on in the
    next line where rows would have 120 columns or more.
    """
    right = [name in numbers.split() for name in columns]
    texts = [list(columns), *([str(cell) for cell in row] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*texts, strict=True)]
    is_wide = is_folded and sum(widths) + 2 * len(widths) > MAX_WIDTH
    if console.is_terminal or is_wide:
        table = Table(box=box.SIMPLE_HEAD if console.is_terminal else None, pad_edge=False)
        for name, is_number in zip(columns, right, strict=True):
            table.add_column(Text(name), justify="right" if is_number else "left", overflow="fold")
        for row in texts[1:]:
            table.add_row(*map(Text, row))
        console.print(table, soft_wrap=False, width=None if console.is_terminal else MAX_WIDTH)
        return
    for row in texts:
        cells = zip(row, widths, right, strict=True)
        line = "  ".join(f"{cell:{'>' if is_number else '<'}{width}}" for cell, width, is_number in cells)
        print_line(console, line.rstrip())


def count(number: int, noun: str) -> str:
    """Return "1 step", "1,234 steps", "2 entries"."""
    if number == 1:
        return f"1 {noun}"
    return f"{number:,} {noun[:-1]}ies" if noun.endswith("ry") else f"{number:,} {noun}s"


def size(num_bytes: int) -> str:
    """Return "512 bytes", "1.2 MB"."""
    if num_bytes < 10_000:
        return count(num_bytes, "byte")
    return f"{num_bytes / 1e3:.1f} kB" if num_bytes < 1_000_000 else f"{num_bytes / 1e6:.1f} MB"


def print_error(error: Exception, *, name: str = "") -> None:
    """Print an error to standard error in one line or a few, without a traceback."""
    sys.stderr.write(f"{name or type(error).__name__}: {error}\n")
    sys.stderr.flush()


def end_process(status: int) -> NoReturn:
    """End the process with this status, from one of its exit handlers or from another thread than the main one.

    Nothing raised by an exit handler changes the status, so the process ends here: what was written is flushed first;
    exit handlers registered earlier do not run.
    """
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
