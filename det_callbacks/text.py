"""Numbers, names and lists in the form that a sentence needs."""

from collections.abc import Iterable, Sequence

MAX_NAMED, MAX_RANKS = 3, 8  # that a sentence names; the others are counted


def visible(text: str) -> str:
    """Return a text with escapes for what a terminal obeys and does not show, as in ``repr``;
    keeps lines and tabs.

    Control characters, those that change the direction of text,
    and separators could make a run look like another.
    """
    if text.isprintable():
        return text
    shown = (
        one if one.isprintable() or one in "\n\t" else one.encode("unicode_escape").decode()
        for one in text
    )
    return "".join(shown)


def count(number: int, noun: str) -> str:
    """Return "1 step", "1,234 steps", "2 entries", "3 batches"."""
    if number == 1:
        return f"1 {noun}"
    if noun.endswith("ry"):
        return f"{number:,} {noun[:-1]}ies"
    return f"{number:,} {noun}{'es' if noun.endswith('ch') else 's'}"


def size(num_bytes: int) -> str:
    """Return "512 bytes", "1.2 MB"."""
    if num_bytes < 10_000:
        return count(num_bytes, "byte")
    return f"{num_bytes / 1e3:.1f} kB" if num_bytes < 1_000_000 else f"{num_bytes / 1e6:.1f} MB"


def capitalised(text: str) -> str:
    """Return a text with a capital at its beginning."""
    return f"{text[:1].upper()}{text[1:]}"


def listed(texts: Iterable[str], separator: str = ", ", limit: int = MAX_NAMED) -> str:
    """Return "a, b and c" or "a, b, c and 2 more", each text once;
    other separators also precede the last text.
    """
    known = list(dict.fromkeys(texts))
    if len(known) > limit:
        return f"{separator.join(known[:limit])} and {len(known) - limit} more"
    if separator != ", " or len(known) < 2:
        return separator.join(known)
    return f"{', '.join(known[:-1])} and {known[-1]}"


def at_most(limit: int, lines: Sequence[str]) -> list[str]:
    """Return the first lines, and how many more there are."""
    num_left = len(lines) - limit
    return [*lines[:limit], f"and {num_left:,} more"] if num_left > 0 else [*lines]


def ranks_text(ranks: Sequence[int]) -> str:
    """Return "rank 1", "ranks 0 and 1"."""
    return f"rank{'s' * (len(ranks) > 1)} {listed(map(str, ranks), limit=MAX_RANKS)}"
