"""By how much runs differ, from what keep_tensors kept; where that is not known it is said,
and no number is wrong.
"""

import json
import shutil
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from faults import BATCH, WIDTH, Deep, Training, add_ulp, below, verify
from fits import Classifier
from judged import require_one_verdict
from processes import run_ranks, verdict_in
from processes import train as train_ranks
from trainers import LIGHTNING_ADVICE, has_same_weights
from verdicts import DIVERGED, DIVERGENCE

from det_callbacks import DeterminismCallback, Verdict, compare_runs
from det_callbacks.cli import main
from det_callbacks.errors import ReplayError
from det_callbacks.report.verdict import verdict_lines
from det_callbacks.verdict import Numbers, TensorNumbers

pytestmark = LIGHTNING_ADVICE

ADDMM = "aten.addmm.default"
FIRST = f"forward/net.0.up:{ADDMM}"
ONE_ULP = Training(around=below(op="aten.addmm", module="net.0.up", step=2))
SIZE = BATCH * WIDTH

References = Callable[..., Path]


def numbers_of(verdict: Verdict) -> Numbers:
    numbers = verdict.first_divergence.numbers
    assert numbers is not None, "no numbers"
    return numbers


def output_of(verdict: Verdict) -> TensorNumbers:
    numbers = numbers_of(verdict)
    assert not numbers.problem, numbers.problem
    (output,) = numbers.output
    return output


def unwrapped(text: str) -> str:
    return " ".join(text.split())


def test_one_ulp_is_said_alike_live_by_diff_and_in_the_report(references, tmp_path, capsys):
    reference, current = references(keep_tensors=(FIRST,)), tmp_path / "current"
    verdict = verify(reference, ONE_ULP, current)
    output = output_of(verdict)
    assert (output.tensor, output.shape, output.dtype) == ("output 0", (BATCH, WIDTH), "float32")
    assert (output.num_differing, output.num_elements, output.max_ulps, output.ulps) == (
        1,
        SIZE,
        1,
        (SIZE - 1, 1),
    )
    assert output.first == output.worst == (0, 0)
    one, other = (torch.tensor(float(text)) for text in output.first_values)
    assert output.max_absolute == float(other.double() - one.double())
    add_ulp(one)
    assert one == other

    capsys.readouterr()
    paths = [str(reference), str(current)]
    assert main(["diff", *paths, "--json"]) == 1
    offline = json.loads(capsys.readouterr().out)
    assert main(["diff", *paths, "--html", str(tmp_path / "page.html")]) == 1
    printed, page = capsys.readouterr().out, (tmp_path / "page.html").read_text()
    for found in (offline, json.loads((current / "verdict.json").read_text())):
        for divergence in (found["first_divergence"], found["origins"][0]):
            assert divergence["numbers"] == verdict.to_dict()["first_divergence"]["numbers"]
    text = verdict_lines(verdict)
    for content in (text, printed, page, (current / "report.html").read_text()):
        assert f"1 of {SIZE} elements differ, by 1 ULP, " in unwrapped(content)
        both = "{} in the reference, {} in the current run".format(*output.first_values)
        assert f"first at [0, 0]: {both}" in unwrapped(content)
    assert "record step" not in text, "there is nothing left to record"


def test_a_nan_on_one_side_is_apart():
    output = TensorNumbers(
        tensor="output 0", shape=(4, 6), num_differing=3, max_ulps=6, num_nan=1, num_inf=1
    )
    found = replace(DIVERGENCE, numbers=Numbers(output=(output,)), output=2)
    text = unwrapped(verdict_lines(replace(DIVERGED, first_divergence=found, origins=(found,))))
    for words in (
        "by up to 6 ULPs",
        "1 with a NaN, 1 with an infinity",
        "aten.addmm.default#0 output 2 ",
    ):
        assert words in text


def test_one_tensor_of_a_list_that_the_optimizer_changes(references, tmp_path):
    model = partial(Deep, optimizer=torch.optim.AdamW, foreach=True)
    op = "aten._foreach_addcdiv_.ScalarList"
    training = Training(model=model, around=below(op="aten._foreach_addcdiv_", step=2, written=2))
    verdict = verify(
        references(model, keep_tensors=(f"optimizer/{op}",)), training, tmp_path / "current"
    )
    first = verdict.first_divergence
    assert (first.phase, first.op, first.output, first.name) == (
        "optimizer",
        op,
        2,
        "net.0.up.weight",
    )
    output = output_of(verdict)
    assert (output.tensor, output.num_differing, output.max_ulps, output.first) == (
        "output 2",
        1,
        1,
        (0, 0),
    )


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::det_callbacks.DivergenceWarning")  # on_divergence="warn"
def test_each_step_and_fit_that_differs_is_kept(tmp_path):
    reference, current = tmp_path / "ref", tmp_path / "current"
    recording = DeterminismCallback(reference, mode="record", keep_tensors=[FIRST])
    verifying = DeterminismCallback(reference, current=current, on_divergence="warn")
    changed = Training(around=below(op="aten.addmm", module="net.0.up", step=2, is_gross=True))
    for callback, second in ((recording, Training()), (verifying, changed)):
        Training().fit(callback)
        second.fit(callback)
    assert output_of(verifying.verdict).num_differing == SIZE
    kept = sorted(
        path.relative_to(path.parents[1]).as_posix()
        for path in current.rglob("kept/*/*.safetensors")
    )
    assert kept == [f"attempt-000.segment-001/step-{step:09d}.safetensors" for step in (2, 3)]


def test_it_changes_no_bit_and_a_match_keeps_nothing(tmp_path, references):
    plain = Training().fit(DeterminismCallback(tmp_path, mode="disabled"))
    state = torch.random.get_rng_state()
    kept = Training().fit(DeterminismCallback(tmp_path / "ref", mode="record", keep_tensors=["*"]))
    assert torch.equal(torch.random.get_rng_state(), state)
    assert has_same_weights(plain, kept)
    assert compare_runs(references(), tmp_path / "ref").verdict == "match"
    callback = DeterminismCallback(tmp_path / "ref", current=tmp_path / "current")
    Training().fit(callback)
    assert callback.verdict.verdict == "match"
    assert not list((tmp_path / "current").rglob("kept"))


def test_what_was_not_kept_stops_no_run_and_is_said_everywhere(tmp_path, capsys, monkeypatch):
    reason = "A Tensor has no plain memory."
    with monkeypatch.context() as patch:
        patch.setattr(
            "det_callbacks.tensors.replay.copy_bits", mock.Mock(side_effect=ReplayError(reason))
        )
        reference = Training().record(tmp_path / "ref", keep_tensors=[FIRST])
    line = capsys.readouterr().out
    assert "recorded 4 steps" in line
    assert (
        f"; kept 0 tensors (0 bytes); did NOT keep the tensors of 4 calls from step 0 on: {reason}"
        in line
    )
    verdict = verify(reference, ONE_ULP, tmp_path / "current")
    capsys.readouterr()
    assert main(["show", str(reference)]) == 0
    assert f"tensors kept: {FIRST}" in capsys.readouterr().out
    problem = f"the reference did not keep it: {reason}"
    assert numbers_of(verdict).problem.startswith(problem)
    assert numbers_of(verdict).output == ()
    for text in (
        unwrapped(verdict_lines(verdict)),
        (tmp_path / "current" / "report.html").read_text(),
    ):
        assert f"cannot be measured: {problem}" in text
    assert f"--only-steps=2 --keep={FIRST}" in verdict_lines(verdict)


def test_damage_is_said_and_never_a_number(references, tmp_path):
    shutil.copytree(references(keep_tensors=(FIRST,)), tmp_path / "ref")
    assert output_of(verify(tmp_path / "ref", ONE_ULP, tmp_path / "current")).num_differing == 1
    for side, name in (("ref", "the reference"), ("current", "the current run")):
        (path,) = (tmp_path / side).rglob("kept/*/step-000000002.safetensors")
        content = path.read_bytes()
        for problem in (
            f"the kept tensors of {name} cannot be read: {path} is damaged: ",
            f"{name} did not keep it",
        ):
            path.unlink()
            if "damaged" in problem:
                # of the last tensor
                path.write_bytes(content[:-7] + bytes([content[-7] ^ 1]) + content[-6:])
            verdict = compare_runs(tmp_path / "ref", tmp_path / "current")
            assert (verdict.verdict, numbers_of(verdict).output) == ("diverged", ())
            assert numbers_of(verdict).problem.startswith(problem)
            path.write_bytes(content)


@pytest.mark.slow
@pytest.mark.ddp
def test_the_numbers_are_those_of_the_rank_that_differs(tmp_path):
    def body(mode: Any, rank: int) -> None:
        options: Any = {"keep_tensors": [f"forward/first:{ADDMM}"]} if mode == "record" else {}
        callback = DeterminismCallback(
            tmp_path / "ref", mode=mode, current=tmp_path / "current", **options
        )
        model = Classifier()
        is_faulty = mode == "verify" and rank == 1
        with below(op="aten.addmm", module="first", step=1)(model) if is_faulty else nullcontext():
            train_ranks(callback, model=lambda: model)

    for mode, status in (("record", 0), ("verify", 1)):
        ended = run_ranks(partial(body, mode), tmp_path / mode, status=status)
    assert "1 of 64 elements differ, by 1 ULP" in ended[0].output
    verdict = verdict_in(tmp_path)
    require_one_verdict(verdict, tmp_path / "ref", tmp_path / "current")
    first = verdict["first_divergence"]
    assert (first["rank"], first["step"]) == (1, 1)
    assert (
        first["numbers"]["output"][0]["num_differing"],
        first["numbers"]["output"][0]["first"],
    ) == (1, [0, 0])
