"""The grammar that chooses ops, ``[phase/][module:]op``."""

from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from glob import escape

from det_callbacks.errors import DetCallbacksError, SelectionError, SettingsError

PHASES = ("forward", "backward", "gradient", "optimizer", "other")


@dataclass(frozen=True, slots=True, kw_only=True)
class OpPattern:
    """Ops by phase, module and name, each an fnmatch pattern ("*" by default).

    ::

        aten.kthvalue.default                   # everywhere
        decoder.*:aten.index_put_.*             # in the modules below decoder
        backward/decoder.*:aten.index_put_.*    # there, in the backward pass
    """

    phase: str
    module: str
    op: str

    @classmethod
    def parse(cls, text: str) -> "OpPattern":
        """Return the pattern of a text; ``SettingsError`` if it is not a pattern."""
        # only a module's name may contain "/" and ":"
        phase, has_phase, rest = text.partition("/") if "/" in text else ("", "", text)
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
        return f"{escape(phase)}/{escape(module)}:{escape(op)}"

    def matches(self, phase: str, module: str, op: str) -> bool:
        return fnmatchcase(op, self.op) and fnmatchcase(module, self.module) and fnmatchcase(phase, self.phase)


def as_names(argument: str, value: object, error: type[DetCallbacksError] = SelectionError) -> tuple[str, ...]:
    """Return a list of strings as a tuple; an error for anything else, including a lone string."""
    if isinstance(value, str):
        raise error(f"{argument} must be a list of strings; got the string {value!r}: write [{value!r}].")
    if not isinstance(value, Sequence) or not all(isinstance(item, str) for item in value):
        raise error(f"{argument} must be a list of strings; got {value!r}.")
    return tuple(value)


def as_patterns(argument: str, value: object) -> tuple[str, ...]:
    """Return a list of op patterns as a tuple, each once; SelectionError, with the argument, for others."""
    patterns = tuple(dict.fromkeys(as_names(argument, value)))
    for pattern in patterns:
        try:
            OpPattern.parse(pattern)
        except SettingsError as error:
            raise SelectionError(f"{argument}: {error}") from error
    return patterns
