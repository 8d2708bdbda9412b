"""compare_modules: whatever inputs, outputs and names are; and the report as text and JSON."""

import copy
import json
import math
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from numerics_models import MODELS, Transformer, change_epsilon, compared, mlp, names, only
from torch import Tensor, nn

from det_callbacks import ModuleRunError, NumericsReport, TensorComparison, compare_modules
from det_callbacks.verdict import TensorNumbers

pytestmark = pytest.mark.usefixtures("single_thread")


def test_outputs_that_are_no_floats() -> None:
    def outputs(weight: Tensor, x: Tensor, *, last: Any) -> Any:
        return [None, "text", True, 7, (x > 0, x.long()), weight.sum().item(), {"last": last, "empty": x[:0]}]

    report = compared(outputs, outputs, ((torch.ones(4),), {"last": 1}))
    assert report.equal
    assert len(names(report, "output")) == 9
    assert not names(report, "loss")
    other = compared(outputs, outputs, ((torch.ones(4),), {"last": 1}), control_inputs=((torch.ones(4),), {"last": 2}))
    found = only(other, "output", "output[6]['last']")
    assert (found.kind, found.base, found.control) == ("content", "int 1", "int 2")
    assert "int 1 in the base, int 2 in the control" in str(other)
    assert not other.close


def test_an_output_that_cannot_be_compared_is_an_error() -> None:
    value = torch.nested.nested_tensor([torch.ones(2)], layout=torch.jagged)
    with pytest.raises(ModuleRunError, match=r"base .* raised TypeError"):
        compared(lambda w, x: [w * x, value], lambda w, x: w * x, torch.ones(4))


def test_float8_and_integers_and_sparse_and_views() -> None:
    def outputs(weight: Tensor, x: Tensor) -> list[Tensor]:
        return [
            (weight * x).to(torch.float8_e4m3fn),
            x.long(),
            torch.diag(weight * x).to_sparse(),
            torch.diag(weight * x).t()[1::2, 1:],
            (weight[0] * x).expand(3, 4),
            torch.complex(weight, x).conj(),
        ]

    def others(weight: Tensor, x: Tensor) -> list[Tensor]:
        return outputs(weight, x + torch.tensor([0.0, 1.0, 0.0, 0.0]))

    x = torch.tensor([1.0, 2.0, 3.0, 4.0])
    assert compared(outputs, outputs, x).equal
    report = compared(outputs, others, x, iterations=1)
    found = [only(report, "output", f"output[{index}]") for index in range(6)]
    assert [one.numbers.num_differing for one in found] == [1, 1, 1, 1, 3, 1]
    assert [one.numbers.max_ulps for one in found][:2] == [4, 1]
    assert all(one.excess > 1 for one in found)


def test_inputs_of_every_form_are_copied_for_each_side() -> None:
    def doubled(weight: Tensor, x: Tensor, mask: Tensor | None = None) -> Tensor:
        x.mul_(2)
        return weight * x if mask is None else weight * x * mask

    x, mask = torch.ones(4, requires_grad=False), torch.tensor([1.0, 0.0, 1.0, 1.0])
    for inputs in (x, (x, mask), {"x": x, "mask": mask}, ((x,), {"mask": mask}), [x, (x, mask)], lambda i: (x, mask)):
        assert compared(doubled, doubled, inputs).equal
        assert torch.equal(x, torch.ones(4))


def test_gradients_of_inputs() -> None:
    x = torch.ones(4, requires_grad=True)
    report = compared(lambda w, x: w * x, lambda w, x: w * x.detach() + x * 2 - x.detach() * 2, x)
    assert not only(report, "gradient", "input[0]").close
    assert only(report, "output", "output").equal
    assert x.grad is None


def test_each_iteration_has_its_input_and_goes_on_from_its_parameters() -> None:
    seen: list[tuple[float, float]] = []

    def note(weight: Tensor, x: Tensor) -> Tensor:
        seen.append((float(x), float(weight[0].detach())))
        return weight * x

    report = compared(note, note, lambda index: torch.tensor(float(index + 1)), iterations=3)
    assert report.equal
    assert [x for x, _ in seen] == [1, 1, 2, 2, 3, 3]
    weights = [weight for _, weight in seen]
    assert weights[::2] == weights[1::2]
    assert len(set(weights)) == 3


def test_names_may_differ_by_wrappers() -> None:
    inner = mlp()
    middle = nn.Sequential(copy.deepcopy(inner[:2]), inner[2:])
    partly = nn.Sequential(torch.compile(copy.deepcopy(inner[:2]), backend="eager"), copy.deepcopy(inner[2:]))
    assert "0._orig_mod.0.weight" in dict(partly.named_parameters())
    report = compare_modules(middle, partly, torch.randn(3, 16), iterations=1)
    assert report.equal, str(report)
    assert "partly compiled Sequential" in str(report)
    assert not names(report, "module")
    assert "Outputs of submodules were not compared, since a side is compiled." in str(report)


# the report

SOME = TensorComparison(
    iteration=1,
    phase="gradient",
    name="net.head",
    kind="content",
    base="float32 [4]",
    control="float32 [4]",
    numbers=TensorNumbers(tensor="net.head", shape=(4,), num_differing=2, max_ulps=1234567, max_absolute=0.5),
    excess=math.inf,
)


def report_of(*comparisons: TensorComparison) -> NumericsReport:
    return NumericsReport(base="Net", control="compiled Net", num_iterations=2, comparisons=comparisons)


@pytest.fixture(scope="module")
def wrong() -> NumericsReport:
    torch.manual_seed(0)
    base = Transformer()
    control = copy.deepcopy(base)
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
    assert "What comes after it may follow from it." in " ".join(lines[2:4])
    assert all(column in lines[5] for column in ("compared", "max abs", "max rel", "max ULPs", "x tolerance"))
    assert "parameter after the step" in text
    assert "more" in lines[-1]
    assert "1,234,567" in str(report_of(SOME))
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
    assert (form["excess"], form["numbers"]["max_ulps"]) == ("inf", 1234567)
    assert set(form) == {field.name for field in fields(SOME)} | {"close"}
