"""The parts of a report, and how they are printed."""

import io
import logging
import os
import random
import sys
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest
from multiprocessing.util import Finalize
from typing import IO, Literal, NoReturn

# rich draws a random number when it is imported, which may be inside a run that
# draws from the same generator
_state_before_rich = random.getstate()
from rich.console import Console  # noqa: E402
from rich.text import Text  # noqa: E402

random.setstate(_state_before_rich)

from det_callbacks.text import visible  # noqa: E402

STYLES = {"match": "bold green", "diverged": "bold red", "not_comparable": "bold yellow"}
MAX_WIDTH = 119  # without a terminal
_AFTER_ALL = -1_000_000  # semaphores have 0, temporary folders -100


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """Rows below their headings; numbers are aligned to the right."""

    columns: Sequence[str]
    rows: Sequence[Sequence[object]]
    limit: int = sys.maxsize  # the rows that are printed; the others are counted
    is_wide: bool = False  # one line a row without a terminal, for other programs

    def is_number(self, column: int) -> bool:
        return any(type(row[column]) is int for row in self.rows)


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    title: str = ""
    style: str = "bold"  # style of the title
    lines: Sequence[str] = ()  # sentences
    items: Sequence[str] = ()  # items of a list
    facts: Sequence[tuple[str, str]] = ()  # each with its name first
    code: Sequence[str] = ()  # lines that are not wrapped
    table: Table | None = None


def make_console(*, stderr: bool = False) -> Console:
    """Return a console, which is plain if it is not a terminal."""
    file = _open_file("stderr" if stderr else "stdout")
    console = Console(file=file, highlight=False)
    return (
        console
        if console.is_terminal
        else Console(file=file, highlight=False, width=MAX_WIDTH, no_color=True)
    )


def _open_file(name: Literal["stdout", "stderr"]) -> IO[str]:
    """Return ``sys.stdout`` or ``sys.stderr``, or what it wrote to if the script has closed it."""
    file: IO[str] | None = getattr(sys, name)
    if file is not None and not getattr(file, "closed", False):
        return file
    try:
        return os.fdopen(
            os.dup(1 if name == "stdout" else 2), "w", buffering=1, errors="backslashreplace"
        )
    except OSError:  # that is closed, too
        return io.StringIO()


def to_text(report: Sequence[Section]) -> str:
    buffer = io.StringIO()
    print_report(report, Console(file=buffer, highlight=False, width=MAX_WIDTH, no_color=True))
    return "\n".join(line.rstrip() for line in buffer.getvalue().splitlines()).strip("\n")


def print_report(report: Sequence[Section], console: Console | None = None) -> None:
    """Print the sections of a report with empty lines between them, wrapped at words."""
    console = make_console() if console is None else console
    for index, section in enumerate(report):
        indent = "  " if section.title else ""
        width = max((len(name) for name, _ in section.facts), default=0)
        facts = (f"{indent}{name:<{width}}  {fact}" for name, fact in section.facts)
        if index:
            print_line(console)
        if section.title:
            print_line(console, _in_one_line(section.title), section.style)
        for line in (*section.lines, *(f"  {item}" for item in section.items), *facts):
            wrapper = textwrap.TextWrapper(
                console.width, subsequent_indent=line[: len(line) - len(line.lstrip())]
            )
            wrapper.break_long_words = wrapper.break_on_hyphens = False
            print_line(console, wrapper.fill(line))
        for line in section.code:
            print_line(console, indent + _in_one_line(line))
        if section.table is not None:
            _print_table(console, section.table)


def print_line(console: Console, text: str = "", style: str = "") -> None:
    """Print a line without markup or wrapping; text of a run cannot steer the terminal."""
    console.print(Text(encodable(visible(text), console.file), style=style), soft_wrap=True)


def _in_one_line(text: str) -> str:
    return visible(text).replace("\n", "\\n")


def encodable(text: str, file: IO[str]) -> str:
    """Return a text with escapes for characters that the file's encoding lacks."""
    encoding, errors = (
        getattr(file, "encoding", None) or "utf-8",
        getattr(file, "errors", None) or "strict",
    )
    try:
        text.encode(encoding, errors)
    except UnicodeEncodeError:
        return text.encode(encoding, "backslashreplace").decode(encoding)
    return text


def print_closing_line(text: str, console: Console | None = None) -> None:
    """Print a closing line, in the colour of its verdict on a terminal."""
    style = next((style for word, style in STYLES.items() if f" {word}:" in text), "")
    print_line(console or Console(file=_open_file("stdout"), highlight=False), text, style)


def _longest_word(text: str) -> int:
    return max(map(len, text.split()), default=0)


def _print_table(console: Console, table: Table) -> None:
    """Print a table whose widest columns are folded until it fits, at words if that is enough."""
    rows = [
        [_in_one_line(str(cell)) for cell in row]
        for row in (table.columns, *table.rows[: table.limit])
    ]
    columns = [*zip(*rows, strict=True)]
    widths = [max(map(len, column)) for column in columns]
    words = [max(map(_longest_word, column)) for column in columns]
    room = (
        sys.maxsize
        if table.is_wide and not console.is_terminal
        else console.width - 2 * (len(widths) - 1)
    )
    while sum(widths) > room and max(widths) > 1:
        between = [column for column, width in enumerate(widths) if width > words[column]]
        widths[max(between or range(len(widths)), key=widths.__getitem__)] -= 1
    signs = [">" if table.is_number(column) else "<" for column in range(len(widths))]
    for number, row in enumerate(rows):
        pairs = zip(row, widths, strict=True)
        folded = [
            [cell] if len(cell) <= width else textwrap.wrap(cell, width) for cell, width in pairs
        ]
        for cells in zip_longest(*folded, fillvalue=""):
            padded = (
                f"{cell:{sign}{width}}"
                for cell, sign, width in zip(cells, signs, widths, strict=True)
            )
            print_line(console, "  ".join(padded).rstrip(), "" if number else "bold")
    if len(table.rows) > table.limit:
        print_line(console, f"and {len(table.rows) - table.limit:,} more")


def print_error(error: Exception, *, name: str = "") -> None:
    """Print an error to standard error, without a traceback."""
    print(visible(f"{name or type(error).__name__}: {error}"), file=_open_file("stderr"))


def end_process(status: int) -> None:
    """End the process from a finalizer, after all others:
    an exception would not change its status.
    """
    Finalize(None, _leave, args=(status,), exitpriority=_AFTER_ALL)


def _leave(status: int) -> NoReturn:
    logging.shutdown()
    _open_file("stdout").flush()
    _open_file("stderr").flush()
    os._exit(status)
