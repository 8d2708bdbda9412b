"""The HTML report: what it says is what the runs hold, it runs and loads nothing,
and a browser opens it.
"""

import json
import random
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from faults import Training, below
from html_page import Page
from playwright.sync_api import sync_playwright
from step_builder import StepBuilder, record
from trainers import LIGHTNING_ADVICE
from verdicts import DIVERGED, THREADS, differing

from det_callbacks import DeterminismCallback, cli, compare_runs
from det_callbacks.errors import DivergenceError, DivergenceWarning, RunExistsError
from det_callbacks.report.page import write_report
from det_callbacks.report.verdict import verdict_lines
from det_callbacks.training import verifying
from det_callbacks.verify import verification

pytestmark = LIGHTNING_ADVICE

CHROMIUM = shutil.which("chromium")
ONE = below(op="aten.native_layer_norm", step=1, module="net.4.norm")
SPREADING = below(op="aten.native_layer_norm_backward", step=1, call=2, is_gross=True)
NASTY = "</script></style></title>\"'><img src=x onerror=alert(1)><!--{{ 7*7 }}"


def verify(runs: Path, current: Path, fault: Any, **options: Any) -> None:
    callback = DeterminismCallback(runs / "reference", mode="verify", current=current, **options)
    with pytest.warns(DivergenceWarning) if options else pytest.raises(DivergenceError):
        Training(around=fault).fit(callback)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: Any) -> Path:
    """A reference, a verification that stopped at one wrong op,
    and one that went on after it had spread.
    """
    folder = tmp_path_factory.mktemp("runs")
    for seed in (random.seed, np.random.seed, torch.manual_seed):
        seed(0)
    Training().record(folder / "reference")
    verify(folder, folder / "one", ONE)
    verify(folder, folder / "spread", SPREADING, on_divergence="warn")
    return folder


def written(folder: Path, current: str = "current") -> Page:
    paths = folder / "reference", folder / current
    return Page(
        write_report(
            folder / "report.html", compare_runs(*paths), reference=paths[0], current=paths[1]
        )
    )


def test_it_says_what_the_verdict_says_in_the_same_words(runs, tmp_path):
    paths = runs / "reference", runs / "one"
    verdict = replace(compare_runs(*paths), evidence=("what led to it",), environment=(THREADS,))
    page = Page(write_report(tmp_path / "r.html", verdict, reference=paths[0], current=paths[1]))
    word, *text = verdict_lines(verdict).split()
    assert {"Evidence", "led", "Origins", "Environment", "Compared", "Next"} <= {*text}
    assert page.text.strip().startswith(f"{word.capitalize()}: ")
    assert [part for part in text if part not in page.text] == []
    assert page.maps[0].outcomes == "1 agree, 1 differ, 2 not compared"
    assert page.maps[0].letters() == "mo..", (
        "equal though not kept, the one that differs, and those that never ran"
    )


def test_the_heat_map_has_a_state_for_each_module_and_step(runs, tmp_path):
    verdict, page = (
        compare_runs(runs / "reference", runs / "spread"),
        Page(runs / "spread" / "report.html"),
    )
    (heat_map,) = page.maps
    assert heat_map.state(1, verdict.first_divergence.module) == "o"
    assert heat_map.state(1, "head") == "m", "the backward pass of the head came before"
    assert heat_map.state(2, "head") == "c"
    assert heat_map.letters() == "mocc", (
        "what differs later was carried on, though it enters the step as an input"
    )
    counts = re.findall(r"step \d: ([\d,]+) of [\d,]+ sites differ", page.text)
    assert sum(int(count.replace(",", "")) for count in counts) == verdict.counts.sites_differing
    shutil.copytree(runs / "spread", tmp_path / "spread", ignore=shutil.ignore_patterns("sources"))
    shutil.copytree(runs / "reference", tmp_path / "reference")
    again = written(tmp_path, "spread")
    assert (again.maps, "    return " in again.text) == (page.maps, False), (
        "no text where the run has none"
    )


def steps(num_steps: int, spreads_from: int = 999, **shape: Any) -> dict[int, StepBuilder]:
    """Steps of a chain of ops; from one of them on, the second half of the chain has other bits."""
    usual, spread = chain(**shape), chain(is_spread=True, **shape)
    return {step: spread if step >= spreads_from else usual for step in range(num_steps)}


def chain(
    *,
    num_sites: int = 8,
    num_modules: int = 2,
    prefix: str = "block",
    file: str = "m.py",
    is_spread: bool = False,
) -> StepBuilder:
    step, reads = StepBuilder(), list[int]()
    for place in range(num_sites):
        module, noise = (
            f"{prefix}{place * num_modules // num_sites}.proj",
            is_spread and 2 * place == num_sites,
        )
        reads = [
            step.op(
                "aten.mm.default", *reads, module=module, source=(f"{file}:{place}",), noise=noise
            )
        ]
    return step


def test_each_rank_and_fit_has_a_map_and_steps_of_one_run_alone_are_counted(tmp_path):
    record(tmp_path / "reference", steps(4), others=[steps(4)])
    record(tmp_path / "current", steps(6), others=[steps(6, 2)])
    page = written(tmp_path)
    found = {heat_map.name: (heat_map.letters(), heat_map.outcomes) for heat_map in page.maps}
    assert found == {
        "Rank 0": ("mmmm..", "4 agree, 2 only in the current run"),
        "Rank 1": ("mmoo..", "2 agree, 2 differ, 2 only in the current run"),
    }
    assert "step 2: 4 of 8 sites differ, starting at 1 of them" in page.text
    for name, step in (("fits", 9), ("alone", 1)):
        record(tmp_path / name, [steps(2), steps(2, step)])
    page = written(tmp_path, "alone")
    assert (page.maps, "world size" in page.text) == ([], True)
    (tmp_path / "reference").rename(tmp_path / "ranks")
    (tmp_path / "fits").rename(tmp_path / "reference")
    letters = {heat_map.name: heat_map.letters() for heat_map in written(tmp_path, "alone").maps}
    assert letters == {"Rank 0": "mm", "Rank 0, segment 1": "mo"}


def test_a_large_report_is_bounded_and_says_what_it_leaves_out(tmp_path):
    for name, spreads_from in (("reference", 999), ("current", 30)):
        record(tmp_path / name, steps(160, spreads_from, num_sites=500, num_modules=100))
    page = written(tmp_path)
    assert (tmp_path / "report.html").stat().st_size < 2_000_000
    assert page.maps[0].letters() == "m" * 10 + "o" * 90
    assert page.maps[0].labels == [*(f"block{one}.*" for one in range(59)), "(other modules)"]
    assert 250 < sum(tag == "tr" for tag, _ in page.tags) < 500
    assert page.text.count("step 39: 250 of 500 sites differ") == 1
    for said in (
        "80,000 sites, 32,500 differing",
        "and 225 more differing sites",
        "and 120 more steps",
    ):
        assert said in page.text


def test_it_has_no_script_and_no_address_and_no_text_of_a_run_is_markup(tmp_path):
    for name, spreads_from in (("reference", 9), ("current", 1)):
        record(tmp_path / name, steps(3, spreads_from, prefix=NASTY))
    verdict = compare_runs(tmp_path / "reference", tmp_path / "current")
    first = replace(
        DIVERGED.origins[0], module=NASTY, name=NASTY, phase=NASTY, dtype=NASTY, source=(NASTY,)
    )
    replayed = {NASTY: {"count": 3, "differing": 2, "mib_per_step": 0.5}}
    coverage = replace(
        verdict.coverage, opaque_regions=(NASTY,), ops_skipped={NASTY: 9}, replayed=replayed
    )
    texts = {
        "reference": NASTY,
        "explanation": NASTY,
        "evidence": (NASTY,),
        "environment": (differing(NASTY),),
    }
    verdict = replace(verdict, first_divergence=first, origins=(first,), coverage=coverage, **texts)
    paths = {name: tmp_path / name for name in ("reference", "current")}
    page = Page(write_report(tmp_path / "report.html", verdict, **paths))
    assert page.text.count("{{ 7*7 }}") > 20
    assert "Where replay restored saved tensors, the map shows a match." in page.text
    assert f"replayed: {NASTY}: 3 tensors restored, 2 of them differed, 0.5 MiB a step" in page.text

    tags = [tag for tag, _ in page.tags]
    assert tags.count("style") == 1
    assert not {"script", "link", "iframe", "object", "embed", "base", "img", "form"} & {*tags}
    known = [item for _, attributes in page.tags for item in attributes.items()]
    assert not any(name.startswith("on") for name, _ in known)
    loading = ("src", "href", "srcset", "action", "data", "poster", "xlink:href", "background")
    links = {text for name, text in known if name in loading}
    assert links, "of columns that lead to their steps"
    assert links <= {f"#{text}" for name, text in known if name == "id"}
    assert not re.search(r"@import|url\(", page.style)
    (policy,) = [attributes["content"] for _, attributes in page.tags if "http-equiv" in attributes]
    assert (
        policy
        == "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"
    )


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="no chromium: apt-get install chromium")
def test_a_browser_opens_it_light_and_dark_wide_and_narrow(runs, tmp_path):
    address = (runs / "spread" / "report.html").as_uri()
    long = {
        "prefix": "model.encoder.transformer.layers.block",
        "file": "src/project/models/components/attention.py",
    }
    for name, spreads_from in (("reference", 9), ("current", 1)):
        record(tmp_path / name, steps(2, spreads_from, **long))
    written(tmp_path)
    with sync_playwright() as playwright:
        options = [
            "--no-sandbox",
            "--disable-gpu",
            "--no-first-run",
            "--disable-background-networking",
        ]
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=options)
        colours, paper = set(), set()
        for scheme, width in (("light", 1400), ("dark", 400)):
            page = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
            said: list[str] = []
            page.on("console", lambda message, said=said: said.append(message.text))
            page.on("request", lambda request, said=said: said.append(request.url))
            page.goto(address)
            assert said == [address], "it complains of nothing and loads nothing"
            assert page.evaluate("document.documentElement.scrollWidth") <= width
            style = page.evaluate(
                "(one => [one.color, one.backgroundColor])(getComputedStyle(document.body))"
            )
            colours |= {*style}
            listed = page.locator("#s0-0-3")
            assert not listed.is_visible()
            page.emulate_media(media="print")
            assert listed.is_visible(), "on paper all steps are open"
            shown = page.evaluate("getComputedStyle(document.body).backgroundColor")
            paper.add(shown)
            page.emulate_media(media="screen")
            page.keyboard.press("Tab")
            focused = page.evaluate("document.activeElement.matches('summary, a, .scroll')")
            assert focused, "the first key leads to what can be opened"
            page.locator("a[href='#s0-0-3']").click(force=True)
            listed.wait_for(state="visible")
        page = browser.new_page(viewport={"width": 1400, "height": 900})
        page.goto((tmp_path / "report.html").as_uri())
        tables = page.locator(".scroll:has(> table)")
        assert tables.count() == 2
        widths = tables.evaluate_all("all => all.map(one => [one.scrollWidth, one.clientWidth])")
        assert all(content <= box for content, box in widths), "a column is out of sight"
        browser.close()
    assert len(colours) == 4, "text and ground are others in the dark"
    assert len(paper) == 1, "and the same on paper"


def test_diff_writes_it_beside_the_verdict_which_comes_first(runs, tmp_path, capsys):
    file = tmp_path / "r.html"

    def diff(current: str, *options: str) -> tuple[int, str, str]:
        return cli.main(
            ["diff", str(runs / "reference"), str(runs / current), *options]
        ), *capsys.readouterr()

    file.write_text("an older one")
    assert diff("one", "--html", str(file)) == (*diff("one")[:2], f"det-callbacks: wrote {file}\n")
    assert Page(file).maps == Page(runs / "one" / "report.html").maps
    assert json.loads(diff("one", "--json", "--html", str(file))[1])["verdict"]
    below = file.rename(tmp_path / "file") / "r"
    status, out, err = diff("one", "--html", str(below))
    assert (status, out.startswith("DIVERGED\n")) == (2, True)
    assert f"{below.parent}: it is a file; pass another file for the report (--html" in err
    below = tmp_path / "a b" / "c" / "r.html"
    assert diff("one", "--html", str(below)) == (
        *diff("one")[:2],
        f"det-callbacks: wrote {below}\n",
    )
    assert diff("reference", "--html", str(file))[0] == 0
    assert ([one.letters() for one in Page(file).maps], "First divergence" in Page(file).text) == (
        ["mmmm"],
        False,
    )


def test_a_match_leaves_none_and_steps_that_were_not_kept_are_not_shown_as_equal(
    runs, tmp_path, monkeypatch, capsys
):
    current = tmp_path / "current"
    monkeypatch.setattr(verification, "STORED_STEPS", 1)
    verify(runs, current, SPREADING, on_divergence="warn")
    assert f"; report: {current / 'report.html'})" in capsys.readouterr().out
    (heat_map,) = Page(current / "report.html").maps
    assert heat_map.letters() == "mo.."
    assert heat_map.outcomes.startswith("1 agree, 1 differ, 2 differ, and were not kept: ")
    Training().fit(DeterminismCallback(runs / "reference", mode="verify", current=current))
    assert not (current / "report.html").exists()
    assert "report" not in capsys.readouterr().out


def test_what_goes_wrong_with_it_hides_nothing_and_no_frame_of_ours_is_shown(
    runs, tmp_path, monkeypatch, capsys
):
    # a mistake of ours: it takes no such arguments
    monkeypatch.setattr(verifying, "write_report", {}.__getitem__)
    for mode, error in (("record", RunExistsError), ("verify", DivergenceError)):
        callback = DeterminismCallback(runs / "reference", mode=mode, current=tmp_path / "current")
        with pytest.raises(error) as caught:
            Training(around=ONE).fit(callback)
        files = [Path(str(entry.path)).as_posix() for entry in caught.traceback]
        assert files[-1].endswith(("lightning/pytorch/trainer/call.py", "trainer/trainer.py"))
        assert not [
            file
            for file in files
            if "/det_callbacks/training/" in file or "/integrations/" in file or "/loops/" in file
        ]
    assert (caught.value.verdict is None, (tmp_path / "current" / "verdict.json").is_file()) == (
        False,
        True,
    )
    out = capsys.readouterr().out
    assert "det_callbacks: no report was written (TypeError: " in out
    assert "det_callbacks: diverged: verified" in out
