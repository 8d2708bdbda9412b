"""What torch says of its ops: read whole, and translated to ops that there are and that really run."""

import json
from collections.abc import Callable, Mapping, Sequence

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import grid_sample, interpolate
from tracing import traced

from det_callbacks.compare.arguments import read_arguments
from det_callbacks.errors import DetCallbacksError
from det_callbacks.nondeterminism import OpFact, may_apply, parse_docstring, read_op_facts

DOCSTRING = torch.use_deterministic_algorithms.__doc__ or ""
FACTS = read_op_facts()
DOCUMENTED = [fact for fact in FACTS if fact.behaviour != "random"]


def fact(name: str, words: str = "") -> OpFact:
    (found,) = [fact for fact in FACTS if fact.name == name and words in fact.condition]
    return found


Call = Callable[[], Tensor]

INDEX = torch.tensor([0, 1])
IMAGES = [torch.ones(1, 2, *[4] * dims, requires_grad=True) for dims in range(4)]
VECTOR = torch.ones(4, requires_grad=True)


def resized(mode: str, dims: int, **options: bool) -> Call:
    return lambda: interpolate(IMAGES[dims], scale_factor=2, mode=mode, **options)


def reduced(reduce: str) -> Call:
    return lambda: VECTOR.scatter_reduce(0, INDEX, torch.ones(2), reduce)


def ctc_loss() -> Tensor:
    chances = torch.ones(5, 1, 4, requires_grad=True).log_softmax(-1)
    return nn.CTCLoss()(chances, torch.tensor([[1, 2]]), torch.tensor([5]), torch.tensor([2]))


CALLS: Mapping[str, Sequence[Call]] = {
    "torch.nn.ConvTranspose3d": [lambda: nn.ConvTranspose3d(2, 2, 3)(IMAGES[3])],
    "torch.nn.MaxUnpool1d": [lambda: nn.MaxUnpool1d(2)(*nn.MaxPool1d(2, return_indices=True)(IMAGES[1]))],
    "torch.nn.MaxPool3d": [lambda: nn.MaxPool3d(2)(IMAGES[3])],
    "torch.nn.NLLLoss": [lambda: nn.NLLLoss()(IMAGES[2], torch.zeros(1, 4, 4, dtype=torch.int64))],
    "torch.nn.CTCLoss": [ctc_loss],
    "torch.nn.EmbeddingBag": [lambda: nn.EmbeddingBag(5, 3, mode="max")(torch.tensor([[0, 1]]))],
    "torch.nn.functional.interpolate": [
        *(resized(mode, dims) for mode, dims in (("linear", 1), ("bilinear", 2), ("bicubic", 2), ("trilinear", 3))),
        *(resized(mode, 2, antialias=True) for mode in ("bilinear", "bicubic")),
    ],
    "torch.nn.functional.grid_sample": [
        lambda: grid_sample(IMAGES[2], torch.zeros(1, 2, 2, 2), align_corners=False),
        lambda: grid_sample(IMAGES[3], torch.zeros(1, 2, 2, 2, 3), align_corners=False),
    ],
    "torch.Tensor.__getitem__": [lambda: VECTOR[[0, 1]]],
    "torch.Tensor.put_": [
        lambda: torch.ones(4).put_(INDEX, torch.ones(2)),
        lambda: torch.ones(4).put_(INDEX, torch.ones(2), accumulate=True),
    ],
    "torch.gather": [lambda: VECTOR.gather(0, INDEX)],
    "torch.index_select": [lambda: VECTOR.index_select(0, INDEX)],
    "torch.repeat_interleave": [lambda: torch.ones(2, requires_grad=True).repeat_interleave(INDEX)],
    "torch.Tensor.scatter_reduce": [reduced("sum"), reduced("mean"), reduced("prod")],
}
"""Documented name -> calls that it speaks of: all that ``ALIASES`` translates, and some of each rule."""


def test_every_bullet_is_read_and_translated() -> None:
    _, *lists = DOCSTRING.split("normally-nondeterministic operations will")  # looked at in torch 2.13
    for behaviour, text in zip(("alternate algorithm", "error"), lists, strict=True):
        lines = text.split("In addition,")[0].splitlines()
        bullets = sorted(line.split("`")[1] for line in lines if line.strip().startswith("* :"))
        assert [fact.name for fact in DOCUMENTED if fact.behaviour == behaviour] == bullets
        assert len(bullets) > 20
    assert all(fact.ops for fact in DOCUMENTED)
    assert [op for fact in FACTS for op in fact.ops if not hasattr(torch.ops.aten, op.removeprefix("aten."))] == []


def test_a_docstring_without_the_lists_is_an_error() -> None:
    for docstring, missing in (
        ("", "alternate algorithm, error"),
        (DOCSTRING.replace("RuntimeError", "ValueError"), "error"),
        (DOCSTRING.replace("will act", "will behave"), "alternate algorithm"),
        (DOCSTRING.replace("mode=True``:", "mode``:"), "alternate algorithm, error"),
    ):
        with pytest.raises(DetCallbacksError, match=rf"has no list of ops for: {missing}\. ") as caught:
            parse_docstring(docstring, ())
        assert caught.value.exit_code == 2


def test_random_ops_are_those_that_torch_tags() -> None:
    named = {op for fact in FACTS if fact.behaviour == "random" for op in fact.ops}
    assert {"aten.rand", "aten.normal_", "aten.native_dropout", "aten.multinomial"} <= named
    assert not {"aten.relu", "aten.mm", "aten.convolution"} & named


def applying(call: Call) -> set[tuple[str, str]]:
    """Return name and condition of the documented facts that may be about what a call and its derivative run."""

    def body() -> None:
        output = call()
        if output.requires_grad:
            output.sum().backward()

    view = traced(body).view()
    calls = [
        {
            "op": site.op,
            "phase": site.phase,
            "arguments": {name: json.loads(text) for name, text in read_arguments(view, position).values.items()},
        }
        for position, site in enumerate(view.program.sites)
        if site.op and site.role in ("output", "value")
    ]
    return {(found.name, found.condition) for found in DOCUMENTED for call in calls if may_apply(found, **call)}


@pytest.mark.parametrize("name", CALLS)
def test_the_ops_are_those_that_run(name: str) -> None:
    found = [applying(call) for call in CALLS[name]]
    assert all(name in dict(facts) for facts in found)
    assert {(fact.name, fact.condition) for fact in DOCUMENTED if fact.name == name} <= set().union(*found)


@pytest.mark.parametrize(
    ("call", "conditions"),
    [
        (CALLS["torch.Tensor.put_"][0], ["when accumulate=False"]),
        (
            CALLS["torch.Tensor.put_"][1],
            ["when accumulate=True and called on a CUDA tensor", "with accumulate=True when called on a CPU tensor"],
        ),
        (reduced("mean"), ["when reduce='sum' or reduce='mean' and called on CUDA tensor"]),
        (reduced("prod"), ["when reduce='prod' and called on CUDA tensor"]),
        (reduced("amax"), []),
        (CALLS["torch.nn.ConvTranspose3d"][0], ["when called on CUDA tensor"]),
        (lambda: VECTOR.detach().index_select(0, INDEX), []),
        (lambda: torch.nn.NLLLoss()(torch.ones(2, 4, requires_grad=True), INDEX), []),
    ],
)
def test_arguments_and_phase_exclude_what_cannot_be_meant(call: Call, conditions: list[str]) -> None:
    names = ("torch.Tensor.put_", "torch.Tensor.scatter_reduce", "torch.nn.", "torch.index_select")
    found = sorted(condition for name, condition in applying(call) if name.startswith(names))
    assert found == conditions


def test_an_argument_of_unknown_value_excludes_nothing() -> None:
    put = {words: fact("torch.Tensor.index_put", words) for words in ("accumulate=False", "accumulate=True")}
    call = {"op": "aten.index_put_.default", "phase": "forward"}
    for words, found in put.items():
        assert may_apply(found, **call, arguments={}, unknown=("accumulate",))
        assert may_apply(found, **call, arguments={"accumulate": True}) == (words == "accumulate=True")
        assert may_apply(found, **call, arguments={}) == (words == "accumulate=False")
    assert may_apply(fact("torch.nn.Conv1d"), op="aten.convolution.default", phase="forward", arguments={})
