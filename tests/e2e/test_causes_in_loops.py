"""Faults planted in loops without a Trainer: the verdict says what happened, and what to do."""

import random
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from loops import Loop, Net, samples, seed, train
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint

from det_callbacks import DivergenceError
from det_callbacks.verdict import Verdict


def verify(
    make: Callable[[], Loop], folder: Path, reference: Callable[[], Loop] = Loop, **arguments: Any
) -> Verdict:
    train(reference, folder / "reference", mode="record", **arguments)
    with pytest.raises(DivergenceError) as caught:
        train(make, folder / "reference", current=folder / "current")
    return caught.value.verdict


def in_step_2(plant: Callable[[], object], *, before_update: bool) -> type[Loop]:
    class Planted(Loop):
        def train_step(self, batch: Any) -> None:
            self.loss(batch).backward()
            if before_update and self.num_done == 2:
                plant()
            self.optimizers[0].step()
            self.optimizers[0].zero_grad()
            if not before_update and self.num_done == 2:
                plant()

    return Planted


@pytest.mark.parametrize("before_update", [True, False])
def test_a_seed_at_the_end_of_a_step_is_no_draw(before_update, tmp_path):
    verdict = verify(in_step_2(lambda: torch.manual_seed(5), before_update=before_update), tmp_path)
    assert (verdict.cause, verdict.first_divergence.step) == ("rng", 2)
    assert "seeded with 11 in the reference and 5 in the current run" in verdict.explanation
    assert "draws from the generator" not in verdict.explanation


def test_a_draw_whose_state_is_restored_is_an_extra_draw(tmp_path):
    def draw() -> None:
        with torch.random.fork_rng():
            torch.rand(2)

    verdict = verify(in_step_2(draw, before_update=False), tmp_path)
    assert (verdict.cause, verdict.first_divergence.op) == ("rng", "aten.rand.default")
    assert "Remove the draw, or record the reference again" in verdict.explanation
    assert "Seed this generator" not in verdict.explanation


def test_a_weight_of_one_element_is_not_said_to_have_equal_elements(tmp_path):
    class Scaled(Net):
        def __init__(self, scale: float) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.full((1,), scale))

        def forward(self, inputs: Tensor) -> Tensor:
            return super().forward(inputs) * self.scale

    def loop(scale: float) -> Loop:
        torch.manual_seed(0)
        return Loop(Scaled(scale))

    verdict = verify(lambda: loop(2.0), tmp_path, lambda: loop(1.0))
    assert verdict.cause == "initial_weights"
    assert "All elements of" not in verdict.explanation
    assert "check how scale is initialised or loaded" in verdict.explanation


class Alternating(Loop):
    """An optimizer for the first layers and one for the last;
    ``calls`` has the optimizers of each step.
    """

    def __init__(self, calls: Mapping[int, Sequence[int]]) -> None:
        super().__init__()
        last = self.model.last.parameters()  # type: ignore[union-attr, operator]
        first = [one for name, one in self.model.named_parameters() if not name.startswith("last.")]
        self.optimizers = [torch.optim.SGD(first, lr=0.1), torch.optim.Adam(last, lr=0.1)]
        self.calls = calls

    def train_step(self, batch: Any) -> None:
        self.loss(batch).backward()
        for number in self.calls.get(self.num_done, (0, 1)):
            self.optimizers[number].step()
        for optimizer in self.optimizers:
            optimizer.zero_grad()


class Repeating(Loop):
    def __init__(self, times: int) -> None:
        super().__init__()
        self.times = times

    def train_step(self, batch: Any) -> None:
        self.loss(batch).backward()
        for _ in range(self.times if self.num_done == 2 else 1):
            self.optimizers[0].step()
        self.optimizers[0].zero_grad()


UPDATED = "updated nothing in the {}, and got gradients in the {}"


@pytest.mark.parametrize("level", ["op", "state"])
@pytest.mark.parametrize(
    ("reference", "current", "what"),
    [
        ((0, 1), (1,), f"optimizer 0 {UPDATED.format('current run', 'reference')}"),
        ((0, 1), (0,), f"optimizer 1 {UPDATED.format('current run', 'reference')}"),
        ((1,), (0, 1), f"optimizer 0 {UPDATED.format('reference', 'current run')}"),
        (
            (0, 1),
            (1, 0, 1),
            (
                "the optimizers got their gradients in the order 0, 1 in the reference and 1, 0, 1 "
                "in the"
            ),
        ),
        (
            (0,),
            (1,),
            (
                "the optimizers got their gradients in the order 0 in the reference and 1 in the "
                "current run"
            ),
        ),
    ],
)
def test_an_optimizer_that_one_run_does_not_step_is_named(
    reference, current, what, level, tmp_path
):
    verdict = verify(
        partial(Alternating, {2: current}),
        tmp_path,
        reference=partial(Alternating, {2: reference}),
        level=level,
    )
    assert (verdict.cause, verdict.first_divergence.step) == ("optimizer", 2), verdict.explanation
    assert verdict.explanation.startswith(f"Step 2: {what}"), verdict.explanation
    assert "Check what calls optimizer.step()" in verdict.explanation


def test_a_second_call_of_step_is_counted(tmp_path):
    verdict = verify(partial(Repeating, 2), tmp_path, reference=partial(Repeating, 1))
    assert verdict.cause == "optimizer"
    said = (
        "Step 2: the optimizer got its gradients 1 time in the reference and 2 times in the "
        "current run. Check"
    )
    assert verdict.explanation.startswith(said), verdict.explanation


class Checkpointed(Loop):
    """Recomputes the first layer and its dropout: "restored" or "drawn again"
    (preserve_rng_state), or not at all.
    """

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how

    def loss(self, batch: Any) -> Tensor:
        inputs, labels = batch
        model: Any = self.model

        def block(one: Tensor) -> Tensor:
            return model.drop(torch.relu(model.first(one)))

        if self.how == "not at all":
            return cross_entropy(model.last(block(inputs)), labels)
        preserve = self.how == "restored"
        hidden = checkpoint(block, inputs, use_reentrant=False, preserve_rng_state=preserve)
        return cross_entropy(model.last(hidden), labels)


@pytest.mark.parametrize("other", ["restored", "not at all"])
@pytest.mark.parametrize("is_in_reference", [False, True])
def test_a_recomputation_that_draws_again_is_named(is_in_reference, other, tmp_path):
    reference, current = (
        partial(Checkpointed, how)
        for how in ("drawn again", other)[:: 1 if is_in_reference else -1]
    )
    verdict = verify(current, tmp_path, reference=reference)
    assert (verdict.cause, verdict.first_divergence.step) == ("rng", 0), verdict.explanation
    said = "Step 0, backward: activation checkpointing ran aten.bernoulli_.float in drop ("
    assert verdict.explanation.startswith(said), verdict.explanation
    side = "reference" if is_in_reference else "current run"
    assert (
        f"again in the {side}, and it gave other bits than in the forward pass"
        in verdict.explanation
    )
    assert "Do not pass preserve_rng_state=False" in verdict.explanation


@pytest.mark.parametrize("is_in_reference", [False, True])
def test_a_recomputation_with_the_same_bits_is_all_that_differs(is_in_reference, tmp_path):
    reference, current = (
        partial(Checkpointed, how)
        for how in ("restored", "not at all")[:: 1 if is_in_reference else -1]
    )
    verdict = verify(current, tmp_path, reference=reference)
    assert verdict.cause == "structure", verdict.explanation
    side = "reference" if is_in_reference else "current run"
    assert f"only the {side} recomputes activations" in verdict.explanation
    assert "everything that both runs have matches" in verdict.explanation


def test_a_recomputation_from_what_changed_since_is_no_draw(tmp_path):
    class Changed(Checkpointed):
        """The checkpointed function reads a tensor that is changed before the backward pass."""

        def loss(self, batch: Any) -> Tensor:
            inputs, labels = batch
            model: Any = self.model
            scale = torch.ones(1)
            hidden = checkpoint(
                lambda one: model.first(one) * scale.exp(), inputs, use_reentrant=False
            )
            loss = cross_entropy(model.last(hidden), labels)
            if self.how == "changed":
                scale.add_(1)
            return loss

    verdict = verify(partial(Changed, "changed"), tmp_path, reference=partial(Changed, "restored"))
    assert verdict.cause != "rng"


def test_a_seed_after_a_draw_is_not_in_place_before_the_step(tmp_path):
    """Without the evidence too, the state that the step's first draw had is recorded."""

    class DrawsTwice(Loop):
        def __init__(self, *, seeds: bool) -> None:
            super().__init__()
            self.seeds = seeds

        def loss(self, batch: Any) -> Tensor:
            loss = super().loss(batch)
            if self.seeds and self.num_done == 2:
                torch.manual_seed(5)
            return loss * torch.rand(())

    verdict = verify(
        partial(DrawsTwice, seeds=True), tmp_path, reference=partial(DrawsTwice, seeds=False)
    )
    assert (verdict.cause, verdict.first_divergence.step) == ("rng", 2)
    assert (
        "code in the step changed it before a later draw, without a recorded op"
        in verdict.explanation
    )


class Dropping(nn.Module):
    """Python draws for each layer whether it runs; the bug is a layer that always runs."""

    def __init__(self, always: int = -1) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(12, 12) for _ in range(6))
        self.last, self.always = nn.Linear(12, 3), always

    def forward(self, inputs: Tensor) -> Tensor:
        for number, layer in enumerate(self.layers):
            if number == self.always or random.random() < 0.5:
                inputs = inputs + layer(inputs)
        return self.last(inputs)


def test_a_branch_that_draws_otherwise_is_the_cause_and_not_the_generator(tmp_path):
    def loop(always: int = -1) -> Loop:
        seed()
        return Loop(Dropping(always))

    verdict = verify(lambda: loop(1), tmp_path, loop)
    first = verdict.first_divergence
    assert (verdict.cause, first.op, first.kind) == ("forward", "aten.addmm.default", "missing")
    assert first.module.startswith("layers.")
    assert first.is_origin is None
    assert [entry.kind for entry in verdict.trail] == ["op"]
    assert "compare the condition that decides it" in verdict.explanation
    assert "give it a separate generator" not in verdict.explanation


def test_draws_before_the_model_is_built_are_not_said_to_be_another_seed(tmp_path):
    def loop(number: int) -> Loop:
        seed()
        torch.rand(number)
        made = Loop.__new__(Loop)
        with mock.patch("loops.seed"):
            made.__init__(Net())
        return made

    verdict = verify(lambda: loop(3), tmp_path, lambda: loop(0))
    assert verdict.cause == "initial_weights"
    assert "a different number of draws from the same seed" in verdict.explanation
    assert "Set the same seed" not in verdict.explanation


class OfSlices(Loop):
    """Without a loader, whose start would draw."""

    def run(self, run: Any = None, **_: Any) -> Loop:
        for number in range(6):
            batch = samples()[4 * number : 4 * number + 4]
            with run.step(batch):
                self.train_step(batch)
        return self


def test_draws_before_the_fit_are_not_said_to_be_in_the_step(tmp_path):
    def loop() -> Loop:
        made = OfSlices()
        torch.rand(3)
        return made

    verdict = verify(loop, tmp_path, OfSlices)
    assert (verdict.cause, verdict.first_divergence.name) == ("rng", "torch.cpu")
    assert "a different number of draws from the same seed" in verdict.explanation
    assert "code in the step changed it" not in verdict.explanation


class Skipping(Loop):
    def run(self, run: Any = None, **_: Any) -> Loop:
        for number, batch in enumerate(run.batches(self.loader)):
            if number != 2:
                with run.step(batch):
                    self.train_step(batch)
        return self


def test_a_batch_that_is_left_out_is_told(tmp_path):
    verdict = verify(Skipping, tmp_path)
    assert (verdict.cause, verdict.first_divergence.step) == ("data_order", 2)
    assert "It holds the samples of step 3 of the reference" in verdict.explanation
    assert "leaves out or repeats a step" in verdict.explanation
