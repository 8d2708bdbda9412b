"""A NumericsReport as a table, as JSON and as a page."""

import json
import math
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from numerics_models import MODELS, Transformer, change_epsilon
from torch.testing import _comparison  # the table that the standard is taken from; torch 2.13

from det_callbacks import NumericsReport, TensorComparison, compare_modules
from det_callbacks.numerics.difference import measure, rms_of
from det_callbacks.numerics.names import plain_name, prefixes_between
from det_callbacks.numerics.tolerances import STANDARD, ToleranceTable

SOME = TensorComparison(
    iteration=1,
    phase="gradient",
    name="net.head",
    kind="content",
    base="float32 [4]",
    control="float32 [4]",
    num_elements=4,
    num_differing=2,
    max_absolute=0.5,
    max_relative=math.inf,
    max_ulps=1234567,
    cosine=0.25,
    num_nan=(0, 1),
    num_inf=(0, 0),
    rtol=1e-6,
    atol=1e-5,
    excess=math.inf,
    index=(3,),
)


def report_of(*comparisons: TensorComparison, **changes: Any) -> NumericsReport:
    content: dict[str, Any] = {"base": "Net", "control": "compiled Net", "num_iterations": 2, "left_out": {}}
    return NumericsReport(comparisons=comparisons, **{**content, **changes})


@pytest.fixture(scope="module")
def wrong() -> NumericsReport:
    torch.manual_seed(0)
    base, control = Transformer(), Transformer()
    control.load_state_dict(base.state_dict())
    change_epsilon(control, 1)
    return compare_modules(base, control, torch.randint(50, (4, 12)), iterations=2)


def test_the_order_decides_what_is_first_and_the_excess_what_is_worst() -> None:
    small, large = replace(SOME, excess=2.0, name="small"), replace(SOME, excess=9.0, name="large")
    bits = replace(SOME, excess=0.5, name="bits")
    module = replace(SOME, excess=99.0, phase="module", name="module")
    report = report_of(bits, small, large)
    assert (report.first, report.worst) == (small, large)
    assert report_of(bits, module).first is bits
    assert report_of(bits, module).close
    assert report_of(bits, module, small).first is module
    assert report_of(bits, module, small).worst is small
    equal = replace(SOME, kind="equal", excess=0.0)
    assert report_of(equal, module).equal
    assert not report_of(equal, bits).equal
    assert report_of(equal).first is report_of(equal).worst is None


def test_the_table(wrong: NumericsReport) -> None:
    text = str(wrong)
    lines = text.splitlines()
    assert lines[0] == "BEYOND TOLERANCE"
    assert lines[1].startswith("Transformer against Transformer, 2 iterations: ")
    assert "first beyond its tolerance: submodule output blocks.1.norm2 in iteration 0: up to" in lines[2]
    assert "What comes after it may follow from it." in lines[2]
    columns = ("compared", "max abs", "max rel", "max ULPs", "min cosine", "x tolerance", "differ since")
    assert all(column in lines[4] for column in columns)
    assert "parameter after the step" in text
    assert "more" in lines[-1]
    assert "up to inf" in str(report_of(replace(SOME, num_nan=(0, 0))))
    assert "0 NaN in the base, 1 in the control" in str(report_of(SOME))
    assert "1,234,567" in str(report_of(SOME))


def test_an_equal_report_says_so_in_a_word() -> None:
    model, inputs = MODELS["mlp"]()
    text = str(compare_modules(model, model, inputs, iterations=1))
    assert text.startswith("EQUAL\nSequential against Sequential, 1 iteration: 20 tensors compared, all bits agree.\n")


def test_json_has_all_that_differs(wrong: NumericsReport, tmp_path: Path) -> None:
    path = wrong.to_json(tmp_path / "report.json")
    content = json.loads(path.read_text(), parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    assert content == json.loads(json.dumps(wrong.to_dict()))
    assert (content["schema"], content["equal"], content["close"]) == (1, False, False)
    assert content["first"]["name"] == "blocks.1.norm2"
    assert len(content["differing"]) == len(wrong.differing)
    assert sum(counts["compared"] for counts in content["counts"].values()) == len(wrong.comparisons)
    assert sum(counts["beyond"] for counts in content["counts"].values()) == len(wrong.beyond)
    form = report_of(SOME).to_dict()["first"]
    assert (form["max_relative"], form["excess"]) == ("inf", "inf")
    assert set(form) == {field.name for field in fields(SOME)} | {"close"}


# figures


@pytest.mark.parametrize("dtype", [dtype for dtype in STANDARD if dtype.itemsize > 1], ids=str)
def test_the_standard_is_that_of_torch(dtype: torch.dtype) -> None:
    assert STANDARD[dtype] == _comparison.default_tolerances(dtype)


def test_tolerances() -> None:
    table = ToleranceTable()
    assert table.of(torch.int32, torch.int32).absolute(5.0) == 0
    assert table.of(torch.float32, torch.float32).absolute(100.0) == pytest.approx(1e-3)
    mixed = table.of(torch.float32, torch.bfloat16)
    assert (mixed.rtol, mixed.absolute(2.0)) == (1.6e-2, 3.2e-2)
    assert ToleranceTable(torch.bfloat16).of(torch.float32) == mixed
    assert ToleranceTable(torch.bfloat16).of(torch.int64).rtol == 0
    given = ToleranceTable((0.1, 0.2)).of(torch.float32, torch.float64)
    assert (given.rtol, given.absolute(100.0)) == (0.1, 0.2)
    listed = ToleranceTable({torch.float16: (0.3, 0.4)})
    assert listed.of(torch.float16, torch.float32).absolute(9.0) == 0.4
    assert listed.of(torch.float32) == table.of(torch.float32)


def test_figures_in_chunks_are_those_of_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    base = torch.randn(5, 7, dtype=torch.float64)
    control = base + torch.randn(5, 7, dtype=torch.float64).mul(1e-6).mul(torch.rand(5, 7) > 0.5)
    base[1, 1], control[2, 2], control[3, 3] = torch.nan, torch.inf, -base[3, 3]
    whole = measure(base, control, rtol=1e-7, atol=1e-7)
    assert (whole.num_nan, whole.num_inf, whole.excess) == ((1, 0), (0, 1), math.inf)
    assert whole.index == (1, 1)
    finite = torch.isfinite(base) & torch.isfinite(control)
    assert whole.max_absolute == float((base - control)[finite].abs().max())
    assert whole.cosine == pytest.approx(float(torch.cosine_similarity(base[finite], control[finite], dim=0)))
    monkeypatch.setattr("det_callbacks.numerics.difference.HOST_ELEMENTS", 3)
    chunked = measure(base, control, rtol=1e-7, atol=1e-7)
    assert replace(chunked, cosine=whole.cosine) == whole
    assert rms_of(base) == pytest.approx(float(base[base.isfinite()].square().mean().sqrt()))
    assert rms_of(torch.tensor([3e200, 4e200], dtype=torch.float64)) == pytest.approx(5e200 / math.sqrt(2))
    assert rms_of(torch.tensor([-3e-200, 4e-200], dtype=torch.complex128)) == pytest.approx(5e-200 / math.sqrt(2))
    opposite = measure(torch.ones(2), -torch.ones(2), rtol=0, atol=1)
    assert (opposite.cosine, opposite.excess, opposite.max_relative) == (pytest.approx(-1), 2, 2)
    zero = measure(torch.zeros(2), torch.tensor([0.0, 1.0]), rtol=0.5, atol=0)
    assert (zero.cosine, zero.excess, zero.max_relative, zero.index) == (None, math.inf, math.inf, (1,))
    signed = measure(torch.zeros(2), -torch.zeros(2), rtol=0, atol=0)
    assert (signed.num_differing, signed.max_ulps, signed.excess) == (2, 0, 0)


def test_names_that_wrappers_change() -> None:
    assert plain_name("_orig_mod.net._orig_mod.0.weight") == "net.0.weight"
    assert prefixes_between(["a.w", "b.w"], ["model.net.a.w", "model.net.b.w"]) == ("", "model.net.")
    assert prefixes_between(["module.a.w"], ["a.w"]) == ("module.", "")
    assert prefixes_between(["a.w"], ["a.w", "model.a.w"]) == ("", "")
    assert prefixes_between(["a.w"], ["c.v"]) == ("", "")
