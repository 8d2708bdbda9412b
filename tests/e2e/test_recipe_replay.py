"""The commands of recipes/replay/README.md, with the output they promise; the race is forced."""

from pathlib import Path

import pytest
from readme_commands import run_readme
from safetensors import safe_open

from det_callbacks.runs.store import Run


@pytest.mark.slow
def test_the_readme_tells_the_truth(tmp_path: Path) -> None:
    assert run_readme("replay", tmp_path, added="model.is_forced=true") == 6
    run = Run.open(tmp_path / "refs" / "replayed")
    assert list(run.manifest.replay) == ["forward/pool:recipe.racing_sum.default"]
    files = sorted(run.path.rglob("*.safetensors"))
    assert len(files) == 30
    with safe_open(files[-1], framework="pt") as file:
        (name,) = file.keys()
        assert file.get_tensor(name).shape == (16, 64)


@pytest.mark.slow
def test_a_promise_of_a_match_would_be_missed(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="promised"):
        run_readme("replay", tmp_path, added="model.is_forced=true determinism.on_divergence=nonsense")
