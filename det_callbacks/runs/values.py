"""Plain values of Python as a run holds them: the arguments of ops, and numbers that ops return."""

import json
import re
import struct
from collections.abc import Sequence
from typing import Any, Literal

from det_callbacks.host_digest import digest_bytes

_TORCH_WORDS = frozenset({"dtype", "layout", "memory_format"})
"""Types of torch whose values are arguments of ops; told by name, so that a run is read without torch."""


def plain_value(value: Any) -> Any:
    """Return a JSON-able form of an op's argument that does not depend on the process or on a device index."""
    if value is None or isinstance(value, bool | str | int):
        return value
    if isinstance(value, float):
        return value if abs(value) < float("inf") else repr(value)
    kind = type(value)
    if kind.__module__ == "torch" and kind.__name__ == "device":
        return value.type
    if isinstance(value, complex) or (kind.__module__ == "torch" and kind.__name__ in _TORCH_WORDS):
        return str(value)
    if isinstance(value, list | tuple):
        return [plain_value(item) for item in value]
    return kind.__name__


ArgumentTag = Literal["float", "int", "bool", "digest"]

_AS_WORD = struct.Struct("<Q")
_AS_DOUBLE = struct.Struct("<d")


def argument_bits(values: Sequence[Any]) -> tuple[int, ArgumentTag]:
    """Return the 64 bits of the arguments that vary, and how to read them.

    One number is kept as it is (IEEE 754 binary64, two's complement, or 0 and 1); anything else as the digest of its
    JSON form.
    """
    if len(values) == 1:
        return scalar_bits(values[0])
    return digest_bytes(json.dumps([plain_value(value) for value in values], separators=(",", ":")).encode()), "digest"


def scalar_bits(value: Any) -> tuple[int, ArgumentTag]:
    """Return the 64 bits of a Python value, and how to read them."""
    if isinstance(value, float):
        return _AS_WORD.unpack(_AS_DOUBLE.pack(value))[0], "float"
    if isinstance(value, bool):
        return int(value), "bool"
    if isinstance(value, int) and -(2**63) <= value < 2**63:
        return value & 0xFFFF_FFFF_FFFF_FFFF, "int"
    return digest_bytes(json.dumps([plain_value(value)], separators=(",", ":")).encode()), "digest"


def itemsize(dtype: str) -> int | None:
    """Return the bytes of an element of a dtype by torch's name ("bfloat16"); None for what is no tensor's dtype."""
    if dtype == "bool":
        return 1
    bits = re.search(r"\d+", dtype)
    return None if bits is None else max(1, int(bits[0]) // 8)
