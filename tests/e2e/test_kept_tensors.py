"""By how much runs differ: what keep_tensors kept, in the verdict, in diff, in the report."""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from kept import Small, fit, numbers_of, output_of, planted, record, ulps_at, verify
from torch import Tensor, nn
from trainers import LIGHTNING_ADVICE

from det_callbacks import (
    CoverageWarning,
    DeterminismCallback,
    SelectionError,
    Verdict,
    compare_runs,
)
from det_callbacks.cli import main
from det_callbacks.report.verdict import verdict_lines

pytestmark = [
    LIGHTNING_ADVICE,
    # of on_divergence="warn", which is what is tried
    pytest.mark.filterwarnings("ignore::det_callbacks.DivergenceWarning"),
]  # on_divergence="warn"

ADDMM = "aten.addmm.default"


def shown(folder: Path, capsys: pytest.CaptureFixture[str]) -> tuple[dict[str, Any], str, str]:
    """Return what diff says of a reference and of the verification beside it: JSON, text and HTML."""
    paths = [str(folder), str(folder.with_name("current"))]
    capsys.readouterr()
    assert main(["diff", *paths, "--json"]) == 1
    verdict = json.loads(capsys.readouterr().out)
    assert main(["diff", *paths, "--html", str(folder.with_name("report.html"))]) == 1
    return verdict, capsys.readouterr().out, folder.with_name("report.html").read_text()


def test_one_ulp_is_said_alike_live_by_diff_and_in_the_report(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    reference = record(tmp_path / "ref", [f"forward/first:{ADDMM}"])
    verdict = verify(reference, around=planted(ADDMM, lambda out, args: ulps_at(out, (1, 3)), call=0))
    output = output_of(verdict)
    assert (output.tensor, output.shape, output.dtype) == ("output 0", (4, 6), "float32")
    assert (output.num_differing, output.num_elements, output.max_ulps, output.ulps) == (1, 24, 1, (23, 1))
    assert output.first == output.worst == (1, 3)
    assert output.first_values is not None
    one, other = (torch.tensor(float(text)) for text in output.first_values)
    assert int(other.view(torch.int32)) - int(one.view(torch.int32)) == 1
    assert output.max_absolute == float((one.double() - other.double()).abs())
    inputs = numbers_of(verdict).inputs
    assert [(tensor.tensor, tensor.name, tensor.num_differing) for tensor in inputs] == [
        ("self", "first.bias", 0),
        ("mat1", None, 0),
        ("mat2", "first.weight", 0),
    ]

    sentence = "1 of 24 elements differ, by 1 ULP (absolute "
    place = f"first at [1, 3]: {output.first_values[0]} in the reference, {output.first_values[1]} now"
    text = verdict_lines(verdict)
    assert sentence in text
    assert place in text
    assert "elements at each distance in ULPs: 0: 23, 1: 1\n" in text
    offline, printed, page = shown(reference, capsys)
    written = json.loads((tmp_path / "current" / "verdict.json").read_text())
    for found in (offline, written):
        for divergence in (found["first_divergence"], found["origins"][0]):
            assert divergence["numbers"] == verdict.to_dict()["first_divergence"]["numbers"]
    assert Verdict.from_dict(written).first_divergence == verdict.first_divergence
    for content in (printed, page, (tmp_path / "current" / "report.html").read_text()):
        assert sentence in content
        assert place in content
    assert page.count('class="bar"') == 1
    assert "record step" not in text, "there is nothing left to record"


def test_a_nan_on_one_side_is_apart(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def change(out: Tensor, args: Any) -> None:
        out[2, 5] = torch.nan
        out[3, 0] = torch.inf
        ulps_at(out, (0, 1), num=6)

    reference = record(tmp_path / "ref", [f"forward/first:{ADDMM}"])
    verdict = verify(reference, around=planted(ADDMM, change))
    output = output_of(verdict)
    assert (output.num_differing, output.num_nan, output.num_inf, output.max_ulps) == (3, 1, 1, 6)
    assert output.ulps == (21, 0, 0, 1)
    assert (output.first, output.worst) == ((0, 1), (2, 5))
    assert output.worst_values is not None
    assert output.worst_values[1] == "nan"
    offline, text, page = shown(reference, capsys)
    json.dumps(offline, allow_nan=False)
    assert "by up to 6 ULPs" in text
    assert "1 with a NaN, 1 with an infinity" in text
    assert "4-7: 1, NaN: 1, Inf: 1" in text
    assert "1 with a NaN" in page


@pytest.mark.slow
def test_another_shape_has_no_numbers_and_says_so(tmp_path: Path) -> None:
    class Cut(nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.width = width

        def forward(self, inputs: Tensor) -> Tensor:
            wide = torch.cat([inputs] * self.width)
            return wide[:4] * 1

    reference = record(tmp_path / "ref", ["forward/aten.cat.default"], lambda: Small(Cut(2)))
    verdict = verify(reference, lambda: Small(Cut(3)))
    assert verdict.first_divergence is not None
    assert verdict.first_divergence.kind == "structure"
    (output,) = numbers_of(verdict).output
    assert output.problem == "float32 [8, 6] in the reference and float32 [12, 6] now, so that no element has a partner"
    assert output.num_differing == 0
    assert output.ulps == ()
    assert output.problem in verdict_lines(verdict)
    assert [tensor.problem for tensor in numbers_of(verdict).inputs] == ["only the current run kept it", "", ""]


def test_an_in_place_op_is_compared_with_what_it_read_before(tmp_path: Path) -> None:
    model = partial(Small, nn.ReLU(inplace=True))
    reference = record(tmp_path / "ref", ["aten.relu_.default"], model)
    verdict = verify(reference, model, around=planted("aten.relu_.default", lambda out, args: args[0].fill_(-1.0)))
    assert output_of(verdict).num_differing == 24
    (read,) = numbers_of(verdict).inputs
    assert (read.tensor, read.num_differing) == ("self", 0)


def test_one_tensor_of_a_list_that_the_optimizer_changes(tmp_path: Path) -> None:
    model = partial(Small, optimizer=torch.optim.AdamW, foreach=True)
    op = "aten._foreach_addcdiv_.ScalarList"
    reference = record(tmp_path / "ref", [f"optimizer/{op}"], model)
    verdict = verify(reference, model, around=planted(op, lambda out, args: ulps_at(args[0][2], (1, 4), num=2)))
    first = verdict.first_divergence
    assert first is not None
    assert (first.phase, first.op, first.output, first.name) == ("optimizer", op, 2, "last.weight")
    output = output_of(verdict)
    assert (output.tensor, output.num_differing, output.max_ulps, output.first) == ("output 2", 1, 2, (1, 4))
    inputs = numbers_of(verdict).inputs
    assert [tensor.tensor for tensor in inputs] == ["self[2]", "tensor1[2]", "tensor2[2]"]
    assert {tensor.shape for tensor in inputs} == {(2, 6)}
    assert not any(tensor.num_differing for tensor in inputs)


@pytest.mark.slow
def test_the_same_ops_twice_are_told_apart(tmp_path: Path) -> None:
    """Equal calls at one place, and one more of them than in the reference."""

    class Twice(nn.Module):
        num = 2

        def forward(self, inputs: Tensor) -> Tensor:
            for _ in range(self.num):
                inputs = inputs * 2
            return inputs

    class Thrice(Twice):
        num = 3

    reference = record(tmp_path / "ref", ["middle.0:aten.mul.Tensor"], lambda: Small(Twice()))
    change = planted("aten.mul.Tensor", lambda out, args: ulps_at(out, (3, 3)), call=1)
    output = output_of(verify(reference, lambda: Small(Twice()), around=change))
    assert (output.num_differing, output.first, output.max_ulps) == (1, (3, 3), 1)
    verdict = verify(reference, lambda: Small(Thrice()), current=tmp_path / "thrice")
    for divergence in (verdict.first_divergence, *verdict.origins):
        assert divergence is not None
        numbers = divergence.numbers
        assert numbers is None or numbers.problem or numbers.output[0].max_absolute is not None


@pytest.mark.slow
def test_two_recordings_are_compared_alike(tmp_path: Path) -> None:
    patterns = [f"forward/first:{ADDMM}"]
    reference = record(tmp_path / "ref", patterns)
    change = planted(ADDMM, lambda out, args: ulps_at(out, (1, 3)))
    current = record(tmp_path / "other", patterns, around=change)
    assert output_of(compare_runs(reference, current)).first == (1, 3)
    without = record(tmp_path / "without", [], around=change)
    assert numbers_of(compare_runs(reference, without)).problem == "the current run did not keep it"
    plain = record(tmp_path / "plain", [])
    first = compare_runs(plain, current).first_divergence
    assert first is not None
    assert first.numbers is None


@pytest.mark.slow
def test_each_step_and_fit_that_differs_is_kept(tmp_path: Path) -> None:
    """The first one is shown; the others are there for diff --steps common and for who looks into the files."""
    reference = record(tmp_path / "ref", [f"forward/first:{ADDMM}"], max_epochs=2)
    verdict = verify(reference, around=planted(ADDMM, lambda out, args: out.add_(1.0), step=1), max_epochs=2)
    assert output_of(verdict).num_differing == 24
    files = sorted(path.name for path in (tmp_path / "current").rglob("kept/*/*.safetensors"))
    assert files == [f"step-{step:09d}.safetensors" for step in range(1, 8)]


@pytest.mark.slow
def test_a_second_fit_keeps_its_own(tmp_path: Path) -> None:
    reference, current = tmp_path / "ref", tmp_path / "current"
    recording = DeterminismCallback(reference, mode="record", keep_tensors=[f"forward/first:{ADDMM}"])
    verifying = DeterminismCallback(reference, current=current, on_divergence="warn")
    change = planted(ADDMM, lambda out, args: ulps_at(out, (1, 3)))
    for callback, around in ((recording, {}), (verifying, {"around": change})):
        fit(callback)
        fit(callback, **around)
    assert verifying.verdict is not None
    assert output_of(verifying.verdict).first == (1, 3)
    assert output_of(compare_runs(reference, current)).first == (1, 3)
    assert [path.parent.name for path in current.rglob("kept/*/*2.safetensors")] == ["attempt-000.segment-001"]


# what asks for it


def test_it_changes_no_bit_and_a_match_keeps_nothing(tmp_path: Path) -> None:
    model = partial(Small, nn.Dropout(0.5), optimizer=torch.optim.AdamW)
    plain = fit(None, model)
    state = torch.random.get_rng_state()
    kept = fit(DeterminismCallback(tmp_path / "ref", mode="record", keep_tensors=["*"]), model)
    assert torch.equal(torch.random.get_rng_state(), state)
    for one, other in zip(plain.parameters(), kept.parameters(), strict=True):
        assert torch.equal(one, other)
    fit(DeterminismCallback(tmp_path / "plain", mode="record"), model)
    assert compare_runs(tmp_path / "plain", tmp_path / "ref").verdict == "match"
    assert verify(tmp_path / "ref", model).verdict == "match"
    assert not list((tmp_path / "current").rglob("kept"))
    assert not list((tmp_path / "plain").rglob("kept"))


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"keep_tensors": "aten.mm.default"}, "keep_tensors must be a list of patterns"),
        ({"keep_tensors": [3]}, "keep_tensors must be a list of patterns"),
        ({"keep_tensors": ["nothing"]}, "keep_tensors: The op pattern 'nothing' names no op"),
        ({"keep_tensors": ["sideways/aten.mm.default"]}, "keep_tensors: .* asks for the phase 'sideways'"),
        ({"keep_tensors": ["*"], "tensor_budget_mib": 0}, "tensor_budget_mib must be a number of MiB above 0; got 0"),
        ({"keep_tensors": ["*"], "tensor_budget_mib": "8"}, "tensor_budget_mib must be a number of MiB above 0"),
        ({"keep_tensors": ["*"], "level": "module"}, 'keep_tensors needs level="op"'),
        ({"keep_tensors": ["*"], "mode": "audit"}, "An audit looks at every op .* and keeps nothing"),
    ],
)
def test_what_cannot_be_asked_for_is_refused(tmp_path: Path, options: dict[str, Any], says: str) -> None:
    with pytest.raises(SelectionError, match=says):
        DeterminismCallback(tmp_path / "ref", **{"mode": "record", **options})


@pytest.mark.slow
def test_other_patterns_than_the_references_are_refused(tmp_path: Path) -> None:
    reference = record(tmp_path / "ref", ["aten.mm.default"])
    with pytest.raises(
        SelectionError, match=r"recorded with keep_tensors=\['aten.mm.default'\], and this run asks for"
    ):
        fit(DeterminismCallback(reference, current=tmp_path / "current", keep_tensors=["aten.addmm.default"]))
    fit(DeterminismCallback(reference, current=tmp_path / "current", keep_tensors=["aten.mm.default"]))


def test_a_pattern_that_meant_no_op_is_said(tmp_path: Path) -> None:
    with pytest.warns(CoverageWarning, match="Nothing was kept for the keep_tensors patterns 'aten.kthvalue.default'"):
        record(tmp_path / "ref", ["aten.mm.default", "aten.kthvalue.default"])


@pytest.mark.slow
def test_a_new_recording_removes_what_was_kept(tmp_path: Path) -> None:
    reference = record(tmp_path / "ref", ["aten.mm.default"])
    assert len(list(reference.rglob("kept/*/*"))) == 4
    fit(
        DeterminismCallback(reference, mode="record", overwrite=True, keep_tensors=["aten.mm.default"]),
        limit_train_batches=1,
    )
    assert len(list(reference.rglob("kept/*/*"))) == 1
    fit(DeterminismCallback(reference, mode="record", overwrite=True))
    assert not list(reference.rglob("kept"))


@pytest.mark.slow
def test_bits_that_were_put_back_are_those_that_are_kept(tmp_path: Path) -> None:
    """Replay and keep at once: what is kept belongs to the digest, so a verification of a noisy op matches."""
    reference = tmp_path / "ref"
    noisy: Callable[..., Any] = partial(planted, "aten.tanh.default", call=0)
    model = partial(Small, nn.Tanh())
    options: dict[str, Any] = {"keep_tensors": ["aten.tanh.default"], "replay": ["aten.tanh.default"]}
    fit(DeterminismCallback(reference, mode="record", **options), model)
    assert verify(reference, model, around=noisy(lambda out, args: out.fill_(0.5))).verdict == "match"
    change = planted(ADDMM, lambda out, args: ulps_at(out, (1, 3)), call=0)
    verdict = verify(reference, model, around=change, current=tmp_path / "again")
    assert verdict.first_divergence is not None
    assert verdict.first_divergence.op == ADDMM
