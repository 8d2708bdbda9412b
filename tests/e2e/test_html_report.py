"""The HTML report of real trainings: what it says is what the runs hold, and writing it changes nothing else."""

import base64
import hashlib
import json
import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from faults import Deep, Training, below
from fits import Fit, record
from html_page import Page, read_page
from torch import nn
from trainers import LIGHTNING_ADVICE

from det_callbacks import DeterminismCallback, cli, compare_runs
from det_callbacks.callback import reporting
from det_callbacks.compare import live
from det_callbacks.errors import DivergenceError, DivergenceWarning, ReportError
from det_callbacks.report import write_report

pytestmark = LIGHTNING_ADVICE

CULPRIT = "net.4.norm"
SPREADING = {"op": "aten.native_layer_norm_backward", "step": 1, "call": 2, "is_gross": True}


class Renamed(Deep):
    """Has a module whose name is markup."""

    NAME = "</script><img src=x onerror=alert(1)>"

    def __init__(self) -> None:
        super().__init__()
        self.middle = nn.Sequential()
        self.middle.add_module(self.NAME, nn.LayerNorm(16))


def seed_all() -> None:
    """Put the generators where every test finds them: a module's fixtures come before that."""
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    seed_all()
    Training().record(folder / "reference")
    Training(around=below(**SPREADING)).record(folder / "spread")
    Training(around=below(op="aten.native_layer_norm", step=1, module=CULPRIT)).record(folder / "one")
    return folder


@pytest.fixture(scope="module")
def report(runs: Path) -> Callable[..., Page]:
    pages: dict[str, Page] = {}

    def written(name: str) -> Page:
        if name not in pages:
            path = runs / f"{name}.html"
            verdict = compare_runs(runs / "reference", runs / name)
            write_report(path, verdict, reference=runs / "reference", current=runs / name)
            pages[name] = read_page(path)
        return pages[name]

    return written


# what it says


def test_the_verdict_and_what_it_found_are_said(runs: Path, report: Callable[..., Page]) -> None:
    verdict, page = compare_runs(runs / "reference", runs / "one"), report("one")
    assert verdict.first_divergence is not None
    for text in (
        verdict.explanation,
        str(verdict.first_divergence.reference_digest),
        str(verdict.first_divergence.current_digest),
        f"{verdict.counts.sites_differing:,} of {verdict.counts.sites_compared:,}",
        "What it read",
        "Around it in the step",
    ):
        assert text in page.text
    title = page.text.split("Skip to")[0]
    assert title.strip().startswith("Diverged: ")


def test_the_source_is_shown_as_it_is_written(report: Callable[..., Page], runs: Path) -> None:
    text = report("one").text
    assert "tests/e2e/faults.py:" in text
    assert "return inputs + self.drop(self.act(self.up(self.norm(inputs))))" in text


def test_one_cell_is_the_origin_and_the_rest_agree(report: Callable[..., Page]) -> None:
    page = report("one")
    assert page.letters() == "momm"
    assert page.state(1, CULPRIT) == "o"
    assert page.state(1, "forward", view="phases") == "o"
    assert page.state(1, "backward", view="phases") == "m"
    (origin,) = [site for site in page.listed() if site["role"] == 0]
    assert (origin["step"], origin["module"], origin["op"]) == (1, CULPRIT, "aten.native_layer_norm.default")


def test_what_follows_is_carried_on_and_what_came_before_agrees(runs: Path, report: Callable[..., Page]) -> None:
    page, verdict = report("spread"), compare_runs(runs / "reference", runs / "spread")
    assert page.letters() == "mocc"
    first = verdict.first_divergence
    assert first is not None
    assert page.state(1, first.module) == "o"
    assert page.state(1, "head") == "m", "the backward pass of the head came before"
    assert page.state(2, "head") == "c"
    assert "o" not in {row[2] for row in page.data["maps"][0]["modules"]["states"]}
    grid = page.data["maps"][0]["modules"]
    assert sum(sum(row[::2][i] * row[1::2][i] for i in range(len(row) // 2)) for row in grid["differing"]) == (
        verdict.counts.sites_differing
    )


def test_the_dataflow_ends_at_a_parameter(report: Callable[..., Page]) -> None:
    text = re.sub(r"\s+", " ", report("spread").text)
    told, flow = text.split("How it went on")[1].split("Origins")[0].split("one of the shortest ways.")
    assert "From where it starts to the first parameter or state that it changed" in told
    hops = [hop for hop in ("aten.native_layer_norm_backward", "optimizer", "state") if hop in flow]
    assert hops == ["aten.native_layer_norm_backward", "optimizer", "state"]
    assert [flow.index(hop) for hop in hops] == sorted(flow.index(hop) for hop in hops)


@pytest.mark.slow
def test_another_seed_starts_at_the_weights(runs: Path, tmp_path: Path) -> None:
    current = Training(seed=12).record(tmp_path / "current")
    verdict = compare_runs(runs / "reference", current)
    page = read_page(write_report(tmp_path / "r.html", verdict, reference=runs / "reference", current=current))
    assert verdict.cause == "initial_weights"
    assert page.state(0, "head") == "o"
    assert page.letters() == "occc", "what differs later was carried on, though it enters the step as an input"


def test_equal_runs_have_a_report_too(runs: Path, report: Callable[..., Page]) -> None:
    page = report("reference")
    assert page.letters() == "mmmm"
    assert page.listed() == []
    assert "First divergence" not in page.text


# what it must not do


def test_nothing_is_loaded_and_only_our_scripts_run(report: Callable[..., Page]) -> None:
    page = report("spread")
    links = [
        (tag, name, value)
        for tag, attributes in page.tags
        for name, value in attributes.items()
        if name in ("src", "href", "srcset", "action", "data", "poster", "xlink:href", "background")
    ]
    assert {value[:1] for _, _, value in links} == {"#"}
    assert not {"link", "iframe", "object", "embed", "base", "img", "form"} & {tag for tag, _ in page.tags}
    assert not any(name.startswith("on") for _, attributes in page.tags for name in attributes)
    assert not re.search(r"@import|url\((?!#)", "".join(page.styles))
    (policy,) = [
        attributes["content"]
        for tag, attributes in page.tags
        if tag == "meta" and attributes.get("http-equiv") == "Content-Security-Policy"
    ]
    digests = [base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in page.scripts]
    assert len(digests) == 3
    assert policy.split("; ") == [
        "default-src 'none'",
        "style-src 'unsafe-inline'",
        "script-src " + " ".join(f"'sha256-{digest}'" for digest in digests),
        "base-uri 'none'",
        "form-action 'none'",
    ]
    # of the libraries' addresses all are names of XML, or stand in a comment
    places = set(re.findall(r"https?://[\w./-]+", "".join(page.scripts)))
    assert {place for place in places if not place.startswith("http://www.w3.org/")} == {"https://d3js.org"}
    assert page.scripts[0].startswith("// https://d3js.org ")


@pytest.mark.slow
def test_markup_in_names_stays_text(tmp_path: Path) -> None:
    Training(model=Renamed).record(tmp_path / "reference")
    Training(model=Renamed, around=below(**SPREADING)).record(tmp_path / "</title><script>alert(2)</script>")
    current = tmp_path / "</title><script>alert(2)</script>"
    verdict = compare_runs(tmp_path / "reference", current)
    page = read_page(write_report(tmp_path / "r.html", verdict, reference=tmp_path / "reference", current=current))
    assert [tag for tag, _ in page.tags].count("script") == 4
    assert "img" not in {tag for tag, _ in page.tags}
    assert f"middle.{Renamed.NAME}" in page.data["modules"]
    assert "<script>alert(2)</script>" in page.text


# det-callbacks diff


@pytest.mark.parametrize(("name", "status"), [("reference", 0), ("one", 1)])
def test_diff_writes_it_beside_the_verdict(
    name: str, status: int, runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["diff", str(runs / "reference"), str(runs / name)]
    assert cli.main(arguments) == status
    without = capsys.readouterr()
    (tmp_path / "r.html").write_text("an older one")
    assert cli.main([*arguments, "--html", str(tmp_path / "r.html")]) == status
    captured = capsys.readouterr()
    assert captured.out == without.out
    assert captured.err == f"det-callbacks: wrote {tmp_path / 'r.html'}\n"
    assert read_page(tmp_path / "r.html").data["maps"]
    assert cli.main([*arguments, "--json", "--html", str(tmp_path / "r.html")]) == status
    assert json.loads(capsys.readouterr().out)["verdict"]


@pytest.mark.parametrize("place", ["gone/r.html", "folder"])
def test_a_file_that_cannot_be_written_ends_with_2_after_the_verdict(
    place: str, runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "folder").mkdir()
    arguments = ["diff", str(runs / "reference"), str(runs / "one"), "--html", str(tmp_path / place)]
    assert cli.main(arguments) == 2
    captured = capsys.readouterr()
    assert captured.out.startswith("DIVERGED\n")
    assert "The report cannot be written to" in captured.err
    assert [path.name for path in tmp_path.iterdir()] == ["folder"]


# verify


def verify(runs: Path, current: Path, *, training: Training, **options: Any) -> DeterminismCallback:
    callback = DeterminismCallback(runs / "reference", mode="verify", current=current, **options)
    training.fit(callback)
    return callback


def test_a_verification_that_diverged_writes_it(runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    current = tmp_path / "current"
    with pytest.raises(DivergenceError):
        verify(runs, current, training=Training(around=below(**SPREADING)))
    assert f"; report: {current / 'report.html'})" in capsys.readouterr().out
    page = read_page(current / "report.html")
    assert page.letters() == "mo..", "equal though not kept, the one that differs, and those that never ran"
    assert "steps 2 to 3: not compared" in page.text.lower()


def test_a_verification_that_goes_on_shows_all_its_steps_and_diff_shows_the_same(runs: Path, tmp_path: Path) -> None:
    current = tmp_path / "current"
    with pytest.warns(DivergenceWarning):
        verify(runs, current, training=Training(around=below(**SPREADING)), on_divergence="warn")
    page = read_page(current / "report.html")
    assert page.letters() == "mocc"
    assert cli.main(["diff", str(runs / "reference"), str(current), "--html", str(tmp_path / "r.html")]) == 1
    assert read_page(tmp_path / "r.html").data == page.data


def test_steps_that_were_not_kept_are_not_shown_as_equal(
    runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live, "KEPT_STEPS", 1)
    with pytest.warns(DivergenceWarning):
        verify(runs, tmp_path / "current", training=Training(around=below(**SPREADING)), on_divergence="warn")
    page = read_page(tmp_path / "current" / "report.html")
    assert page.letters() == "mo.."
    assert "Steps 2 to 3: differ, and were not kept" in page.text


def test_a_verification_that_matches_writes_none(
    runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    verify(runs, tmp_path / "current", training=Training())
    assert not (tmp_path / "current" / "report.html").exists()
    assert not list((tmp_path / "current").rglob("compared.json"))
    assert "report" not in capsys.readouterr().out


@pytest.mark.slow
def test_the_next_verification_into_a_folder_leaves_no_old_report(runs: Path, tmp_path: Path) -> None:
    current = tmp_path / "current"
    with pytest.raises(DivergenceError):
        verify(runs, current, training=Training(around=below(**SPREADING)))
    assert (current / "report.html").exists()
    verify(runs, current, training=Training())
    assert not (current / "report.html").exists()


@pytest.mark.parametrize(
    "error",
    [
        pytest.param(ReportError("the disk is full", "x"), marks=pytest.mark.slow),
        KeyError("a mistake of ours"),
    ],
)
def test_what_goes_wrong_with_it_hides_nothing(
    error: Exception,
    runs: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(reporting, "write_report", fail)
    with pytest.raises(DivergenceError) as caught:
        verify(runs, tmp_path / "current", training=Training(around=below(**SPREADING)))
    assert caught.value.verdict is not None
    assert (tmp_path / "current" / "verdict.json").is_file()
    out = capsys.readouterr().out
    assert f"det_callbacks: no report was written ({type(error).__name__}: " in out
    assert "det_callbacks: diverged: verified" in out


@pytest.mark.slow
def test_a_run_of_two_fits_has_a_map_of_each(tmp_path: Path) -> None:
    def train(callback: DeterminismCallback, change: float = 0.0) -> None:
        fit = Fit(callback).run()
        with torch.no_grad():
            fit.model.first.weight[0, 0] += change
        fit.again(epochs=2)

    train(DeterminismCallback(tmp_path / "reference", mode="record"))
    with pytest.raises(DivergenceError):
        train(DeterminismCallback(tmp_path / "reference", current=tmp_path / "current"), change=1.0)
    page = read_page(tmp_path / "current" / "report.html")
    assert [grid["fit"] for grid in page.data["maps"]] == [0, 1]
    assert set(page.letters()) == {"m"}
    assert page.letters(number=1)[0] == "o"


@pytest.mark.slow
def test_steps_that_only_one_run_has_are_named(tmp_path: Path) -> None:
    record(tmp_path / "short")
    record(tmp_path / "long", max_epochs=2)
    verdict = compare_runs(tmp_path / "short", tmp_path / "long")
    written = write_report(tmp_path / "r.html", verdict, reference=tmp_path / "short", current=tmp_path / "long")
    page = read_page(written)
    assert page.letters() == "mmmm...."
    assert "Steps 4 to 7: only in the current run." in page.text


@pytest.mark.slow
def test_what_was_put_back_is_shown(tmp_path: Path) -> None:
    patterns = ("aten.bernoulli_.float", "aten.native_layer_norm.default")
    Training().fit(DeterminismCallback(tmp_path / "reference", mode="record", replay=patterns))
    faulty = Training(around=below(op="aten.native_layer_norm_backward", step=2, call=2, is_gross=True))
    with pytest.raises(DivergenceError):
        faulty.fit(DeterminismCallback(tmp_path / "reference", current=tmp_path / "current"))
    page = read_page(tmp_path / "current" / "report.html")
    assert page.state(0, "net.4.norm") == "r"
    assert page.state(0, "head") == "m"
    assert "aten.native_layer_norm.default" in page.text.split("Replayed")[-1]
