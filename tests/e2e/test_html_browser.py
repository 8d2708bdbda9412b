"""The HTML report as a person sees and uses it, in a real browser."""

import random
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from browsing import NEEDS_CHROMIUM, browser, opened
from faults import Deep, Training, below
from playwright.sync_api import Browser
from stored_runs import SELECTION, OneOf, digests_of, join
from torch import nn
from trainers import LIGHTNING_ADVICE

from det_callbacks import compare_runs
from det_callbacks.report import write_report
from det_callbacks.runs.program import Layout, Program, Site, TensorLayout
from det_callbacks.runs.writer import RunWriter
from det_callbacks.verdict import Divergence

pytestmark = [LIGHTNING_ADVICE, NEEDS_CHROMIUM]

MARKUP = "</script><img src=x onerror=alert(1)>"


class Renamed(Deep):
    """Has a module whose name is markup."""

    def __init__(self) -> None:
        super().__init__()
        self.middle = nn.Sequential()
        self.middle.add_module(MARKUP, nn.LayerNorm(16))


@pytest.fixture(scope="module")
def chromium() -> Iterator[Browser]:
    with browser() as started:
        yield started


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of a fault that starts in the module whose name is markup, and spreads from there."""
    folder = tmp_path_factory.mktemp("report")
    for seed in (random.seed, np.random.seed, torch.manual_seed):
        seed(0)
    Training(model=Renamed).record(folder / "reference")
    fault = below(op="aten.native_layer_norm_backward", step=1, call=0, is_gross=True)
    Training(model=Renamed, around=fault).record(folder / "current")
    return written(folder)


def written(folder: Path) -> Path:
    verdict = compare_runs(folder / "reference", folder / "current")
    path = folder / "report.html"
    return write_report(path, verdict, reference=folder / "reference", current=folder / "current")


@pytest.fixture(scope="module")
def first(report: Path) -> Divergence:
    found = compare_runs(report.parent / "reference", report.parent / "current").first_divergence
    assert found is not None
    assert found.module == f"middle.{MARKUP}"
    return found


def test_it_opens_without_a_word_and_loads_nothing(chromium: Browser, report: Path) -> None:
    with opened(chromium, report) as seen:
        page = seen.page
        assert seen.requests == [report.as_uri()]
        assert seen.complaints == []
        assert page.title().startswith("Diverged: ")
        assert page.evaluate("document.documentElement.lang") == "en"
        assert page.evaluate("document.images.length") == 0
        labels = page.eval_on_selector_all("#heat a", "all => all.map((one) => one.getAttribute('aria-label'))")
        assert len(labels) == 4 * len(
            page.eval_on_selector_all("#heat [aria-label^='y-axis tick label'] text", "a => a")
        )
        assert any(label.startswith(f"step 1, middle.{MARKUP}: origin: it starts here; ") for label in labels)


def test_scripts_that_are_not_ours_do_not_run(chromium: Browser, report: Path, tmp_path: Path) -> None:
    text = report.read_text()
    assert text.count("</main>") == 1
    changed = tmp_path / "changed.html"
    changed.write_text(text.replace("</main>", "<script>alert(3)</script><img src=x onerror=alert(4)></main>"))
    with opened(chromium, changed) as seen:
        assert not any("dialog" in complaint for complaint in seen.complaints)
        assert len([complaint for complaint in seen.complaints if "Content Security Policy" in complaint]) >= 2


def test_a_click_on_a_cell_leads_to_its_op(chromium: Browser, report: Path, first: Divergence) -> None:
    with opened(chromium, report) as seen:
        page = seen.page
        page.locator("#heat a[aria-label^='step 3, head:']").click()
        seen.wait_for_focus("Sites of step 3, head")
        page.locator("#heat a[aria-label*='origin: it starts here']").first.click()
        seen.wait_for_focus(f"Sites of step 1, {first.module}")
        cells = page.locator("#listing tbody tr").first.locator("td").all_inner_texts()
        assert cells[0] == "starts here"
        assert cells[1:4] == [first.phase, first.module, f"{first.op}#{first.occurrence}"]
        assert cells[5:7] == [first.reference_digest, first.current_digest]
        assert cells[8].split("\n")[0] == first.source[0]
        page.get_by_text("Back to the heat map").click()
        seen.wait_for_focus(f"step 1, {first.module}: origin")
        assert seen.complaints == []


def test_a_cell_that_agrees_says_so(chromium: Browser, report: Path) -> None:
    with opened(chromium, report) as seen:
        seen.page.locator("#heat a[aria-label^='step 0, head:']").click()
        seen.wait_for_focus("Sites of step 0, head")
        text = seen.page.inner_text("#listing")
        assert re.match(r"Match; \d+ sites agree\.", text)
        assert seen.page.locator("#listing table").count() == 0


def test_the_map_is_used_with_the_keyboard_alone(chromium: Browser, report: Path) -> None:
    with opened(chromium, report) as seen:
        page, press = seen.page, seen.page.keyboard.press
        page.locator("input[value=modules]").focus()
        press("ArrowRight")
        assert page.locator("input[value=phases]").is_checked()
        press("Tab")
        seen.wait_for_focus("step 0, data: match")
        assert page.locator("#heat .ring").get_attribute("visibility") == "visible"
        press("ArrowRight")
        press("ArrowDown")
        seen.wait_for_focus("step 1, rng: match")
        press("End")
        press("PageDown")
        last = seen.wait_for_focus("step 3, ")
        press("ArrowDown")
        press("ArrowRight")
        assert seen.wait_for_focus("step 3, ") == last, "the edge of the map"
        assert seen.page.inner_text("#pointed") == last
        press("Enter")
        seen.wait_for_focus("Sites of step 3, ")
        assert page.locator("#listing tbody tr").count() > 0
        press("Escape")
        assert seen.wait_for_focus("step 3, ") == last
        assert page.locator("#heat a[tabindex='0']").count() == 1
        press("Tab")
        assert page.locator("#heat :focus").count() == 0, "one Tab leaves the map"


def test_an_address_opens_its_cell(chromium: Browser, report: Path) -> None:
    with opened(chromium, report, fragment="#at-0-phases-0-2") as seen:
        seen.wait_for_focus("Sites of step 2, data")
        assert seen.page.locator("input[value=phases]").is_checked()
    with opened(chromium, report, fragment="#at-0-modules-0-4") as seen:
        for strange in ("#at-9-modules-0-0", "#at-0-modules-999-0", "#at-0-__proto__-0-0", "#at-0-modules-0"):
            seen.page.evaluate(f"location.hash = '{strange}'")
        assert seen.page.inner_text("#cell").startswith("Sites of step 1, "), "no such cells"
        assert seen.complaints == []


def test_light_and_dark_can_both_be_read(chromium: Browser, report: Path) -> None:
    brightness = {}
    for scheme in ("light", "dark"):
        with opened(chromium, report, color_scheme=scheme) as seen:
            pairs = [("body", "body"), (".quiet", "body"), ("header h1", "header"), (".word", "header")]
            for text, ground in pairs:
                assert contrast(seen.page, text, ground) >= 4.5, (scheme, text)
            brightness[scheme] = luminance(colour(seen.page, "body", "backgroundColor"))
    assert brightness["dark"] < 0.1 < 0.8 < brightness["light"]


def test_it_prints_light_without_controls(chromium: Browser, report: Path) -> None:
    with opened(chromium, report, color_scheme="dark") as seen:
        seen.page.emulate_media(media="print", color_scheme="dark")
        assert luminance(colour(seen.page, "body", "backgroundColor")) > 0.99
        for hidden in ("nav", ".controls", "#pointed", "#map-help"):
            assert not seen.page.locator(hidden).is_visible()
        assert seen.page.locator("#heat svg").is_visible()
        printed = seen.page.pdf(prefer_css_page_size=True)
    assert 3 <= len(re.findall(rb"/Type\s*/Page\b", printed)) <= 12, "pages"
    assert len(printed) < 2_000_000, "drawn as lines"


def test_it_fits_a_narrow_window(chromium: Browser, report: Path) -> None:
    with opened(chromium, report, width=380) as seen:
        assert seen.page.evaluate("document.documentElement.scrollWidth") <= 380
        assert seen.complaints == []


def write_run(
    path: Path, *, num_steps: int, num_sites: int, num_modules: int, num_ranks: int = 1, spreads_from: tuple[int, int]
) -> None:
    """Write a run of a chain of ops; from (rank, step) on, the second half of each step has other bits."""
    layout = Layout(entries=(TensorLayout(dtype="bfloat16", shape=(8, 64), stride=(64, 1)),) * num_sites)
    sites = [
        Site(
            phase="forward" if place < num_sites // 2 else "backward",
            module=f"model.blocks.{place * num_modules // num_sites}.attention.proj",
            op="aten.mm.default",
            occurrence=place,
            output=0,
            role="output",
            inputs=(place - 1,) if place else (),
            source=(f"model.py:{place % 90 + 1} in forward",),
        )
        for place in range(num_sites)
    ]
    program = Program(sites=tuple(sites), ops_seen=num_sites, ops_digested=num_sites)
    manifest = {"selection": SELECTION, "environment": {}}
    for rank in range(num_ranks):
        writer = RunWriter.create(path, peers=OneOf(0, num_ranks), manifest=manifest) if not rank else join(path, rank)
        writer.put_program(program)
        writer.put_layout(layout)
        for step in range(num_steps):
            digests = digests_of(step, num_sites)
            if rank == spreads_from[0] and step >= spreads_from[1]:
                digests[num_sites // 2 :] ^= np.uint64(1)
            writer.append(step, 0, program.id, layout.id, digests)
        writer.close(complete=True)


def test_each_rank_has_a_map(chromium: Browser, tmp_path: Path) -> None:
    sizes = {"num_steps": 4, "num_sites": 8, "num_modules": 2, "num_ranks": 2}
    write_run(tmp_path / "reference", spreads_from=(9, 9), **sizes)
    write_run(tmp_path / "current", spreads_from=(1, 2), **sizes)
    with opened(chromium, written(tmp_path)) as seen:
        page = seen.page
        assert page.locator("#which").input_value() == "1", "the rank that differs is shown first"
        assert page.locator("#heat a[aria-label^='rank 1, step 2, model.blocks.1.attention.proj: origin']").count() == 1
        page.select_option("#which", "0")
        assert page.locator("#heat a[aria-label*='match']").count() == page.locator("#heat a").count()
        rows = page.locator("section[aria-labelledby=ranks] tbody tr").all_inner_texts()
        assert [row.split("\t")[0] for row in rows] == ["0", "1"]
        assert seen.complaints == []


@pytest.mark.slow
def test_a_large_report_is_small_and_opens(chromium: Browser, tmp_path: Path) -> None:
    sizes = {"num_steps": 200, "num_sites": 5_000, "num_modules": 100}
    write_run(tmp_path / "reference", spreads_from=(9, 9), **sizes)
    write_run(tmp_path / "current", spreads_from=(0, 60), **sizes)
    path = written(tmp_path)
    assert path.stat().st_size < 10_000_000
    with opened(chromium, path) as seen:
        assert seen.page.locator("#heat a").count() == 200 * 100
        assert seen.complaints == []


def colour(page: Any, selector: str, name: str) -> tuple[float, float, float]:
    text = page.eval_on_selector(selector, f"one => getComputedStyle(one).{name}")
    red, green, blue = (float(part) / 255 for part in re.findall(r"[\d.]+", text)[:3])
    return red, green, blue


def luminance(parts: tuple[float, float, float]) -> float:
    """Return the relative luminance of a colour (WCAG 2.2)."""
    red, green, blue = (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrast(page: Any, text: str, ground: str) -> float:
    """Return the contrast of text on what lies below it (WCAG 2.2: 4.5 can be read)."""
    both = luminance(colour(page, text, "color")), luminance(colour(page, ground, "backgroundColor"))
    return (max(both) + 0.05) / (min(both) + 0.05)
