"""A fit that replays CUDA graphs, on the stand-in: what it says, and where a difference inside one is looked for."""

from functools import partial
from pathlib import Path

import pytest
import torch
from fits import FEATURES, Classifier, Fit
from host_graphs import graph_of, host_graphs
from torch import Tensor
from trainers import LIGHTNING_ADVICE

from det_callbacks import DeterminismCallback, DivergenceError

pytestmark = LIGHTNING_ADVICE


class Graphed(Classifier):
    """Replays what its first layer does, which gives other bits in one step."""

    def __init__(self, fault_at: int | None = None) -> None:
        super().__init__()
        self.fault_at = fault_at
        self.given, self.hidden = torch.zeros(8, FEATURES), torch.zeros(8, 16)
        self.graph = graph_of(self._work)

    def _work(self) -> None:
        self.hidden.copy_(self.first(self.given).tanh())
        if self.global_step == self.fault_at:
            self.hidden[0, 0] += 1

    def forward(self, inputs: Tensor) -> Tensor:
        self.given.copy_(inputs)
        self.graph.replay()
        return self.last(self.hidden)


def fit(path: Path, mode: str, fault_at: int | None = None) -> None:
    Fit(DeterminismCallback(path, mode=mode, current=path.with_name("current")), model=partial(Graphed, fault_at)).run()


def test_a_fit_that_replays_a_graph(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
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
    assert "a CUDA graph, of which nothing is seen inside, may have written it" in verdict.explanation
