"""compare_modules: what differs is found, by how much, and in the right place first."""

import copy
import math
from typing import Any

import pytest
import torch
from numerics_models import MODELS, WRONG, Transformer, compared, mlp, names, only
from torch import Tensor, nn

from det_callbacks import NumericsError, compare_modules

pytestmark = pytest.mark.usefixtures("single_thread")


@pytest.mark.parametrize("name", MODELS)
def test_a_copy_is_equal(name: str) -> None:
    model, inputs = MODELS[name]()
    report = compare_modules(model, copy.deepcopy(model), inputs, iterations=3)
    assert report.equal
    assert report.close
    assert report.first is report.worst is None
    report.assert_close()
    for phase in ("module", "output", "loss", "gradient", "parameter"):
        assert names(report, phase, 2), phase
    assert bool(names(report, "buffer")) == (name == "convolutions")


@pytest.mark.parametrize("layer", range(3))
def test_a_wrong_transformation_is_named_first(layer: int) -> None:
    wrong = WRONG[layer]
    model = Transformer()
    control = copy.deepcopy(model)
    expected = wrong(control, layer)
    report = compare_modules(model, control, torch.randint(50, (4, 12)), iterations=2)
    assert not report.close
    assert (report.first.iteration, report.first.phase, report.first.name) == (0, *expected)
    assert report.first.excess > 10
    with pytest.raises(NumericsError) as caught:
        report.assert_close()
    assert f" {expected[1]} in iteration 0" in str(caught.value).splitlines()[2]
    plain = compare_modules(model, control, torch.randint(50, (4, 12)), iterations=1, modules=())
    assert plain.first.phase == ("initial" if expected[0] == "initial" else "output")


def test_a_wrong_backward_is_found_where_it_begins() -> None:
    class Halved(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, value: Tensor) -> Tensor:
            return value.clone()

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            return gradient / 2

    class Middle(nn.Module):
        def forward(self, value: Tensor) -> Tensor:
            return Halved.apply(value)

    layers = [nn.Linear(4, 4) for _ in range(3)]
    base = nn.Sequential(layers[0], layers[1], nn.Identity(), layers[2])
    control = nn.Sequential(layers[0], layers[1], Middle(), layers[2])
    report = compare_modules(base, control, torch.randn(5, 4), iterations=1)
    assert (report.first.phase, report.first.name) == ("gradient", "1.bias")  # not of layer 3, which is right
    assert only(report, "gradient", "3.weight").equal
    assert only(report, "gradient", "1.weight").numbers.max_relative == pytest.approx(0.5)


def test_a_difference_of_one_ulp_has_its_figures() -> None:
    def nudged(weight: Tensor, x: Tensor) -> Tensor:
        y = weight * x
        changed = y.detach().clone()
        changed[1] = torch.nextafter(changed[1], torch.tensor(torch.inf))
        return y + (changed - y.detach())

    x = torch.tensor([1.0, 2.0, 3.0, 4.0])
    report = compared(lambda weight, x: weight * x, nudged, x, iterations=1)
    found = only(report, "output", "output")
    numbers = found.numbers
    assert (found.kind, numbers.num_differing, numbers.max_ulps, numbers.worst) == ("content", 1, 1, (1,))
    assert (numbers.max_absolute, numbers.max_relative, numbers.num_elements) == (2**-22, 2**-23, 4)
    assert found.excess == pytest.approx(2**-22 / (1e-5 + 2 * 1.3e-6))
    assert report.close
    assert not report.equal
    assert report.first is found


def test_nan_and_infinity_on_one_side_are_beyond_and_on_both_no_difference() -> None:
    for bad in (math.nan, math.inf):
        report = compared(
            lambda weight, x: weight * x,
            lambda weight, x, bad=bad: torch.where(torch.arange(4) == 2, bad, weight * x),
            torch.ones(4),
            iterations=1,
        )
        found = only(report, "output", "output")
        assert (found.numbers.num_nan, found.numbers.num_inf) == (int(math.isnan(bad)), int(math.isinf(bad)))
        assert (found.excess, found.numbers.worst) == (math.inf, (2,))
        assert report.first is found
        assert f"1.0 in the base, {bad} in the control at [2]" in " ".join(str(report).split())

    def broken(weight: Tensor, x: Tensor) -> Tensor:
        return torch.stack([weight[0] * x[0], x[1] * math.nan, x[1] * math.inf])

    assert compared(broken, broken, torch.ones(4)).equal
    report = compared(broken, lambda w, x: broken(w, x * (1 + 2**-22)), torch.ones(4), iterations=1)
    found = only(report, "output", "output")
    assert found.numbers.num_differing == 1
    assert found.close


def test_a_gradient_that_one_side_lacks() -> None:
    report = compared(lambda w, x: w * x, lambda w, x: w.detach() * x + x.sum() * 0, torch.ones(4))
    found = only(report, "gradient", "weight")
    assert (found.kind, found.control, found.excess) == ("missing", None, math.inf)
    assert report.first is found
    assert only(report, "parameter", "weight").kind == "content"
    reversed_report = compared(lambda w, x: w.detach() * x, lambda w, x: w * x, torch.ones(4))
    assert only(reversed_report, "gradient", "weight").kind == "extra"
    neither = compared(lambda w, x: w.detach() * x, lambda w, x: w.detach() * x, torch.ones(4))
    assert neither.equal
    assert not names(neither, "gradient")


def test_other_shapes_dtypes_and_outputs() -> None:
    def base(weight: Tensor, x: Tensor) -> dict[str, Any]:
        return {"a": weight * x, "b": weight.sum(), "c": 3, "only": x}

    def control(weight: Tensor, x: Tensor) -> dict[str, Any]:
        return {"b": weight.sum().double(), "a": (weight * x)[:3], "c": 3.0, "new": x}

    report = compared(base, control, torch.ones(4), iterations=1)
    kinds = {found.name: found.kind for found in report.comparisons if found.phase == "output"}
    assert kinds == {
        "output['a']": "structure",
        "output['b']": "structure",
        "output['c']": "structure",
        "output['only']": "missing",
        "output['new']": "extra",
    }
    assert only(report, "output", "output['a']").numbers is None
    assert all(not found.close for found in report.comparisons if found.phase == "output")
    assert "float32 [4] in the base, float32 [3] in the control" in " ".join(str(report).split())


def test_another_dtype_can_be_let_through() -> None:
    model = mlp()
    report = compare_modules(
        model,
        copy.deepcopy(model).bfloat16(),
        inputs := torch.randn(8, 16),
        control_inputs=inputs.bfloat16(),
        check_dtype=False,
        iterations=2,
    )
    assert not report.equal
    found = only(report, "initial", "0.weight")
    assert (found.kind, found.rtol) == ("content", 1.6e-2)
    assert 0 < found.numbers.max_relative < 2**-8  # rounded once
    assert found.close
    assert only(report, "output", "output").excess < 20
    strict = compare_modules(model, copy.deepcopy(model).bfloat16(), inputs, control_inputs=inputs.bfloat16())
    assert {found.kind for found in strict.comparisons if found.phase == "parameter"} == {"structure"}
