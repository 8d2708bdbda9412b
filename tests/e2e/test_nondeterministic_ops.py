"""Ops without a deterministic implementation: named with module and line, refused,
let through or warned of.

``Tensor.put_`` without accumulation is such an op on the CPU.
"""

import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from faults import OnGradient
from fits import FEATURES, Classifier, Samples
from torch import Tensor, nn
from torch.utils.data import DataLoader
from trainers import has_same_weights, quiet_trainer

from det_callbacks import DeterminismCallback, DeterminismSettings, enforce_determinism
from det_callbacks.errors import NondeterministicOpError, NondeterministicOpWarning

PUT = "aten.put_.default"


def put(values: Tensor) -> Tensor:
    return values.clone().put_(torch.tensor([0]), torch.ones(1))


def harmless(outputs: Tensor) -> Tensor:
    return outputs + outputs.kthvalue(2, dim=1, keepdim=True).values


def in_forward(outputs: Tensor) -> Tensor:
    return harmless(outputs) * put(outputs.detach())


def in_backward(outputs: Tensor) -> Tensor:
    return OnGradient.apply(harmless(outputs), put)


def in_hook(outputs: Tensor) -> Tensor:
    outputs.register_hook(put)
    return outputs


def wrong(outputs: Tensor) -> Tensor:
    torch.ones(4).put_(torch.tensor([99]), torch.ones(1), accumulate=True)
    return outputs


class Decoder(nn.Module):
    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.linear = nn.Linear(FEATURES, 16)
        self.function = function

    def forward(self, inputs: Tensor) -> Tensor:
        return self.function(self.linear(inputs))


class Model(Classifier):
    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.decoder = Decoder(function)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.last(self.decoder(inputs))

    def test_step(self, batch, batch_idx):
        # a test that logs nothing is refused
        self.log("tested", self.training_step(batch, batch_idx))


def settings(algorithms: str = "error", *allow: str) -> DeterminismSettings:
    return DeterminismSettings(seed=0, deterministic_algorithms=algorithms, allow=allow)


def train(function: Any, *callbacks: pl.Callback, stage: str = "fit") -> Model:
    model = Model(function)
    getattr(quiet_trainer(*callbacks), stage)(model, DataLoader(Samples(), batch_size=16))
    return model


def watched(
    folder: Path, function: Any, wanted: Any, *, level: str = "op", stage: str = "fit"
) -> Model:
    with enforce_determinism(wanted):
        flags, filters = torch.get_deterministic_debug_mode(), list(warnings.filters)
        try:
            callback = DeterminismCallback(folder, mode="record", settings=wanted, level=level)
            return train(function, callback, stage=stage)
        finally:
            assert torch.get_deterministic_debug_mode() == flags
            assert list(warnings.filters) == filters


@pytest.mark.parametrize(
    ("function", "level", "op", "module", "line"),
    [
        # torch's own formula of the backward of put_ calls put
        (put, "state", "aten.put.default", "decoder", "torch/"),
        (in_hook, "op", PUT, "decoder.linear", "in put"),
    ],
)
def test_backward_of_torch_and_of_a_hook(function, level, op, module, line, tmp_path):
    with pytest.raises(NondeterministicOpError, match=rf"{line}.* \(backward\)") as refused:
        watched(tmp_path / "run", function, settings("error", f"forward/{PUT}"), level=level)
    assert (refused.value.op, refused.value.module) == (op, module)


@pytest.mark.parametrize(
    ("function", "level", "stage"),
    [(in_forward, "op", "fit"), (in_backward, "state", "fit"), (put, "op", "test")],
)
def test_it_is_refused_let_through_or_warned_of(function, level, stage, tmp_path, recwarn):
    def heard(category: type[Warning], text: str) -> list[str]:
        texts = [str(item.message) for item in recwarn if item.category is category]
        return [found for found in texts if text in found]

    def run(name: str, wanted: DeterminismSettings) -> Model:
        return watched(tmp_path / name, function, wanted, level=level, stage=stage)

    phase = "backward" if function is in_backward else "forward"
    where = f"test_nondeterministic_ops.py:{put.__code__.co_firstlineno + 1} in put"
    with pytest.raises(NondeterministicOpError) as refused:
        run("refused", settings())
    error = refused.value
    assert (error.op, error.module, error.exit_code) == (PUT, "decoder", 2)
    assert str(error).startswith(f"{PUT} in decoder at ")
    assert f"{where} ({phase}) has no deterministic implementation" in str(error)
    assert f"DeterminismSettings(allow=('decoder:{PUT}',))" in str(error)
    run("allowed", settings("error", f"{phase}/decoder*:{PUT}"))
    assert not heard(NondeterministicOpWarning, "") + heard(UserWarning, "put_ does not")
    with pytest.raises(NondeterministicOpError, match="in decoder at"):
        run("elsewhere", settings("error", f"last:{PUT}", f"optimizer/{PUT}"))
    seen = run("warned", settings("warn"))
    (message,) = heard(NondeterministicOpWarning, "")
    assert message.startswith(f"{PUT} in decoder at ")
    assert where in message
    assert not heard(UserWarning, "put_ does not")
    if stage == "fit":
        assert not (tmp_path / "refused" / "run.json").exists()
        for name in ("allowed", "warned"):
            (found,) = json.loads(
                (tmp_path / name / "rank-00000" / "nondeterministic_ops.json").read_text()
            )
            assert (found["op"], found["module"], found["phase"]) == (PUT, "decoder", phase)
            assert (found["is_allowed"], found["num_calls"]) == (name == "allowed", 2)
            assert found["source"][0].endswith("in put")
    with enforce_determinism(settings("warn")):
        put(torch.zeros(2))
        assert len(heard(UserWarning, "put_ does not")) == 1, "torch is heard again after the fit"
        assert has_same_weights(seen, train(function, stage=stage)), "the watch changes no bit"


def test_other_errors_pass_as_they_are_and_the_flags_go_back(tmp_path):
    with pytest.raises(IndexError):
        watched(tmp_path / "run", wrong, settings("warn"), level="state")
