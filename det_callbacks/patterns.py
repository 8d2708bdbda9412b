"""The one grammar in which ops are chosen: ``[phase/][module:]op``."""

from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from glob import escape

from det_callbacks.errors import SelectionError, SettingsError

PHASES = ("forward", "backward", "gradient", "optimizer", "other")


@dataclass(frozen=True, slots=True, kw_only=True)
class OpPattern:
    """Ops by phase, module and name, each an fnmatch pattern: "backward/decoder.*:aten.index_put_.*".

    Attributes:
        phase: "*" where none was given.
        module: over qualified module names; "*" where none was given.
        op: over ``namespace.op.overload``.

    Example:
        >>> OpPattern.parse("decoder.*:aten.index_put_.*").matches("forward", "decoder.0", "aten.index_put_.default")
        True
    """

    phase: str
    module: str
    op: str

    @classmethod
    def parse(cls, text: str) -> "OpPattern":
        """Return the pattern a text stands for.

        Raises:
            SettingsError: it is not of that form, or its phase matches none there is.
        """
        phase, has_phase, rest = text.rpartition("/")
        module, has_module, op = rest.rpartition(":")
        pattern = cls(phase=phase if has_phase else "*", module=module if has_module else "*", op=op)
        if not op.strip() or ("." not in op and "*" not in op):
            raise SettingsError(
                f"The op pattern {text!r} names no op; write [phase/][module:]op with the op as namespace.op.overload, "
                'for example "aten.kthvalue.default" or "decoder.*:aten.index_put_.*".'
            )
        if not any(fnmatchcase(known, pattern.phase) for known in PHASES):
            raise SettingsError(
                f"The op pattern {text!r} asks for the phase {phase!r}; the phases are {', '.join(PHASES)}."
            )
        return pattern

    @staticmethod
    def exactly(phase: str, module: str, op: str) -> str:
        """Return the pattern that means the ops of one place and no others.

        Example:
            >>> OpPattern.exactly("forward", "net.0", "aten.addmm.default")
            'forward/net.0:aten.addmm.default'
        """
        return f"{escape(phase)}/{escape(module)}:{escape(op)}"

    def matches(self, phase: str, module: str, op: str) -> bool:
        """Return whether an op at this place is meant."""
        return fnmatchcase(op, self.op) and fnmatchcase(module, self.module) and fnmatchcase(phase, self.phase)


def as_patterns(argument: str, value: object) -> tuple[str, ...]:
    """Return a list of op patterns as a tuple, each once.

    Raises:
        SelectionError: it is no list of strings, or one of them is no pattern; the argument is named.
    """
    is_list = isinstance(value, Sequence) and not isinstance(value, str | bytes)
    if not is_list or not all(isinstance(item, str) for item in value):  # type: ignore[attr-defined]  # a list
        raise SelectionError(
            f'{argument} must be a list of patterns, such as ["forward/net.head:aten.addmm.default"]; got {value!r}.'
        )
    patterns = tuple(dict.fromkeys(value))  # type: ignore[call-overload]  # a list of strings
    for pattern in patterns:
        try:
            OpPattern.parse(pattern)
        except SettingsError as error:
            raise SelectionError(f"{argument}: {error}") from error
    return patterns
