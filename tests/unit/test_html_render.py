"""A report's page: all that a person is to see is there, and nothing of it is markup."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from html_page import Page, read_page
from stored_runs import SELECTION, OneOf, append, join

from det_callbacks.compare import compare_runs
from det_callbacks.report import write_report
from det_callbacks.report.html.first import Dataflow, NearView
from det_callbacks.report.html.model import RankSummary, Report
from det_callbacks.report.html.render import render_report
from det_callbacks.report.html.rows import CARRIED, STARTS, SiteRow
from det_callbacks.report.html.settings_table import Setting
from det_callbacks.report.html.source_text import SourceLine, SourceText
from det_callbacks.report.html.step_table import StepTable
from det_callbacks.runs.writer import RunWriter
from det_callbacks.verdict import Counts, Coverage, Divergence, EnvironmentDifference, Verdict

NASTY = "</script></style></title>\"'><img src=x onerror=alert(1)><!--{{ 7*7 }}"

DIVERGENCE = Divergence(
    rank=3,
    step=12,
    phase=NASTY,
    module=NASTY,
    op=NASTY,
    occurrence=2,
    output=1,
    name=NASTY,
    kind="content",
    source=(NASTY,),
    shape=(4,),
    dtype=NASTY,
    reference_digest="9f3c000000000001",
    current_digest="1b07000000000002",
    is_origin=True,
)
VERDICT = Verdict(
    verdict="diverged",
    reference=NASTY,
    current=NASTY,
    first_divergence=DIVERGENCE,
    origins=(DIVERGENCE,),
    cause="forward",
    explanation=NASTY,
    counts=Counts(steps_compared=100, sites_compared=48312, sites_differing=17),
    coverage=Coverage(
        ranks=4,
        steps=(0, 99),
        ops_seen=61000,
        ops_digested=48312,
        ops_skipped={NASTY: 9},
        opaque_regions=(NASTY,),
        replayed={NASTY: {"count": 3, "differing": 2, "mib_per_step": 0.5}},
    ),
    environment=(EnvironmentDifference(name=NASTY, reference=NASTY, current=1, changes_bits=True, is_machine=False),),
)
ROW = SiteRow(
    position=7,
    phase=NASTY,
    module=NASTY,
    what=NASTY,
    tensor=NASTY,
    state=STARTS,
    kind="content",
    reference_digest="9f3c000000000001",
    current_digest="1b07000000000002",
    source=(NASTY,),
)


def full_report() -> Report:
    steps = StepTable(rank=3, segment=0)
    steps.outcomes.update({"equal": 12, "differs": 1})
    steps.spans.append(("missing", 13, 15))
    grid = {"states": ["o"], "compared": [[1, 1]], "differing": [[1, 1]], "starting": [[1, 1]]}
    return Report(
        verdict=VERDICT,
        evidence=("the weights agree " + NASTY, "the batch agrees", "the generators agree"),
        ranks=(
            RankSummary(rank=3, segment=0, number=0, first=12, num_steps=13, outcomes={}, num_sites=1, num_starting=1),
            RankSummary(rank=4, segment=1, number=None, first=14, num_steps=13),
        ),
        num_ranks_left_out=1234,
        maps={
            "modules": [NASTY],
            "phases": [NASTY],
            "maps": [{"rank": 3, "fit": 0, "columns": [[12, 12]], "modules": grid, "phases": grid}],
            "texts": [NASTY],
            "sites": [[0, 0, 0, 0, 0, 0, 0, 0, 0, 0, [0]]],
            "entries": [[0, 12, 0, 0, 0, "", ""]],
        },
        num_listed=1,
        is_grouped=True,
        has_ranges=True,
        has_replayed=True,
        steps=(steps,),
        near=NearView(
            site=ROW,
            arguments=NASTY,
            other_arguments=((NASTY, NASTY, NASTY),),
            inputs=(ROW,),
            num_inputs=51,
            neighbours=(replace(ROW, position=6, state=CARRIED), ROW),
            sources=(SourceText(place=NASTY, lines=(SourceLine(number=4, text=NASTY, is_named=True),)),),
        ),
        dataflow=Dataflow(before=(ROW,), num_left_out=1962, after=(ROW,), reaches_state=True),
        settings=(
            Setting(name=NASTY, reference=NASTY, current=NASTY, differs=True, is_machine=False, changes_bits=True),
            Setting(name=NASTY, reference=NASTY, current=NASTY, differs=False, is_machine=True, changes_bits=False),
        ),
        notes=(NASTY,),
    )


def page_of(report: Report, folder: Path) -> Page:
    path = folder / "report.html"
    path.write_text(render_report(report), encoding="utf-8")
    return read_page(path)


def test_no_text_of_a_run_is_markup(tmp_path: Path) -> None:
    page = page_of(full_report(), tmp_path)
    tags = [tag for tag, _ in page.tags]
    assert tags.count("script") == 4
    assert tags.count("style") == tags.count("title") == 1
    assert "img" not in tags
    assert not any(name.startswith("on") for _, attributes in page.tags for name in attributes)
    assert "{{ 7*7 }}" in page.text
    assert page.text.count(NASTY) > 30
    assert page.data["modules"] == [NASTY]


def test_all_of_a_report_is_shown(tmp_path: Path) -> None:
    text = " ".join(page_of(full_report(), tmp_path).text.split())
    for part in (
        "17 of 48,312",
        "100 (steps 0 to 99)",
        "the batch agrees the generators agree",
        "rank 3, step 12",
        "9f3c000000000001 in the reference, 1b07000000000002 now",
        "origin: what it read agrees, so it starts here",
        "and 50 more",
        "1,962 sites between",
        "1 site that differs though nothing read there differs",
        "not looked into further",
        "and 1,234 more",
        "12 steps agree, 1 differs. Steps 13 to 15: only in the reference.",
        "A column stands for several steps",
        "1 entry differs, 1 of which can change bits.",
        "1 equal entry",
        "61,000 seen, 48,312 digested",
        f"{NASTY}320.5",
    ):
        assert part in text, part


@pytest.mark.parametrize(
    ("verdict", "word"), [("match", "Match"), ("diverged", "Diverged"), ("not_comparable", "Not comparable")]
)
def test_a_report_without_runs_says_its_verdict(verdict: Any, word: str, tmp_path: Path) -> None:
    known = replace(VERDICT, verdict=verdict, first_divergence=None, origins=(), cause=None, environment=())
    page = page_of(Report(verdict=known, notes=("No step was compared.",)), tmp_path)
    assert page.text.split(":")[0].strip() == word
    assert "No step was compared." in page.text
    assert "Neither run recorded any." in page.text
    assert "svg" not in [tag for tag, _ in page.tags]


def test_runs_of_other_numbers_of_processes_have_a_report_too(tmp_path: Path) -> None:
    manifest = {"selection": SELECTION, "environment": {}}
    for name, world_size in (("reference", 1), ("current", 2)):
        writer = RunWriter.create(tmp_path / name, peers=OneOf(0, world_size), manifest=manifest)
        append(writer, range(3))
        writer.close(complete=True)
    second = join(tmp_path / "current", 1)
    append(second, range(3))
    second.close(complete=True)
    verdict = compare_runs(tmp_path / "reference", tmp_path / "current")
    assert verdict.verdict == "not_comparable"
    path = write_report(tmp_path / "r.html", verdict, reference=tmp_path / "reference", current=tmp_path / "current")
    page = read_page(path)
    assert page.data == {"maps": []}
    assert "No step of one is a step of the other".lower() in page.text.lower()
