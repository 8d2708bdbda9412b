"""compare_modules: what differs is found, by how much, and in the right place first;
nothing else is changed.
"""

import copy
import gc
import json
import math
import pickle
import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from numerics_models import MODELS, Apply, Transformer, compared, mlp, names, only, state_of
from torch import Tensor, nn

from det_callbacks import ModuleRunError, NothingComparedError, NumericsReport, compare_modules
from det_callbacks.errors import DetCallbacksError
from det_callbacks.tensors.files import SavedTensor

pytestmark = pytest.mark.usefixtures("single_thread")

BYTES = torch.arange(1, 5, dtype=torch.uint8)


def words(report: NumericsReport) -> str:
    return " ".join(str(report).split())


@pytest.mark.parametrize("name", MODELS)
def test_a_copy_is_equal_in_inference_mode_too_and_the_module_is_left_as_it_was(name):
    model, inputs = MODELS[name]()
    for part in [*model.modules()][2:]:
        part.train(False)
    before = state_of(model)
    with torch.inference_mode(name == "odd"):
        report = compare_modules(
            model, copy.deepcopy(model), inputs, iterations=3, optimizer=torch.optim.AdamW
        )
        assert torch.is_inference_mode_enabled() == (name == "odd")
    assert (report.equal, report.close, report.first, report.worst) == (True, True, None, None), (
        str(report)
    )
    report.assert_close()
    for phase in ("module", "output", "loss", "gradient", "parameter"):
        assert names(report, phase, 2), phase
    assert bool(names(report, "buffer")) == (name == "convolutions")
    assert str(report).startswith(f"EQUAL\n{report.control} against {report.base}, 3 iterations: ")
    assert state_of(model) == before


def test_a_wrong_backward_is_found_where_it_begins():
    layers = [nn.Linear(4, 4) for _ in range(3)]
    base, control = (nn.Sequential(*layers) for _ in range(2))
    control.insert(2, Apply(lambda weight, value: value / 2 + value.detach() / 2))
    base.insert(2, Apply(lambda weight, value: value.clone()))
    report = compare_modules(base, control, torch.randn(5, 4), iterations=1)
    # not of layer 3, which is right
    assert (report.first.phase, report.first.name) == ("gradient", "1.bias")
    assert only(report, "gradient", "3.weight").equal
    assert only(report, "gradient", "1.weight").measure.relative == pytest.approx(0.5)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_nan_and_infinity_on_one_side_are_beyond_and_on_both_no_difference(bad):
    def broken(weight: Tensor, x: Tensor) -> Tensor:
        return torch.where(torch.arange(4) == 2, bad, weight * x)

    report = compared(lambda weight, x: weight * x, broken, torch.ones(4), iterations=1)
    found = only(report, "output", "output")
    assert (report.first, found.excess, found.measure.ulp) == (found, math.inf, None)
    assert "a NaN or an infinity on one side, inf x the tolerance" in words(report)
    assert compared(broken, broken, torch.ones(4)).equal
    assert only(
        compared(broken, lambda w, x: broken(w, x * (1 + 2**-22)), torch.ones(4)),
        "output",
        "output",
    ).close


def test_a_gradient_that_one_side_lacks_or_that_of_an_input():
    with_gradient, without = (lambda w, x: w * x), (lambda w, x: w.detach() * x + x.sum() * 0)
    found = only(report := compared(with_gradient, without, torch.ones(4)), "gradient", "weight")
    assert (found.kind, found.control, found.excess, report.first) == (
        "missing",
        None,
        math.inf,
        found,
    )
    assert only(report, "parameter", "weight").kind == "content"
    assert (
        only(compared(without, with_gradient, torch.ones(4)), "gradient", "weight").kind == "extra"
    )
    assert not names(compared(without, without, torch.ones(4)), "gradient")

    x = torch.ones(4, requires_grad=True)
    report = compared(with_gradient, lambda w, x: w * x.detach() + x * 2 - x.detach() * 2, x)
    assert not only(report, "gradient", "input[0]").close
    assert only(report, "output", "output").equal
    assert x.grad is None


def test_other_shapes_dtypes_and_outputs():
    def base(weight: Tensor, x: Tensor) -> dict[str, Any]:
        return {
            "a": weight * x,
            "b": weight.sum(),
            "c": 3,
            "only": x,
            "text": "one",
            "d": [x.long(), 7, True, x[:0]],
        }

    def control(weight: Tensor, x: Tensor) -> dict[str, Any]:
        other = base(weight, x) | {
            "a": (weight * x)[:3],
            "b": weight.sum().double(),
            "c": 3.0,
            "new": x,
            "text": "two",
        }
        del other["only"]
        other["d"][1] = 8
        return other

    report = compared(base, control, torch.ones(4), iterations=1)
    kinds = {
        found.name[7:-1]: found.kind for found in report.comparisons if found.phase == "output"
    }
    others = {"'only'": "missing", "'new'": "extra", "'d'][1": "content"}
    equal = {f"'d'][{index}": "equal" for index in (0, 2, 3)}
    assert kinds == {"'a'": "structure", "'b'": "structure", "'c'": "structure", **others, **equal}
    assert only(report, "output", "output['a']").measure is None
    assert not only(report, "output", "output['d'][1]").close, "whole numbers have to be equal"
    assert "float32 [4] in the base, float32 [3] in the control" in words(report)


def test_other_bits_of_a_dtype_without_numbers_are_beyond_every_tolerance():
    def scaled(factor: int) -> nn.Module:
        module = Apply(lambda weight, x: weight * x)
        module.register_buffer("scale", (BYTES * factor).view(torch.float8_e8m0fnu))
        return module

    same, report = (
        compare_modules(scaled(1), scaled(factor), torch.ones(4), iterations=1, rtol=1.0, atol=1e9)
        for factor in (1, 2)
    )
    found = report.first
    assert (same.equal, found.phase, found.name, found.excess) == (
        True,
        "initial",
        "scale",
        math.inf,
    )
    assert (
        "initial state scale in iteration 0: float8_e8m0fnu, whose numbers are not known, inf x"
        in words(report)
    )
    assert "buffer after the step 1 1 1 unknown - - inf iteration 0" in words(report)


def test_inputs_of_every_form_are_copied_for_each_side_and_each_iteration():
    def doubled(weight: Tensor, x: Tensor, mask: Tensor | None = None) -> Tensor:
        x.mul_(2)
        seen.append((float(x[1]), float(weight[0].detach())))
        return weight * x if mask is None else weight * x * mask

    x, mask = torch.ones(4), torch.tensor([1.0, 0.0, 1.0, 1.0])
    for inputs in (x, (x, mask), {"x": x, "mask": mask}, lambda i: (x + i, mask)):
        seen: list[tuple[float, float]] = []
        assert compared(doubled, doubled, inputs).equal
        assert torch.equal(x, torch.ones(4))
        assert seen[0] == seen[1] != seen[2] == seen[3], "each side goes on from its parameters"
    assert [value for value, _ in seen] == [2, 2, 4, 4]
    assert compared(doubled, doubled, lambda _: (torch.randn(4), mask)).equal, (
        "what is drawn is drawn once"
    )


def test_both_sides_draw_the_same_numbers_and_have_their_own_state():
    counted: list[int] = []

    class Counting(nn.Module):
        """Draws from every generator, and keeps state in a list, a buffer,
        and a generator of its own.
        """

        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(4))
            self.register_buffer("mean", torch.zeros(4))
            self.generator = torch.Generator().manual_seed(3)
            self.seen: list[float] = []

        def forward(self, x: Tensor) -> Tensor:
            self.seen.append(1.0)
            counted.append(len(self.seen))
            self.mean = self.mean * 0.9 + self.weight.detach() * len(self.seen)
            noise = torch.rand(4) * random.random() * np.random.rand() + torch.randn(
                4, generator=self.generator
            )
            return self.weight * x + noise + sum(self.seen)

    module = Counting()
    mean, state = module.mean, module.generator.get_state()
    assert compare_modules(module, module, torch.ones(4), iterations=3, seed=2**32 - 1).equal
    assert counted == [1, 1, 2, 2, 3, 3]
    assert (module.seen, module.mean is mean) == ([], True)
    assert torch.equal(module.generator.get_state(), state)


def test_what_a_side_raises_names_the_side_and_leaves_nothing_behind():
    model, inputs = MODELS["convolutions"]()
    before, factors = state_of(model), iter([1, 1, 1])
    said = r"The control \(Sequential\) raised StopIteration in iteration 1"
    with pytest.raises(ModuleRunError, match=said) as caught:
        compare_modules(
            model, model, inputs, iterations=2, loss=lambda output: output.mean() * next(factors)
        )
    lost = pickle.loads(pickle.dumps(caught.value))
    assert (str(lost), lost.side, lost.iteration, lost.exit_code) == (
        str(caught.value),
        "control",
        1,
        2,
    )
    assert isinstance(caught.value.__cause__, StopIteration)
    assert state_of(model) == before


def test_wrong_arguments_are_refused():
    layer, x, ran = nn.Linear(4, 4), torch.ones(4), nn.utils.spectral_norm(nn.Linear(4, 4))
    ran(torch.ones(1, 4))
    (compiled := nn.Linear(4, 4)).compile(backend="eager")
    for error, text, options in (
        (ValueError, "iterations", {"iterations": 0}),
        (ValueError, "seed", {"seed": -1}),
        (TypeError, "control must be", {"control": print}),
        (ValueError, "given together", {"rtol": 1e-3}),
        (ValueError, "not negative", {"rtol": -1.0, "atol": 0.0}),
        (ValueError, "finite", {"rtol": 0.0, "atol": float("inf")}),
        (ValueError, "cannot be copied", {"control": ran}),
        (ValueError, "compiled in place", {"control": compiled}),
        (ModuleRunError, "uninitialized parameter", {"control": nn.LazyLinear(3)}),
        (ModuleRunError, "an ordinary strided tensor", {"control": nn.Linear(4, 4, device="meta")}),
        (
            ModuleRunError,
            "an ordinary strided tensor",
            {"control": Apply(lambda weight, x: (weight * x).to_sparse())},
        ),
        (DetCallbacksError, "list of strings", {"modules": "net.*"}),
    ):
        arguments = {"base": layer, "control": layer, "inputs": x, **options}
        with pytest.raises(error, match=text):
            compare_modules(**arguments)

    silent = type("Silent", (nn.Module,), {"forward": lambda self, x: []})()
    with pytest.raises(NothingComparedError):
        compare_modules(silent, silent, x)


def test_memory_does_not_grow_with_the_iterations():
    """What one iteration computed is gone when the next one is compared."""
    alive: list[int] = []

    def note(weight: Tensor, x: Tensor) -> Tensor:
        alive.append(
            sum(type(one) is SavedTensor and one.shape == (1234,) for one in gc.get_objects())
        )
        return weight[0] * x

    compared(note, note, torch.ones(1234), iterations=3)
    assert max(alive[4:]) <= max(alive[2:4]) > 0


def test_names_may_differ_by_wrappers():
    inner = mlp()
    middle = nn.Sequential(copy.deepcopy(inner[:2]), inner[2:])
    partly = nn.Sequential(
        torch.compile(copy.deepcopy(inner[:2]), backend="eager"), copy.deepcopy(inner[2:])
    )
    report = compare_modules(middle, partly, torch.randn(3, 16), iterations=1)
    assert (report.equal, names(report, "module")) == (True, []), str(report)
    for said in (
        "compiled Sequential",
        "Outputs of submodules were not compared, since a side is compiled.",
    ):
        assert said in str(report)


def test_the_order_decides_what_is_first_and_the_excess_what_is_worst():
    report = compared(lambda w, x: w * x, lambda w, x: w * x * 2, torch.ones(4), iterations=1)
    some = only(report, "output", "output")
    small, large, bits = (replace(some, excess=excess) for excess in (2.0, 9.0, 0.5))
    module, equal = (
        replace(some, excess=99.0, phase="module"),
        replace(some, kind="equal", excess=0.0),
    )
    for found, *said in (
        ((bits, small, large), small, large, False, False),
        ((bits, module), bits, bits, True, False),  # a submodule alone decides nothing
        ((bits, module, small), module, small, False, False),
        ((equal, module), module, None, True, True),
    ):
        one = replace(report, comparisons=found)
        assert [one.first, one.worst, one.close, one.equal] == said
    infinite = replace(
        some, excess=math.inf, measure=replace(some.measure, excess=math.inf)
    ).to_dict()
    assert (infinite["excess"], "excess" in infinite["measure"]) == ("inf", False)


def test_a_wrong_transformation_is_named_first_in_the_table_the_json_and_the_error(tmp_path):
    base = Transformer()
    control = copy.deepcopy(base)
    control.blocks[1].norm2.eps = 1e-3
    tokens = torch.randint(50, (4, 12))
    assert compare_modules(base, control, tokens, iterations=1, modules=()).first.phase == "output"
    wrong = compare_modules(base, control, tokens, iterations=2)
    assert (wrong.first.iteration, wrong.first.phase, wrong.first.name) == (
        0,
        "module",
        "blocks.1.norm2",
    )
    assert wrong.first.excess > 10
    assert str(wrong).startswith(
        "BEYOND TOLERANCE\nTransformer against Transformer, 2 iterations: "
    )
    assert "first beyond its tolerance: submodule output blocks.1.norm2 in iteration 0" in str(
        wrong
    )
    assert f"The largest outside submodule outputs: {wrong.worst.phase} {wrong.worst.name}" in str(
        wrong
    )
    (columns,) = [line for line in str(wrong).splitlines() if line.startswith("compared ")]
    assert all(column in columns for column in ("ULP", "relative", "absolute", "x tolerance"))
    assert "parameter after the step" in str(wrong)
    path = wrong.to_json(tmp_path / "report.json")
    content = json.loads(
        path.read_text(), parse_constant=lambda name: pytest.fail(f"{name} is no JSON")
    )
    assert content == json.loads(json.dumps(wrong.to_dict()))
    assert (content["schema"], content["equal"], content["close"]) == (1, False, False)
    assert (content["first"]["name"], len(content["differing"])) == (
        "blocks.1.norm2",
        len(wrong.differing),
    )
    for name, found in (("compared", wrong.comparisons), ("beyond", wrong.beyond)):
        assert sum(counts[name] for counts in content["counts"].values()) == len(found)
    with pytest.raises(AssertionError) as caught:
        wrong.assert_close()
    error = pickle.loads(pickle.dumps(caught.value))
    assert (str(error), error.report, error.exit_code) == (str(caught.value), wrong, 1)
    weight = control.blocks[0].self_attn.out_proj.weight
    weight.data = weight.data.t().contiguous()
    first = compare_modules(base, control, tokens, iterations=1).first
    assert (first.phase, first.name) == ("initial", "blocks.0.self_attn.out_proj.weight")


class Tokens(nn.Module):
    """Computes tokens together, or one by one; ``wrong`` is the place of one that it changes."""

    def __init__(self, layer: nn.Module, *, size: int, wrong: int | None = None) -> None:
        super().__init__()
        self.layer, self.size, self.wrong = layer, size, wrong

    def forward(self, x: Tensor) -> Tensor:
        if self.wrong is not None:
            x = torch.cat([x[:, : self.wrong], x[:, self.wrong :] * 2], 1)
        return torch.cat([self.layer(part) for part in x.split(self.size, 1)], 1)


@pytest.mark.parametrize("join", [1, -2])
def test_calls_of_a_submodule_are_joined_along_the_tokens(join):
    layer, x = nn.Sequential(nn.ReLU(), nn.Tanh()), torch.randn(2, 6, 4)
    options: dict[str, Any] = {"iterations": 1, "loss": lambda output: None}
    together, apart = Tokens(layer, size=6), Tokens(layer, size=2)
    joined = compare_modules(together, apart, x, join=join, **options)
    assert joined.equal
    assert {
        (one.name, one.base, one.kind) for one in joined.comparisons if one.phase == "module"
    } == {(name, "float32 [2, 6, 4]", "equal") for name in ("layer", "layer.0", "layer.1")}
    apart_from = compare_modules(together, apart, x, **options)  # call by call
    assert {one.kind for one in apart_from.comparisons if one.phase == "module"} == {"structure"}
    wrong = compare_modules(together, Tokens(layer, size=2, wrong=4), x, join=join, **options)
    assert (wrong.first.name, wrong.first.kind) == ("layer.0", "content")
    assert 0 < wrong.first.measure.num_differing <= 16


def test_outputs_without_the_dimension_of_the_tokens_are_joined_in_theirs():
    class Positions(nn.Module):
        def __init__(self, size: int) -> None:
            super().__init__()
            self.size, self.embedding = size, nn.Embedding(6, 4)
            nn.init.ones_(self.embedding.weight)

        def forward(self, x: Tensor) -> Tensor:
            parts = torch.arange(6).split(self.size)
            return torch.cat([self.embedding(part) for part in parts]) + x

    report = compare_modules(
        Positions(6), Positions(2), torch.randn(2, 6, 4), iterations=1, join=1, modules=["*"]
    )
    (found,) = (one for one in report.comparisons if one.phase == "module")
    assert (found.base, found.kind) == ("float32 [6, 4]", "equal")
    for wrong in ("x", True, 1.0):
        with pytest.raises(ValueError, match="join must be the number of a dimension"):
            compare_modules(nn.ReLU(), nn.ReLU(), torch.randn(2), join=wrong)


def test_calls_that_do_not_fit_together_are_not_joined():
    class Uneven(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.ReLU()

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x) + self.layer(x[:, :, :2]).sum() + self.layer(x[0, 0]).sum()

    report = compare_modules(Uneven(), Uneven(), torch.randn(2, 3, 4), iterations=1, join=1)
    assert report.equal
    assert not [one for one in report.comparisons if one.phase == "module"], "nothing is shown"
