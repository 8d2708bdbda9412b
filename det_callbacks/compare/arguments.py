"""The arguments an op was called with, constant or varying, and how two calls differ in them."""

import json
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from det_callbacks.runs.program import StepView
from det_callbacks.runs.values import argument_bits, plain_value

_UNKNOWN = "a value that was kept as a digest only"
_ABSENT = "a tensor or nothing"
_NAN = 0x7FF8_0000_0000_0000


@dataclass(frozen=True, slots=True, kw_only=True)
class ArgumentDifference:
    """How the arguments of two aligned calls differ.

    Attributes:
        values: argument name -> (text of the reference's value, text of the current one).
        is_known: False where the values cannot be compared: each side kept a digest of other arguments.
    """

    values: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    is_known: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Arguments:
    """The arguments of one call.

    Attributes:
        values: name -> JSON text of its value, for the constant ones and a varying one that is a number.
        digested: names of the varying ones of which only a common digest was kept.
        bits: that digest.
    """

    values: Mapping[str, str]
    digested: tuple[str, ...] = ()
    bits: int = 0


class ArgumentReader:
    """Reads the arguments of the ops of one step.

    Args:
        view: the step.
    """

    def __init__(self, view: StepView) -> None:
        self._view = view
        self._parsed: dict[str, dict[str, str]] = {}
        self._canonical: dict[str, str] = {}

    def read(self, output: int) -> Arguments:
        """Return the arguments of the call that an output row belongs to.

        Args:
            output: position of the row; that of the argument row itself for a call without outputs.
        """
        site = self._view.program.sites[output]
        constants = self._constants(site.arguments)
        if not site.varying:
            return Arguments(values=constants)
        row = output if site.role == "argument" else output - site.output - 1
        assert self._view.program.sites[row].role == "argument", "varying arguments have a row before the outputs"
        bits = int(self._view.record.digests[row])
        entry = self._view.layout.entries[row]
        value = None if entry is None or len(site.varying) > 1 else _decode(bits, entry.dtype)
        if value is None:
            return Arguments(values=constants, digested=site.varying, bits=bits)
        # Two NaNs of other bits would have the same text.
        text = f'"nan {bits:#x}"' if value != value and bits != _NAN else json.dumps(plain_value(value))
        return Arguments(values={**constants, site.varying[0]: text})

    def canonical(self, output: int) -> str:
        """Return a text that is equal for equal arguments, whichever of them vary."""
        site = self._view.program.sites[output]
        if not site.varying:
            known = self._canonical.get(site.arguments)
            if known is None:
                known = self._canonical[site.arguments] = _canonical(Arguments(values=self._constants(site.arguments)))
            return known
        return _canonical(self.read(output))

    def _constants(self, text: str) -> dict[str, str]:
        known = self._parsed.get(text)
        if known is None:
            known = {name: json.dumps(value) for name, value in json.loads(text).items()}
            self._parsed[text] = known
        return known


def differing_arguments(reference: Arguments, current: Arguments) -> ArgumentDifference | None:
    """Return how two calls differ in their arguments, None where they agree.

    Arguments of which one side kept only a digest are compared by digesting the other side's values.
    """
    if reference.digested == current.digested:
        agree = reference.bits == current.bits
        digested = {} if agree else dict.fromkeys(reference.digested, (_UNKNOWN, _UNKNOWN))
        is_known = True
    else:
        digested = {}
        is_known = True
        for one, other, is_swapped in ((reference, current, False), (current, reference, True)):
            if not one.digested:
                continue
            if not all(name in other.values for name in one.digested):
                is_known = False
                continue
            bits = argument_bits([_revive(other.values[name]) for name in one.digested])[0]
            if bits != one.bits:
                for name in one.digested:
                    pair = (_UNKNOWN, other.values[name])
                    digested[name] = pair[::-1] if is_swapped else pair
    skipped = {*reference.digested, *current.digested}
    values = {
        name: (reference.values.get(name, _ABSENT), current.values.get(name, _ABSENT))
        for name in (*reference.values, *(name for name in current.values if name not in reference.values))
        if name not in skipped and reference.values.get(name) != current.values.get(name)
    }
    if values or digested:
        return ArgumentDifference(values={**values, **digested})
    return None if is_known else ArgumentDifference(is_known=False)


def _canonical(arguments: Arguments) -> str:
    content: list[Any] = [sorted(arguments.values.items())]
    if arguments.digested:
        content += [arguments.digested, arguments.bits]
    return json.dumps(content)


def _decode(bits: int, tag: str) -> float | int | bool | None:
    """Return the number that the 64 bits of an argument row are, None where they are a digest."""
    if tag == "float":
        return float(struct.unpack("<d", struct.pack("<Q", bits))[0])
    if tag == "int":
        return bits - 2**64 if bits >= 2**63 else bits
    if tag == "bool":
        return bool(bits)
    return None


def _revive(text: str) -> Any:
    """Return a value from its JSON text as the trace had it: infinities and NaN are kept as texts."""
    value = json.loads(text)
    return float(value) if value in ("inf", "-inf", "nan") else value
