"""Compiled models under a Trainer: recorded and verified, seen for what they are,
and trained as without us.
"""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import loops
import pytest
import torch
from compiling import COMPILING, NUDGE, net, nobody_follows, opaque_backend, state_of
from fits import Classifier
from lightning.pytorch.callbacks import LambdaCallback
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.utils.data import DataLoader, TensorDataset
from trainers import LIGHTNING_ADVICE, quiet_trainer

from det_callbacks import DeterminismCallback, DivergenceError, SelectionError, Verdict
from det_callbacks.runs.store import Run

pytestmark = [*COMPILING, LIGHTNING_ADVICE, pytest.mark.slow]


class Training(Classifier):
    def __init__(self, network: nn.Module) -> None:
        super().__init__(lr=1e-3)
        self.network = network

    def forward(self, inputs: Tensor) -> Tensor:
        return self.network(inputs)


def whole(training: Training, backend: Any) -> Any:
    return torch.compile(training, backend=backend)


def network(training: Training, backend: Any) -> Any:
    training.network.compile(backend=backend)
    return training


def fit(
    folder: Path,
    mode: str,
    compile_it: Callable[[Training, Any], Any],
    backend: Any,
    *,
    is_nudged: bool = False,
    is_warm: bool = False,
    beside: Sequence[pl.Callback] = (),
    **options: Any,
) -> tuple[Verdict | None, list[Tensor]]:
    torch._dynamo.reset()
    counters.clear()
    torch.manual_seed(0)
    training = Training(net())
    NUDGE["twice"] = is_nudged
    generator = torch.Generator().manual_seed(1)
    data = TensorDataset(
        torch.randn(16, 8, generator=generator), torch.randint(2, (16,), generator=generator)
    )
    compiled = compile_it(training, backend)
    if is_warm:
        state, generator_state = state_of(training), torch.get_rng_state()
        with nobody_follows():
            quiet_trainer(max_steps=4).fit(compiled, DataLoader(data, batch_size=4))
        training.load_state_dict(state)
        torch.set_rng_state(generator_state)
    callback = DeterminismCallback(
        folder / "reference", mode=mode, current=folder / "current", **options
    )
    trainer = quiet_trainer(callback, *beside, default_root_dir=folder, max_steps=4)
    try:
        trainer.fit(compiled, DataLoader(data, batch_size=4))
    except DivergenceError as error:
        return error.verdict, list(training.parameters())
    assert counters["stats"]["unique_graphs"], "nothing was compiled"
    return callback.verdict, [parameter.detach().clone() for parameter in training.parameters()]


@pytest.mark.parametrize(
    ("compile_it", "backend"), [(whole, "inductor"), (network, opaque_backend())]
)
def test_a_compiled_training_is_verified_and_a_fault_inside_is_found(
    tmp_path, capsys, backend, compile_it
):
    def run(mode: str, *, is_nudged: bool = False) -> Any:
        return fit(tmp_path, mode, compile_it, backend, is_nudged=is_nudged)[0]

    is_seen = backend == "inductor"  # its kernels are rows
    run("record")
    assert ("(seen only from outside: compiled." in capsys.readouterr().out) is not is_seen
    same = run("verify")
    assert (same.verdict, same.counts.steps_compared) == ("match", 4)
    assert len(same.coverage.opaque_regions) == (not is_seen)

    inside = run("verify", is_nudged=True)
    first = inside.first_divergence
    op, is_origin = "det_tests.twice.default", True if is_seen else None
    assert (first.step, first.op, first.is_origin, inside.cause) == (0, op, is_origin, "forward")
    origins = {op} if is_seen else {f"{region}.outputs" for region in same.coverage.opaque_regions}
    assert {origin.op for origin in inside.origins} == origins
    assert ("compiled region" in inside.explanation) is not is_seen


@pytest.mark.parametrize(
    ("compile_it", "backend"), [(whole, opaque_backend()), (network, "inductor")]
)
def test_a_model_that_was_compiled_before_its_fit_has_the_graphs_of_one_that_was_not(
    tmp_path, backend, compile_it
):
    def run(mode: str, number: int, *, is_warm: bool) -> Any:
        return fit(tmp_path / str(number), mode, compile_it, backend, is_warm=is_warm)

    for number, is_warm in enumerate((True, False)):
        _, recorded = run("record", number, is_warm=is_warm)
        verdict, _ = run("verify", number, is_warm=not is_warm)
        assert (verdict.verdict, verdict.counts.steps_compared) == ("match", 4)
        assert len(verdict.coverage.opaque_regions) == (backend != "inductor")
        _, alone = run("disabled", number, is_warm=is_warm)
        assert all(map(torch.equal, recorded, alone))


def test_eager_steps_have_the_bits_of_such_steps_and_are_not_compared_with_compiled_ones(
    tmp_path, capsys
):
    def force(trainer: pl.Trainer, *_: Any) -> None:
        """Eager steps without us; the last one compiles the network."""
        torch.compiler.set_stance("force_eager" if trainer.global_step < 3 else "default")

    only = {"only_steps": [0, 1, 2]}
    words = "compiled code ran as eager code, with different kernels"
    _, watched = fit(tmp_path, "record", network, "inductor", compiled="eager", **only)
    assert words in capsys.readouterr().out
    _, alone = fit(
        tmp_path,
        "disabled",
        network,
        "inductor",
        beside=[LambdaCallback(on_train_batch_start=force)],
    )
    assert all(map(torch.equal, watched, alone))
    verdict, _ = fit(tmp_path, "verify", network, "inductor")
    assert verdict.verdict == "match", "taken from the reference"
    assert words in capsys.readouterr().out
    fit(tmp_path / "run", "record", network, "inductor", **only)
    with pytest.raises(SelectionError, match="eager"):
        fit(tmp_path / "run", "verify", network, "inductor", compiled="eager")


def compiled_or_not(*, is_compiled: bool) -> loops.Loop:
    loops.seed()
    model: Any = loops.Net()
    return loops.Loop(torch.compile(model, backend=opaque_backend()) if is_compiled else model)


@pytest.mark.parametrize("level", ["op", "module"])
@pytest.mark.parametrize(("first", "side"), [(True, "reference"), (False, "current run")])
def test_a_verdict_says_that_only_one_of_two_runs_is_compiled(first, side, level, tmp_path):
    loops.train(
        partial(compiled_or_not, is_compiled=first), tmp_path / "run", mode="record", level=level
    )
    with pytest.raises(DivergenceError) as caught:
        loops.train(
            partial(compiled_or_not, is_compiled=not first),
            tmp_path / "run",
            current=tmp_path / "current",
        )
    verdict = caught.value.verdict
    assert (
        f"Step 0, forward: only the {side} runs compiled code (compiled.Net_forward); "
        in verdict.explanation
    )
    assert "Compile both runs, or neither." in verdict.explanation
    assert verdict.cause == "structure"


@pytest.mark.parametrize("compiled", ["run", "eager"])
def test_a_compiled_model_in_a_loop_has_the_names_of_the_model(compiled, tmp_path):
    loops.train(loops.Compiled, tmp_path / "run", mode="record", compiled=compiled)
    names = {site.name for site in Run.open(tmp_path / "run").view(0, 0, 1).program.sites}
    assert {"last.bias", "grad of last.bias", "loss"} <= names
    _, run = loops.train(loops.Compiled, tmp_path / "run", current=tmp_path / "current")
    assert run.verdict.verdict == "match"
