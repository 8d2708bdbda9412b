"""Which sites a run records, and the grammar that chooses ops."""

from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from glob import escape
from typing import Any, Literal, get_args

from det_callbacks.errors import DetCallbacksError, SelectionError, SettingsError
from det_callbacks.verdict import as_json

ALL_PHASES = ("forward", "backward", "gradient", "optimizer", "other")

Level = Literal["op", "module", "state"]
LEVELS = get_args(Level)
PHASES = ("forward", "backward", "optimizer")

_LEFT_OUT = "!metric/"


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
        pattern = cls(
            phase=phase if has_phase else "*", module=module if has_module else "*", op=op
        )
        if not op.strip() or ("." not in op and "*" not in op):
            raise SettingsError(
                f"The op pattern {text!r} names no op; write [phase/][module:]op with the op as "
                'namespace.op.overload, for example "aten.kthvalue.default" or '
                '"decoder.*:aten.index_put_.*".'
            )
        if not any(fnmatchcase(known, pattern.phase) for known in ALL_PHASES):
            raise SettingsError(
                f"The op pattern {text!r} asks for the phase {phase!r}; the phases are "
                f"{', '.join(ALL_PHASES)}."
            )
        return pattern

    @staticmethod
    def exactly(phase: str, module: str, op: str) -> str:
        return f"{escape(phase)}/{escape(module)}:{escape(op)}"

    def matches(self, phase: str, module: str, op: str) -> bool:
        return (
            fnmatchcase(op, self.op)
            and fnmatchcase(module, self.module)
            and fnmatchcase(phase, self.phase)
        )


def as_names(
    argument: str, value: object, error: type[DetCallbacksError] = SelectionError
) -> tuple[str, ...]:
    """Return a list of strings as a tuple; an error for anything else, including a lone string."""
    if isinstance(value, str):
        raise error(
            f"{argument} must be a list of strings; got the string {value!r}: write [{value!r}]."
        )
    if not isinstance(value, Sequence) or not all(isinstance(item, str) for item in value):
        raise error(f"{argument} must be a list of strings; got {value!r}.")
    return tuple(value)


def as_patterns(argument: str, value: object) -> tuple[str, ...]:
    """Return a list of op patterns as a tuple, each once; SelectionError, with
    the argument, for others.
    """
    patterns = tuple(dict.fromkeys(as_names(argument, value)))
    for pattern in patterns:
        try:
            OpPattern.parse(pattern)
        except SettingsError as error:
            raise SelectionError(f"{argument}: {error}") from error
    return patterns


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """What is digested, by the arguments of the callback; an invalid value is a SelectionError.

    ::

        Selection()                             # the outputs of every op of every step
        Selection(modules=("encoder.*",))       # of the ops in these modules
        Selection(phases=("forward",))          # of the ops of the forward pass
        Selection(level="module")               # of modules, with their gradients; not of ops
        Selection(level="state")                # batch, loss, gradients, weights, optimizer state
        Selection(every_n_steps=100)            # each of these in the steps 0, 100, 200 and so on

    A number that Python reads from a tensor (``item``) is recorded in every phase except the
    optimizer, because any op may be called with it.
    """

    level: str = "op"
    modules: tuple[str, ...] = ("*",)
    phases: tuple[str, ...] = PHASES
    every_n_steps: int = 1
    only_steps: tuple[int, ...] | None = None
    compiled: str = "run"

    def __post_init__(self) -> None:
        for name, allowed in (("level", LEVELS), ("compiled", ("run", "eager"))):
            if getattr(self, name) not in allowed:
                raise SelectionError(
                    f"{name} must be one of {', '.join(allowed)}; got {getattr(self, name)!r}."
                )
        object.__setattr__(self, "modules", as_names("modules", self.modules))
        if not self._module_patterns:
            raise SelectionError(
                'modules must have at least one pattern; ("*",) selects everything.'
            )
        for pattern in self.modules:
            if pattern.startswith(("!", "metric/")) and not pattern.startswith(_LEFT_OUT):
                raise SelectionError(
                    f"modules: {pattern!r} selects no modules; to leave out a metric, add "
                    f'"{_LEFT_OUT}NAME" to the patterns of modules.'
                )
        phases = as_names("phases", self.phases)
        if not phases or not set(phases).issubset(PHASES):
            raise SelectionError(
                f"phases must be chosen among {', '.join(PHASES)}; got {list(phases)!r}."
            )
        object.__setattr__(self, "phases", tuple(phase for phase in PHASES if phase in phases))
        if type(self.every_n_steps) is not int or self.every_n_steps < 1:
            raise SelectionError(
                f"every_n_steps must be an integer >= 1; got {self.every_n_steps!r}."
            )
        if self.only_steps is not None:
            steps = self.only_steps if isinstance(self.only_steps, Sequence) else ()
            if not steps or not all(type(step) is int and step >= 0 for step in steps):
                raise SelectionError(
                    "only_steps must be step numbers >= 0, such as [812], or None; got "
                    f"{self.only_steps!r}."
                )
            object.__setattr__(self, "only_steps", tuple(sorted(set(steps))))
            if self.every_n_steps != 1:
                raise SelectionError(
                    f"only_steps and every_n_steps={self.every_n_steps} both select steps: pass "
                    "only one of them."
                )

    @property
    def is_every_step(self) -> bool:
        return self.every_n_steps == 1 and self.only_steps is None

    @property
    def shown_steps(self) -> str:
        """The argument that chooses the steps, as text."""
        steps = self.only_steps
        return (
            f"every_n_steps={self.every_n_steps}" if steps is None else f"only_steps={list(steps)}"
        )

    @property
    def _module_patterns(self) -> list[str]:
        return [pattern for pattern in self.modules if not pattern.startswith(_LEFT_OUT)]

    def selects_module(self, module: str) -> bool:
        return any(fnmatchcase(module, pattern) for pattern in self._module_patterns)

    def selects_metric(self, name: str) -> bool:
        left_out = [
            pattern.removeprefix(_LEFT_OUT)
            for pattern in self.modules
            if pattern.startswith(_LEFT_OUT)
        ]
        return not any(fnmatchcase(name, pattern) for pattern in left_out)

    def selects_phase(self, phase: str) -> bool:
        """Return whether ops of this phase are selected; phases outside ``PHASES`` always are."""
        return phase not in PHASES or phase in self.phases

    def selects_step(self, step: int) -> bool:
        return (
            step % self.every_n_steps == 0 if self.only_steps is None else step in self.only_steps
        )

    def check_modules(self, names: Sequence[str]) -> None:
        """Raise ``SelectionError`` if a pattern matches none of a model's modules."""
        for pattern in self._module_patterns:
            if pattern != "*" and not any(fnmatchcase(name, pattern) for name in names):
                shown = ", ".join(repr(name) for name in list(names)[:12])
                shown += ", ..." if len(names) > 12 else ""
                raise SelectionError(
                    f"The pattern {pattern!r} in modules matches no module of the model. Its "
                    f"modules are: {shown}."
                )

    def to_dict(self) -> dict[str, Any]:
        return as_json(self)
