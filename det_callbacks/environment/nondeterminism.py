"""Lists ops that the installed torch documents as nondeterministic,
and ops that draw random numbers.
"""

import ast
import inspect
import re
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

from det_callbacks.errors import DetCallbacksError

Behaviour = Literal["alternate algorithm", "error", "random"]
Device = Literal["cuda", "cpu", "mps", "any"]

BEHAVIOURS: tuple[Behaviour, ...] = get_args(Behaviour)

_UPSAMPLE = ("linear1d", "bilinear2d", "bicubic2d", "trilinear3d")
_INDEX_ADD = ("index_add", "index_add_")
_CONVOLUTION = ("convolution", "convolution_backward")

ALIASES: Mapping[str, tuple[str, ...]] = {
    # one aten op for all
    **{
        f"torch.nn.Conv{kind}{dims}d": _CONVOLUTION
        for kind in ("", "Transpose")
        for dims in (1, 2, 3)
    },
    # the derivatives of those ops call these
    "torch.Tensor.__getitem__": ("index_put", "index_put_", "_index_put_impl_"),
    "torch.gather": ("scatter_add", "scatter_add_"),
    "torch.index_select": _INDEX_ADD,
    "torch.repeat_interleave": _INDEX_ADD,
    # the first on MPS without indices
    "torch.nn.MaxPool2d": ("max_pool2d_backward", "max_pool2d_with_indices_backward"),
    "torch.nn.MaxPool3d": ("max_pool3d_with_indices_backward",),
    "torch.nn.Embedding": ("embedding_dense_backward",),
    "torch.nn.EmbeddingBag": ("_embedding_bag_backward", "_embedding_bag_dense_backward"),
    # the op depends on their arguments; "aa" is antialias=True
    "torch.nn.functional.interpolate": (
        *(f"upsample_{mode}_backward" for mode in _UPSAMPLE),
        "_upsample_bilinear2d_aa_backward",
        "_upsample_bicubic2d_aa_backward",
    ),
    "torch.nn.functional.grid_sample": ("grid_sampler_2d_backward", "grid_sampler_3d_backward"),
    "torch.nn.MaxUnpool1d": ("max_unpool2d",),  # no one-dimensional kernel
    # only the loss over images raises (NLLLoss2d.cu)
    "torch.nn.NLLLoss": ("nll_loss2d", "nll_loss2d_forward"),
}
"""Documented name -> aten ops that ``_aten_names`` does not find."""

_SECTIONS: Mapping[str, Behaviour] = {
    "act deterministically": "alternate algorithm",
    "RuntimeError": "error",
}
# torch 2.15 writes two values as reduce='prod'\'mean'
_VALUES = re.compile(r"\b(\w+)=((?:'[^']*'\\?)+|True|False)")
_VALUE = re.compile(r"'[^']*'|True|False")
_CONVOLUTION_NAME = re.compile(r"torch\.nn\.Conv(Transpose)?(\d)d")
_ROLE = re.compile(r":[\w:]+:`~?([^`]+)`")
_NAMES = re.compile(rf"(?:(?:, )?(?:and )?{_ROLE.pattern}\s*)*")


@dataclass(frozen=True, slots=True, kw_only=True)
class OpFact:
    """What torch documents about a name, or the tag of an op.

    ``condition`` is torch's text; ``device`` is "any" if the text names none or several.
    """

    name: str
    ops: tuple[str, ...]
    behaviour: Behaviour
    device: Device
    condition: str = ""


def read_op_facts() -> tuple[OpFact, ...]:
    """Return all facts, sorted by behaviour, name and condition; takes about 0.2 s."""
    import torch  # noqa: PLC0415  # for the command ops; facts are plain data

    from det_callbacks.internals.torch import TORCH, all_op_names  # noqa: PLC0415  # likewise

    TORCH.require()
    all_names = all_op_names()
    names = [
        full.removeprefix("aten::").partition(".")
        for full in all_names
        if full.startswith("aten::")
    ]
    seeded = torch.Tag.nondeterministic_seeded
    drawing = {
        name
        for name, _, overload in names
        if seeded in getattr(getattr(torch.ops.aten, name), overload or "default").tags
    }
    facts = [
        *parse_docstring(
            torch.use_deterministic_algorithms.__doc__ or "", {name for name, *_ in names}
        ),
        *(
            OpFact(name=f"aten.{it}", ops=(f"aten.{it}",), behaviour="random", device="any")
            for it in drawing
        ),
    ]
    return tuple(
        sorted(
            facts, key=lambda fact: (BEHAVIOURS.index(fact.behaviour), fact.name, fact.condition)
        )
    )


def parse_docstring(docstring: str, registered: Collection[str]) -> list[OpFact]:
    """Return the facts in the two lists in
    the docstring of ``torch.use_deterministic_algorithms``.
    """
    facts = []
    # an indented list follows a paragraph that ends in "``mode=True``:"; a bullet may hold a list
    lists = re.findall(
        r"((?:^\S.*\n)+)\n((?:[ \t].*\n|\n)+)", f"{inspect.cleandoc(docstring)}\n", re.MULTILINE
    )
    for paragraph, block in lists:
        text = " ".join(paragraph.split())
        if not text.endswith("``mode=True``:"):
            continue
        bullets = re.split(r"^\s*\* ", block, flags=re.MULTILINE)[1:]
        for behaviour in (behaviour for words, behaviour in _SECTIONS.items() if words in text):
            facts += [fact for bullet in bullets for fact in _facts(behaviour, bullet, registered)]
    missing = set(_SECTIONS.values()) - {fact.behaviour for fact in facts}
    if missing:
        raise DetCallbacksError(
            "The docstring of torch.use_deterministic_algorithms has no list of ops for: "
            f"{', '.join(sorted(missing))}. det_callbacks reads the docstring as of torch 2.13; "
            "python -OO removes it."
        )
    return facts


def may_apply(
    fact: OpFact, *, op: str, phase: str, arguments: Mapping[str, Any], unknown: Sequence[str] = ()
) -> bool:
    """Return whether a fact may apply to a call; False only if name,
    phase or arguments exclude it.
    """
    base = op.rpartition(".")[0]
    if base not in fact.ops:
        return False
    if _is_of_backward(fact.condition) and not base.endswith("_backward") and phase != "backward":
        return False
    found = _CONVOLUTION_NAME.fullmatch(fact.name)
    if found and {"stride", "transposed"} <= arguments.keys():
        return len(arguments["stride"]) == int(found[2]) and arguments["transposed"] == bool(
            found[1]
        )
    # several values are alternatives: "when reduce='sum' or reduce='mean'"
    documented = defaultdict[str, list[Any]](list)
    for name, values in _VALUES.findall(fact.condition):
        documented[name] += map(ast.literal_eval, _VALUE.findall(values))
    for name, values in documented.items():
        # torch omits defaults from the call; flags default to False
        given = arguments.get(name, False if isinstance(values[0], bool) else None)
        # mode='max' of EmbeddingBag is mode=2 in aten, so other types exclude nothing
        if name not in unknown and isinstance(given, type(values[0])) and given not in values:
            return False
    return True


def _facts(behaviour: Behaviour, bullet: str, registered: Collection[str]) -> list[OpFact]:
    """Return the facts of a bullet, one for each name that it begins with."""
    choices = re.compile(r"^\s*- (.*)$", re.MULTILINE)
    text = " ".join(choices.sub("", bullet).split())
    beginning = _NAMES.match(text)
    end = beginning.end() if beginning else 0
    names, rest = (_ROLE.findall(text[:end]), text[end:]) if end else ([_without_markup(text)], "")
    condition = _without_markup(f"{rest} {', '.join(choices.findall(bullet))}")
    device = _device_of(condition)
    return [
        OpFact(
            name=name,
            ops=tuple(
                f"aten.{op}" for op in sorted(_aten_names(name, condition)) if op in registered
            ),
            behaviour=behaviour,
            device=device,
            condition=condition,
        )
        for name in names
    ]


def _device_of(condition: str) -> Device:
    devices: tuple[Device, ...] = ("cuda", "cpu", "mps")
    named = [device for device in devices if device.upper() in condition]
    return named[0] if len(named) == 1 else "any"


def _without_markup(text: str) -> str:
    return " ".join(_ROLE.sub(r"\1", text).replace("`", "").split())


def _is_of_backward(condition: str) -> bool:
    return "differentiate" in condition or "requires grad" in condition


def _aten_names(name: str, condition: str) -> set[str]:
    """Return the aten ops of a documented name: lstm_cell, or its backward, for
    "torch.nn.LSTMCell".
    """
    if name in ALIASES:
        return {*ALIASES[name]}
    words = re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", name.rpartition(".")[2])
    base = words.lower().removesuffix("_")
    if _is_of_backward(condition):
        return {f"{base}_backward", f"_{base}_backward"}
    return {base, f"{base}_"}
