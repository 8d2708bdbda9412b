"""Every style of training: recorded twice alike, verified as a match,
and trained as if nobody looked.

And one that replays CUDA graphs, on the stand-in; and a long one, in which memory stays flat.
"""

import os
import resource
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from fits import FEATURES, STYLES, Classifier, Fit, Samples, train
from host_graphs import HostGraph, host_graphs
from processes import run_ranks
from torch import Tensor
from torch.utils.data import DataLoader
from trainers import LIGHTNING_ADVICE, has_same_weights, quiet_trainer

from det_callbacks import DeterminismCallback, DivergenceError
from det_callbacks.runs.store import Run

pytestmark = LIGHTNING_ADVICE

LOWER = [("plain", "state"), ("checkpoint", "module")]


@pytest.mark.parametrize(("style", "level"), [*((style, "op") for style in STYLES), *LOWER])
def test_a_verified_run_matches_and_is_not_disturbed(style, level, tmp_path):
    module, options = STYLES[style]
    options = {"epochs": 2 if style == "skipping" else 1, **options}
    plain, losses, states = train(module, **options)
    train(module, DeterminismCallback(tmp_path / "first", mode="record", level=level), **options)
    first = Run.open(tmp_path / "first")
    assert first.is_complete
    callback = DeterminismCallback(tmp_path / "first", current=tmp_path / "current")
    seen, seen_losses, seen_states = train(module, callback, **options)
    assert (callback.verdict.verdict, callback.selection.level) == ("match", level)
    assert callback.verdict.counts.sites_differing == 0
    assert callback.verdict.counts.steps_compared == first.rank(0).num_steps > 0
    assert has_same_weights(plain, seen)
    assert (losses, states) == (seen_losses, seen_states)
    # repeated ops and their backward have the user's lines
    if style == "checkpoint" and level == "op":
        sites = first.view(0, 0, 1).program.sites
        repeated = [site for site in sites if site.recomputed and site.op]
        assert len(repeated) > 3
        backward = [
            site
            for site in sites
            if site.phase == "backward" and site.op and site.module not in ("", "?")
        ]
        for site in (*repeated, *backward):
            assert any(line.startswith("tests/e2e/fits.py:") for line in site.source), (
                site.op,
                site.source,
            )


class Graphed(Classifier):
    """Replays what its first layer does, which gives other bits in one step."""

    def __init__(self, fault_at: int | None = None) -> None:
        super().__init__()
        self.fault_at = fault_at
        self.given, self.hidden = torch.zeros(8, FEATURES), torch.zeros(8, 16)
        self.graph = HostGraph(self._work)

    def _work(self) -> None:
        self.hidden.copy_(self.first(self.given).tanh())
        if self.global_step == self.fault_at:
            self.hidden[0, 0] += 1

    def forward(self, inputs: Tensor) -> Tensor:
        self.given.copy_(inputs)
        self.graph.replay()
        return self.last(self.hidden)


def fit(path: Path, mode: str, fault_at: int | None = None) -> None:
    Fit(
        DeterminismCallback(path, mode=mode, current=path.with_name("current")),
        model=partial(Graphed, fault_at),
    ).run()


def test_a_fit_that_replays_a_graph(tmp_path, capsys):
    with host_graphs():
        fit(tmp_path / "run", "record")
        assert "at level op (seen only from outside: cuda_graph)" in capsys.readouterr().out
        fit(tmp_path / "run", "verify")
        assert "match: verified 4 steps" in capsys.readouterr().out
        with pytest.raises(DivergenceError) as raised:
            fit(tmp_path / "run", "verify", fault_at=1)
    verdict = raised.value.verdict
    first = verdict.first_divergence
    assert (first.step, first.phase, first.module, first.is_origin) == (1, "other", "last", None)
    assert (verdict.origins, verdict.cause) == ((), "unknown")
    assert verdict.coverage.opaque_regions == ("cuda_graph",)
    assert verdict.coverage.ops_skipped["replayed"] == 2
    assert "a CUDA graph may have written it, which the recorder cannot see" in verdict.explanation


class Watched(Classifier):
    """Compares memory and open files after a tenth of the steps with those at the end."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if self.global_step == NUM_LONG_STEPS // 10:
            self.before = resident_bytes(), num_open_files()

    def on_train_epoch_end(self) -> None:  # later, the run is read for findings
        self.after = resident_bytes(), num_open_files()

    def on_train_end(self) -> None:
        (bytes_before, files_before), (bytes_after, files_after) = self.before, self.after
        print(
            f"resident memory: {bytes_before / 2**20:.1f} MiB, then {bytes_after / 2**20:.1f} MiB"
        )
        assert self.global_step == NUM_LONG_STEPS
        assert files_after == files_before
        assert bytes_after < 1.05 * bytes_before


NUM_LONG_STEPS = 20_000


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def num_open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


@pytest.mark.soak
@pytest.mark.timeout(7200)  # on a machine that may be busy
def test_memory_and_open_files_stay_flat_over_20000_steps(tmp_path):
    def train_long(mode: Any) -> None:
        pl.seed_everything(0, verbose=False)
        callback = DeterminismCallback(tmp_path / "run", mode=mode, current=tmp_path / "current")
        loader = DataLoader(Samples(), batch_size=4)
        quiet_trainer(callback, max_epochs=NUM_LONG_STEPS // len(loader)).fit(Watched(), loader)

    for mode in ("record", "verify"):
        (ended,) = run_ranks(
            lambda _, mode=mode: train_long(mode), tmp_path / mode, world_size=1, seconds=3600
        )
        assert ended.exit_code == 0, ended.output
        print(ended.output)
