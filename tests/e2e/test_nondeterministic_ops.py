"""Ops without a deterministic implementation: named with module and line, refused, let through or warned of.

``Tensor.put_`` without accumulation is such an op on the CPU.
"""

import json
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from faults import OnGradient
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from trainers import quiet_trainer

from det_callbacks import DeterminismCallback, DeterminismSettings, enforce_determinism
from det_callbacks.errors import NondeterministicOpError, NondeterministicOpWarning

PLACES = [("forward", "op"), ("backward", "state"), ("test", "op")]
PUT = "aten.put_.default"
NUM_STEPS = 2


def put(values: Tensor) -> Tensor:
    return values.clone().put_(torch.tensor([0]), torch.ones(1))


class Decoder(nn.Module):
    def __init__(self, place: str) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.place = place

    def forward(self, inputs: Tensor, stage: str) -> Tensor:
        outputs = self.linear(inputs)
        if (self.place, stage) == ("forward", "fit"):
            return outputs * put(outputs.detach())
        if (self.place, stage) == ("backward", "fit"):
            return OnGradient.apply(outputs, put)
        return put(outputs) if self.place == stage else outputs


class Model(pl.LightningModule):
    def __init__(self, place: str, decoder: type[Decoder]) -> None:
        super().__init__()
        self.encoder = nn.Linear(4, 4)
        self.decoder = decoder(place)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.decoder(self.encoder(batch[0]), "fit").sum()

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.log("tested", self.decoder(self.encoder(batch[0]), "test").sum())  # a test that logs nothing is refused

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def settings(algorithms: str = "error", *allow: str) -> DeterminismSettings:
    return DeterminismSettings(seed=0, deterministic_algorithms=algorithms, allow=allow)


def train(place: str, callback: DeterminismCallback | None, *, decoder: type[Decoder] = Decoder) -> Model:
    """Fit or test, as the place of the op needs; the settings must be in force already."""
    model = Model(place, decoder)
    trainer = quiet_trainer(*([] if callback is None else [callback]))
    inputs = torch.linspace(-1, 1, NUM_STEPS * 4 * 4).view(-1, 4)
    loader = DataLoader(TensorDataset(inputs), batch_size=4)
    if place == "test":
        trainer.test(model, loader, verbose=False)
    else:
        trainer.fit(model, loader)
    return model


def watched(
    folder: Path, place: str, wanted: DeterminismSettings, *, decoder: type[Decoder] = Decoder, level: str = "op"
) -> Model:
    """Record a training; flags and filters must be what they were, whatever comes of it."""
    with enforce_determinism(wanted):
        flags, filters = torch.get_deterministic_debug_mode(), list(warnings.filters)
        callback = DeterminismCallback(folder, mode="record", settings=wanted, level=level)
        try:
            return train(place, callback, decoder=decoder)
        finally:
            assert torch.get_deterministic_debug_mode() == flags
            assert list(warnings.filters) == filters


def listed(folder: Path) -> list[dict[str, Any]]:
    return json.loads((folder / "rank-00000" / "nondeterministic_ops.json").read_text())


@pytest.fixture
def heard() -> Iterator[list[warnings.WarningMessage]]:
    """The warnings that come up to the user, each as often as it does."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield caught


def of_ops(heard: list[warnings.WarningMessage]) -> list[str]:
    return [str(item.message) for item in heard if item.category is NondeterministicOpWarning]


def of_torch(heard: list[warnings.WarningMessage]) -> list[str]:
    texts = [str(item.message) for item in heard if item.category is UserWarning]
    return [text for text in texts if "put_ does not have a deterministic impl" in text]


class Formula(Decoder):
    """Its backward is torch's own formula of ``put_``, which calls ``put``."""

    def forward(self, inputs: Tensor, stage: str) -> Tensor:
        return put(self.linear(inputs))


class Hooked(Decoder):
    def forward(self, inputs: Tensor, stage: str) -> Tensor:
        outputs = self.linear(inputs)
        outputs.register_hook(put)
        return outputs


@pytest.mark.parametrize(
    ("decoder", "level", "op", "allowed", "module", "line"),
    [
        (Formula, "state", "aten.put.default", PUT, "decoder", "torch/"),
        (Hooked, "op", PUT, "x.y", "decoder.linear", "in put"),
    ],
)
def test_backward_of_torch_and_of_a_hook(
    decoder: Any, level: str, op: str, allowed: str, module: str, line: str, tmp_path: Path
) -> None:
    with pytest.raises(NondeterministicOpError) as refused:
        watched(tmp_path / "run", "", settings("error", allowed), decoder=decoder, level=level)
    assert (refused.value.op, refused.value.module) == (op, module)
    assert line in str(refused.value)
    assert "(backward)" in str(refused.value)


def test_a_warning_made_an_error_stops_at_the_op(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", NondeterministicOpWarning)
        with pytest.raises(NondeterministicOpWarning, match="in decoder at"):
            watched(tmp_path / "run", "forward", settings("warn"))
    assert not (tmp_path / "run" / "run.json").exists()


def test_the_same_allow_list_matches_and_another_is_named(tmp_path: Path) -> None:
    watched(tmp_path / "run", "forward", settings("error", PUT))
    verdicts = []
    for allow in (PUT, f"decoder:{PUT}"):
        wanted = settings("error", allow)
        callback = DeterminismCallback(tmp_path / "run", current=tmp_path / allow[:4], settings=wanted)
        with enforce_determinism(wanted):
            train("forward", callback)
        verdicts.append(callback.verdict)
    same, other = verdicts
    assert same.verdict == other.verdict == "match"
    assert "settings.allow" not in {difference.name for difference in same.environment}
    (difference,) = [difference for difference in other.environment if difference.name == "settings.allow"]
    assert (difference.reference, difference.current) == ([PUT], [f"decoder:{PUT}"])
    (found,) = listed(tmp_path / PUT[:4])
    assert (found["op"], found["num_calls"]) == (PUT, NUM_STEPS)


class Harmless(Decoder):
    """Ops that have no deterministic implementation on CUDA, and one on the CPU."""

    def forward(self, inputs: Tensor, stage: str) -> Tensor:
        outputs = self.linear(inputs)
        product = torch.bmm(torch.ones(1, 4, 4).to_sparse(), outputs.unsqueeze(0))
        return outputs + product.squeeze(0) + outputs.kthvalue(2, dim=1, keepdim=True).values


def test_ops_that_are_deterministic_on_the_cpu_are_not_refused(tmp_path: Path) -> None:
    watched(tmp_path / "run", "", settings(), decoder=Harmless, level="state")
    assert not (tmp_path / "run" / "rank-00000" / "nondeterministic_ops.json").exists()


@pytest.mark.parametrize(("place", "level"), PLACES)
def test_it_is_refused_let_through_or_warned_of(
    place: str, level: str, tmp_path: Path, heard: list[warnings.WarningMessage]
) -> None:
    phase = "backward" if place == "backward" else "forward"
    where = f"test_nondeterministic_ops.py:{put.__code__.co_firstlineno + 1} in put"
    with pytest.raises(NondeterministicOpError) as refused:
        watched(tmp_path / "refused", place, settings(), level=level)
    error = refused.value
    assert (error.op, error.module, error.exit_code) == (PUT, "decoder", 2)
    assert str(error).startswith(f"{PUT} in decoder at ")
    assert f"{where} ({phase}) has no deterministic implementation" in str(error)
    assert f"DeterminismSettings(allow=('decoder:{PUT}',))" in str(error)
    watched(tmp_path / "allowed", place, settings("error", f"{phase}/decoder*:{PUT}"), level=level)
    assert of_ops(heard) == of_torch(heard) == []
    with pytest.raises(NondeterministicOpError, match="in decoder at"):
        watched(tmp_path / "elsewhere", place, settings("error", f"encoder:{PUT}", f"optimizer/{PUT}"), level=level)
    seen = watched(tmp_path / "warned", place, settings("warn"), level=level)
    (message,) = of_ops(heard)
    assert message.startswith(f"{PUT} in decoder at ")
    assert where in message
    assert of_torch(heard) == []
    if place != "test":
        assert not (tmp_path / "refused" / "run.json").exists()
        for name, is_allowed, num_calls in (("allowed", True, 2), ("warned", False, 2)):
            (found,) = listed(tmp_path / name)
            assert (found["op"], found["module"], found["phase"]) == (PUT, "decoder", phase)
            assert (found["is_allowed"], found["num_calls"]) == (is_allowed, num_calls)
            assert found["source"][0].endswith("in put")
    with enforce_determinism(settings("warn")):
        put(torch.zeros(2))
        assert len(of_torch(heard)) == 1, "torch is heard again after the fit"
        unseen = train(place, None)
    for one, other in zip(seen.parameters(), unseen.parameters(), strict=True):
        assert torch.equal(one, other), "the watch changes no bit"


class Wrong(Decoder):
    """Makes another error than that of an op without a deterministic implementation."""

    def forward(self, inputs: Tensor, stage: str) -> Tensor:
        torch.ones(4).put_(torch.tensor([99]), torch.ones(1), accumulate=True)
        return inputs


@pytest.mark.parametrize("algorithms", ["error", "warn"])
@pytest.mark.parametrize("level", ["op", "state"])
def test_other_errors_pass_as_they_are_and_the_flags_go_back(algorithms: str, level: str, tmp_path: Path) -> None:
    with pytest.raises(IndexError):
        watched(tmp_path / "run", "", settings(algorithms), decoder=Wrong, level=level)
