"""compare_modules: what differs is found, by how much, and in the right place first."""

import copy
import gc
import math
import pickle
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from numerics_models import MODELS, WRONG, Transformer, mlp
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import conv2d

from det_callbacks import (
    DeterminismSettings,
    ModuleRunError,
    NothingComparedError,
    NumericsError,
    NumericsReport,
    SettingsError,
    compare_modules,
    enforce_determinism,
)
from det_callbacks.errors import DetCallbacksError


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """These tensors are small: a second thread only waits for its core."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


class Apply(nn.Module):
    """Calls a function with its input and a layer's output."""

    def __init__(self, function: Callable[..., Any], *, weight: float = 1.0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((4,), weight))
        self.function = function

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(self.weight, *args, **kwargs)


def compared(one: Callable[..., Any], other: Callable[..., Any], inputs: Any, **options: Any) -> NumericsReport:
    options = {"iterations": 2, **options}
    return compare_modules(Apply(one), Apply(other), inputs, **options)


def names(report: NumericsReport, phase: str, iteration: int = 0) -> list[str]:
    return [found.name for found in report.comparisons if (found.phase, found.iteration) == (phase, iteration)]


def only(report: NumericsReport, phase: str, name: str, iteration: int = 0) -> Any:
    (found,) = (one for one in report.comparisons if (one.phase, one.name, one.iteration) == (phase, name, iteration))
    return found


# what is wrong is found, the right tensor first


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


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("wrong", WRONG)
def test_a_wrong_transformation_is_named_first(wrong: Callable[[Any, int], tuple[str, str]], seed: int) -> None:
    torch.manual_seed(seed)
    model = Transformer()
    control = copy.deepcopy(model)
    expected = wrong(control, seed % 3)
    report = compare_modules(model, control, torch.randint(50, (4, 12)), iterations=2)
    assert not report.close
    assert report.first is not None
    assert (report.first.iteration, report.first.phase, report.first.name) == (0, *expected)
    assert report.first.excess > 10
    with pytest.raises(NumericsError) as caught:
        report.assert_close()
    assert f" {expected[1]} in iteration 0" in str(caught.value).splitlines()[2]
    plain = compare_modules(model, control, torch.randint(50, (4, 12)), iterations=1, modules=())
    assert plain.first is not None
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
    assert report.first is not None
    assert (report.first.phase, report.first.name) == ("gradient", "1.bias")  # not of layer 3, which is right
    assert only(report, "gradient", "3.weight").equal
    assert only(report, "gradient", "1.weight").cosine == pytest.approx(1)
    assert only(report, "gradient", "1.weight").max_relative == pytest.approx(0.5)


def test_a_difference_of_one_ulp_has_its_figures() -> None:
    def nudged(weight: Tensor, x: Tensor) -> Tensor:
        y = weight * x
        changed = y.detach().clone()
        changed[1] = torch.nextafter(changed[1], torch.tensor(torch.inf))
        return y + (changed - y.detach())

    x = torch.tensor([1.0, 2.0, 3.0, 4.0])
    report = compared(lambda weight, x: weight * x, nudged, x, iterations=1)
    found = only(report, "output", "output")
    assert (found.kind, found.num_differing, found.max_ulps, found.index) == ("content", 1, 1, (1,))
    assert found.max_absolute == 2**-22
    assert found.max_relative == 2**-23
    assert found.num_elements == 4
    assert 0 < found.excess < 0.01
    assert report.close
    assert not report.equal
    assert report.first is found


def test_it_is_as_strict_for_small_gradients_as_for_large_ones() -> None:
    """A wrong gradient of 1e-7 is within the absolute tolerance of assert_close."""
    x, scale = torch.randn(4), 1e-7

    def loss(output: Tensor) -> Tensor:
        return output.sum() * scale

    report = compared(lambda w, x: w * x, lambda w, x: w * x + 1e-2 * (w - w.detach()) * x, x, loss=loss)
    assert only(report, "output", "output").equal
    assert not only(report, "gradient", "weight").close
    given = compared(
        lambda w, x: w * x, lambda w, x: w * x + 1e-2 * (w - w.detach()) * x, x, loss=loss, tolerances=(1.3e-6, 1e-5)
    )
    assert given.close


def test_a_gradient_that_cancels_out_is_no_failure() -> None:
    """A bias ahead of a normalisation: rounding errors on both sides, and nothing else."""

    class BiasLater(nn.Conv2d):
        def forward(self, x: Tensor) -> Tensor:
            return conv2d(x, self.weight) + self.bias[:, None, None]

    base = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Flatten(), nn.Linear(8 * 196, 3))
    control = copy.deepcopy(base)
    control[0].__class__ = BiasLater
    report = compare_modules(base, control, torch.randn(8, 3, 16, 16), iterations=3)
    found = only(report, "gradient", "0.bias")
    assert not found.equal
    assert found.max_relative > 0.01
    assert report.close, str(report)


# kinds of difference


@pytest.mark.parametrize(("bad", "counts"), [(math.nan, ((0, 1), (0, 0))), (math.inf, ((0, 0), (0, 1)))])
def test_nan_and_infinity_on_one_side(bad: float, counts: tuple[tuple[int, int], tuple[int, int]]) -> None:
    def broken(weight: Tensor, x: Tensor) -> Tensor:
        return torch.where(torch.arange(4) == 2, bad, weight * x)

    report = compared(lambda weight, x: weight * x, broken, torch.ones(4), iterations=1, optimizer=None)
    found = only(report, "output", "output")
    assert (found.num_nan, found.num_inf) == counts
    assert found.excess == math.inf
    assert found.index == (2,)
    assert found.max_absolute == 0
    assert report.first is found
    assert f"0 {'NaN' if math.isnan(bad) else 'infinite'} in the base, 1 in the control" in str(report)


def test_nan_on_both_sides_is_no_difference_and_is_said() -> None:
    def broken(weight: Tensor, x: Tensor) -> Tensor:
        return torch.stack([weight[0] * x[0], x[1] * math.nan])

    report = compared(broken, broken, torch.ones(4))
    assert report.equal
    assert "NaN on both sides" in str(report)


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
    assert only(report, "output", "output['a']").num_differing is None
    assert only(report, "output", "output['b']").max_ulps == 0
    assert all(not found.close for found in report.comparisons if found.phase == "output")
    assert "float32 [4] in the base, float32 [3] in the control" in str(report)


def test_another_dtype_can_be_let_through() -> None:
    model = mlp()
    report = compare_modules(
        model,
        copy.deepcopy(model).bfloat16(),
        inputs := torch.randn(8, 16),
        control_inputs=inputs.bfloat16(),
        check_dtype=False,
        iterations=2,
        tolerances=torch.bfloat16,
    )
    assert not report.equal
    found = only(report, "initial", "0.weight")
    assert (found.kind, found.max_ulps) == ("content", 0)  # rounded once
    assert 0 < found.max_relative < 2**-8
    assert only(report, "output", "output").excess < 2
    strict = compare_modules(model, copy.deepcopy(model).bfloat16(), inputs, control_inputs=inputs.bfloat16())
    assert {found.kind for found in strict.comparisons if found.phase == "parameter"} == {"structure"}


# what may be in inputs and outputs


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
    with pytest.raises(ModuleRunError, match=r"base .* raised TypeError"):
        compared(lambda w, x: [w * x, object()], lambda w, x: w * x, torch.ones(4))


@pytest.mark.parametrize(
    "dtype", [torch.complex64, torch.complex128, torch.bfloat16, torch.float16, torch.float64], ids=str
)
def test_dtypes(dtype: torch.dtype) -> None:
    x = torch.linspace(1, 2, 4).to(dtype)
    report = compared(lambda w, x: w.to(dtype) * x, lambda w, x: w.to(dtype) * x, x)
    assert report.equal
    report = compared(lambda w, x: w.to(dtype) * x, lambda w, x: w.to(dtype) * x * 1.5, x)
    found = only(report, "output", "output")
    assert not found.close
    assert found.max_relative == pytest.approx(0.5, rel=0.02)
    assert found.cosine == pytest.approx(1)
    assert found.max_ulps


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
    assert [one.num_differing for one in found] == [1, 1, 1, 1, 3, 1]
    assert [one.max_ulps for one in found][:2] == [4, 1]
    assert all(one.excess > 1 for one in found)
    assert found[1].index == (1,)


def test_inputs_of_every_form_are_copied_for_each_side() -> None:
    def doubled(weight: Tensor, x: Tensor, mask: Tensor | None = None) -> Tensor:
        x.mul_(2)
        return weight * x if mask is None else weight * x * mask

    x, mask = torch.ones(4, requires_grad=False), torch.tensor([1.0, 0.0, 1.0, 1.0])
    for inputs in (x, (x, mask), {"x": x, "mask": mask}, ((x,), {"mask": mask}), [x, (x, mask)], lambda i: (x, mask)):
        report = compared(doubled, doubled, inputs)
        assert report.equal
        assert torch.equal(x, torch.ones(4))
        assert [name for name in names(report, "input") if "mask" not in name]
    wrong = compared(doubled, lambda w, x: w * x * 2, x)
    assert only(wrong, "input", "input[0]").kind == "content"
    assert only(wrong, "output", "output").equal
    wrong = compared(lambda w, x: w * x * 2, doubled, x)
    assert only(wrong, "input", "input[0]").max_absolute == 1


def test_inputs_that_share_memory_still_do() -> None:
    def shared(weight: Tensor, x: Tensor, part: Tensor) -> Tensor:
        x.add_(1)
        return weight * part

    x = torch.zeros(8)
    assert torch.equal(seen_outputs(shared, (x, x[::2])), torch.ones(4))
    assert seen_outputs(lambda w, x: w * x[:, 0] * x.stride(0), torch.ones(1).expand(4, 2)).sum() == 0


def seen_outputs(function: Callable[..., Tensor], inputs: Any) -> Tensor:
    seen = []

    def note(*args: Any) -> Tensor:
        seen.append(function(*args))
        return seen[-1]

    assert compared(note, note, inputs, iterations=1).equal
    assert torch.equal(seen[0], seen[1])
    return seen[0].detach()


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


# names


def test_names_may_differ_by_wrappers_and_prefixes() -> None:
    inner = mlp()

    class Wrapped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.module = copy.deepcopy(inner)

        def forward(self, x: Tensor) -> Tensor:
            return self.module(x)

    x = torch.randn(3, 16)
    for pair in ((inner, Wrapped()), (Wrapped(), inner)):
        report = compare_modules(*pair, x, iterations=1)
        assert report.equal, str(report)
        assert "0.weight" in names(report, "gradient")
        assert "0" in names(report, "module")
    middle = nn.Sequential(copy.deepcopy(inner[:2]), inner[2:])
    partly = nn.Sequential(torch.compile(copy.deepcopy(inner[:2]), backend="eager"), copy.deepcopy(inner[2:]))
    assert "0._orig_mod.0.weight" in dict(partly.named_parameters())
    report = compare_modules(middle, partly, x, iterations=1)
    assert report.equal, str(report)
    assert "partly compiled Sequential" in str(report)
    assert not names(report, "module")
    assert "outputs of submodules, since a side is compiled" in str(report)


def test_what_only_one_side_has() -> None:
    base, control = nn.Linear(4, 4), nn.Linear(4, 4, bias=False)
    control.weight = base.weight
    report = compare_modules(base, control, torch.ones(2, 4), iterations=1)
    assert only(report, "initial", "bias").kind == "missing"
    assert report.first is not None
    assert (report.first.phase, report.first.name) == ("initial", "bias")
    assert only(compare_modules(control, base, torch.ones(2, 4)), "initial", "bias").kind == "extra"


# the same numbers on both sides


def test_both_sides_draw_the_same_numbers() -> None:
    def noisy(weight: Tensor, x: Tensor) -> Tensor:
        return weight * torch.rand(4) * random.random() * np.random.rand()

    assert compared(noisy, noisy, torch.ones(4), iterations=3).equal
    seeded = compared(noisy, noisy, torch.ones(4), seed=2**32 - 1)
    assert seeded.equal


def test_a_module_against_itself_with_state_of_its_own() -> None:
    class Counting(nn.Module):
        """Keeps state in an attribute, a list, a buffer that it replaces, and a generator."""

        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(4))
            self.register_buffer("mean", torch.zeros(4))
            self.generator = torch.Generator().manual_seed(3)
            self.cache = torch.zeros(4)
            self.calls = 0
            self.seen: list[float] = []

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            self.seen.append(float(self.calls))
            self.mean = self.mean * 0.9 + self.weight.detach() * self.calls
            self.cache += 1
            noise = torch.randn(4, generator=self.generator)
            return self.weight * x * self.calls + noise + self.cache + len(self.seen)

    module = Counting()
    mean, state = module.mean, module.generator.get_state()
    report = compare_modules(module, module, torch.ones(4), iterations=3)
    assert report.equal, str(report)
    assert (module.calls, module.seen) == (0, [])
    assert module.mean is mean
    assert torch.equal(module.mean, torch.zeros(4))
    assert torch.equal(module.cache, torch.zeros(4))
    assert torch.equal(module.generator.get_state(), state)


# nothing is changed


def everything(model: nn.Module) -> dict[str, Any]:
    state = {name: (id(value), value.detach().clone(), value._version) for name, value in model.state_dict().items()}
    return {
        "state": {name: (value.tolist()) for name, (_, value, _) in state.items()},
        "objects": [(name, id(value), value.data_ptr()) for name, value in model.named_parameters()],
        "grads": [
            None if value.grad is None else (id(value.grad), value.grad.tolist()) for value in model.parameters()
        ],
        "training": [part.training for part in model.modules()],
        "attributes": [sorted(vars(part)) for part in model.modules()],
        "hooks": [len(part._forward_hooks) for part in model.modules()],
        "python": random.getstate(),
        "numpy": np.random.get_state()[1].tolist(),
        "torch": torch.get_rng_state().tolist(),
        "flags": (torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.get_num_threads()),
    }


@pytest.mark.parametrize("fails_in", [None, "forward", "backward", "loss", "optimizer"])
def test_everything_is_as_before(fails_in: str | None) -> None:
    model, inputs = MODELS["convolutions"]()
    model.eval()
    model.net[0].train()
    model(inputs).sum().backward()
    model.net[-1].bias.grad = None
    before = everything(model)
    calls = 0

    class Failing(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, value: Tensor) -> Tensor:
            return value.clone()

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            raise RuntimeError("backward failed")

    def loss(output: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        if fails_in == "loss" and calls == 4:
            raise RuntimeError("loss failed")
        return (Failing.apply(output) if fails_in == "backward" and calls == 4 else output).square().mean()

    def optimizer(parameters: Any) -> torch.optim.Optimizer:
        made = torch.optim.AdamW(parameters)
        if fails_in == "optimizer":
            made.step = lambda: 1 / 0
        return made

    control = copy.deepcopy(model)
    if fails_in == "forward":
        control.net[3].register_forward_pre_hook(lambda *_: torch.ones(2) @ torch.ones(3))
    after_control = everything(control)
    with torch.no_grad():
        before["flags"] = after_control["flags"] = (False, False, torch.get_num_threads())
        if fails_in is None:
            report = compare_modules(model, control, inputs, iterations=2, loss=loss, optimizer=optimizer)
            assert report.equal
            assert names(report, "gradient")
        else:
            with pytest.raises(ModuleRunError) as caught:
                compare_modules(model, control, inputs, iterations=2, loss=loss, optimizer=optimizer)
            side, iteration = {
                "forward": ("control", 0),
                "backward": ("control", 1),
                "loss": ("control", 1),
                "optimizer": ("base", 0),
            }[fails_in]
            assert (caught.value.side, caught.value.iteration) == (side, iteration)
            assert f"The {side} (ConvNet) raised" in str(caught.value)
            assert caught.value.exit_code == 2
            assert isinstance(caught.value.__cause__, RuntimeError | ZeroDivisionError)
        assert everything(model) == before
        assert everything(control) == after_control


def test_settings_and_contexts_are_in_force_and_put_back() -> None:
    seen: list[tuple[bool, int]] = []

    def note(weight: Tensor, x: Tensor) -> Tensor:
        seen.append((torch.are_deterministic_algorithms_enabled(), torch.get_num_threads()))
        return weight * x

    threads = torch.get_num_threads()
    compared(
        note,
        note,
        torch.ones(4),
        iterations=1,
        settings={"num_threads": 2},
        control_context=lambda: enforce_determinism(
            DeterminismSettings(deterministic_algorithms="disabled", num_threads=1)
        ),
    )
    assert seen == [(True, 2), (False, 1)]
    assert torch.get_num_threads() == threads
    assert not torch.are_deterministic_algorithms_enabled()
    with pytest.raises(SettingsError):
        compared(note, note, torch.ones(4), settings={"num_threads": "many"})


def test_two_attention_backends_and_autocast() -> None:
    model, inputs = MODELS["transformer"]()
    report = compare_modules(
        model,
        model,
        inputs,
        iterations=2,
        base_context=lambda: sdpa_kernel(SDPBackend.FLASH_ATTENTION),
        control_context=lambda: sdpa_kernel(SDPBackend.MATH),
    )
    assert report.close, str(report)
    assert not report.equal
    assert report.first is not None
    assert report.first.name == "blocks.0.project"  # the first that reads what an attention gave
    half = compare_modules(
        model,
        model,
        inputs,
        iterations=2,
        control_context=lambda: torch.autocast("cpu", torch.bfloat16),
        check_dtype=False,
        tolerances=torch.bfloat16,
    )
    assert half.close, str(half)
    assert "bfloat16" in only(half, "output", "output").control
    assert "float32" in only(half, "gradient", "head.weight").control


# what it refuses, and what it says


def test_wrong_arguments_are_refused() -> None:
    layer, x = nn.Linear(4, 4), torch.ones(4)
    for error, text, options in (
        (ValueError, "iterations", {"iterations": 0}),
        (ValueError, "seed", {"seed": -1}),
        (ValueError, "for each of 3", {"inputs": [x, x], "iterations": 3}),
        (TypeError, "control is", {"control": print}),
        (TypeError, "keys are texts", {"inputs": {1: x}}),
        (TypeError, "pair", {"tolerances": 1e-3}),
        (TypeError, "by dtype", {"tolerances": {"float32": (0.1, 0.1)}}),
        (ValueError, "not negative", {"tolerances": (-1.0, 0.0)}),
        (ValueError, "no tolerance of its own", {"tolerances": torch.int32}),
        (ValueError, "not initialised", {"control": nn.LazyLinear(3)}),
        (ValueError, "meta tensor", {"control": nn.Linear(4, 4, device="meta")}),
        (DetCallbacksError, "list of strings", {"modules": "net.*"}),
    ):
        arguments = {"base": layer, "control": layer, "inputs": x, **options}
        with pytest.raises(error, match=text):
            compare_modules(**arguments)


def test_nothing_to_compare_is_an_error() -> None:
    class Silent(nn.Module):
        def forward(self, x: Tensor) -> list[Tensor]:
            return []

    with pytest.raises(NothingComparedError):
        compare_modules(Silent(), Silent(), torch.ones(2))


def test_the_errors_survive_pickling() -> None:
    report = compared(lambda w, x: w * x, lambda w, x: w * x * 2, torch.ones(4))
    with pytest.raises(AssertionError) as caught:
        report.assert_close()
    error = pickle.loads(pickle.dumps(caught.value))
    assert isinstance(error, NumericsError)
    assert (str(error), error.report, error.exit_code) == (str(caught.value), report, 1)
    lost = pickle.loads(pickle.dumps(ModuleRunError("text", "base", 3)))
    assert (str(lost), lost.side, lost.iteration) == ("text", "base", 3)


def test_memory_does_not_grow_with_the_iterations() -> None:
    """What one iteration computed is gone when the next one is compared."""
    alive: list[int] = []

    def note(weight: Tensor, x: Tensor) -> Tensor:
        alive.append(sum(type(one) is torch.Tensor and one.numel() == 1234 for one in gc.get_objects()))
        return weight[0] * x

    compared(note, note, torch.ones(1234), iterations=5)
    assert max(alive[4:]) <= max(alive[2:4])
