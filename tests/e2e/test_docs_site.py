"""The site of docs/ and its pictures: built strictly, complete, searchable,
and without anything from the network.
"""

import functools
import http.server
import json
import os
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pictures
import pytest
from playwright.sync_api import sync_playwright

import det_callbacks

ROOT = Path(__file__).parents[2]
CHROMIUM = shutil.which("chromium")

pytestmark = pytest.mark.slow


def build(folder: Path, site: Path) -> subprocess.CompletedProcess[str]:
    """Build the pages of a folder with docs/ and mkdocs.yml, as ``make docs`` does."""
    (options,) = re.findall(r"(?m)^\t.*/mkdocs (build .*)$", (ROOT / "Makefile").read_text())
    command = [sys.executable, "-m", "mkdocs", *options.split(), "--site-dir", str(site)]
    variables = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    return subprocess.run(
        command, cwd=folder, env=variables, capture_output=True, text=True, check=False
    )


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("mkdocs", reason="no mkdocs: it is in the extra dev")
    folder = tmp_path_factory.mktemp("site")
    done = build(ROOT, folder)
    assert done.returncode == 0, done.stderr
    return folder


@contextmanager
def served(site: Path) -> Iterator[str]:
    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=str(site))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def test_every_public_name_has_a_place_with_an_example_in_the_api_reference(site):
    page = (site / "reference" / "api" / "index.html").read_text()
    places = re.split(r'(?=<h3 id="det_callbacks\.)', page)[1:]
    with_examples = {
        place.split('"')[1].rpartition(".")[2] for place in places if "&gt;&gt;&gt;" in place
    }
    assert set(det_callbacks.__all__) <= with_examples


def test_the_search_knows_each_page(site):
    index = json.loads((site / "search" / "search_index.json").read_text())
    found = {entry["location"].partition("#")[0] for entry in index["docs"]}
    pages = {path.parent.relative_to(site).as_posix() for path in site.rglob("index.html")}
    assert {place.rstrip("/") or "." for place in found} == pages


@pytest.mark.skipif(CHROMIUM is None, reason="no chromium: apt-get install chromium")
def test_a_browser_finds_something_and_asks_for_nothing_elsewhere(site):
    with served(site) as address, sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"]
        )
        page = browser.new_page(viewport={"width": 1400, "height": 900})
        asked: list[str] = []
        page.on("request", lambda request: asked.append(request.url))
        page.goto(address)
        page.locator("input.md-search__input").click()
        page.keyboard.type("nondeterministic op")
        first = page.locator("a.md-search-result__link").first
        first.wait_for(state="visible")
        assert "nondeterministic" in first.inner_text().lower()
        page.goto(f"{address}/how-to/report/")
        assert page.locator("img").evaluate_all("all => all.every(one => one.naturalWidth > 0)")
        browser.close()
    assert asked
    assert [url for url in asked if not url.startswith((address, "blob:", "data:"))] == []


@pytest.mark.parametrize(
    ("written", "complaint"),
    [
        ("[gone](how-to/gone.md)", "how-to/gone.md"),
        ("[gone](how-to/check.md#gone)", "#gone"),
        ("[gone](/how-to/check.md)", "absolute link"),
        ("::: det_callbacks.gone", "det_callbacks.gone"),
    ],
)
def test_a_wrong_link_is_an_error(written, complaint, tmp_path):
    pytest.importorskip("mkdocs", reason="no mkdocs: it is in the extra dev")
    for name in ("docs", "det_callbacks", "conf"):
        (tmp_path / name).symlink_to(ROOT / name)
    (tmp_path / "docs").unlink()
    shutil.copytree(ROOT / "docs", tmp_path / "docs")
    shutil.copy(ROOT / "mkdocs.yml", tmp_path)
    with (tmp_path / "docs" / "index.md").open("a") as page:
        page.write(f"\n{written}\n")
    done = build(tmp_path, tmp_path / "site")
    assert done.returncode == 1
    assert complaint in done.stderr


def test_the_picture_of_a_report_shows_what_the_same_run_says_today(tmp_path):
    picture = pictures.REPORT.read_bytes()
    assert pictures.text_of(picture) == pictures.shown(pictures.write_report(tmp_path))
    assert (
        pictures.text_of(
            pictures.with_text(b"".join([pictures.SIGNATURE, picture[8:33]]), "one text")
        )
        == "one text"
    )
