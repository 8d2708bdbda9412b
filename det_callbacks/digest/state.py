"""StateDigest: the digests of a state, to compare the weights of two runs."""

import dataclasses
import json
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from det_callbacks.digest.components import tensor_bits
from det_callbacks.digest.device.deferred import Bits, DeferredDigests, value_of
from det_callbacks.digest.host import digest_bytes, format_digest
from det_callbacks.errors import DetCallbacksError

MAX_DEPTH = 20

_Entry = tuple[str, Tensor | bool | int | float]


@dataclass(frozen=True, slots=True, kw_only=True)
class StateDigest:
    """The digests of a state's tensors, by name.

    Two are equal if they have the same names, with the same bits, dtype and shape for each.

    Attributes:
        digest: digest of names, dtypes, shapes and bits; 16 hexadecimal digits.
        tensors: name -> digest of its elements, as ``digest_tensor`` returns it and ``det-callbacks
            show`` prints it.
        layouts: name -> dtype and shape, "float32 [64, 768]"; for a number, its type.

    Examples:
        >>> state = digest_state(torch.nn.Linear(2, 3))
        >>> state.layouts
        {'weight': 'float32 [3, 2]', 'bias': 'float32 [3]'}
        >>> len(state.digest), state == digest_state(torch.nn.Linear(2, 3))  # other weights
        (16, False)
    """

    digest: str
    tensors: Mapping[str, str] = field(hash=False)
    layouts: Mapping[str, str] = field(hash=False)

    def differing(self, other: "StateDigest") -> tuple[str, ...]:
        """Return the names that differ or are in one state only, in the order of this state.

        Examples:
            >>> weights = {"a": torch.zeros(2), "b": torch.ones(2)}
            >>> digest_state(weights).differing(digest_state({**weights, "a": torch.ones(2)}))
            ('a',)
        """
        own = {name: (self.layouts[name], digest) for name, digest in self.tensors.items()}
        others = {name: (other.layouts[name], digest) for name, digest in other.tensors.items()}
        return tuple(name for name in own | others if own.get(name) != others.get(name))


def digest_state(state: nn.Module | Mapping[Any, Any]) -> StateDigest:
    """Return the digests of a module's parameters and buffers, or of the tensors and numbers of a nested dict.

    For a module these are its parameters, then all buffers, by their names in ``state_dict``; a tied
    tensor has an entry for each name. In a mapping, such as the ``state_dict`` of an optimizer, it
    searches mappings, lists, tuples and dataclasses up to 20 levels deep, joins names by dots
    ("state.0.exp_avg"), and skips strings and other objects.

    It costs one pass over the memory, with two threads for large states. It copies device tensors to
    the host, one at a time. For a DTensor it digests this rank's shard.

    Args:
        state: a module, or a mapping whose tensors have any shape, dtype, layout and device.

    Raises:
        TypeError: ``state`` is neither, or a tensor in it, which the message names, has no data (meta,
            fake, uninitialised).
        DetCallbacksError: a tensor's storage is freed, or two entries have the same name.

    Examples:
        >>> model = torch.nn.Linear(2, 3)
        >>> digest_state(model) == digest_state(model.state_dict())
        True
        >>> list(digest_state(model).tensors)
        ['weight', 'bias']
    """
    entries: list[_Entry]
    if isinstance(state, nn.Module):
        tables = state.named_parameters(remove_duplicate=False), state.named_buffers(remove_duplicate=False)
        entries = [entry for table in tables for entry in table]
    elif isinstance(state, Mapping):
        entries = list(_of_mapping(state))
    else:
        raise TypeError(f"digest_state takes a module or a mapping such as a state_dict; got {type(state).__name__}.")
    tensors: dict[str, str] = {}
    layouts: dict[str, str] = {}
    for (name, value), digest in zip(entries, _digests(entries), strict=True):
        if name in tensors:
            raise DetCallbacksError(f"Two entries of the state have the name {name!r}. Rename one.")
        tensors[name] = format_digest(digest)
        layouts[name] = type(value).__name__
        if isinstance(value, Tensor):
            layouts[name] = f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}"
    lines = sorted([name, layouts[name], tensors[name]] for name in tensors)
    whole = digest_bytes(json.dumps(lines, separators=(",", ":")).encode())
    return StateDigest(digest=format_digest(whole), tensors=tensors, layouts=layouts)


def _digests(entries: list[_Entry]) -> list[int]:
    deferred = DeferredDigests()
    found: list[Bits] = []
    for name, value in entries:
        try:
            found.append(tensor_bits(value, deferred) if isinstance(value, Tensor) else _digest_number(value))
        except TypeError as error:
            raise TypeError(f"{name}: {error}") from error
    known = deferred.finish()
    return [value_of(bits, known) for bits in found]


def _digest_number(value: bool | int | float) -> int:
    return digest_bytes(struct.pack("<d", value) if isinstance(value, float) else str(int(value)).encode())


def _of_mapping(tree: Any, name: str = "", depth: int = 0) -> Iterator[_Entry]:
    if isinstance(tree, Tensor | bool | int | float):
        yield name, tree
        return
    if isinstance(tree, Mapping):
        items = [(str(key), value) for key, value in tree.items()]
    elif isinstance(tree, list | tuple):
        items = [(str(index), value) for index, value in enumerate(tree)]
    elif dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        items = [(entry.name, getattr(tree, entry.name)) for entry in dataclasses.fields(tree)]
    else:
        return
    if depth == MAX_DEPTH:
        raise DetCallbacksError(f"{name} is nested more than {MAX_DEPTH} levels deep; pass the part with tensors.")
    for key, value in items:
        yield from _of_mapping(value, f"{name}.{key}" if name else key, depth + 1)
