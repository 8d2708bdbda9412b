"""check_batch_invariance: the op in which a sample depends on its batch is named, and why; the
model stays as it is.
"""

import json
import pickle
import weakref
from typing import Any

import pytest
import torch
from numerics_models import Transformer, convolutions, mlp, state_of
from torch import Tensor, library, nn

from det_callbacks import (
    BatchInvarianceError,
    BatchInvarianceReport,
    NothingComparedError,
    check_batch_invariance,
)
from det_callbacks.numerics.batches import MAX_MEASURED

pytestmark = pytest.mark.usefixtures("single_thread")


class Apply(nn.Module):
    """A model that is one function of its input."""

    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Any:
        return self.function(x)


@library.custom_op("batches::by_size", mutates_args=())
def by_size(x: Tensor) -> Tensor:
    """Round like a kernel that sums in a different order in batches of up
    to two samples, on any CPU.
    """
    return x * (1 + 2**-23) if len(x) <= 2 else x.clone()


@library.custom_op("batches::by_rows", mutates_args=())
def by_rows(x: Tensor) -> Tensor:
    """The same, for rows of several tokens a sample."""
    return x * (1 + 2**-23) if len(x) <= 12 else x.clone()


def check(model: nn.Module, batch: Any, **options: Any) -> BatchInvarianceReport:
    report = check_batch_invariance(model, batch, **options)
    assert (
        json.loads(json.dumps(report.to_dict(), allow_nan=False))["invariant"] == report.invariant
    )
    assert str(report).splitlines()[0] in ("INVARIANT", "DEPENDS ON THE BATCH", "NOT COMPARED")
    return report


def kinds(report: BatchInvarianceReport) -> dict[str, str]:
    return {one.op or one.name: one.kind for one in (*report.ops, *report.unseparated)}


def begun(report: BatchInvarianceReport) -> list[tuple[str, str, bool | None]]:
    return [(one.op, one.kind, one.begins) for one in report.ops if one.begins is not False]


by_size.register_fake(torch.empty_like)
by_rows.register_fake(torch.empty_like)


class Rounds(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Apply(by_size)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.inner(x.exp())) + 1


def test_the_op_that_rounds_by_the_batch_size_is_named_with_its_sizes_line_and_distance():
    report = check(Rounds(), torch.rand(8, 5))
    first = report.first
    assert (report.invariant, report.sizes, first.module, first.op) == (
        False,
        (1, 2, 4),
        "inner",
        "batches.by_size.default",
    )
    assert (first.kind, first.sizes, first.begins) == ("rounding", (1, 2), True)
    assert 0 < first.measure.ulp <= 2
    assert "test_batch_invariance.py" in first.source[0]
    assert first.source[0].endswith("in forward")
    # ops that read the difference differ, and do not begin it
    assert begun(report) == [("batches.by_size.default", "rounding", True)]
    passed_on = [one for one in report.ops if one.begins is False]
    assert [one.op or one.name for one in passed_on] == [
        "aten.relu.default",
        "aten.add.Tensor",
        "output",
    ]
    assert all(one.kind == "rounding" for one in passed_on)
    assert "First: batches.by_size.default in inner at " in str(report)
    with pytest.raises(BatchInvarianceError, match="DEPENDS ON THE BATCH") as caught:
        report.assert_invariant()
    assert pickle.loads(pickle.dumps(caught.value)).report.first.op == first.op
    assert isinstance(caught.value, AssertionError)


def test_only_the_asked_sizes_are_compared_and_a_rest_has_a_size_of_its_own():
    assert check(Rounds(), torch.rand(8, 5), sizes=[4]).invariant
    assert check(Rounds(), torch.rand(8, 5), sizes=[4, 2]).first.sizes == (2,)
    report = check(Rounds(), torch.rand(7, 5), sizes=[3])
    assert (report.sizes, report.first.sizes) == ((1, 3), (1,))


@pytest.mark.parametrize("sizes", [[0], [8], [], [1.0], [True]])
def test_wrong_sizes_are_refused(sizes):
    with pytest.raises(ValueError, match="sizes must be integers from 1 to 7"):
        check_batch_invariance(mlp(), torch.rand(8, 16), sizes=sizes)


def test_wrong_arguments_are_refused():
    with pytest.raises(TypeError, match="model must be a torch"):
        check_batch_invariance(torch.relu, torch.rand(8, 16))
    with pytest.raises(TypeError, match="no tensor with a dimension"):
        check_batch_invariance(mlp(), (3.0,))
    with pytest.raises(ValueError, match="has 1 samples"):
        check_batch_invariance(mlp(), torch.rand(1, 16))
    with pytest.raises(NothingComparedError, match="no sample could be compared"):
        check_batch_invariance(Apply(lambda x: x.sum()), torch.rand(4, 3))
    with pytest.raises(RuntimeError) as caught:
        check_batch_invariance(
            Apply(lambda x: x.view(8, 2, 3) if len(x) == 8 else x.view(-1, 5)), torch.rand(8, 6)
        )
    assert caught.value.__notes__ == ["check_batch_invariance ran the model on 4 of 8 samples"]


@pytest.mark.parametrize(
    ("function", "op"),
    [
        (lambda x: x - x.mean(0), "aten.sub.Tensor"),
        (lambda x: x / x.abs().max(), "aten.div.Tensor"),
        (lambda x: x * x.sum().item(), "aten.mul.Tensor"),
        (lambda x: x.softmax(0), "aten._softmax.default"),
        (lambda x: x.cumsum(0), "aten.cumsum.default"),
        (lambda x: x + x.roll(3, 0), "aten.add.Tensor"),
        (lambda x: nn.functional.normalize(x, dim=0), "aten.div.Tensor"),
    ],
)
def test_an_op_that_mixes_samples_is_not_called_rounding(function, op):
    model = nn.Sequential(Apply(by_size), Apply(function))
    report = check(model, torch.rand(8, 6) + 0.1)
    assert begun(report)[0] == ("batches.by_size.default", "rounding", True)
    (mixing,) = [one for one in report.ops if one.kind == "mixing" and one.begins is not False]
    assert (mixing.op, mixing.module) == (op, "1")
    assert "other values if other samples are in the batch" in str(
        check(Apply(function), torch.rand(8, 6) + 0.1)
    )


@pytest.mark.parametrize("shift", [1, 2, 3, 4, 5, 6])
def test_each_pair_of_samples_is_tried(shift):
    """Of any two samples, one is kept in some batch in which the other is replaced."""

    def only_one(x: Tensor) -> Tensor:
        mixed = x.clone()
        if len(x) == 7:  # so that the parts do not show it
            mixed[0] += x[shift] * 0.5
        return mixed.exp()

    report = check(Apply(only_one), torch.rand(7, 4) + 1, sizes=[1])
    assert {one.kind for one in report.ops if one.op == "aten.exp.default"} == {"mixing"}


def test_batch_normalisation_is_told_and_not_accused_in_train_mode():
    model = nn.Sequential(nn.BatchNorm2d(3), nn.ReLU(), nn.Flatten())
    report = check(model, torch.rand(8, 3, 4, 4))
    assert (report.invariant, report.first) == (False, None)
    assert kinds(report)["aten.native_batch_norm.default"] == "batch_statistics"
    assert [one.begins for one in report.ops] == [False, False]  # relu, and the output
    assert "By design: aten.native_batch_norm.default in 0" in str(report)
    with pytest.raises(BatchInvarianceError):
        report.assert_invariant()
    report = check(model.eval(), torch.rand(8, 3, 4, 4))
    assert (report.invariant, report.first, report.ops, report.unseparated) == (True, None, (), ())
    # instance normalisation runs the same op, on samples that are apart
    assert check(nn.Sequential(nn.InstanceNorm2d(3), nn.ReLU()), torch.rand(8, 3, 4, 4)).invariant


def test_random_numbers_are_told_and_not_accused():
    report = check(nn.Sequential(nn.Dropout(0.5), nn.Tanh()), torch.rand(8, 40))
    assert (report.invariant, report.first) == (False, None)
    assert "random" in kinds(report).values()
    assert check(nn.Sequential(nn.Dropout(0.5), nn.Tanh()).eval(), torch.rand(8, 40)).invariant
    # drawn once for all samples
    assert check(Apply(lambda x: x + torch.rand(())), torch.rand(8, 4)).invariant


def test_a_reduction_over_the_batch_is_told_and_changes_nothing():
    report = check(Apply(lambda x: {"loss": x.exp().mean(), "logits": x * 2}), torch.rand(8, 4))
    assert report.invariant
    assert [(one.op, one.kind) for one in report.unseparated] == [
        ("aten.mean.default", "reduction")
    ]
    assert "aten.mean.default in function" not in str(report)
    assert "computes over all samples" in str(report)


def test_an_op_that_differs_from_itself_is_not_blamed_on_the_batch():
    calls = []

    def moving(x: Tensor) -> Tensor:
        calls.append(len(x))
        return x + len(calls)

    report = check(Apply(moving), torch.rand(4, 3))
    assert {one.kind for one in report.ops} == {"nondeterministic"}


class Heads(nn.Module):
    """Attention by hand on tokens of all samples: rows are sample-major, then batch * heads."""

    def __init__(self, *, time_first: bool) -> None:
        super().__init__()
        self.query, self.rounds, self.time_first = nn.Linear(8, 8), Apply(by_rows), time_first

    def forward(self, x: Tensor) -> Tensor:
        if self.time_first:
            x = x.transpose(0, 1).contiguous()
        tokens = self.rounds(x.reshape(-1, 8).exp())
        heads = tokens.view(*x.shape[:2], 2, 4)
        batch_heads = heads.permute(1, 2, 0, 3) if self.time_first else heads.permute(0, 2, 1, 3)
        flat = batch_heads.reshape(-1, x.shape[0 if self.time_first else 1], 4)
        return (flat @ flat.transpose(1, 2)).view(-1, 2, 6, 6).sum(1)


@pytest.mark.parametrize("time_first", [False, True])
def test_samples_are_followed_through_reshapes_and_transposes(time_first):
    report = check(Heads(time_first=time_first), torch.rand(8, 6, 8))
    assert begun(report) == [("batches.by_rows.default", "rounding", True)]
    assert report.first.sizes == (1, 2)
    followed = {one.op for one in report.ops}
    assert {"batches.by_rows.default", "aten.bmm.default", "aten.sum.dim_IntList"} <= followed
    assert not report.unseparated


@pytest.mark.parametrize(
    ("function", "op", "word"),
    [
        (
            lambda x: torch.relu(torch.cat([x, x])).chunk(2)[0] + 1,
            "aten.cat.default",
            "order of the samples",
        ),
        (lambda x: (x @ x.T).relu().sum(1), "aten.mm.default", "several of its dimensions"),
        (
            lambda x: x[x[:, 0] > 0.5].relu().sum() * 0 + x,
            "aten.index.Tensor",
            "does not follow the batch size",
        ),
        (lambda x: x.flip(0).relu().flip(0) + 1, "aten.flip.default", "in a different order"),
    ],
)
def test_what_cannot_be_followed_is_said(function, op, word):
    report = check(Apply(function), torch.rand(8, 5))
    assert kinds(report)[op] == "not_followed"
    (detail,) = {
        one.detail for one in report.unseparated if one.op == op and one.kind == "not_followed"
    }
    assert word in detail
    assert f"samples not followed ({detail})" in " ".join(str(report).split())


def test_a_difference_behind_what_is_not_followed_has_no_proven_beginning():
    report = check(
        Apply(lambda x: by_rows(torch.cat([x, x * 2, x, x])).chunk(4)[1].exp()), torch.rand(8, 5)
    )
    assert begun(report) == [("aten.exp.default", "rounding", None)]


def test_an_output_that_cannot_be_compared_is_no_match():
    # one sample has no dimension left
    report = check(Apply(lambda x: x.sum(1).squeeze()), torch.rand(8, 5))
    assert (report.invariant, report.ops, report.not_compared) == (None, (), ("output",))
    with pytest.raises(BatchInvarianceError, match="NOT COMPARED"):
        report.assert_invariant()
    report = check(Apply(lambda x: (torch.cat([x, x]) + 1, x * 2)), torch.rand(8, 5))
    assert (report.invariant, report.not_compared) == (None, ("output[0]",))
    assert check(Apply(lambda x: x.exp().sum().item()), torch.rand(8, 5)).not_compared == (
        "output",
    )
    assert check(Apply(lambda x: x.exp().to_sparse()), torch.rand(8, 5)).not_compared == ("output",)


class Loop(nn.Module):
    """Invariant by construction: one sample at a time."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([self.layer(by_size(one[None]))[0] for one in x]).relu()


def test_a_loop_over_samples_is_invariant():
    report = check(Loop(), torch.rand(8, 16))
    assert report.invariant
    assert report.num_compared == 3  # stack, relu and the output


def test_models_on_this_cpu():
    """Which kernels round by the batch size depends on the CPU;
    the conclusion must be the same as of the outputs.
    """
    padded = torch.randint(1, 50, (6, 10))
    padded[2:, 7:] = 0

    class Tokens(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tokens, self.out = nn.Embedding(50, 8, padding_idx=0), nn.Linear(8, 3)

        def forward(self, tokens: Tensor) -> Tensor:
            mask = (tokens != 0).unsqueeze(-1)
            return self.out((self.tokens(tokens) * mask).sum(1) / mask.sum(1))

    models: list[tuple[nn.Module, Tensor]] = [
        (mlp(), torch.rand(8, 16)),
        (Transformer(), torch.randint(0, 50, (8, 12))),
        (Transformer().eval(), torch.randint(0, 50, (8, 12))),
        (convolutions().eval(), torch.rand(6, 3, 12, 12)),
        (convolutions().eval(), torch.rand(6, 3, 12, 12).to(memory_format=torch.channels_last)),
        (Tokens(), padded),
        (nn.LSTM(8, 6, batch_first=True), torch.rand(6, 4, 8)),
    ]
    for model, batch in models:
        report = check(model, batch)

        def of(part: Tensor, model: nn.Module = model) -> Tensor:
            with torch.no_grad():
                out = model(part)
            return out[0] if isinstance(out, tuple) else out

        whole = of(batch)
        parts = [
            torch.cat([of(part.clone()) for part in batch.split(size)]) for size in report.sizes
        ]
        is_equal = all(torch.equal(whole, part) for part in parts)
        assert report.invariant is is_equal, str(report)
        if not is_equal:
            assert report.first.kind == "rounding", str(report)


def test_sizes_in_which_the_model_raises_are_left_out_unless_asked_for():
    model = nn.Sequential(nn.BatchNorm1d(5), Apply(by_size))
    report = check(model, torch.rand(8, 5))
    assert report.sizes == (2, 4)
    assert report.notes[0].startswith(
        "Batches of 1 were not compared: the model raised ValueError (Expected more than"
    )
    assert check(model.eval(), torch.rand(8, 5)).sizes == (1, 2, 4)
    with pytest.raises(ValueError, match="Expected more than 1 value"):
        check_batch_invariance(model.train(), torch.rand(8, 5), sizes=[1])
    assert not model[0].num_batches_tracked


def test_keyword_batches_and_tensors_for_all_samples():
    class Both(nn.Module):
        def forward(
            self, x: Tensor, *, scale: Tensor, mask: dict[str, Tensor], factor: float
        ) -> dict[str, Tensor]:
            return {"y": by_size(x * scale + mask["on"]) * factor}

    batch = {
        "x": torch.rand(8, 5),
        "scale": torch.rand(5),
        "mask": {"on": torch.ones(8, 5)},
        "factor": 2.0,
    }
    report = check(Both(), batch)
    assert report.first.op == "batches.by_size.default"
    assert [one.name for one in report.ops if not one.op] == ["output['y']"]
    assert "Passed whole to each part" in str(report)
    assert "['scale']" in report.notes[-1]
    assert check(nn.Bilinear(4, 3, 2), (torch.rand(4, 4), torch.rand(4, 3))).num_samples == 4


def test_other_ops_in_small_batches_are_aligned_and_told():
    def branch(x: Tensor) -> Tensor:
        x = x.exp() if len(x) > 1 else x.exp().abs()
        return by_size(x * 2 if len(x) > 1 else x * 2 + 0).sin()

    report = check(Apply(branch), torch.rand(8, 5))
    assert report.first.op == "batches.by_size.default"
    assert report.first.sizes == (1, 2)

    def needs_all(x: Tensor) -> Tensor:
        return (x.tan() if len(x) > 1 else x).exp()

    report = check(Apply(needs_all), torch.rand(8, 5))
    assert begun(report) == [("aten.exp.default", "rounding", None)]
    assert any(
        "In batches of 1, the model runs other ops: 1 output of ops" in note
        for note in report.notes
    )


def test_data_decides_which_ops_run():
    """A batch without padding skips the mask, as transformers does:
    parts of one size run different ops.
    """

    def masked(x: Tensor) -> Tensor:
        mask = x != 0
        return (x * 1.5 if bool(mask.all()) else by_size(x * mask) * 1.5).exp()

    batch = torch.rand(8, 5) + 0.1
    batch[3, 2:] = 0
    report = check(Apply(masked), batch)
    assert (report.first.op, report.first.sizes) == ("batches.by_size.default", (1, 2))


@pytest.mark.parametrize("in_place", [False, True])
def test_of_a_compiled_model_only_outputs_are_compared(in_place):
    model = Apply(by_size)
    if in_place:
        model.compile(backend="eager")
    else:
        model = torch.compile(model, backend="eager")
    report = check(model, torch.rand(8, 5))
    assert [(one.op, one.name, one.sizes, one.begins) for one in report.ops] == [
        ("", "output", (1, 2), None)
    ]
    assert 0 < report.first.measure.ulp <= 2
    assert any("only its outputs were compared" in note for note in report.notes)
    torch.compiler.reset()


def test_writes_into_parts_of_a_buffer_are_followed():
    def fills(x: Tensor) -> Tensor:
        buffer = x.new_empty(len(x), 3, 5)
        for token in range(3):
            buffer[:, token] = by_size(x) + token
        return buffer.view(-1, 5).exp()

    report = check(Apply(fills), torch.rand(8, 5))
    assert [one[0] for one in begun(report)] == ["batches.by_size.default"] * 3
    assert "not_followed" not in kinds(report).values() or report.not_compared == ("output",)


def test_the_model_and_the_process_stay_as_they_were():
    model = nn.Sequential(nn.Linear(16, 8), nn.BatchNorm1d(8), nn.Dropout(0.5))
    batch = torch.rand(8, 16, requires_grad=True)
    before, generators, copied = state_of(model), torch.get_rng_state(), batch.detach().clone()
    check(model, batch)
    assert state_of(model) == before
    assert torch.equal(torch.get_rng_state(), generators)
    assert torch.equal(batch, copied)
    assert batch.grad is None
    assert model.training
    with torch.inference_mode():
        report = check(model.eval(), batch)
    assert state_of(model.train()) == before
    assert report.num_compared


def test_no_pass_keeps_the_outputs_of_its_ops():
    alive: list[Any] = []
    most = 0

    def counts(x: Tensor) -> Tensor:
        nonlocal most
        for _ in range(20):
            x = x + 1
            alive.append(weakref.ref(x))
            most = max(most, sum(one() is not None for one in alive))
        alive.clear()
        return x

    check(Apply(counts), torch.rand(8, 5))
    assert most <= 2


def test_the_distance_is_the_largest_of_all_samples():
    x = torch.ones(4, 3)
    x[0] = 2.0  # alone, every sample is divided by its own maximum; only the others change
    report = check_batch_invariance(Apply(lambda x: x / x.abs().max()), x, sizes=[1])
    (first,) = (one for one in report.ops if one.op == "aten.div.Tensor")
    assert first.measure.max_absolute == 0.5


def test_a_model_that_returns_only_a_mean_is_not_compared():
    report = check_batch_invariance(Apply(lambda x: (x * 2).mean()), torch.randn(4, 3))
    assert (report.invariant, report.not_compared) == (None, ("output",))
    both = check_batch_invariance(Apply(lambda x: (x * 2, x.mean())), torch.randn(4, 3))
    assert both.invariant is True


def test_at_most_a_few_distances_are_measured():
    report = check(
        Apply(lambda x: [by_size(x + n) for n in range(MAX_MEASURED + 3)]), torch.rand(8, 5)
    )
    measured = [one for one in report.ops if one.measure is not None]
    assert len(measured) == MAX_MEASURED
    assert len(begun(report)) > MAX_MEASURED


def test_half_precision_and_autocast():
    assert check(Apply(lambda x: by_size(x.bfloat16()).exp()), torch.rand(8, 5)).num_compared
    with torch.autocast("cpu", torch.bfloat16):
        report = check(mlp(), torch.rand(8, 16))
    assert any("bfloat16" in str(one.measure) or one.op for one in report.ops) or report.invariant
