"""CUDA's generators on a GPU: dropout there is recorded, run again and gone on with."""

from pathlib import Path

import lightning.pytorch as pl
import pytest
import torch
from fits import Fit
from resumes import SaveAfter
from torch import nn
from trainers import LIGHTNING_ADVICE

from det_callbacks import BitwiseEquivalenceMode, DeterminismCallback, DivergenceError
from det_callbacks.settings.generators import GeneratorStates, RewindPoint, used_generators
from det_callbacks.trace.generators import GeneratorLog

pytestmark = [
    pytest.mark.gpu,
    LIGHTNING_ADVICE,
    # Lightning's advice: a resume within an epoch
    pytest.mark.filterwarnings("ignore:.*dataloader is not resumable"),
    # torch says it once a process
    pytest.mark.filterwarnings("ignore:Synchronization debug mode:UserWarning"),
]


def fit(
    root: Path, *callbacks: pl.Callback, cuda_seed: int = 1, ckpt_path: Path | None = None
) -> None:
    started = Fit(*callbacks, max_epochs=2, default_root_dir=root, accelerator="gpu", devices=1)
    torch.cuda.manual_seed_all(cuda_seed)
    started.run(ckpt_path=ckpt_path)


@pytest.fixture
def device() -> torch.device:
    torch.cuda.init()
    torch.cuda.manual_seed_all(1)
    return torch.device("cuda", torch.cuda.current_device())


def test_another_seed_of_cuda_is_named_and_dropout_goes_on_where_it_was(tmp_path):
    run = tmp_path / "reference"
    fit(tmp_path, DeterminismCallback(run, mode="record"), SaveAfter(tmp_path, 3))
    again = DeterminismCallback(run)
    fit(tmp_path, again)
    assert again.verdict.verdict == "match"
    with pytest.raises(DivergenceError) as caught:
        fit(tmp_path, DeterminismCallback(run), cuda_seed=2)
    verdict = caught.value.verdict
    assert (verdict.cause, verdict.first_divergence.name) == ("rng", "torch.cuda")
    assert "seeded with 1 in the reference and 2 in the current run" in verdict.explanation
    resumed = DeterminismCallback(run, resume="exact", steps="common")
    fit(tmp_path, resumed, cuda_seed=9, ckpt_path=tmp_path / "3.ckpt")
    assert (resumed.verdict.verdict, resumed.verdict.coverage.steps) == ("match", (3, 7))


def test_dropout_is_equal_to_itself_and_draws_once(device):
    layers = nn.Sequential(nn.Linear(64, 64), nn.Dropout(), nn.Linear(64, 8)).to(device)
    inputs = torch.ones(16, 64, device=device)
    before = torch.cuda.get_rng_state()
    plain = layers(inputs)
    after = torch.cuda.get_rng_state()
    torch.cuda.set_rng_state(before)
    with BitwiseEquivalenceMode() as mode:
        again = layers(inputs)
    assert not mode.get_mismatches()
    assert mode.num_compared
    assert torch.equal(plain, again)
    assert not torch.equal(before, after)
    assert torch.equal(torch.cuda.get_rng_state(), after)


def test_nothing_waits_for_the_device_and_none_is_touched(device):
    contexts = [
        torch._C._cuda_hasPrimaryContext(index) for index in range(torch.cuda.device_count())
    ]
    torch.rand(1, device=device)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        assert {generator.get_state().numel() for _, generator in used_generators()} == {16}
        GeneratorLog().mark("fit start", with_seeds=True)
        kept, states = RewindPoint(), GeneratorStates.capture()
        first = torch.rand(4, device=device)
        kept.put_back()
        second = torch.rand(4, device=device)
        assert states.restore() == []
        third = torch.rand(4, device=device)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(first, second)
    assert torch.equal(first, third)
    contexts[device.index] = True
    assert contexts == [
        torch._C._cuda_hasPrimaryContext(index) for index in range(torch.cuda.device_count())
    ]


def test_a_capture_is_left_alone(device):
    inputs, graph, ledger = torch.ones(8, device=device), torch.cuda.CUDAGraph(), GeneratorLog()
    with torch.cuda.graph(graph):
        ledger.mark("batch start", with_seeds=True)
        states = GeneratorStates.capture()
        outputs = inputs + 1
    graph.replay()
    assert outputs.tolist() == [2.0] * 8
    assert not [row.name for row in ledger.take(0) if "cuda" in row.name]
    assert states.states["torch.cuda"] is None
    assert "torch.cuda" in states.restore()
