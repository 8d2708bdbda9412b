"""What torch says of its ops: read whole, and translated to ops that there are and that really run."""

import json
from collections.abc import Iterator, Mapping

import pytest
import torch
from op_calls import CALLS, INDEX, Call, reduced, vector
from tiers import rest_slow
from tracing import traced

from det_callbacks.compare.arguments import ArgumentReader
from det_callbacks.errors import DetCallbacksError
from det_callbacks.nondeterminism import OpFact, may_apply, parse_docstring, read_op_facts

DOCSTRING = torch.use_deterministic_algorithms.__doc__ or ""
FACTS = read_op_facts()
DOCUMENTED = [fact for fact in FACTS if fact.behaviour != "random"]

# Documented names whose op leaves no site in a trace -> why.
WITHOUT_SITES: Mapping[str, str] = {"torch.Tensor.resize_": "it writes nothing, and new memory is uninitialised"}


def fact(name: str, words: str = "") -> OpFact:
    (found,) = [fact for fact in FACTS if fact.name == name and words in fact.condition]
    return found


def bullets(behaviour: str) -> Iterator[str]:
    """Yield the documented names, by splitting the docstring at words that torch 2.13 has there."""
    _, alternate, error = DOCSTRING.split("normally-nondeterministic operations will")
    for line in (alternate if behaviour == "alternate algorithm" else error).split("In addition,")[0].splitlines():
        if line.strip().startswith("* :"):
            yield line.split("`")[1]


# reading


@pytest.mark.parametrize("behaviour", ["alternate algorithm", "error"])
def test_every_bullet_is_read(behaviour: str) -> None:
    names = [fact.name for fact in DOCUMENTED if fact.behaviour == behaviour]
    assert len(names) > 20
    assert names == sorted(bullets(behaviour))


@pytest.mark.parametrize(
    ("docstring", "missing"),
    [
        ("", "alternate algorithm, error"),
        (DOCSTRING.replace("RuntimeError", "ValueError"), "error"),
        (DOCSTRING.replace("will act", "will behave"), "alternate algorithm"),
        (DOCSTRING.replace("mode=True``:", "mode``:"), "alternate algorithm, error"),
    ],
)
def test_a_docstring_without_the_lists_is_an_error(docstring: str, missing: str) -> None:
    with pytest.raises(DetCallbacksError, match=rf"has no list of ops for: {missing}\. ") as caught:
        parse_docstring(docstring, ())
    assert caught.value.exit_code == 2


def test_random_ops_are_those_that_torch_tags() -> None:
    named = {op for fact in FACTS if fact.behaviour == "random" for op in fact.ops}
    assert {"aten.rand", "aten.normal_", "aten.native_dropout", "aten.multinomial"} <= named
    assert not {"aten.relu", "aten.mm", "aten.convolution"} & named
    for op in named:  # an entry has no overloads, so what it says must hold for all of them
        packet = getattr(torch.ops.aten, op.removeprefix("aten."))
        for overload in packet.overloads():
            assert torch.Tag.nondeterministic_seeded in getattr(packet, overload).tags, (op, overload)


# names


def test_every_documented_op_is_translated() -> None:
    assert all(fact.ops for fact in DOCUMENTED)
    for found in FACTS:
        for op in found.ops:
            assert hasattr(torch.ops.aten, op.removeprefix("aten.")), (found.name, op)


# calls


def applying(call: Call) -> set[tuple[str, str]]:
    """Return name and condition of the documented facts that may be about what a call and its derivative run."""

    def body() -> None:
        output = call()
        if output.requires_grad:
            output.sum().backward()

    view = traced(body).view()
    reader = ArgumentReader(view)
    calls = [
        {
            "op": site.op,
            "phase": site.phase,
            "arguments": {name: json.loads(text) for name, text in reader.read(position).values.items()},
        }
        for position, site in enumerate(view.program.sites)
        if site.op and site.role in ("output", "value")
    ]
    return {(found.name, found.condition) for found in DOCUMENTED for call in calls if may_apply(found, **call)}


def test_there_is_a_call_for_every_documented_op() -> None:
    assert set(CALLS) == {fact.name for fact in DOCUMENTED}


@pytest.mark.parametrize("name", rest_slow(CALLS, every=6))
def test_the_ops_are_those_that_run(name: str) -> None:
    found = [applying(call) for call in CALLS[name]]
    if name in WITHOUT_SITES:
        assert found == [set()]
        return
    assert all(name in {name for name, _ in facts} for facts in found)
    wanted = {(fact.name, fact.condition) for fact in DOCUMENTED if fact.name == name}
    assert wanted <= set().union(*found)


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
        (CALLS["torch.nn.Conv2d"][0], ["when called on CUDA tensor"]),
        (CALLS["torch.nn.ConvTranspose3d"][0], ["when called on CUDA tensor"]),
        (lambda: vector().detach().index_select(0, INDEX), []),
        (lambda: torch.nn.ReflectionPad1d(1)(torch.ones(1, 2, 4)), []),
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
