"""compare_modules: both sides have the same numbers, nothing is changed, and errors say where."""

import gc
import pickle
import random
from typing import Any

import numpy as np
import pytest
import torch
from numerics_models import MODELS, compared, names, only
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

from det_callbacks import ModuleRunError, NothingComparedError, NumericsError, compare_modules, enforce_determinism
from det_callbacks.errors import DetCallbacksError

pytestmark = pytest.mark.usefixtures("single_thread")


def test_both_sides_draw_the_same_numbers() -> None:
    def noisy(weight: Tensor, x: Tensor) -> Tensor:
        return weight * torch.rand(4) * random.random() * np.random.rand()

    assert compared(noisy, noisy, torch.ones(4), iterations=3).equal
    seeded = compared(noisy, noisy, torch.ones(4), seed=2**32 - 1)
    assert seeded.equal


def test_a_module_against_itself_with_state_of_its_own() -> None:
    counted: list[tuple[int, int]] = []

    class Counting(nn.Module):
        """Keeps state in an attribute, a list, a tensor, a buffer that it replaces, and a generator."""

        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(4))
            self.register_buffer("mean", torch.zeros(4))
            self.generator = torch.Generator().manual_seed(3)
            self.cache = torch.zeros(4)
            self.seen: list[float] = []

        def forward(self, x: Tensor) -> Tensor:
            self.seen.append(1.0)
            self.mean = self.mean * 0.9 + self.weight.detach() * len(self.seen)
            self.cache += 1
            counted.append((len(self.seen), int(self.cache[0])))
            return self.weight * x + torch.randn(4, generator=self.generator) + self.cache + sum(self.seen)

    module = Counting()
    mean, state = module.mean, module.generator.get_state()
    report = compare_modules(module, module, torch.ones(4), iterations=3)
    assert report.equal, str(report)
    assert counted == [(1, 1), (1, 1), (2, 2), (2, 2), (3, 3), (3, 3)]  # each side goes on from its own
    assert module.seen == []
    assert module.mean is mean
    assert torch.equal(module.cache, torch.zeros(4))
    assert torch.equal(module.generator.get_state(), state)


def state_of(model: nn.Module) -> dict[str, Any]:
    return {
        "tensors": [(name, id(one), one.tolist()) for name, one in model.state_dict(keep_vars=True).items()],
        "grads": [None if one.grad is None else one.grad.tolist() for one in model.parameters()],
        "training": [part.training for part in model.modules()],
        "hooks": [len(part._forward_hooks) for part in model.modules()],
        "generators": (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()),
        "flags": (torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.get_num_threads()),
    }


@pytest.mark.parametrize("fails_in", [None, "loss"])
def test_everything_is_as_before(fails_in: str | None) -> None:
    model, inputs = MODELS["convolutions"]()
    model.eval()
    model.net[0].train()
    model(inputs).sum().backward()
    before = state_of(model)
    calls = 0

    def loss(output: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        if fails_in == "loss" and calls == 4:
            raise RuntimeError("loss failed")
        return output.square().mean()

    if fails_in is None:
        assert compare_modules(model, model, inputs, iterations=2, loss=loss, optimizer=torch.optim.AdamW).equal
    else:
        with pytest.raises(
            ModuleRunError, match=r"The control \(ConvNet\) raised RuntimeError in iteration 1"
        ) as caught:
            compare_modules(model, model, inputs, iterations=2, loss=loss)
        assert (caught.value.side, caught.value.iteration, caught.value.exit_code) == ("control", 1, 2)
        assert isinstance(caught.value.__cause__, RuntimeError)
    assert state_of(model) == before


def test_contexts_are_in_force_and_put_back() -> None:
    seen: list[tuple[bool, int]] = []

    def note(weight: Tensor, x: Tensor) -> Tensor:
        seen.append((torch.are_deterministic_algorithms_enabled(), torch.get_num_threads()))
        return weight * x

    threads = torch.get_num_threads()
    one, two = ({"deterministic_algorithms": word, "num_threads": n} for word, n in (("error", 2), ("disabled", 1)))
    contexts = {"base_context": lambda: enforce_determinism(one), "control_context": lambda: enforce_determinism(two)}
    compared(note, note, torch.ones(4), iterations=1, **contexts)
    assert seen == [(True, 2), (False, 1)]
    assert torch.get_num_threads() == threads
    assert not torch.are_deterministic_algorithms_enabled()


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
    assert report.first.name == "blocks.0.self_attn[0]"
    half = compare_modules(
        model,
        model,
        inputs,
        iterations=2,
        control_context=lambda: torch.autocast("cpu", torch.bfloat16),
        check_dtype=False,
        rtol=1.6e-2,
        atol=1.6e-2,
    )
    assert half.close, str(half)
    assert "bfloat16" in only(half, "output", "output").control
    assert "float32" in only(half, "gradient", "head.weight").control


def ran(module: nn.Module) -> nn.Module:
    module(torch.ones(1, 4))
    return module


def compiled_in_place(module: nn.Module) -> nn.Module:
    module.compile(backend="eager")
    return module


def test_wrong_arguments_are_refused() -> None:
    layer, x = nn.Linear(4, 4), torch.ones(4)
    for error, text, options in (
        (ValueError, "iterations", {"iterations": 0}),
        (ValueError, "seed", {"seed": -1}),
        (ValueError, "lists 2 for 3 iterations", {"inputs": [x, x], "iterations": 3}),
        (TypeError, "control is", {"control": print}),
        (ValueError, "given together", {"rtol": 1e-3}),
        (ValueError, "not negative", {"rtol": -1.0, "atol": 0.0}),
        (ValueError, "finite", {"rtol": 0.0, "atol": float("inf")}),
        (ValueError, "cannot be copied", {"control": ran(nn.utils.spectral_norm(nn.Linear(4, 4)))}),
        (ValueError, "compiled in place", {"control": compiled_in_place(nn.Linear(4, 4))}),
        (ModuleRunError, "uninitialized parameter", {"control": nn.LazyLinear(3)}),
        (ModuleRunError, "no ordinary strided tensor", {"control": nn.Linear(4, 4, device="meta")}),
        (DetCallbacksError, "list of strings", {"modules": "net.*"}),
    ):
        arguments = {"base": layer, "control": layer, "inputs": x, **options}
        with pytest.raises(error, match=text):
            compare_modules(**arguments)

    class Silent(nn.Module):
        def forward(self, x: Tensor) -> list[Tensor]:
            return []

    with pytest.raises(NothingComparedError):
        compare_modules(Silent(), Silent(), x)


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

    compared(note, note, torch.ones(1234), iterations=3)
    assert max(alive[4:]) <= max(alive[2:4])


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.Linear(8, 8))

    def forward(self, x: Tensor) -> Any:
        return checkpoint(self.body, x, use_reentrant=False)


ODD = {
    "weight_norm": lambda: nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(8, 8)), nn.Tanh()),
    "checkpointed": Checkpointed,
    "lstm": lambda: nn.LSTM(8, 4),
    "fast path": lambda: nn.TransformerEncoderLayer(8, 2, batch_first=True).eval(),
}


@pytest.mark.parametrize("name", ODD)
def test_odd_modules_against_themselves(name: str) -> None:
    module = ODD[name]()
    x = torch.randn(3, 5, 8)
    before = state_of(module)
    report = compare_modules(module, module, x, iterations=3, optimizer=torch.optim.AdamW)
    assert report.equal, str(report)
    assert names(report, "gradient", 2)
    assert state_of(module) == before
    weights = [found for found in report.comparisons if found.phase == "parameter"]
    assert len(weights) == 3 * len(list(module.parameters()))


def test_it_trains_in_inference_mode_too() -> None:
    model, inputs = MODELS["mlp"]()
    with torch.inference_mode():
        report = compare_modules(model, model, inputs + 0, iterations=2)
        assert torch.is_inference_mode_enabled()
    assert report.equal
    assert names(report, "gradient")
