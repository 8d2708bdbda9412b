"""Makes the pictures of docs/ from real runs: ``make pictures``, which needs Chromium.

A picture carries the text that it shows (a chunk ``iTXt`` of the PNG), so that a test can compare
it with what the same run says today, without a browser.
"""

import os
import shutil
import struct
import subprocess
import sys
import tempfile
import zlib
from pathlib import Path

from html_page import Page

ROOT = Path(__file__).resolve().parents[1]
REPORT = ROOT / "docs" / "report.png"
WIDTH, HEIGHT = 1200, 785
SIGNATURE = b"\x89PNG\r\n\x1a\n"
KEYWORD = b"Description"
END = "The column of a differing step"  # the first words below the heat map, where the picture ends

TRAIN = "recipes/digits/train.py determinism.reference=refs/digits hydra.run.dir=outputs/digits"
VERIFY = "+determinism=verify determinism.on_divergence=collect model.perturb=net.conv1"
COMMANDS = {  # with the exit status of each
    f"{TRAIN} +determinism=record": 0,
    f"{TRAIN} {VERIFY}": 1,
    "-m det_callbacks diff refs/digits outputs/digits/determinism --html report.html": 1,
}


def write_report(folder: Path) -> Path:
    """Record the digits, verify them while one layer goes wrong,
    and return the report of the comparison.
    """
    (folder / "recipes").symlink_to(ROOT / "recipes")
    variables = {name: value for name, value in os.environ.items() if name != "CI"}
    for command, status in COMMANDS.items():
        words = [sys.executable, *command.split()]
        done = subprocess.run(
            words, cwd=folder, env=variables, capture_output=True, text=True, check=False
        )
        if done.returncode != status:
            raise SystemExit(
                f"python {command} ended with {done.returncode}, not {status}:\n{done.stderr}"
            )
    return folder / "report.html"


def shown(report: Path) -> str:
    """Return what the picture of a report shows: its text, and where in the
    heat map a difference starts.

    How far a difference of one ULP spreads depends on the machine.
    """
    page = Page(report)
    (heat_map,) = page.maps
    origins = [
        f"origin: {label}, step {step}"
        for label in heat_map.labels
        for step in heat_map.columns
        if heat_map.state(step, label) == "o"
    ]
    lines = page.text.partition(END)[0].splitlines()
    return "\n".join([*filter(None, map(str.strip, lines)), *origins])


def chunks(picture: bytes) -> list[tuple[bytes, bytes]]:
    found, at = [], len(SIGNATURE)
    while at < len(picture):
        (size,) = struct.unpack(">I", picture[at : at + 4])
        found.append((picture[at + 4 : at + 8], picture[at + 8 : at + 8 + size]))
        at += size + 12
    return found


def with_text(picture: bytes, text: str) -> bytes:
    content = KEYWORD + b"\0\0\0\0\0" + text.encode()
    first, *others = chunks(picture)
    parts = [SIGNATURE]
    for kind, data in (first, (b"iTXt", content), *others):
        parts += [
            struct.pack(">I", len(data)),
            kind,
            data,
            struct.pack(">I", zlib.crc32(kind + data)),
        ]
    return b"".join(parts)


def text_of(picture: bytes) -> str:
    (content,) = (
        data for kind, data in chunks(picture) if kind == b"iTXt" and data.startswith(KEYWORD)
    )
    return content[len(KEYWORD) + 5 :].decode()


def take_picture(report: Path, chromium: str) -> bytes:
    """Return the top of a page as a browser shows it, on light ground."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=chromium, args=["--no-sandbox", "--disable-gpu"]
        )
        page = browser.new_page(viewport={"width": WIDTH, "height": HEIGHT}, color_scheme="light")
        page.goto(report.as_uri())
        picture: bytes = page.screenshot()
        browser.close()
    return picture


def main() -> None:
    chromium = shutil.which("chromium")
    if chromium is None:
        raise SystemExit(
            "make pictures needs Chromium in PATH under the name chromium (apt-get install "
            "chromium)"
        )
    with tempfile.TemporaryDirectory() as folder:
        report = write_report(Path(folder))
        REPORT.write_bytes(with_text(take_picture(report, chromium), shown(report)))
    print(f"wrote {REPORT.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
