"""Makes docs/bugs.md of the READMEs in recipes/gallery: ``make bugs``."""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "bugs.md"
GALLERY = ROOT / "recipes" / "gallery"


def pinned(package: str) -> str:
    """Return the version that constraints.txt pins, with which the tests run the gallery."""
    (version,) = re.findall(rf"(?m)^{package}==(\S+)$", (ROOT / "constraints.txt").read_text())
    return str(version)


HEAD = f"""# Bugs it would have found

<!-- Made by `make bugs` from the READMEs in recipes/gallery: change those. -->

Real, public bugs, and what det_callbacks reports for each. The scripts are in `recipes/gallery`, at most 80 lines each,
as their users wrote them. A test runs each script twice: with the bug, the verdict names the culprit; with the fix, the
verdict is `match`, without findings.

The outputs are from torch {pinned("torch")} and Lightning {pinned("lightning")}, on two cores of an AMD EPYC
without a GPU.
"""  # noqa: E501  # a text


def entries() -> dict[str, str]:
    """Return the README of each entry, by the name of its folder, in the order of their titles."""
    readmes = {path.parent.name: path.read_text() for path in GALLERY.glob("*/README.md")}
    return dict(sorted(readmes.items(), key=lambda item: item[1]))


def told(readme: str) -> str:
    """Return the cause or the finding that a README promises."""
    (word,) = re.findall(r"^(?:cause +|det_callbacks: 1 finding: )(\w+)", readme, re.MULTILINE)
    return str(word)


def page() -> str:
    rows, sections = ["| bug | cause or finding |", "| --- | --- |"], list[str]()
    for name, readme in entries().items():
        title = readme.partition("\n")[0].removeprefix("# ")
        anchor = re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")
        rows.append(f"| [{title}](#{anchor}) | `{told(readme)}` |")
        body = readme.partition("\n")[2].replace("```console", "```text").strip()
        sections.append(f"## {title}\n\n`recipes/gallery/{name}`: {body}")
    return "\n\n".join([HEAD.rstrip(), "\n".join(rows), *sections]) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page())
