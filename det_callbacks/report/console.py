"""Words, lines and tables, on a terminal and the end of a process that may not look as if all were well."""

import io
import logging
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import NoReturn

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

MAX_NAMED, MAX_RANKS = 3, 8
"""Things, and ranks, that a sentence names; the others are counted."""
PLAIN_WIDTH, MAX_WIDTH = 240, 119
"""Columns of a line that is not wrapped, and of a folded table, where there is no terminal."""

# words


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


def capitalised(text: str) -> str:
    """Return a sentence with a capital at its beginning."""
    return f"{text[:1].upper()}{text[1:]}"


def listed(texts: Iterable[str], separator: str = ", ", limit: int = MAX_NAMED) -> str:
    """Return "a, b, c and 2 more"; a text that is there twice counts once."""
    known = list(dict.fromkeys(texts))
    more = f" and {len(known) - limit} more" if len(known) > limit else ""
    return separator.join(known[:limit]) + more


def ranks_text(ranks: Sequence[int]) -> str:
    """Return "rank 1", "ranks 0, 1 and 3 more"."""
    return f"rank{'s' * (len(ranks) > 1)} {listed(map(str, ranks), limit=MAX_RANKS)}"


# lines and tables


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
    rows: Iterable[Sequence[object]],
    *,
    numbers: str = "",
    is_folded: bool = False,
) -> None:
    """Print rows below their headings; long cells go on in the next line on a terminal, and where ``is_folded``.

    Elsewhere each row is one line, however long, so that other programs can read it. ``numbers`` are the headings of
    right-aligned columns, separated by spaces.
    """
    right = [name in numbers.split() for name in columns]
    texts = [[str(cell) for cell in row] for row in rows]
    if console.is_terminal or is_folded:
        table = Table(box=box.SIMPLE_HEAD if console.is_terminal else None, pad_edge=False)
        for name, is_number in zip(columns, right, strict=True):
            table.add_column(Text(name), justify="right" if is_number else "left", overflow="fold")
        for row in texts:
            table.add_row(*map(Text, row))
        console.print(table, soft_wrap=False, width=None if console.is_terminal else MAX_WIDTH)
        return
    texts.insert(0, [*columns])
    widths = [max(map(len, column)) for column in zip(*texts, strict=True)]
    for row in texts:
        cells = zip(row, widths, right, strict=True)
        line = "  ".join(f"{cell:{'>' if is_number else '<'}{width}}" for cell, width, is_number in cells)
        print_line(console, line.rstrip())


# ends


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
