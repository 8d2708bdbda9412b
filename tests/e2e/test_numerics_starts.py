"""diff --numerics: a change that an op of one run makes starts at that op, at its line."""

from functools import partial
from pathlib import Path

import pytest
import torch
from numerics_loops import layers, loop, numerics_of, words
from torch import nn

from det_callbacks.cli import main


@pytest.fixture
def inputs() -> torch.Tensor:
    return torch.randn(16, 8, generator=torch.Generator().manual_seed(1))


def scaled(x: torch.Tensor) -> torch.Tensor:
    return torch.tanh(x) * 1.01


def masked(x: torch.Tensor) -> torch.Tensor:
    mask = torch.arange(8) != 3
    return torch.tanh(x) * mask


def cast_and_scaled(x: torch.Tensor) -> torch.Tensor:
    mask = torch.arange(8) != 3
    wide = torch.tanh(x).double()
    return (wide * mask).float()


class Adapted(nn.Module):
    """Adds a layer, whose weight the other run lacks."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((8,), 1.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x) * self.weight


def line_of(text: str) -> str:
    """Return the place of the line of this file that ends with a text."""
    lines = Path(__file__).read_text().splitlines()
    return (
        f"{Path(__file__).name}:"
        f"{1 + next(at for at, line in enumerate(lines) if line.endswith(text))}"
    )


@pytest.mark.parametrize("is_reference", [False, True])
@pytest.mark.parametrize(
    ("changed", "line"),
    [
        (lambda: scaled, "return torch.tanh(x) * 1.01"),
        (lambda: masked, "return torch.tanh(x) * mask"),
        (lambda: cast_and_scaled, "return (wide * mask).float()"),
        (Adapted, "return torch.tanh(x) * self.weight"),
    ],
    ids=["scaled", "masked", "cast_and_scaled", "adapted"],
)
def test_a_change_starts_at_the_op_that_only_one_run_has(
    changed, line, is_reference, tmp_path, inputs, capsys
):
    paths = [
        loop(tmp_path / "a", partial(layers, torch.tanh), inputs),
        loop(tmp_path / "b", lambda: layers(changed()), inputs),
    ]
    if is_reference:
        paths.reverse()
    side, kind = ("the reference", "missing") if is_reference else ("the current run", "extra")
    start, jump = numerics_of(*paths).jumps[:2]
    assert (start.op, start.kind, start.phase, jump.op) == (
        "aten.mul.Tensor",
        kind,
        "forward",
        "aten.addmm.default",
    )
    main(["diff", *map(str, paths), "--numerics"])
    printed = words(capsys.readouterr().out).split("Differing sites")[0]
    assert printed.count("A real change starts at aten.mul.Tensor in ") == 1
    first = printed.split("A real change starts at ")[1]
    assert line_of(line) in first.split(", which only ")[0]
    assert first.split(", which only ")[1].startswith(
        f"{side} has; the next op that both have differs: aten.addmm."
    )
    assert "in second at " in first.split("; the next op")[1]
    assert "inputs differ by" not in first


def test_a_cast_passes_errors_on_and_an_op_with_other_arguments_explains_its_own(tmp_path, inputs):
    def steep(x: torch.Tensor) -> torch.Tensor:
        return torch.cos(x * 1000)

    def cast(x: torch.Tensor) -> torch.Tensor:
        return torch.cos((x * 1000).bfloat16().float())

    def moved(x: torch.Tensor) -> torch.Tensor:
        return nn.functional.gelu(x * 1, approximate="tanh")

    for reference, current, op in (
        (steep, cast, "aten.cos.default"),
        (nn.functional.gelu, moved, "aten.gelu.default"),
    ):
        paths = [
            loop(tmp_path / op / function.__name__, partial(layers, function), inputs)
            for function in (reference, current)
        ]
        first = numerics_of(*paths).first_jump
        assert first.through
        assert (first.op, first.kind in ("missing", "extra")) == (op, False)


def test_many_sites_behind_one_op_have_one_start(tmp_path, inputs):
    def clipping(net: nn.Module) -> None:
        nn.utils.clip_grad_norm_(net.parameters(), 1e-3)

    paths = [
        loop(tmp_path / "a", partial(layers, torch.tanh), inputs),
        loop(tmp_path / "b", partial(layers, torch.tanh), inputs, before_update=clipping),
    ]
    found = numerics_of(*paths)
    starts = [site for site in found.jumps if site.kind == "extra"]
    assert [(site.op, site.phase) for site in starts] == [("aten._foreach_norm.Scalar", "gradient")]
    assert (found.jumps[0], len(found.jumps) > 3) == (starts[0], True)
