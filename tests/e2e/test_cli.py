"""The commands on real recordings and checkpoints: exit status, JSON, plain output and errors."""

import json
import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import torch
from faults import BLOCKS, Deep, Training
from fits import Fit, record
from stored_runs import record as write_run
from torch import nn
from trainers import LIGHTNING_ADVICE

from det_callbacks import DeterminismCallback, cli, compare_runs
from det_callbacks.digest.host import format_digest
from det_callbacks.environment.nondeterminism import read_op_facts
from det_callbacks.report.console import Section, Table, to_text
from det_callbacks.runs.store import Run

pytestmark = LIGHTNING_ADVICE

Command = Callable[..., tuple[int, str, str]]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: Any) -> Path:
    """A reference, others of which each differs in one way, one with ops that torch
    speaks of, and a checkpoint.
    """
    folder, threads = tmp_path_factory.mktemp("runs"), torch.get_num_threads()
    record(folder / "reference")
    for name, num_threads in (("other", threads), ("elsewhere", threads + 1)):
        torch.set_num_threads(num_threads)
        fit = Fit(DeterminismCallback(folder / name, mode="record"))
        with torch.no_grad():
            fit.model.first.weight[0, 0] += 1
        fit.run()
    torch.set_num_threads(threads)
    fit = Fit(
        DeterminismCallback(folder / "state", mode="record", level="state"), max_epochs=1
    ).run()
    fit.trainer.save_checkpoint(folder / "x.ckpt")
    write_run(folder / "long", range(24))
    write_run(folder / "short", range(4))
    Training(model=partial(Deep, middle=partial(nn.ReflectionPad1d, (1, -1)))).record(
        folder / "ops"
    )
    return folder


@pytest.fixture
def command(runs: Path, capsys: Any, monkeypatch: Any) -> Command:
    monkeypatch.chdir(runs)

    def run(words: str) -> tuple[int, str, str]:
        capsys.readouterr()
        try:
            status = cli.main(words.split())
        except SystemExit as leaving:  # argparse
            status = int(leaving.code or 0)
        return status, *capsys.readouterr()

    return run


@pytest.mark.slow
def test_whoever_reads_may_leave_and_a_pipe_gets_plain_text(runs):
    def piped(words: str, into: str) -> str:
        script = f"{sys.executable} -m det_callbacks {words} | {into}; echo ${{PIPESTATUS[0]}}"
        done = subprocess.run(
            ["bash", "-c", script], cwd=runs, capture_output=True, text=True, check=False
        )
        assert done.stderr == ""
        return done.stdout

    text = piped("diff reference other", "cat")
    assert text.startswith("DIVERGED\n")
    assert text.endswith("\n1\n")
    assert "\x1b[" not in text
    for words, status in (("show long", 0), ("diff reference other", 1), ("show long --json", 0)):
        assert piped(words, "true") == f"{status}\n"


@pytest.mark.parametrize(
    ("words", "status", "text"),
    [
        ("reference reference", 0, "MATCH\nAll "),
        ("reference other", 1, "the initial state differs (first.weight: 1 of 9 tensors)"),
        (
            "short long",
            1,
            "Steps 4 to 23 (20 of them) are only in the current run; the 4 common steps match.",
        ),
        ("short long --steps common", 0, "Only the steps that both runs have were compared."),
        ("reference elsewhere", 3, "torch.num_threads"),
    ],
)
def test_diff_prints_the_verdict(words, status, text, command):
    done, out, err = command(f"diff {words}")
    assert (done, err) == (status, "")
    assert text in out
    assert out.startswith(("MATCH\n", "DIVERGED\n", "", "NOT COMPARABLE\n")[status])
    assert ("cause" in out) is (status != 0)
    reference, current, *options = words.split()
    verdict = compare_runs(reference, current, steps="common" if options else "all")
    done, out, err = command(f"diff {words} --json")
    assert (done, json.loads(out), err) == (status, verdict.to_dict(), "")


def test_sentences_and_tables_stay_below_120_columns_and_what_is_copied_is_one_line():
    rows, words, copied = (
        [("x" * 300, 7)],
        " ".join(["word"] * 60),
        "det-callbacks show " + "y" * 200,
    )
    text = to_text([Section(lines=[words], code=[copied], table=Table(columns="ab", rows=rows))])
    lines = text.splitlines()
    assert max(len(line) for line in lines if line != copied) < 120
    assert (" ".join(lines[: lines.index(copied)]), text.count("x")) == (words, 300)
    wide = to_text([Section(table=Table(columns="ab", rows=rows, is_wide=True))])
    assert wide.splitlines()[1].split() == ["x" * 300, "7"], "other programs read it line by line"
    name = "recipe.racing_sum.default" * 3
    folded = to_text(
        [Section(table=Table(columns="ab", rows=[(name, "at train.py:41 in forward " * 3)]))]
    )
    assert name in folded, "words are cut only where nothing else helps"
    few = Section(
        title="Some",
        items=["one"],
        facts=[("a", "b")],
        table=Table(columns="ab", rows=["cd"] * 3, limit=1),
    )
    assert to_text([few]).splitlines() == ["Some", "  one", "  a  b", "a  b", "c  d", "and 2 more"]


def test_show_lists_the_steps_and_the_sites_of_one(runs, command):
    run = Run.open(runs / "reference")
    lines = command("show reference")[1].splitlines()
    assert lines[0] == f"run {run.manifest.run_id} in reference: complete"
    assert ("level op" in lines[1], lines[2]) == (True, "rank 0: 4 steps in 1 fit")
    assert lines[-1].endswith(format_digest(run.rank(0).chain(0, 3)))
    content = json.loads(command("show reference --json")[1])
    assert (content["complete"], content["world_size"], content["selection"]["level"]) == (
        True,
        1,
        "op",
    )
    assert [row["step"] for row in content["steps"]] == [0, 1, 2, 3]
    shown = [line.split()[1] for line in command("show long")[1].splitlines()[4:]]
    assert shown == [*map(str, range(10)), "...", *map(str, range(14, 24))]

    view = run.view(0, 0, 1)
    lines = command("show reference --step 1")[1].splitlines()
    assert lines[0].startswith(f"step 1 (epoch 0, rank 0): {len(view.program)} sites, ")
    assert len(lines) == 2 + len(view.program)
    position = next(
        place for place, site in enumerate(view.program.sites) if site.op == "aten.addmm.default"
    )
    row, digests = lines[2 + position], [format_digest(int(bits)) for bits in view.record.digests]
    place = rf"{position} +forward +first +aten.addmm.default#0 +float32 \[8, .* "
    place += rf"{digests[position]} .* in forward"
    assert re.fullmatch(place, row.strip())
    sites = json.loads(command("show reference --step 1 --json")[1])["sites"]
    found = [(row["op"], row["digest"]) for row in sites]
    assert found == [
        (site.op, bits) for site, bits in zip(view.program.sites, digests, strict=True)
    ]


def test_ops_lists_what_torch_says_and_what_a_run_uses(command):
    lines, facts = command("ops")[1].splitlines(), read_op_facts()
    counts = Counter(fact.behaviour for fact in facts)
    # that of PyPI's wheels is without the "+cu130" of torch.__version__
    installed = version("torch")
    assert lines[0].startswith(
        f"torch {installed}: {len(facts)} entries ({counts['alternate algorithm']} alt"
    )
    assert [line.split()[0] for line in lines[3:]] == [fact.name for fact in facts]
    (row,) = [line.split() for line in lines if line.startswith("torch.histc ")]
    assert row == [
        "torch.histc",
        "error",
        "cuda",
        "aten.histc",
        "when",
        "called",
        "on",
        "a",
        "CUDA",
        "tensor",
    ]
    content = json.loads(command("ops --json")[1])
    assert (content["schema"], content["torch"], content["run"]) == (1, installed, None)
    assert (content["counts"], len(content["entries"])) == (counts, len(facts))

    used = json.loads(command("ops --used-by ops --json")[1])["entries"]
    drawing = {("aten.bernoulli_", f"net.{block}.drop", 1) for block in range(BLOCKS)}
    expected = {("torch.nn.ReflectionPad1d", "middle", 1), *drawing}
    assert {(entry["name"], entry["module"], entry["sites"]) for entry in used} == expected
    lines = command("ops --used-by ops")[1].splitlines()
    assert lines[2].endswith("; 2 may be about this run")
    (row,) = [line.split()[1:6] for line in lines if line.startswith("torch.nn.ReflectionPad1d")]
    assert row == ["error", "cuda", "middle", "aten.reflection_pad1d_backward.default", "1"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("show nowhere --json", "There is no run in "),
        ("ops --used-by nowhere --json", "There is no run in "),
        ("diff reference nowhere --json", "There is no run in "),
        ("findings nowhere --json", "There is no run in "),
        ("doctor --json --against nowhere", "There is no run in "),
        ("check-checkpoint nowhere --json", "There is no checkpoint "),
        (
            "diff reference state",
            "were recorded with different arguments (level: 'op' and 'state')",
        ),
        (
            "show reference --step 4",
            "has no step 4 of segment 0, rank 0; it has 4 steps from 0 to 3 there.",
        ),
        (
            "show reference --segment 1 --step 0",
            "has no step 0 of segment 1, rank 0; it has no steps there.",
        ),
        ("show reference --segment 4", "has no segment 4, rank 0; it has no steps there."),
        ("show reference --rank 1", "has no rank 1; it has 1, from 0."),
        # a run that holds no ops is no run that uses none
        ("ops --used-by state", "state holds no ops (level state, 4 steps of rank 0)"),
        *(
            (words, "usage: det-callbacks")
            for words in ("", "show", "show run --step -1", "diff reference")
        ),
        *(
            (words, "usage: det-callbacks")
            for words in ("diff reference current --steps some", "ops --used-by")
        ),
    ],
)
def test_what_could_not_be_done_is_written_to_standard_error(words, message, command):
    status, out, err = command(words)
    assert (status, out) == (2, "")
    assert err.startswith(("det-callbacks: ", "usage: "))
    assert message in err


def test_a_checkpoint_is_compared_with_its_digests_or_with_another_one(runs, command):
    path, other = runs / "x.ckpt", runs / "y.ckpt"

    def check(words: str, status: int, *texts: str) -> dict[str, Any]:
        done, out, err = command(f"check-checkpoint {words}")
        assert (done, [text for text in texts if text not in out + err]) == (status, [])
        return json.loads(command(f"check-checkpoint {words} --json")[1] or "{}")

    saved = f"{path} matches what was saved, byte for byte"
    content = check(str(path), 0, saved, "saved after step 3 in epoch 1, run ")
    assert (content["equal"], content["entries"], content["save"]["step"]) == (True, [], 3)

    checkpoint = torch.load(path, weights_only=True)
    torch.save(checkpoint, other, _use_new_zipfile_serialization=False)
    check(f"{path} {other}", 0, "hold the same", "the files' bytes differ")
    bias = checkpoint["state_dict"]["last.bias"]
    bias.view(torch.int32)[1] += 5
    checkpoint["state_dict"]["more"] = bias
    torch.save(checkpoint, other)
    texts = "differ in 2 entries", "1 of 3 elements, by up to 5 ULPs", "is new"
    entry, _ = check(f"{path} {other}", 1, *texts)["entries"]
    assert (entry["num_differing"], entry["num_elements"], entry["max_ulps"]) == (1, 3, 5)

    checkpoint["state_dict"]["norm.bias"] = torch.zeros(4)
    torch.save(checkpoint, path)
    texts = (
        "last.bias differs (",
        "norm.bias was float32 [16], and is float32 [4]",
        "entries match what was saved",
    )
    entries = check(str(path), 1, *texts)["entries"]
    found = [(entry["path"], entry["kind"]) for entry in entries]
    assert sorted(found) == [
        ("last.bias", "content"),
        ("more", "extra"),
        ("norm.bias", "structure"),
    ]

    os.unlink(f"{path}.digests.json")
    check(str(path), 2, "nothing to compare")
    os.truncate(path, 1000)
    check(f"{path} {path}", 2)
    check(f"{path}.gone", 2)
