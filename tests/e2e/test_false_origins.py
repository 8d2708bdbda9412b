"""Where a difference is passed on, or cannot be followed, nobody is called its origin.

What Python may have passed on, past every edge, is in tests/unit/test_origin_values.py.
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from faults import Deep, Training, below, first_of, verify
from torch import Tensor, nn
from trainers import LIGHTNING_ADVICE

from det_callbacks.runs.store import Run

pytestmark = LIGHTNING_ADVICE


class ThroughNumpy(nn.Module):
    """A tensor that NumPy writes between two ops, where the trace cannot see it."""

    def __init__(self, shift: float) -> None:
        super().__init__()
        self.shift = shift

    def forward(self, inputs: Tensor) -> Tensor:
        values = inputs * 2
        values.detach().numpy()[:] += self.shift
        return values.tanh()


def test_an_unseen_writer_makes_no_origin(tmp_path: Path, references: Callable[..., Path]) -> None:
    reference = references(partial(Deep, middle=partial(ThroughNumpy, 0.0)))
    training = Training(model=partial(Deep, middle=partial(ThroughNumpy, 1e-3)))
    verdict = verify(reference, training, tmp_path / "current")
    first = first_of(verdict)
    assert (first.module, first.op, first.kind, first.is_origin) == ("middle", "aten.tanh.default", "content", None)
    assert verdict.origins == ()
    assert "something that the trace did not see wrote what it reads" in verdict.explanation
    assert "cannot be proven" in verdict.explanation


def test_an_unselected_module_in_between_makes_no_origin(tmp_path: Path, references: Callable[..., Path]) -> None:
    modules = ("net.[0-3]*", "net.[6-9]*", "head")
    reference = references(Deep, modules=modules)
    training = Training(around=below(op="aten.addmm", module="net.4.up", step=1, is_gross=True))
    verdict = verify(reference, training, tmp_path / "current")
    first = first_of(verdict)
    assert (first.step, first.phase, first.module, first.is_origin) == (1, "input", "net.6.norm", False)
    assert verdict.origins == ()
    assert "an op that is not recorded (modules, phases) may have written it" in verdict.explanation
    seen = {site.module for site in Run.open(reference).view(0, 0, 1).program.sites if site.op}
    assert "net.3.up" in seen
    assert not seen & {"net.4.up", "net.5.up"}


@pytest.mark.parametrize("level", ["module", "state"])
def test_lower_levels_find_the_step_and_blame_no_op(
    level: str, tmp_path: Path, references: Callable[..., Path]
) -> None:
    training = Training(around=below(op="aten.addmm", step=2, module="net.5.up", is_gross=True))
    verdict = verify(references(Deep, level=level), training, tmp_path / "current")
    first = first_of(verdict)
    assert (first.step, first.phase) == (2, "forward")
    assert first.module == ("net.5.up" if level == "module" else "")
    assert first.name == ("output" if level == "module" else "loss")
    assert not any(origin.op for origin in verdict.origins)
