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
from tiers import rest_slow
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from trainers import quiet_trainer

from det_callbacks import (
    DeterminismCallback,
    DeterminismSettings,
    enforce_determinism,
)
from det_callbacks.errors import NondeterministicOpError, NondeterministicOpWarning
from det_callbacks.runs.store import Run
from det_callbacks.trace.nondeterministic_ops import NondeterministicOps

PLACES = ("forward", "backward", "validation", "test", "predict")
PUT = "aten.put_.default"
LEVELS = ("op", "state")
NUM_STEPS = 2


def put(values: Tensor) -> Tensor:
    return values.clone().put_(torch.tensor([0]), torch.ones(1))


class Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.place = ""

    def forward(self, inputs: Tensor, place: str) -> Tensor:
        outputs = self.linear(inputs)
        if self.place == place == "forward":
            outputs = outputs * put(outputs.detach())
        if self.place == "backward" and place == "forward":
            outputs = OnGradient.apply(outputs, put)
        if self.place == place != "forward":
            outputs = put(outputs)
        return outputs


class Model(pl.LightningModule):
    def __init__(self, place: str) -> None:
        super().__init__()
        self.encoder = nn.Linear(4, 4)
        self.decoder = Decoder()
        self.decoder.place = place

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.decoder(self.encoder(batch[0]), "forward").sum()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.decoder(self.encoder(batch[0]), "validation")

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.log("tested", self.decoder(self.encoder(batch[0]), "test").sum())  # a test that logs nothing is refused

    def predict_step(self, batch: Any, batch_idx: int) -> None:
        self.decoder(self.encoder(batch[0]), "predict")

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def settings(algorithms: str = "error", *allow: str) -> DeterminismSettings:
    return DeterminismSettings(seed=0, deterministic_algorithms=algorithms, allow=allow)


def train(place: str, callback: DeterminismCallback | None, *, model: pl.LightningModule | None = None) -> Model:
    """Fit, test or predict, as the place of the op needs; the settings must be in force already."""
    model = Model(place) if model is None else model
    callbacks = [] if callback is None else [callback]
    trainer = quiet_trainer(*callbacks, num_sanity_val_steps=0)
    inputs = torch.linspace(-1, 1, NUM_STEPS * 4 * 4).view(-1, 4)
    loader = DataLoader(TensorDataset(inputs), batch_size=4)
    if place == "test":
        trainer.test(model, loader, verbose=False)
    elif place == "predict":
        trainer.predict(model, loader)
    else:
        trainer.fit(model, loader, loader)
    return model


def watched(folder: Path, place: str, wanted: DeterminismSettings, *, mode: str = "record", **options: Any) -> Model:
    """Train with a callback; flags and filters must be what they were, whatever comes of it."""
    with enforce_determinism(wanted):
        flags, filters = torch.get_deterministic_debug_mode(), list(warnings.filters)
        try:
            return train(place, DeterminismCallback(folder, mode=mode, settings=wanted, **options))
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
    return [
        str(item.message)
        for item in heard
        if "put_ does not have a deterministic impl" in str(item.message) and item.category is UserWarning
    ]


# error


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("place", PLACES)
def test_it_is_refused_with_module_and_line(place: str, level: str, tmp_path: Path) -> None:
    with pytest.raises(NondeterministicOpError) as refused:
        watched(tmp_path / "run", place, settings(), level=level)
    line = put.__code__.co_firstlineno + 1
    phase = "backward" if place == "backward" else "forward"
    error = refused.value
    assert (error.op, error.module, error.exit_code) == (PUT, "decoder", 2)
    assert str(error).startswith(f"{PUT} in decoder at ")
    assert f"test_nondeterministic_ops.py:{line} in put ({phase}) has no deterministic implementation" in str(error)
    assert f"DeterminismSettings(allow=('decoder:{PUT}',))" in str(error)
    if place not in ("test", "predict"):
        (found,) = listed(tmp_path / "run")
        assert (found["op"], found["module"], found["phase"], found["num_calls"]) == (PUT, "decoder", phase, 1)
        assert found["is_allowed"] is False
        assert not Run.open(tmp_path / "run").is_complete


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("place", PLACES)
def test_what_is_allowed_is_let_through_and_listed(
    place: str, level: str, tmp_path: Path, heard: list[warnings.WarningMessage]
) -> None:
    phase = "backward" if place == "backward" else "forward"
    watched(tmp_path / "run", place, settings("error", f"{phase}/decoder*:{PUT}"), level=level)
    assert of_ops(heard) == of_torch(heard) == []
    if place not in ("test", "predict"):
        (found,) = listed(tmp_path / "run")
        assert (found["op"], found["module"], found["phase"], found["is_allowed"]) == (PUT, "decoder", phase, True)
        assert found["num_calls"] == NUM_STEPS
        assert found["source"][0].endswith("in put")


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("place", rest_slow(PLACES, every=4))
@pytest.mark.parametrize("pattern", ["encoder:{op}", "{other}/{op}", "decoder.linear:{op}", "aten.put.default"])
def test_a_pattern_of_another_place_does_not_let_it_through(
    pattern: str, place: str, level: str, tmp_path: Path
) -> None:
    other = "forward" if place == "backward" else "backward"
    with pytest.raises(NondeterministicOpError, match=r"in decoder at"):
        watched(tmp_path / "run", place, settings("error", pattern.format(op=PUT, other=other)), level=level)


class Formula(Decoder):
    """Its backward is torch's own formula of ``put_``, which calls ``put``."""

    def forward(self, inputs: Tensor, place: str) -> Tensor:
        return put(self.linear(inputs)) if place == "forward" else inputs


class Hooked(Decoder):
    def forward(self, inputs: Tensor, place: str) -> Tensor:
        outputs = self.linear(inputs)
        if outputs.requires_grad:
            outputs.register_hook(put)
        return outputs


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize(
    ("decoder", "op", "is_allowed", "module", "line"),
    [
        (Formula, "aten.put.default", PUT, "decoder", {"op": "in put", "state": "torch/"}),
        (Hooked, PUT, "x.y", "decoder.linear", "in put"),
    ],
)
def test_backward_of_torch_and_of_a_hook(
    decoder: Any, op: str, is_allowed: str, module: str, line: Any, level: str, tmp_path: Path
) -> None:
    with enforce_determinism(settings("error", is_allowed)):
        model = Model("")
        model.decoder = decoder()
        callback = DeterminismCallback(
            tmp_path / "run", mode="record", level=level, settings=settings("error", is_allowed)
        )
        with pytest.raises(NondeterministicOpError) as refused:
            train("", callback, model=model)
    found = listed(tmp_path / "run")[-1]
    assert (refused.value.op, found["op"], found["phase"]) == (op, op, "backward")
    assert found["module"] == module
    assert (line if isinstance(line, str) else line[level]) in found["source"][0]


# warn


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("place", PLACES)
def test_it_is_warned_of_once_per_place_instead_of_torch(
    place: str, level: str, tmp_path: Path, heard: list[warnings.WarningMessage]
) -> None:
    watched(tmp_path / "run", place, settings("warn"), level=level)
    (message,) = of_ops(heard)
    line = put.__code__.co_firstlineno + 1
    assert message.startswith(f"{PUT} in decoder at ")
    assert f"test_nondeterministic_ops.py:{line} in put" in message
    assert of_torch(heard) == []
    if place not in ("test", "predict"):
        (found,) = listed(tmp_path / "run")
        assert (found["module"], found["is_allowed"], found["num_calls"]) == ("decoder", False, NUM_STEPS)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("place", PLACES)
def test_of_what_is_not_caught_torch_itself_is_heard(
    place: str, level: str, tmp_path: Path, heard: list[warnings.WarningMessage], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(NondeterministicOps, "may_warn", lambda self, base: False)
    watched(tmp_path / "run", place, settings("warn"), level=level)
    assert of_ops(heard) == []
    assert len(of_torch(heard)) == NUM_STEPS


@pytest.mark.parametrize("level", LEVELS)
def test_torch_is_heard_again_after_the_fit(level: str, tmp_path: Path, heard: list[warnings.WarningMessage]) -> None:
    watched(tmp_path / "run", "forward", settings("warn"), level=level)
    with enforce_determinism(settings("warn")):
        put(torch.zeros(2))
    assert len(of_torch(heard)) == 1


def test_a_warning_made_an_error_stops_at_the_op(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", NondeterministicOpWarning)
        with pytest.raises(NondeterministicOpWarning, match="in decoder at"):
            watched(tmp_path / "run", "forward", settings("warn"))
    assert listed(tmp_path / "run")[0]["num_calls"] == 1


class Quieted(Decoder):
    """Calls the op where the filters of warnings are others for a while."""

    def forward(self, inputs: Tensor, place: str) -> Tensor:
        with warnings.catch_warnings():
            put(inputs.detach())
        return self.linear(inputs) * put(inputs.detach())


def test_filters_that_come_and_go_during_the_fit_do_not_let_torch_be_heard(
    tmp_path: Path, heard: list[warnings.WarningMessage]
) -> None:
    with enforce_determinism(settings("error", PUT)):
        model = Model("")
        model.decoder = Quieted()
        callback = DeterminismCallback(tmp_path / "run", mode="record", settings=settings("error", PUT))
        train("", callback, model=model)
    assert of_torch(heard) == []


# no difference to the training


# under "warn" both speak of the op; what is said is checked above
# torch's alert, which is what is tried
# torch's alert, which is what is tried
@pytest.mark.filterwarnings("ignore:put_ does not have a deterministic:UserWarning")
@pytest.mark.filterwarnings("ignore::det_callbacks.errors.NondeterministicOpWarning")
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("place", ["forward", "backward", "validation"])
def test_the_watch_changes_no_bit(place: str, level: str, tmp_path: Path) -> None:
    seen = watched(tmp_path / "run", place, settings("warn"), level=level)
    with enforce_determinism(settings("warn")):
        unseen = train(place, None)
        other = train("", None, model=Model("forward" if place == "backward" else "backward"))
    weights = dict(unseen.named_parameters())
    assert all(torch.equal(value, weights[name]) for name, value in seen.named_parameters())
    assert not all(torch.equal(value, weights[name]) for name, value in other.named_parameters())


# verification


@pytest.mark.parametrize("level", LEVELS)
def test_the_same_allow_list_matches_and_another_is_named(level: str, tmp_path: Path) -> None:
    watched(tmp_path / "run", "forward", settings("error", PUT), level=level)
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


# what only sounds alike


class Harmless(Decoder):
    """Ops that have no deterministic implementation on CUDA, and one on the CPU."""

    def forward(self, inputs: Tensor, place: str) -> Tensor:
        outputs = self.linear(inputs)
        dense = outputs.unsqueeze(0)
        product = torch.bmm(torch.ones(1, 4, 4).to_sparse(), dense)
        return outputs + product.squeeze(0) + outputs.kthvalue(2, dim=1, keepdim=True).values


@pytest.mark.parametrize("level", LEVELS)
def test_ops_that_are_deterministic_on_the_cpu_are_not_refused(level: str, tmp_path: Path) -> None:
    with enforce_determinism(settings()):
        model = Model("")
        model.decoder = Harmless()
        train("", DeterminismCallback(tmp_path / "run", mode="record", level=level, settings=settings()), model=model)
    assert not (tmp_path / "run" / "rank-00000" / "nondeterministic_ops.json").exists()
