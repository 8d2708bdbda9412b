"""The phases of a loop of one's own, which torch's calls tell apart."""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from loops import STYLES, Loop, train
from nondeterministic_ops import noisy_

from det_callbacks import DivergenceWarning, TrainingRun
from det_callbacks.runs.store import Run


def phases(folder: Path, step: int = 1) -> dict[str, Counter[str]]:
    found: dict[str, Counter[str]] = {}
    for site in Run.open(folder).view(0, 0, step).program.sites:
        if site.role == "output" and not site.output:
            found.setdefault(site.phase, Counter())[
                site.op.split(".")[1] if site.op else site.name or ""
            ] += 1
    return found


def test_phases_are_told_by_torch_and_the_loss_is_what_backward_is_called_on(tmp_path):
    for style in ("clipped", "adversarial", "closure", "scaled"):
        train(STYLES[style], tmp_path / style, mode="record")
    clipped = phases(tmp_path / "clipped")
    # of both parts, and the clipping is neither forward nor optimizer
    assert clipped["forward"]["nll_loss_forward"] == clipped["backward"]["nll_loss_backward"] == 2
    assert {"linalg_vector_norm", "_foreach_norm"} & clipped["gradient"].keys()
    assert "addmm" not in clipped["gradient"]
    assert "addcdiv_" in clipped["optimizer"]
    adversarial = phases(tmp_path / "adversarial")
    assert adversarial["forward"]["addmm"] == 5
    assert set(adversarial["optimizer"]) == {"add_"}
    assert phases(tmp_path / "closure")["forward"]["nll_loss_forward"] >= 2
    scaled = phases(tmp_path / "scaled")
    assert any("unscale" in op for op in scaled["gradient"])
    names = [site.name for site in Run.open(tmp_path / "scaled").view(0, 0, 1).program.sites]
    assert (names.count("loss"), "grad of last.bias" in names, "exp_avg of last.bias" in names) == (
        1,
        True,
        True,
    )


@pytest.mark.parametrize("optimizer", ["plain", "closure"])
def test_what_follows_an_update_is_neither_gradient_nor_forward_until_a_module_is_called(
    optimizer, tmp_path
):
    """A recording and an audit agree, so that what an audit finds can be replayed."""

    class Averaged(STYLES[optimizer]):  # type: ignore[misc]
        def train_step(self, batch: Any) -> None:
            super().train_step(batch)
            noisy_(torch.zeros(2))
            self.model(batch[0])

    train(Averaged, tmp_path / "run", mode="record")
    found = phases(tmp_path / "run")
    assert [phase for phase in found if "noisy_" in found[phase]] == ["other"]
    assert not {"addmm", "native_batch_norm"} & {*found["other"], *found.get("gradient", {})}
    arguments: dict[str, Any] = {
        "mode": "audit",
        "current": tmp_path / "audit",
        "on_divergence": "warn",
    }
    with pytest.warns(DivergenceWarning):
        _, audited = train(Averaged, None, **arguments)  # type: ignore[arg-type]
    assert {
        one.phase for one in audited.audit_report.findings if one.op == "planted.noisy_.default"
    } == {"other"}


def test_a_batch_that_is_loaded_within_a_step_is_recorded_and_ends_the_gradients(tmp_path):
    loop = Loop()
    with TrainingRun(
        tmp_path / "run", mode="record", model=loop.model, optimizers=loop.optimizers
    ) as run:
        batches = run.batches(loop.loader)
        for first in batches:
            with run.step(first):
                loop.loss(first).backward()
                inputs, labels = next(batches)
                loop.loss((inputs * 2, labels)).backward()
                loop.optimizers[0].step()
    found = phases(tmp_path / "run", step=0)
    assert not [phase for phase in found if "stack" in found[phase]]
    assert found["other"]["mul"] == 1
    sites = Run.open(tmp_path / "run").view(0, 0, 0).program.sites
    assert [site.name for site in sites if (site.phase, site.role) == ("data", "named")] == [
        *("batch[0]", "batch[1]"),
        *("batch 2[0]", "batch 2[1]"),
    ]
