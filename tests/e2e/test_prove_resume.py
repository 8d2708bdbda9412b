"""The proof of a resume: that it holds, that it can fail,
and what it says when it cannot be given.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from fits import Samples, Scripted
from resumes import RESUMING, Augmented, Manual, Noisy, loader
from torch.utils.data import DataLoader
from trainers import quiet_trainer

from det_callbacks import NotResumableError, SelectionError, Verdict, prove_resume
from det_callbacks.settings.generators import GeneratorStates

pytestmark = RESUMING


def prove(root: Path, model: Any = Noisy, data: Any = loader, **options: Any) -> Verdict:
    trainer = {"max_epochs": 3, "default_root_dir": root, **options.pop("trainer", {})}
    defaults: dict[str, Any] = {
        "stop_at": 4,
        "steps": 10,
        "level": "state",
        "folder": root / "proof",
    }
    return prove_resume(lambda: quiet_trainer(**trainer), model, data, **{**defaults, **options})


def test_it_holds(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    before = GeneratorStates.capture()
    verdict = prove(tmp_path, folder=None)
    assert (verdict.verdict, verdict.coverage.steps) == ("match", (4, 9))
    assert GeneratorStates.capture() == before
    folder = tmp_path / "determinism" / "resume-000"
    checkpoint = {f"interrupted.ckpt{end}" for end in ("", ".digests.json", ".resume")}
    assert {path.name for path in folder.iterdir()} == checkpoint | {
        "reference",
        "interrupted",
        "resumed",
    }
    data = loader(), DataLoader(Augmented(num_samples=4), batch_size=2)
    verdict = prove(
        tmp_path, Manual, lambda: data, stop_at=7, level="op", trainer={"val_check_interval": 2}
    )
    assert (verdict.verdict, verdict.coverage.steps) == ("match", (7, 9))
    assert (tmp_path / "proof" / "reference").exists()


@pytest.mark.parametrize(
    ("stop_at", "given"), [(10, ()), (8, (Scripted, lambda: DataLoader(Samples(), 4)))]
)
def test_it_can_fail(stop_at, given, tmp_path):
    verdict = prove(tmp_path, *given, resume="plain", stop_at=stop_at, steps=12)
    assert (verdict.verdict, verdict.cause, verdict.first_divergence.step) == (
        "diverged",
        "rng",
        stop_at,
    )
    assert "the first after resuming" in verdict.explanation
    assert 'What restores one: fit(ckpt_path=...) with resume="exact"' in verdict.explanation


class DrawsInStepsOnly(Noisy):
    """The resume shuffles as the run did at its start."""

    def on_fit_start(self) -> None:
        pass

    def on_train_epoch_start(self) -> None:
        pass


def test_a_shuffle_from_an_unrestored_generator_needs_no_other_seed(tmp_path):
    verdict = prove(tmp_path, DrawsInStepsOnly, lambda: loader("none"), resume="plain")
    assert "batch: all of its samples are at step 0 of the reference" in verdict.evidence
    assert verdict.cause == "data_order", verdict.explanation
    assert "the first of the epoch, so the loader started again: skip the 4" in verdict.explanation
    assert "same seed" not in verdict.explanation
    # a generator of the loader's own is not the process's
    separate = lambda: loader("none", generator=torch.Generator().manual_seed(4))  # noqa: E731
    verdict = prove(
        tmp_path, DrawsInStepsOnly, separate, resume="plain", folder=tmp_path / "separate"
    )
    assert verdict.cause == "data_order", verdict.explanation


def test_a_training_that_is_not_repeatable_is_said_to_be(tmp_path):
    model = Noisy()  # trained once before it is interrupted
    verdict = prove(tmp_path, lambda: model)
    assert (verdict.verdict, verdict.cause, verdict.first_divergence.step) == (
        "diverged",
        "initial_weights",
        0,
    )
    assert verdict.current.endswith("interrupted")


REFUSED: list[tuple[dict[str, Any], str]] = [
    *(
        ({"stop_at": one, "steps": 5}, "stop_at must be at least 1 and less than steps")
        for one in (0, 5, True, 2.0)
    ),
    ({"trainer": {"max_epochs": 1}}, "The training ended after 7 of 10 steps"),
    (
        {"trainer": {"devices": 2, "strategy": "ddp_spawn"}},
        r'Spawned processes return nothing: use strategy="ddp", or torchrun',
    ),
    (
        {"data": lambda: loader(num_workers=1, persistent_workers=True), "stop_at": 9},
        "persistent_workers=False",
    ),
]


@pytest.mark.parametrize(("options", "match"), REFUSED)
def test_what_cannot_be_proven_is_refused(options, match, tmp_path):
    with pytest.raises((SelectionError, NotResumableError), match=match):
        prove(tmp_path, **options)
