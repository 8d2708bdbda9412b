"""The examples of bitwise_det's README and its tests, rewritten for a CPU: only import and reference are others."""

import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from det_callbacks import (
    ObserverContext,
    Verdict,
    compare_runs,
    disable_hash_mode,
    enable_hash_mode,
)
from det_callbacks.runs.store import Run
from det_callbacks.tensors.files import SavedStep

Observed = Callable[[ObserverContext], object]


def run(folder: Path, name: str, body: Observed, reference: str | None = None, seed: int = 0) -> ObserverContext:
    torch.manual_seed(seed)
    with ObserverContext(folder, name, None if reference is None else folder / reference) as observer:
        body(observer)
    return observer


def verify(folder: Path, body: Observed, *, seed: int = 0) -> Verdict:
    """Record a run with seed 0 and compare one with another seed, or the same, with it."""
    run(folder, "reference", body)
    verdict = run(folder, "current", body, "reference", seed=seed).verdict
    assert verdict is not None
    return verdict


def test_the_hash_mode_example(tmp_path: Path) -> None:
    for name in ("hash_run", "again"):
        torch.manual_seed(0)
        with ObserverContext(dump_dir=str(tmp_path), name=name) as observer:
            observer.enable_mode()
            model = torch.nn.Linear(10, 5)
            x = torch.randn(3, 10)
            output = model(x)
            observer.disable_mode()
    assert output.shape == (3, 5)
    ops = [site.op for site in Run.open(tmp_path / "hash_run").view(0, 0, 0).program.sites if site.role == "output"]
    assert "aten.addmm.default" in ops
    assert ops.count("aten.uniform_.default") == 2
    assert compare_runs(tmp_path / "hash_run", tmp_path / "again").verdict == "match"


def test_regions_in_a_training_loop(tmp_path: Path) -> None:
    def body(observer: ObserverContext) -> None:
        model = nn.Linear(4, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(3):
            enable_hash_mode()
            optimizer.zero_grad()
            model(torch.randn(2, 4)).sum().backward()
            disable_hash_mode()
            torch.randn(2) @ torch.randn(2)
            with enable_hash_mode():
                optimizer.step()
            observer.next_step()

    assert verify(tmp_path, body).verdict == "match"
    sites = Run.open(tmp_path / "reference").view(0, 0, 2).program.sites
    assert {site.phase for site in sites if site.op} == {"forward", "backward", "optimizer"}
    assert not any(site.op == "aten.dot.default" for site in sites)


@pytest.mark.slow
def test_a_kill_leaves_whole_steps_and_what_they_saved(tmp_path: Path) -> None:
    script = textwrap.dedent(
        """
        import sys, torch
        from det_callbacks import ObserverContext, observe_non_deterministic
        with ObserverContext(sys.argv[1], "run") as observer:
            for step in range(10**6):
                observe_non_deterministic("x", torch.full((2**16,), float(step)))
                observer.next_step()
                print(step, flush=True)
        """
    )
    for kills in range(2):
        folder = tmp_path / str(kills)
        process = subprocess.Popen([sys.executable, "-c", script, str(folder)], stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        for _ in range(20 + 7 * kills):
            last = int(process.stdout.readline())
        process.kill()
        process.wait()
        process.stdout.close()
        reference = Run.open(folder / "run")
        assert not reference.is_complete
        steps = reference.rank(0).steps(0)
        assert len(steps) > last
        for step in steps.tolist():
            _assert_replays(reference, step)


def _assert_replays(reference: Run, step: int) -> None:
    saved = SavedStep.of(reference, rank=0, segment=0, step=step).read("observation:x#0.0")
    assert saved.bits.view("float32").tolist() == [float(step)] * 2**16
