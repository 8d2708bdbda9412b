"""Generators that begin elsewhere: a note as long as nothing draws from them,
and a cause from the first draw on.
"""

import random
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from loops import Loop
from resumes import SaveAfter
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset
from trainers import LIGHTNING_ADVICE, quiet_trainer

from det_callbacks import DeterminismCallback, TrainingRun, Verdict, compare_runs
from det_callbacks.errors import DivergenceError
from det_callbacks.text import capitalised

pytestmark = LIGHTNING_ADVICE

pl = pytest.importorskip("lightning.pytorch")
LEVELS = ("op", "module", "state")
NOTE = "Generators that had a different state at the start of the fit and changed no bit: "


class Plain(pl.LightningModule):
    """Draws from torch's generator only, by dropout and a shuffle;
    ``draw`` may draw from others in a step.
    """

    def __init__(self, draw: Callable[[int], float]) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Dropout(0.2), nn.Linear(8, 2))
        self.draw = draw

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        drawn = self.draw(self.trainer.fit_loop.epoch_loop.total_batch_idx)
        noise = torch.from_numpy(np.full(2, drawn, dtype=np.float32))
        return cross_entropy(self.net(batch[0]) + noise, batch[1])

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def nothing(step: int) -> float:
    return 0.0


def from_numpy(step: int) -> float:
    return np.random.rand() if step == 3 else 0.0


def from_python(step: int) -> float:
    return random.random() if step == 3 else 0.0


def unused_from_numpy(step: int) -> float:
    return 0.0 * np.random.rand() if step == 3 else 0.0


def fit(callback: Any, *others: Any, seed: int, draw: Any = nothing, **options: Any) -> None:
    """Train as a process does that seeds torch; Python's and NumPy's
    generators are wherever it began.
    """
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(24, 4), torch.randint(2, (24,)))
    trainer = quiet_trainer(callback, *others, max_epochs=2)
    trainer.fit(Plain(draw), DataLoader(data, 4, shuffle=True), **options)


def verify(run: Path, current: Path, **options: Any) -> Verdict:
    callback = DeterminismCallback(run, current=current)
    with suppress(DivergenceError):
        fit(callback, **options)
    verdict = callback.verdict
    assert compare_runs(run, current).to_dict() == verdict.to_dict()
    return verdict


@pytest.mark.parametrize("level", LEVELS)
def test_a_generator_that_nothing_draws_from_may_be_anywhere(level, tmp_path):
    fit(DeterminismCallback(tmp_path / "run", mode="record", level=level), seed=1)
    verdict = verify(tmp_path / "run", tmp_path / "current", seed=2)
    assert (verdict.verdict, verdict.counts.steps_compared) == ("match", 12)
    assert f"{NOTE}numpy and python." in verdict.explanation
    found = {one.name: (one.is_machine, one.changes_bits) for one in verdict.environment}
    assert found == dict.fromkeys(("generators.numpy", "generators.python"), (True, False))
    fit(DeterminismCallback(tmp_path / "second", mode="record", level=level), seed=3)
    verdict = compare_runs(tmp_path / "run", tmp_path / "second")
    assert (verdict.verdict, NOTE in verdict.explanation) == ("match", True)
    same = verify(tmp_path / "run", tmp_path / "same", seed=1)
    assert (same.environment, NOTE in same.explanation) == ((), False)


@pytest.mark.parametrize(
    ("level", "draw", "name"),
    [*((level, from_numpy, "numpy") for level in LEVELS), ("op", from_python, "python")],
)
def test_it_is_the_cause_from_the_first_draw_on(level, draw, name, tmp_path):
    fit(DeterminismCallback(tmp_path / "run", mode="record", level=level), seed=1, draw=draw)
    verdict = verify(tmp_path / "run", tmp_path / "current", seed=2, draw=draw)
    first = verdict.first_divergence
    assert (verdict.verdict, verdict.cause, first.step) == ("diverged", "rng", 3)
    use = (
        "the fit had not drawn from it at the batch start of step 3, but had after forward of step "
        "3"
    )
    (line,) = (line for line in verdict.evidence if line.startswith(f"the generator {name} "))
    start = f"the generator {name} had a different state when the fit started"
    assert line == f"{start}; {use}; what ran in between: the forward pass"
    assert capitalised(line) in verdict.explanation
    assert NOTE not in verdict.explanation
    assert verdict.origins == ()
    # with the same seeds the same draws are no difference
    assert verify(tmp_path / "run", tmp_path / "same", seed=1, draw=draw).verdict == "match"


@pytest.mark.parametrize("draws", [(nothing, unused_from_numpy), (unused_from_numpy, nothing)])
def test_a_draw_in_one_run_only_is_a_difference_of_its_step(draws, tmp_path):
    """Also where nothing was made of it yet, and where both began in the same state."""
    fit(DeterminismCallback(tmp_path / "run", mode="record", level="state"), seed=1, draw=draws[0])
    for seed in (1, 2):
        verdict = verify(tmp_path / "run", tmp_path / f"current-{seed}", seed=seed, draw=draws[1])
        first = verdict.first_divergence
        assert (verdict.cause, first.step, first.name) == ("rng", 3, "numpy after the step")
        assert "The forward pass draws from the generator numpy: " in verdict.explanation


@pytest.mark.parametrize("resume", ["exact", "plain"])
@pytest.mark.parametrize("draw", [nothing, from_numpy])
def test_a_resumed_training_is_the_same_training(resume, draw, tmp_path):
    """NumPy is idle, or was drawn from before the checkpoint and not since."""
    options: dict[str, Any] = {"level": "state", "resume": resume}
    checkpoint, run = tmp_path / "8.ckpt", tmp_path / "run"
    fit(
        DeterminismCallback(run, mode="record", **options),
        SaveAfter(tmp_path, 8),
        seed=1,
        draw=draw,
    )

    def go_on(callback: DeterminismCallback) -> None:
        # what a training restores by itself, where Lightning alone resumes
        class Restores(pl.Callback):
            def on_train_start(self, *_: Any) -> None:
                np.random.seed(1)
                draw(3)

        fit(
            callback,
            *([Restores()] if resume == "plain" else []),
            seed=3,
            draw=draw,
            ckpt_path=checkpoint,
        )

    resumed = DeterminismCallback(run, current=tmp_path / "current", resume=resume)
    if resume == "exact":
        go_on(resumed)
        assert (resumed.verdict.verdict, resumed.verdict.coverage.steps) == ("match", (8, 11))
    else:
        with pytest.raises(DivergenceError) as caught:  # the shuffle
            go_on(resumed)
        assert not any("numpy" in line for line in caught.value.verdict.evidence)
    go_on_recording = DeterminismCallback(tmp_path / "elsewhere", mode="record", **options)
    if resume == "exact":
        go_on(go_on_recording)
        assert compare_runs(run, tmp_path / "elsewhere", steps="common").verdict == "match"


def loop_of_one_s_own(
    reference: Path, *, seed: int, draw: Any = nothing, **options: Any
) -> TrainingRun:
    loop = Loop()
    loop.plant = draw
    random.seed(seed)
    np.random.seed(seed)
    run = TrainingRun(
        reference, model=loop.model, optimizers=loop.optimizers, level="state", **options
    )
    with suppress(DivergenceError), run:
        loop.run(run, epochs=2)
    return run


@pytest.mark.parametrize(
    ("draw", "seed", "word"),
    [(nothing, 2, "match"), (from_numpy, 1, "match"), (from_numpy, 2, "diverged")],
)
def test_a_loop_that_goes_on_has_the_generators_idle_that_were_so(draw, seed, word, tmp_path):
    """One that was drawn from before is compared from where the loop has restored it."""
    loop_of_one_s_own(tmp_path / "run", mode="record", seed=1, draw=draw)
    loop = Loop().run()
    run = TrainingRun(
        tmp_path / "run", model=loop.model, optimizers=loop.optimizers, current=tmp_path / "current"
    )
    with suppress(DivergenceError), run.resume_from(6, epoch=1):
        np.random.seed(seed)
        draw(3)
        loop.run(run)
    verdict = run.verdict
    assert (verdict.verdict, verdict.cause) == (word, None if word == "match" else "rng")
    if word == "match":
        assert verdict.coverage.steps == (6, 11)
