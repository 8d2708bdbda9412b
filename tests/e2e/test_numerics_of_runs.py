"""diff --numerics: rounding is told from a change, the change is named where it starts,
and nothing is hidden.
"""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from faults import Training, below
from numerics_loops import ALL, layers, loop, numerics_of, words
from torch import nn
from trainers import LIGHTNING_ADVICE

from det_callbacks import compare_runs
from det_callbacks.cli import main
from det_callbacks.compare.nonfinite import first_nonfinite
from det_callbacks.environment.variables import PERTURB
from det_callbacks.errors import DivergenceError, SelectionError
from det_callbacks.runs.store import Run

pytestmark = LIGHTNING_ADVICE

GROSS = Training(around=below(op="aten.addmm", module="net.4.up", step=0, is_gross=True))
ONE_ULP = Training(around=below(op="aten.addmm", module="net.4.up", step=0))


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Return a function that records the first step of a training with all its tensors,
    each once.
    """

    known = dict[str, Path]()

    def record(training: Training | None = None, **options: Any) -> Path:
        key = f"{id(training)} {options}"
        if key not in known:
            folder = tmp_path_factory.mktemp("run") / "run"
            known[key] = (training or Training()).record(folder, **{**ALL, **options})
        return known[key]

    return record


def test_a_change_is_named_where_it_starts_with_what_it_reads(recorded, tmp_path, capsys):
    paths = [str(recorded()), str(recorded(GROSS))]
    capsys.readouterr()
    assert main(["diff", *paths, "--numerics", "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    numerics = found["numerics"]
    assert (found["verdict"], numerics["conclusion"], numerics["tolerance"]) == (
        "diverged",
        "change",
        "torch.testing",
    )
    jump, first = numerics["first_jump"], found["first_divergence"]
    for name in set(first) - {"numbers"}:
        assert jump[name] == first[name], name
    assert (jump["module"], jump["op"], jump["reads"], jump["within"]) == (
        "net.4.up",
        "aten.addmm.default",
        0.0,
        False,
    )
    assert jump["absolute"] == pytest.approx(1, rel=1e-6)
    assert jump["ulp"] > 10**6
    assert numerics["worst"]["excess"] >= jump["excess"] > 1e4
    # what only carries it on is beyond too, and starts nothing
    beyond = [site for site in numerics["sites"] if not site["within"]]
    assert len(beyond) == numerics["num_beyond"] > 50
    assert [site["module"] for site in numerics["sites"] if site["is_start"]] == ["net.4.up"]
    equal = [site for site in numerics["sites"] if site["kind"] == "equal"]
    assert {
        (site["ulp"], site["relative"], site["absolute"], site["within"]) for site in equal
    } == {(0, 0, 0, True)}
    assert {"net.3.up"} <= {site["module"] for site in equal if site["phase"] == "forward"}

    assert main(["diff", *paths, "--numerics", "--html", str(tmp_path / "page.html")]) == 1
    for text in (capsys.readouterr().out, (tmp_path / "page.html").read_text()):
        assert "A real change starts at aten.addmm.default in net.4.up at " in words(text)
        assert "its inputs are equal" in words(text)


def test_one_ulp_is_rounding_and_the_verdict_stays(recorded, capsys):
    paths = [str(recorded()), str(recorded(ONE_ULP))]
    assert main(["diff", *paths, "--numerics"]) == 1
    numerics = compare_runs(*paths, numerics=True).numerics
    worst = numerics.worst
    assert worst.excess == max(site.excess for site in numerics.sites if site.kind != "equal")
    # it is the worst by its multiple of the tolerance: another site has more ULPs
    assert f"Rounding only: the worst is {worst.excess:.3g} x the tolerance (" in words(
        capsys.readouterr().out
    )
    assert (numerics.conclusion, numerics.first_jump, numerics.num_beyond, numerics.jumps) == (
        "rounding",
        None,
        0,
        (),
    )
    first = next(site for site in numerics.sites if site.kind != "equal")
    assert (first.module, first.ulp, first.within, first.reads) == ("net.4.up", 1, True, 0.0)
    assert max(site.growth for site in numerics.sites) < 10


def test_equal_runs_have_no_difference(recorded, tmp_path):
    verdict = compare_runs(recorded(), Training().record(tmp_path / "run", **ALL), numerics=True)
    numerics = verdict.numerics
    assert (verdict.exit_code, numerics.conclusion, numerics.worst, numerics.num_differing) == (
        0,
        "none",
        None,
        0,
    )
    assert len(numerics.sites) > 200
    assert compare_runs(
        recorded(), tmp_path / "run"
    ).to_dict().keys() == verdict.to_dict().keys() - {"numerics"}


def test_a_sample_of_the_elements_finds_the_same_change_and_is_said(recorded, capsys):
    reference, small = recorded(), recorded(GROSS, tensor_budget_mib=0.02)
    assert ", of them by a sample" not in capsys.readouterr().out
    assert main(["diff", str(reference), str(small), "--numerics"]) == 1
    printed = words(capsys.readouterr().out)
    assert "A real change starts at aten.addmm.default in net.4.up at " in printed
    assert ", an even sample; " in printed
    verdicts = [compare_runs(reference, run, numerics=True) for run in (recorded(GROSS), small)]
    whole, sample = (one.numerics.first_jump for one in verdicts)
    assert sample.num_elements < whole.num_elements == 128
    assert (sample.op, sample.module, sample.step) == (whole.op, whole.module, whole.step)
    # the size is that of the whole tensor
    assert sample.relative == pytest.approx(whole.relative, rel=1e-3)
    assert sample.shape == whole.shape == (8, 16)

    # one element that differs may be outside of the sample: that is said to differ, too
    found = numerics_of(reference, recorded(ONE_ULP, tensor_budget_mib=0.02))
    first = next(site for site in found.sites if site.kind != "equal")
    assert (first.module, first.op, first.absolute) == ("net.4.up", "aten.addmm.default", 0.0)
    assert found.conclusion == "rounding"


def test_recordings_without_tensors_say_how_to_keep_them(recorded, tmp_path, capsys):
    plain = Training().record(tmp_path / "plain")
    assert main(["diff", str(plain), str(recorded()), "--numerics"]) == 2
    error = capsys.readouterr().err
    assert f"{plain} kept no tensors" in error
    assert "det-callbacks record RUN --only-steps 0 --keep '*' -- python train.py" in error
    other = Training().record(tmp_path / "other", keep_tensors=["*"], only_steps=[1])
    assert main(["diff", str(other), str(recorded()), "--numerics"]) == 2
    assert "kept no tensor that both have" in capsys.readouterr().err
    assert main(["diff", str(recorded()), str(recorded(GROSS)), "--tolerance", str(tmp_path)]) == 2
    assert "need --numerics" in capsys.readouterr().err
    assert (
        main(
            [
                "diff",
                str(recorded()),
                str(recorded(GROSS)),
                "--numerics",
                "--tolerance",
                str(tmp_path),
            ]
        )
        == 2
    )
    assert "det-callbacks check --numerics --to" in capsys.readouterr().err


def test_a_verification_is_refused_and_the_message_says_what_to_record(tmp_path, capsys):
    torch.manual_seed(0)
    reference = loop(tmp_path / "reference", lambda: nn.Linear(4, 2), torch.ones(3, 4))
    options: Any = {
        "mode": "verify",
        "keep_tensors": None,
        "only_steps": None,
        "current": tmp_path / "verified",
    }
    with pytest.raises(DivergenceError):
        loop(reference, lambda: nn.Linear(4, 2), torch.zeros(3, 4), **options)
    capsys.readouterr()
    for paths in ((reference, tmp_path / "verified"), (tmp_path / "verified", reference)):
        assert main(["diff", *map(str, paths), "--numerics"]) == 2
        error = capsys.readouterr().err
        assert (
            f"{tmp_path / 'verified'} is a verification, which keeps only steps that differ"
            in error
        )
        assert "kept no tensors" not in error
        assert "det-callbacks record RUN --only-steps 0 --keep '*' -- python train.py" in error


@pytest.fixture
def inputs() -> torch.Tensor:
    return torch.randn(16, 8, generator=torch.Generator().manual_seed(1))


def test_another_op_in_its_place_is_looked_through_and_named(tmp_path, inputs, capsys):
    reference = loop(tmp_path / "relu", partial(layers, torch.relu), inputs)
    current = loop(tmp_path / "gelu", partial(layers, nn.functional.gelu), inputs)
    found = numerics_of(reference, current)
    start, jump = found.jumps[:2]
    assert found.first_jump == start
    assert (start.op, start.kind, start.phase, start.reads) == (
        "aten.gelu.default",
        "extra",
        "forward",
        0.0,
    )
    assert (start.ulp, start.relative, start.excess, start.num_elements) == (None, None, None, 0), (
        "not measured"
    )
    assert start not in found.sites
    assert (found.conclusion, jump.module, jump.op, jump.reads) == (
        "change",
        "second",
        "aten.addmm.default",
        2**-23,
    )
    assert set(jump.through) == {"aten.relu.default", "aten.gelu.default"}
    assert found.not_compared["only the reference has it"] >= 1
    main(["diff", str(reference), str(current), "--numerics"])
    printed = words(capsys.readouterr().out)
    assert "A real change starts at aten.gelu.default in no submodule at " in printed
    assert (
        "its inputs come through aten.relu.default and aten.gelu.default, whose outputs were "
        "not compared"
    ) in printed
    assert "inputs differ by" not in printed


def test_bfloat16_against_float32_is_rounding(tmp_path, inputs):
    def half(x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x.bfloat16()).float()

    def broken(x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x.bfloat16() * 1.1).float()

    reference = loop(tmp_path / "float32", partial(layers, torch.tanh), inputs)
    found = numerics_of(reference, loop(tmp_path / "bf16", partial(layers, half), inputs))
    tanh = next(site for site in found.sites if site.op == "aten.tanh.default")
    assert (found.conclusion, tanh.dtype, tanh.kind) == ("rounding", "bfloat16", "structure")
    assert 0 < tanh.ulp <= 2
    changed = numerics_of(reference, loop(tmp_path / "changed", partial(layers, broken), inputs))
    assert (changed.conclusion, changed.first_jump.op) == ("change", "aten.mul.Tensor")
    assert changed.jumps[1].op == "aten.tanh.default"


def test_other_shapes_are_counted_and_the_rest_is_compared(tmp_path, inputs):
    reference = loop(tmp_path / "a", partial(layers, torch.tanh), inputs)
    found = numerics_of(reference, loop(tmp_path / "b", partial(layers, torch.tanh), inputs[:8]))
    assert found.not_compared["of another shape"] >= 3
    # of the weights
    assert {site.shape for site in found.sites if site.kind != "equal"} >= {(8, 8), (4, 8)}


def test_a_weight_that_differs_was_not_kept_so_nothing_says_that_it_is_rounding(
    tmp_path, inputs, capsys
):
    def changed() -> nn.Module:
        net = layers(torch.tanh)
        with torch.no_grad():
            net.second.weight.mul_(1.5)
        return net

    paths = [
        loop(tmp_path / "a", partial(layers, torch.tanh), inputs),
        loop(tmp_path / "b", changed, inputs),
    ]
    found = numerics_of(*paths)
    assert (found.conclusion, found.first_jump) == ("change", None)
    main(["diff", *map(str, paths), "--numerics"])
    printed = words(capsys.readouterr().out)
    assert "first at aten.addmm.default in second at " in printed
    assert "its inputs differ and were not kept (second.weight), so it is unknown where" in printed


class Tokens(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(10, 8), nn.Linear(8, 4)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.embedding(tokens))


def test_the_last_bit_of_the_first_inputs_is_changed_and_of_tokens_that_of_their_embeddings(
    tmp_path, inputs, monkeypatch
):
    inputs[0] = torch.tensor([0.0, -0.0, torch.inf, torch.nan, 1.0, 1.0, 1.0, 1.0])
    before = inputs.clone()
    tokens = torch.arange(10)
    reference = loop(tmp_path / "a", Tokens, tokens)
    monkeypatch.setenv(PERTURB, "1")
    loop(tmp_path / "b", partial(layers, torch.tanh), inputs)
    assert (inputs != before).sum() == 16 * 8 - 4 + 1  # NaN is never equal
    assert torch.equal(inputs[1:].view(torch.int32) ^ 1, before[1:].view(torch.int32))
    found = numerics_of(reference, loop(tmp_path / "c", Tokens, tokens))
    first = next(site for site in found.sites if site.kind != "equal")
    assert (first.op, first.ulp, found.conclusion) == ("aten.embedding.default", 1, "rounding")
    with pytest.raises(SelectionError, match="No floating-point number goes into the first step"):
        loop(tmp_path / "d", Tokens, tokens, phases=["backward"])


# the first number that is not finite


class Attention(nn.Module):
    """Masked attention, whose infinities are meant, and a logarithm that may get a zero."""

    def __init__(self, *, zero: bool, is_whole_row: bool = False) -> None:
        super().__init__()
        self.query, self.zero, self.is_whole_row = nn.Linear(8, 8), zero, is_whole_row

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores = self.query(x) @ x.t()
        mask = torch.ones(16, 16, dtype=torch.bool).triu(0 if self.is_whole_row else 1)
        weights = scores.masked_fill(mask, -torch.inf).softmax(-1)
        return torch.log(weights.sum(-1).square() * (0 if self.zero else 1)) * 0


def test_the_first_number_that_is_not_finite_is_named_with_its_line(tmp_path, inputs, capsys):
    finite = loop(tmp_path / "finite", partial(Attention, zero=False), inputs)
    assert first_nonfinite(Run.open(finite)) is None  # of a mask
    zero = loop(tmp_path / "zero", partial(Attention, zero=True), inputs)
    capsys.readouterr()
    assert main(["show", str(zero)]) == 0
    shown = words(capsys.readouterr().out)
    line = "test_numerics_of_runs.py:"
    assert (
        "The first number that is not finite comes from aten.log.default in no submodule at "
        in shown
    )
    assert line in shown
    assert (
        "(step 0, forward): 16 infinite of 16 elements; its inputs are finite. aten.mul.Tensor in"
        in shown
    )
    assert main(["diff", str(finite), str(zero)]) == 1
    assert "current run: The first number that is not finite comes from aten.log.default" in words(
        capsys.readouterr().out
    )
    found = first_nonfinite(
        Run.open(loop(tmp_path / "row", partial(Attention, zero=False, is_whole_row=True), inputs))
    )
    assert (found.site.op, found.num_inf, found.num_unknown) == ("aten.masked_fill.Scalar", 136, 0)
    assert found.first_nan.op == "aten._softmax.default"


# the same model in other words


class Attended(nn.Module):
    """Self-attention without heads, its projections apart or as one."""

    def __init__(self, *, is_fused: bool, wrong: bool = False) -> None:
        super().__init__()
        parts = [nn.Linear(8, 8) for _ in range(3)]
        self.wrong = wrong
        if is_fused:
            with torch.random.fork_rng():  # what comes after it draws the same weights
                self.qkv_proj = nn.Linear(8, 24)
            with torch.no_grad():
                for name in ("weight", "bias"):
                    getattr(self.qkv_proj, name).copy_(
                        torch.cat([getattr(part, name) for part in parts])
                    )
        else:
            self.to_q, self.to_k, self.to_v = parts

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if hasattr(self, "qkv_proj"):
            query, key, value = self.qkv_proj(x).chunk(3, -1)
        else:
            query, key, value = self.to_q(x), self.to_k(x), self.to_v(x)
        scores = (query @ key.t()) * (1.25 if self.wrong else 1)
        return torch.softmax(scores, -1) @ value


class Wrapped(nn.Module):
    def __init__(self, name: str, **options: Any) -> None:
        super().__init__()
        self.name = name
        self.add_module(name, nn.Sequential(nn.LayerNorm(8), Attended(**options), nn.Linear(8, 4)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.get_submodule(self.name)(x)


RULES = """
encoder.* -> blocks.*
encoder.1.to_q, encoder.1.to_k, encoder.1.to_v -> blocks.1.qkv_proj   # concatenated
"""


def test_renamed_and_fused_modules_are_mapped_by_a_file(tmp_path, inputs, capsys):
    reference = loop(tmp_path / "reference", partial(Wrapped, "encoder", is_fused=False), inputs)
    port = loop(tmp_path / "port", partial(Wrapped, "blocks", is_fused=True), inputs)
    wrong = loop(tmp_path / "wrong", partial(Wrapped, "blocks", is_fused=True, wrong=True), inputs)
    (tmp_path / "names.txt").write_text(RULES)

    without = numerics_of(reference, port)
    assert not [site for site in without.sites if site.module.startswith("blocks")]
    found = numerics_of(reference, port, names=tmp_path / "names.txt")
    modules = {site.module for site in found.sites if site.phase == "forward"}
    assert {"blocks.0", "blocks.1", "blocks.1.qkv_proj", "blocks.2"} <= modules
    fused = next(
        site
        for site in found.sites
        if site.module == "blocks.1.qkv_proj" and site.phase == "forward"
    )
    assert (fused.shape, fused.num_elements, fused.ulp <= 4) == ((16, 24), 16 * 24, True)
    assert sum(found.not_compared.values()) < sum(without.not_compared.values())
    assert found.conclusion in ("rounding", "none")
    swapped = tmp_path / "swapped.txt"
    swapped.write_text(
        "blocks.* -> encoder.*\n"
        "blocks.1.qkv_proj -> encoder.1.to_q, encoder.1.to_k, encoder.1.to_v\n"
    )
    back = numerics_of(port, reference, names=swapped)
    fused = next(
        site
        for site in back.sites
        if site.module == "encoder.1.qkv_proj" and site.phase == "forward"
    )
    assert fused.num_elements == 16 * 24

    changed = numerics_of(reference, wrong, names=tmp_path / "names.txt")
    assert (changed.conclusion, changed.first_jump.module) == ("change", "blocks.1")
    paths = [str(reference), str(port)]
    for text, says in (
        ("encoder.*", "names.txt:1: 'encoder.*' maps no modules"),
        ("a.* -> b", "maps no modules"),
        ("# nothing", "maps no modules"),
        ("a, b -> c, d", "maps no modules"),
        ("a -> ", "maps no modules"),
        (
            "encodr.* -> blocks.*",
            "'encodr.*' matches no module of the reference, which has encoder, encoder.0, ",
        ),
        (
            "encoder.* -> block.*",
            "'block.*' matches no module of the current run, which has blocks, blocks.0, ",
        ),
    ):
        (tmp_path / "names.txt").write_text(text)
        assert main(["diff", *paths, "--numerics", "--names", str(tmp_path / "names.txt")]) == 2
        assert says in capsys.readouterr().err
    assert main(["diff", *paths, "--numerics", "--names", str(tmp_path / "none.txt")]) == 2
    assert "cannot be read" in capsys.readouterr().err


def test_a_sum_whose_terms_cancel_is_no_jump(tmp_path, inputs):
    class Cancelling(nn.Module):
        def __init__(self, dtype: torch.dtype, offset: float) -> None:
            super().__init__()
            self.layer, self.dtype, self.offset = nn.Linear(8, 8), dtype, offset

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            weights = torch.softmax(self.layer(x), -1).to(self.dtype).float()
            centred = weights - weights.mean(-1, keepdim=True)
            return centred.sum(-1) * 1e3 + self.offset * weights.sum()

    runs = [
        loop(tmp_path / name, partial(Cancelling, dtype, offset), inputs)
        for name, dtype, offset in (
            ("a", torch.float32, 0),
            ("b", torch.bfloat16, 0),
            ("c", torch.bfloat16, 1),
        )
    ]
    found = numerics_of(runs[0], runs[1])
    sums = [
        site
        for site in found.sites
        if site.op == "aten.sum.dim_IntList" and site.phase == "forward"
    ]
    assert sums[0].relative > 10 * sums[0].reads
    assert sums[0].growth < 10
    assert found.conclusion == "rounding"
    assert numerics_of(runs[0], runs[2]).conclusion == "change"
