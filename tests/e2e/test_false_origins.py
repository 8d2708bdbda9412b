"""Where a difference is passed on, or cannot be followed, nobody is called its origin.

What Python may have passed on, past every edge, is in tests/unit/test_origin_values.py.
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from faults import Deep, Training, below, first_of, verify
from torch import Tensor, nn
from trainers import LIGHTNING_ADVICE

from det_callbacks.runs.store import Run

pytestmark = LIGHTNING_ADVICE


class ThroughNumpy(nn.Module):
    """A tensor that NumPy writes between two ops, where the trace cannot see it."""

    def __init__(self, read: Callable[[Tensor], Tensor], shift: float) -> None:
        super().__init__()
        self.read, self.shift = read, shift

    def forward(self, inputs: Tensor) -> Tensor:
        values = inputs * 2
        values.detach().numpy()[0, 0] += self.shift
        return inputs + self.read(values).sum()


def after(write: Callable[[Tensor], object]) -> Callable[[Tensor], Tensor]:
    def read(values: Tensor) -> Tensor:
        write(values)
        return values[:1].tanh()

    return read


def in_empty(values: Tensor) -> Tensor:
    """Read memory of which one part has no writer but NumPy."""
    memory = torch.empty(4, 4)
    memory[:2] = 0
    memory.numpy()[2:] = values.detach().numpy()[0, 0]
    return memory.tanh()


READS: dict[str, Callable[[Tensor], Tensor]] = {
    "all of it": torch.tanh,
    "a part": lambda values: values[:, :2].tanh(),
    "a part, when another row was written": after(lambda values: values[1].zero_()),
    "a part, when a column was written": after(lambda values: values[:, 1].zero_()),
    "what it then overwrites": lambda values: torch.tanh(values.detach(), out=values.detach()),
    "memory that is half written": in_empty,
}


@pytest.mark.parametrize("read", READS.values(), ids=READS)
def test_an_unseen_writer_makes_no_origin(read: Any, tmp_path: Path, references: Callable[..., Path]) -> None:
    reference = references(partial(Deep, middle=partial(ThroughNumpy, read, 0.0)))
    training = Training(model=partial(Deep, middle=partial(ThroughNumpy, read, 1e-3)))
    verdict = verify(reference, training, tmp_path / "current")
    first = first_of(verdict)
    assert (first.module, first.op.split(".")[1], first.kind, first.is_origin) == ("middle", "tanh", "content", None)
    assert verdict.origins == ()
    assert "what it reads was written by nothing that the trace saw" in verdict.explanation
    assert "cannot be proven" in verdict.explanation


class Viewing(nn.Module):
    """Takes one part of a tensor, or another one."""

    def __init__(self, view: Callable[[Tensor, int], Tensor], number: int) -> None:
        super().__init__()
        self.view, self.number = view, number
        self.weight = nn.Parameter(torch.linspace(0, 1, 8))

    def forward(self, inputs: Tensor) -> Tensor:
        return inputs + self.view(inputs * 2 + self.weight.sum(), self.number).sum()


def write_row(values: Tensor, number: int) -> Tensor:
    rows = torch.zeros(4, 4)
    rows[number].fill_(1)
    return rows * torch.arange(16.0).view(4, 4)


VIEWS: dict[str, tuple[Callable[[Tensor, int], Tensor], str]] = {
    "a half": (lambda values, number: values.chunk(2, -1)[number].tanh(), "aten.tanh.default"),
    "a detached row": (lambda values, number: values[number].detach().exp(), "aten.exp.default"),
    "transposed": (
        lambda values, number: values[:4, :4].mm([values[:4, :4].mT, values[:4, :4]][number]),
        "aten.mm.default",
    ),
    "in a list": (lambda values, number: torch.cat([values[:1], values[number : number + 1]]), "aten.cat.default"),
    "a number": (lambda values, number: values * values[number, 0].item(), "aten._local_scalar_dense.default"),
    "written": (write_row, "aten.fill_.Scalar"),
}


@pytest.mark.parametrize(("view", "op"), VIEWS.values(), ids=VIEWS)
def test_an_op_that_reads_another_part_is_called_otherwise(
    view: Any, op: str, tmp_path: Path, references: Callable[..., Path]
) -> None:
    reference = references(partial(Deep, middle=partial(Viewing, view, 0)))
    verdict = verify(reference, Training(model=partial(Deep, middle=partial(Viewing, view, 1))), tmp_path / "current")
    first = first_of(verdict)
    assert (first.module, first.op, first.kind, first.is_origin) == ("middle", op, "structure", True)
    assert "read another part of what it was given: " in verdict.explanation


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
