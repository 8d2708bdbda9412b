"""Every style of training: recorded twice alike, verified as a match, and trained as if nobody looked."""

from pathlib import Path

import pytest
import torch
from styles import STYLES, Classifier, train
from tiers import rest_slow
from trainers import LIGHTNING_ADVICE

from det_callbacks import DeterminismCallback, DivergenceError
from det_callbacks.runs.store import Run

pytestmark = [
    LIGHTNING_ADVICE,
]


def record(style: str, folder: Path, **options: object) -> Run:
    module, trainer_options = STYLES[style]
    train(module, DeterminismCallback(folder, mode="record", **options), **trainer_options)
    return Run.open(folder)


@pytest.mark.parametrize("style", STYLES)
def test_a_verified_run_matches_and_is_not_disturbed(style: str, tmp_path: Path) -> None:
    module, options = STYLES[style]
    plain, losses, states = train(module, **options)

    first = record(style, tmp_path / "first")
    assert first.is_complete
    callback = DeterminismCallback(tmp_path / "first", current=tmp_path / "current")
    seen, seen_losses, seen_states = train(module, callback, **options)

    assert callback.verdict is not None
    assert callback.verdict.verdict == "match"
    assert callback.verdict.counts.sites_differing == 0
    assert callback.verdict.counts.steps_compared == first.rank(0).num_steps > 0
    assert all(
        torch.equal(one.view(torch.uint8) if one.dim() else one, other.view(torch.uint8) if other.dim() else other)
        for one, other in zip(plain.state_dict().values(), seen.state_dict().values(), strict=True)
    )
    assert [None if loss is None else loss.item() for loss in losses] == [
        None if loss is None else loss.item() for loss in seen_losses
    ]
    assert torch.equal(states["torch"], seen_states["torch"])
    assert states["numpy"] == seen_states["numpy"]


@pytest.mark.parametrize("style", ["checkpoint", "checkpoint_reentrant"])
def test_repeated_ops_and_their_backward_have_the_users_lines(style: str, tmp_path: Path) -> None:
    view = record(style, tmp_path / "run").view(0, 0, 1)
    repeated = [site for site in view.program.sites if site.recomputed and site.op]
    assert len(repeated) > 3
    backward = [
        site for site in view.program.sites if site.phase == "backward" and site.op and site.module not in ("", "?")
    ]
    for site in (*repeated, *backward):
        assert any(line.startswith("tests/e2e/styles.py:") for line in site.source), (site.op, site.module, site.source)


@pytest.mark.parametrize("level", ["state", "module"])
@pytest.mark.parametrize(
    "style",
    rest_slow(["plain", "manual", "lbfgs", "checkpoint", "nested_batch", "undefined_gradients", "scripted"], every=3),
)
def test_lower_levels_match_too(style: str, level: str, tmp_path: Path) -> None:
    module, options = STYLES[style]
    plain, _, states = train(module, **options)
    record(style, tmp_path / "run", level=level)
    callback = DeterminismCallback(tmp_path / "run", current=tmp_path / "current")
    seen, _, seen_states = train(module, callback, **options)
    assert callback.verdict is not None
    assert callback.verdict.verdict == "match"
    assert callback.selection.level == level
    assert all(torch.equal(a, b) for a, b in zip(plain.parameters(), seen.parameters(), strict=True))
    assert torch.equal(states["torch"], seen_states["torch"])


def test_two_recordings_of_one_run_have_equal_chains(tmp_path: Path) -> None:
    chains = []
    for name in ("a", "b"):
        rank = record("plain", tmp_path / name).rank(0)
        chains.append([rank.chain(0, int(step)) for step in rank.steps(0)])
    assert chains[0] == chains[1]
    assert len(set(chains[0])) == len(chains[0]) == 8


def test_every_n_steps_and_module_patterns_are_kept_to(tmp_path: Path) -> None:
    run = record("plain", tmp_path / "run", every_n_steps=3, modules=["first"])
    assert run.rank(0).steps(0).tolist() == [0, 3, 6]
    view = run.view(0, 0, 3)
    assert {site.module for site in view.program.sites if site.op and site.role != "value"} == {"first"}
    callback = DeterminismCallback(tmp_path / "run", current=tmp_path / "current")
    train(Classifier, callback)
    assert callback.verdict is not None
    assert callback.verdict.verdict == "match"
    assert callback.verdict.counts.steps_compared == 3


def test_a_shorter_run_is_diverged_unless_common_steps_are_asked_for(tmp_path: Path) -> None:
    record("plain", tmp_path / "run")
    with pytest.raises(DivergenceError) as caught:
        train(Classifier, DeterminismCallback(tmp_path / "run", current=tmp_path / "current"), epochs=1)
    assert caught.value.exit_code == 1
    assert caught.value.verdict is not None
    first = caught.value.verdict.first_divergence
    assert first is not None
    assert (first.kind, first.step) == ("missing", 4)
    callback = DeterminismCallback(tmp_path / "run", current=tmp_path / "other", steps="common")
    train(Classifier, callback, epochs=1)
    assert callback.verdict is not None
    assert callback.verdict.verdict == "match"
    assert callback.verdict.coverage.steps == (0, 3)


def test_a_longer_run_is_diverged(tmp_path: Path) -> None:
    record("plain", tmp_path / "run")
    with pytest.raises(DivergenceError) as caught:
        train(Classifier, DeterminismCallback(tmp_path / "run", current=tmp_path / "current"), epochs=3)
    assert caught.value.verdict is not None
    first = caught.value.verdict.first_divergence
    assert first is not None
    assert (first.kind, first.step) == ("extra", 8)
