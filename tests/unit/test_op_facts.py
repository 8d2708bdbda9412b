"""What torch says of its ops: read whole, and translated to ops that there are
and that really run.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import grid_sample, interpolate
from tracing import traced
from versions import TORCH

from det_callbacks.compare.order import read_arguments
from det_callbacks.environment.nondeterminism import (
    ALIASES,
    OpFact,
    may_apply,
    parse_docstring,
    read_op_facts,
)
from det_callbacks.errors import DetCallbacksError

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


def index_reduced(reduce: str) -> Call:
    return lambda: VECTOR.detach().index_reduce(0, INDEX, torch.ones(2), reduce)


def ctc_loss() -> Tensor:
    chances = torch.ones(5, 1, 4, requires_grad=True).log_softmax(-1)
    return nn.CTCLoss()(chances, torch.tensor([[1, 2]]), torch.tensor([5]), torch.tensor([2]))


CALLS: Mapping[str, Sequence[Call]] = {
    "torch.nn.ConvTranspose3d": [lambda: nn.ConvTranspose3d(2, 2, 3)(IMAGES[3])],
    "torch.nn.MaxUnpool1d": [
        lambda: nn.MaxUnpool1d(2)(*nn.MaxPool1d(2, return_indices=True)(IMAGES[1]))
    ],
    "torch.nn.MaxPool2d": [lambda: nn.MaxPool2d(2)(IMAGES[2])],
    "torch.nn.MaxPool3d": [lambda: nn.MaxPool3d(2)(IMAGES[3])],
    "torch.nn.NLLLoss": [lambda: nn.NLLLoss()(IMAGES[2], torch.zeros(1, 4, 4, dtype=torch.int64))],
    "torch.nn.CTCLoss": [ctc_loss],
    "torch.nn.Embedding": [lambda: nn.Embedding(5, 3)(INDEX)],
    "torch.nn.EmbeddingBag": [lambda: nn.EmbeddingBag(5, 3, mode="max")(torch.tensor([[0, 1]]))],
    "torch.nn.functional.interpolate": [
        *(
            resized(mode, dims)
            for mode, dims in (("linear", 1), ("bilinear", 2), ("bicubic", 2), ("trilinear", 3))
        ),
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
    "torch.Tensor.index_reduce": [index_reduced("prod"), index_reduced("mean")],
}
"""Documented name -> calls that it speaks of: all that ``ALIASES`` translates,
and some of each rule.
"""

FIRST_DOCUMENTED = {
    "torch.nn.Embedding": (2, 14),
    "torch.nn.MaxPool2d": (2, 15),
    "torch.Tensor.index_reduce": (2, 15),
}
"""Documented name -> the first version of torch whose docstring has it;
the others are in all versions.
"""

# torch 2.15 no longer says for which reductions scatter_reduce raises
SCATTER_REDUCE_RAISES = ["when called on CUDA or MPS tensor"] if TORCH >= (2, 15) else []
SCATTER_PROD_RAISES = SCATTER_REDUCE_RAISES or ["when reduce='prod' and called on CUDA tensor"]


def test_every_bullet_is_read_and_translated():
    # looked at in torch 2.13
    _, *lists = DOCSTRING.split("normally-nondeterministic operations will")
    for behaviour, text in zip(("alternate algorithm", "error"), lists, strict=True):
        lines = [
            line
            for line in text.split("In addition,")[0].splitlines()
            if line.strip().startswith("* :")
        ]
        bullets = sorted(
            name for line in lines for name in re.findall(r":(?:class|func):`([^`]+)`", line)
        )
        assert [fact.name for fact in DOCUMENTED if fact.behaviour == behaviour] == bullets
        assert len(bullets) > 20
    assert all(fact.ops for fact in DOCUMENTED)
    assert [
        op
        for fact in FACTS
        for op in fact.ops
        if not hasattr(torch.ops.aten, op.removeprefix("aten."))
    ] == []


def test_each_alias_is_documented_and_names_ops_that_there_are():
    documented = {fact.name for fact in DOCUMENTED}
    newer = {name for name, first in FIRST_DOCUMENTED.items() if first > TORCH}
    assert {*ALIASES, *CALLS} - documented == newer
    assert [op for ops in ALIASES.values() for op in ops if not hasattr(torch.ops.aten, op)] == []


def test_a_docstring_without_the_lists_is_an_error():
    for docstring, missing in (
        ("", "alternate algorithm, error"),
        (DOCSTRING.replace("RuntimeError", "ValueError"), "error"),
        (DOCSTRING.replace("will act", "will behave"), "alternate algorithm"),
        (DOCSTRING.replace("mode=True``:", "mode``:"), "alternate algorithm, error"),
    ):
        with pytest.raises(DetCallbacksError, match=rf"has no list of ops for: {missing}\. "):
            parse_docstring(docstring, ())


def test_random_ops_are_those_that_torch_tags():
    named = {op for fact in FACTS if fact.behaviour == "random" for op in fact.ops}
    assert {"aten.rand", "aten.normal_", "aten.native_dropout", "aten.multinomial"} <= named
    assert not {"aten.relu", "aten.mm", "aten.convolution"} & named


def applying(call: Call) -> set[tuple[str, str]]:
    def body() -> None:
        output = call()
        if output.requires_grad:
            output.sum().backward()

    view = traced(body).view()
    calls = [
        {
            "op": site.op,
            "phase": site.phase,
            "arguments": {
                name: json.loads(text)
                for name, text in read_arguments(view, position).values.items()
            },
        }
        for position, site in enumerate(view.program.sites)
        if site.op and site.role in ("output", "value")
    ]
    return {
        (found.name, found.condition)
        for found in DOCUMENTED
        for call in calls
        if may_apply(found, **call)
    }


def test_a_bullet_about_several_names_is_a_fact_about_each():
    bullets = r"""
        * :func:`torch.bmm`, :func:`torch.nn.MaxPool3d`, and :func:`torch.nn.AvgPool3d`
          when attempting to differentiate an MPS tensor
        * :func:`torch.mm` and :func:`torch.dot` when called on a CUDA or MPS tensor
        * :func:`torch.Tensor.index_reduce` with ``reduce='prod'\'mean'`` when called on a CPU tensor
    """  # noqa: E501  # a text
    docstring = "".join(
        f"It {words} when ``mode=True``:\n{bullets}\n"
        for words in ("act deterministically", "RuntimeError")
    )
    facts = parse_docstring(docstring, {"avg_pool3d_backward", "index_reduce"})
    backward = "when attempting to differentiate an MPS tensor"
    assert [(one.name, one.device, one.condition) for one in facts[:5]] == [
        ("torch.bmm", "mps", backward),
        ("torch.nn.MaxPool3d", "mps", backward),
        ("torch.nn.AvgPool3d", "mps", backward),
        ("torch.mm", "any", "when called on a CUDA or MPS tensor"),
        ("torch.dot", "any", "when called on a CUDA or MPS tensor"),
    ]
    assert facts[2].ops == ("aten.avg_pool3d_backward",)
    call = {"op": "aten.index_reduce.default", "phase": "forward"}
    applies = [
        reduce
        for reduce in ("prod", "mean", "amax")
        if may_apply(facts[5], **call, arguments={"reduce": reduce})
    ]
    assert applies == ["prod", "mean"]
    assert facts[5].device == "cpu"


# torch says so once, of a function that 2.15 documents as nondeterministic
@pytest.mark.filterwarnings(r"ignore:index_reduce\(\) is in beta:UserWarning")
@pytest.mark.parametrize(
    "name", [name for name in CALLS if FIRST_DOCUMENTED.get(name, TORCH) <= TORCH]
)
def test_the_ops_are_those_that_run(name):
    found = [applying(call) for call in CALLS[name]]
    assert all(name in dict(facts) for facts in found)
    assert {(fact.name, fact.condition) for fact in DOCUMENTED if fact.name == name} <= set().union(
        *found
    )


@pytest.mark.parametrize(
    ("call", "conditions"),
    [
        (CALLS["torch.Tensor.put_"][0], ["when accumulate=False"]),
        (
            CALLS["torch.Tensor.put_"][1],
            [
                "when accumulate=True and called on a CUDA tensor",
                "with accumulate=True when called on a CPU tensor",
            ],
        ),
        (
            reduced("mean"),
            [
                *SCATTER_REDUCE_RAISES,
                "when reduce='sum' or reduce='mean' and called on CUDA tensor",
            ],
        ),
        (reduced("prod"), SCATTER_PROD_RAISES),
        (reduced("amax"), SCATTER_REDUCE_RAISES),
        (CALLS["torch.nn.ConvTranspose3d"][0], ["when called on CUDA tensor"]),
        (lambda: VECTOR.detach().index_select(0, INDEX), []),
        (lambda: torch.nn.NLLLoss()(torch.ones(2, 4, requires_grad=True), INDEX), []),
    ],
)
def test_arguments_and_phase_exclude_what_cannot_be_meant(call, conditions):
    names = ("torch.Tensor.put_", "torch.Tensor.scatter_reduce", "torch.nn.", "torch.index_select")
    found = sorted(condition for name, condition in applying(call) if name.startswith(names))
    assert found == conditions


def test_an_argument_of_unknown_value_excludes_nothing():
    documented = ("with accumulate=False", "with accumulate=True when called on a CPU tensor")
    put = {words: fact("torch.Tensor.index_put", words) for words in documented}
    call = {"op": "aten.index_put_.default", "phase": "forward"}
    for words, found in put.items():
        assert may_apply(found, **call, arguments={}, unknown=("accumulate",))
        assert may_apply(found, **call, arguments={"accumulate": True}) == (
            "accumulate=True" in words
        )
        assert may_apply(found, **call, arguments={}) == ("accumulate=False" in words)
    assert may_apply(
        fact("torch.nn.Conv1d"), op="aten.convolution.default", phase="forward", arguments={}
    )
