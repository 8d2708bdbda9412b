"""Lints prose with proselint, and with patterns of our own: ``make lint``, or with the files and
folders as arguments.

In a Markdown file it reads everything except code. In a Python file it reads docstrings, comments
and messages: strings with four words or more.
"""

import io
import re
import sys
import tokenize
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from proselint import checks
from proselint.config import DEFAULT
from proselint.registry import CheckRegistry
from proselint.tools import LintFile

# People read these texts in a terminal and beside code, where quotes and ellipses are ASCII.
NOT_ASKED_FOR = ("typography.symbols", "typography.punctuation", "typography.diacritical_marks")

# Accepted words: sizes such as "3 x 96 x 96", "lets torch.compile compile", and a word of 8 bytes.
ACCEPTED = re.compile(r"[\dx ]+|compile compile|in a word")

# Patterns of a translation, each with what to write instead. A space also matches a line break.
HOUSE = {
    r"\b(nobody|no one) (is|was|has|tells|told|sees|saw|knows)\b": "name who acts",
    r"\b(is|are|was|were) (said|told|noted)\b": (
        "name who says it: the closing line, the error, the report"
    ),
    r"\bone's own\b|\bof (its|their) own\b": "say what it is",
    r"\b(stand|stands|standing) (above|below|beside|for it|in(?! for)|under)\b": "is, or has",
    r"\b(lie|lies) (below|beside|in)\b": "is",
    r"\balike\b": "the same, or equal",
    r"\b(tells|told) of\b|\bof which (nobody|none)\b": "reports",
    r"\ball the same\b": "still, or anyway",
    r"\ba loop of (your|one's) own\b": "your own loop",
    r"\bwhat (is|was|has) \w+ is what\b": "name the thing",
    r"\bbut for\b": "except",
    r"\b(step|epoch|update) before\b(?=[.;:)]| in the same order| had used)": "the previous one",
    r"\b(state|a tensor|a setting) differs? that\b": (
        "put the clause next to its noun, or write two"
    ),
    r"\b(in|of|with) another (order|kind|shape|number|version|type|size|length|seed|dtype)\b": (
        "a different one"
    ),
    r"\b(are|is) others\b|\bothers than\b": "differ, or are not those of",
    r", as (those|that) of\b": "such as",
    r"\bchoices? differs?\b": "setting",
    r"\bwhat (is|was) not (kept|recorded|saved) (is|was)\b": "name the thing",
    r"(?<!there)\sis no (origin|finding|difference|terminal|tensor|stream|output|match)\b": (
        "is not a"
    ),
    r"\bwhole number from\b|\bnumber from \d+ on\b": "an integer >= n",
    (
        r"\b(a|one|each|this|another|finished|resumed|several|two|both) training\b(?= (is|was|that|"
        r"which|has|had|in|of|on"
        r"|with|without|from|ends?|resumes?|repeats?|differs?|matches|and|or)\b|[.,;:)])|"
        r"\btrainings\b"
    ): ("run"),
    r"\bin the reference(,| and) [^.;(]*\bnow\b": "in the current run",
    r"\b(memory|written|freed|reused|writes?) unseen\b|\bare unseen\b": (
        "without the recorder seeing it"
    ),
    r"\bfollows? from\b": "depends on",
    r"\bmakes? (a|no|new) (row|site|node)s?\b": "adds, creates, or has",
    r", also (after|in|from|if|when|on|for|those)\b": "even",
    r"\bbeside (it|the|a|each|checkpoints)\b": "next to",
    r"\bis not what (its|their)\b": "does not match",
    r"\ba line says\b": "the output says",
    r"\bdifferent structure\b": "a different shape or dtype",
    r"\brepeats? (itself|themselves)\b": "is reproducible, or deterministic",
    r"\bgoes? on (from|with)\b|\bgoing on\b": "continue",
    r"\bmended\b": "fixed",
}

WHITESPACE = r"\s+"


def blanked(text: str) -> str:
    """Return ``text`` as spaces, with its line breaks, and backquotes to
    separate the words beside code.
    """
    return re.sub(r"[^\n`]", " ", text)


def prose_of_markdown(text: str) -> str:
    """Return a page with everything blanked except prose: no code, comments,
    targets of links or rules of tables.
    """
    code = (
        r"(?ms)^```.*?^```$|^ {4}.*?$|`[^`\n]+`|<!--.*?-->|\]\([^)\s]*\)|https?://\S+|^\|[-| ]+\|$"
    )
    return re.sub(code, lambda match: blanked(match[0]), text)


def prose_of_python(text: str) -> str:
    """Return a module with everything blanked except docstrings, comments and messages."""
    lines = text.splitlines(keepends=True)
    starts = [0]
    for line in lines:
        starts.append(starts[-1] + len(line))
    # the last since Python 3.12
    parts = tokenize.STRING, tokenize.COMMENT, getattr(tokenize, "FSTRING_MIDDLE", None)
    prose = list(blanked(text))
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        is_short = (
            token.type == tokenize.STRING and len(re.findall(r"[A-Za-z]{2,}", token.string)) < 4
        )
        if token.type in parts and not is_short:
            first, last = (starts[line - 1] + column for line, column in (token.start, token.end))
            code = r"``?[^`\n]+``?|\{[^{}\n]*\}|^[rbfRBF]*(\"\"\"|\"|')|(\"\"\"|\"|')$|^#+"
            prose[first:last] = re.sub(code, lambda match: blanked(match[0]), text[first:last])
    return "".join(prose)


def found_in(name: str, prose: str) -> list[tuple[int, str]]:
    found = []
    content = f"\n{prose}\n"  # as proselint reads it
    for result in LintFile(name, prose or " ").lint(DEFAULT):
        check = result.check_result
        words = content[slice(*check.span)].strip()
        # a heading and its paragraph, cells of a table
        is_across_a_gap = bool(re.search(r"\n| {3}", words))
        if not (
            is_across_a_gap
            or ACCEPTED.fullmatch(words)
            or check.check_path.startswith(NOT_ASKED_FOR)
        ):
            found.append(
                (content.count("\n", 0, check.span[0] + 1), f"{check.message} ({check.check_path})")
            )
    for pattern, cure in HOUSE.items():
        for match in re.finditer(f"(?i){pattern.replace(' ', WHITESPACE)}", prose):
            line = prose.count("\n", 0, match.start()) + 1
            found.append(
                (line, f"{' '.join(match[0].split())!r}: {cure} (HOUSE of tests/prose.py)")
            )
    return sorted(found)


def texts(paths: Sequence[str]) -> Iterator[tuple[str, str]]:
    for path in map(Path, paths):
        for file in sorted(path.rglob("*")) if path.is_dir() else [path]:
            if file.suffix == ".md":
                yield str(file), prose_of_markdown(file.read_text())
            elif file.suffix == ".py":
                yield str(file), prose_of_python(file.read_text())


def check(text: tuple[str, str]) -> list[tuple[str, int, str]]:
    if not CheckRegistry().checks:  # once in each process
        CheckRegistry().register_many(checks.__register__)
    return [(text[0], line, message) for line, message in found_in(*text)]


def main(paths: Sequence[str]) -> int:
    with ProcessPoolExecutor() as pool:
        found = [one for each in pool.map(check, texts(paths), chunksize=8) for one in each]
    for name, line, message in found:
        print(f"{name}:{line}: {message}")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
