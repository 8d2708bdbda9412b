"""Tables that are boxed on a terminal and plain, aligned and unwrapped everywhere else."""

import io
from collections.abc import Callable, Sequence

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

PLAIN_WIDTH = 240


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


def print_table(
    console: Console, columns: Sequence[str], rows: Sequence[Sequence[object]], *, numbers: str = ""
) -> None:
    """Print rows below their headings.

    Args:
        console: where to.
        columns: headings.
        rows: cells, made text by ``str``.
        numbers: headings of right-aligned columns, separated by spaces.
    """
    if not console.is_terminal:
        _print_plain(console, columns, rows, numbers.split())
        return
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in columns:
        table.add_column(Text(name), justify="right" if name in numbers.split() else "left", overflow="fold")
    for row in rows:
        table.add_row(*(Text(str(cell)) for cell in row))
    console.print(table)


def _print_plain(
    console: Console, columns: Sequence[str], rows: Sequence[Sequence[object]], numbers: Sequence[str]
) -> None:
    texts = [list(columns), *([str(cell) for cell in row] for row in rows)]
    widths = [max(len(row[index]) for row in texts) for index in range(len(columns))]
    for row in texts:
        cells = [
            cell.rjust(width) if name in numbers else cell.ljust(width)
            for name, cell, width in zip(columns, row, widths, strict=True)
        ]
        console.print(Text("  ".join(cells).rstrip()), soft_wrap=True)
