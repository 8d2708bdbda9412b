"""Observations inside a compiled function: ops of its graph.

An op that returns nothing would be dropped as dead code, so each has an ordered effect. What was tried instead: a
clone whose result is used (it changes what is fused even where the return value is ignored), and an op that declares
its argument as mutated (torch 2.13 allows no autograd through it).
"""

import ast
from typing import Any

import torch
from torch import Tensor, library
from torch._library.effects import EffectType  # looked at in torch 2.13

from det_callbacks.observers.observations import REGISTRY, Leaves


@library.custom_op("det_callbacks::observe_leaf", mutates_args=())
def observe_leaf(tensor: Tensor, name: str, path: str, index: int) -> None:
    """Record one tensor of an observation."""
    if REGISTRY.sink is not None:
        REGISTRY.sink.observe(name, [(path, tensor)], first=index)


@library.custom_op("det_callbacks::observe_plain", mutates_args=())
def observe_plain(name: str, path: str, index: int, text: str) -> None:
    """Record one plain value of an observation, from its ``repr``."""
    if REGISTRY.sink is not None:
        REGISTRY.sink.observe(name, [(path, _plain(text))], first=index)


@library.custom_op("det_callbacks::observe_int", mutates_args=())
def observe_int(name: str, path: str, index: int, value: int) -> None:
    """Record one integer of an observation, which may be a size that is only known when the graph runs."""
    if REGISTRY.sink is not None:
        REGISTRY.sink.observe(name, [(path, value)], first=index)


@library.custom_op("det_callbacks::replay_leaf", mutates_args=())
def replay_leaf(tensor: Tensor, name: str, path: str, index: int) -> Tensor:
    """Return a copy of one tensor, with the saved bits where a run is verified."""
    copy = tensor.clone()
    if REGISTRY.sink is not None:
        REGISTRY.sink.observe(name, [(path, copy)], first=index, is_replayed=True)
    return copy


@replay_leaf.register_fake
def _(tensor: Tensor, name: str, path: str, index: int) -> Tensor:
    return tensor.clone()


for _op in (observe_leaf, observe_plain, observe_int):
    _op.register_fake(lambda *_: None)
for _op in (observe_leaf, observe_plain, observe_int, replay_leaf):
    _op.register_effect(EffectType.ORDERED)


def observe_in_graph(name: str, leaves: Leaves, *, is_replayed: bool) -> None:
    """Make the ops that record the leaves of an observation when the graph runs, or save them and put them back.

    The copy back is one that autograd does not see: what it saved of the tensor are the bits put back, as in the run
    that was recorded. Plain values are part of the graph, and stay as they are.
    """
    for index, (path, leaf) in enumerate(leaves):
        if isinstance(leaf, Tensor) and is_replayed:
            with torch.no_grad():
                saved = replay_leaf(leaf.detach(), name, path, index)
                with torch.autograd.grad_mode._unsafe_preserve_version_counter(leaf):
                    leaf.copy_(saved)
        elif isinstance(leaf, Tensor):
            observe_leaf(leaf.detach(), name, path, index)
        elif isinstance(leaf, int) and not isinstance(leaf, bool):
            observe_int(name, path, index, leaf)
        else:
            observe_plain(name, path, index, repr(leaf))


def _plain(text: str) -> Any:
    try:
        return ast.literal_eval(text)
    except ValueError:  # nan and inf are no literals
        return complex(text) if "j" in text else float(text)
