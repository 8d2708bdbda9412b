"""Replay: saves tensors while recording, and restores their bits while verifying."""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml
from torch import Tensor

from det_callbacks.digest.components import digest_tensor
from det_callbacks.errors import ReferenceFormatError, SelectionError
from det_callbacks.internals.torch import without_modes
from det_callbacks.runs.patterns import OpPattern, as_patterns
from det_callbacks.tensors.copies import TensorBudget, misfit, require_apart, write_bits
from det_callbacks.tensors.files import MIB, SavedStep, SavedTensor, StepWriter
from det_callbacks.trace.op.components import unwrapped
from det_callbacks.trace.op.deferred_sites import DeferredSites


def replay_patterns(replay: object) -> tuple[str, ...]:
    """Return the patterns of an argument ``replay``: a list, or the path of a YAML file that holds one."""
    if not isinstance(replay, str | Path):
        return as_patterns("replay", replay)
    if Path(replay).suffix not in (".yaml", ".yml"):
        raise SelectionError(
            f"replay must be a list of patterns, or the path of a YAML file that holds one; got {str(replay)!r}: write "
            f"[{str(replay)!r}] if that is a pattern."
        )
    try:
        content = yaml.safe_load(Path(replay).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise SelectionError(f"replay: {replay} cannot be read ({error}).") from error
    return as_patterns(f"replay (in {replay})", content)


class Replay:
    """Saves tensors and plain values of a step under keys, or restores the saved ones.

    A key names a value within its step: ``phase/module:op#occurrence.output``, ``observation:name#occurrence.leaf``.
    Replay copies a tensor immediately, since it may change later in the step.

    If the recorded step has nothing that fits a live value, the live value stays, and ``end_step`` raises unless the
    comparison has found that the steps differ.
    """

    def __init__(self, writer: StepWriter | None = None, budget: TensorBudget | None = None) -> None:
        self._writer, self._budget = writer, budget or TensorBudget()
        self._counts: dict[str, tuple[int, int, int]] = {}  # by op or observation: count, differing, bytes
        self._num_steps = 0
        self.begin(None)

    @property
    def num_bytes(self) -> int:
        """Bytes saved; without a writer, bytes restored."""
        return sum(total for _, _, total in self._counts.values())

    def to_dict(self) -> dict[str, dict[str, Any]]:
        """Return ``replayed`` of the coverage: how many tensors, how many of them differed, MiB per step."""
        steps = max(1, self._num_steps)
        return {
            op: {"count": count, "differing": differing, "mib_per_step": round(total / MIB / steps, 6)}
            for op, (count, differing, total) in sorted(self._counts.items())
        }

    def begin(self, saved: SavedStep | None) -> None:
        """Start a step, and drop an unfinished one; ``saved`` is None for a step that was not recorded before."""
        self.saved = saved
        self._copies: dict[str, SavedTensor] = {}
        self._values: dict[str, Any] = {}
        self._unsaved: ReferenceFormatError | None = None
        self._ops: list[tuple[str, int]] = []
        self.calls: Counter[str] = Counter()  # by place of the op
        self._budget.num_bytes = 0

    def write(self, step: int) -> None:
        """Write the saved values of a settled step, and count them."""
        assert self._writer is not None, "it saves tensors"
        self._writer.write(step, self._copies, self._values)
        for op, num_bytes in self._ops:
            self._count(op, is_saved=True, num_bytes=num_bytes)
        self._num_steps += 1
        self.begin(None)

    def end_step(self, *, differs: bool) -> None:
        """End a compared step; raise ReferenceFormatError if it matches although a saved value was missing."""
        if self._unsaved is not None and not differs:
            raise self._unsaved
        self._num_steps += self._writer is None

    def exchange(self, key: str, live: Any, *, op: str, deferred: DeferredSites | None) -> Any:
        """Save a value, or restore the saved one: in the memory of the tensor, or by returning the saved number."""
        if isinstance(live, Tensor):
            if self.saved is not None or self._writer is not None:
                require_apart(live)
            saved = self._exchange(key, live, op, deferred)
            if saved is not None:
                write_bits(saved, live, deferred)
            return live
        if self.saved is None:
            self._values[key] = [live.real, live.imag] if isinstance(live, complex) else live
            self._ops.append((op, 0))
            return live
        if key not in self.saved.values:
            self.note_unsaved(f"it has no plain value {key!r}")
            return live
        value = self.saved.values[key]
        value = complex(*value) if isinstance(value, list) else value
        self._count(op, differs=repr(value) != repr(live))
        return value

    def exchange_apart(self, key: str, live: Tensor, *, op: str, deferred: DeferredSites | None) -> Tensor | None:
        """Save a tensor, or return a clone with the saved bits, which keeps the history, or None if nothing changes."""
        saved = self._exchange(key, live, op, deferred)
        if saved is None:
            return None
        with without_modes():  # the reference has no clone
            copy = live.clone()
        write_bits(saved, copy, deferred)
        return copy

    def note_unsaved(self, what: str) -> None:
        """Report in ``end_step`` that a live value has no saved one; if the file is missing, raise now."""
        saved = self.saved
        assert saved is not None
        is_there = "" if saved.exists else "there is no such file, so "
        error = ReferenceFormatError(
            f"{saved.path}: {is_there}{what}. Without the saved bits of step {saved.place.step} nothing after it could "
            "be compared, so this is an error and not a difference. Record the reference again with the same code.",
            str(saved.path),
        )
        if not saved.exists:
            raise error
        self._unsaved = self._unsaved or error

    def _count(self, op: str, *, is_saved: bool = False, differs: bool = False, num_bytes: int = 0) -> None:
        if is_saved == (self._writer is not None):  # do not count what a resumed recording restores
            count, differing, total = self._counts.get(op, (0, 0, 0))
            self._counts[op] = count + 1, differing + differs, total + num_bytes

    def _exchange(self, key: str, live: Tensor, op: str, deferred: DeferredSites | None) -> SavedTensor | None:
        """Save a tensor; or count it, and return the saved bits if they have to be restored."""
        if self.saved is None:
            if self._writer is not None:
                if key in self._copies:
                    raise ValueError(f"the step has saved {key!r} already")
                self._copies[key] = self._budget.copy(live, op, deferred)
                self._ops.append((op, self._copies[key].bits.nbytes))
            return None
        if key not in self.saved.entries:
            known = ", ".join(map(repr, list(self.saved.entries)[:4])) or "none"
            self.note_unsaved(f"it has no tensor {key!r}; it has {known}")
            return None
        saved = self.saved.read(key)
        if problem := misfit(saved, live):
            self.note_unsaved(f"{key!r} does not fit: {problem}")
            return None
        inner, digest, num_bytes = unwrapped(live), saved.digest, saved.bits.nbytes
        if deferred is not None and deferred.is_deferred(inner):
            bits = deferred.tensor_bits(inner)
            deferred.ask((bits,), lambda found: self._count(op, differs=found[0] != digest, num_bytes=num_bytes))
            return saved
        differs = digest_tensor(inner) != digest
        self._count(op, differs=differs, num_bytes=num_bytes)
        return saved if differs else None


class OpSelection:
    """The ops that patterns match; a pattern is ``[phase/][module:]op``."""

    def __init__(self, patterns: Sequence[str]) -> None:
        self._patterns = {pattern: OpPattern.parse(pattern) for pattern in patterns}
        self._known: dict[tuple[str, str, str], bool] = {}
        self._used: set[str] = set()

    def selects(self, phase: str, module: str, op: str) -> bool:
        """Return whether a pattern matches an op at this place."""
        place = (phase, module, op)
        if place not in self._known:
            matching = [text for text, pattern in self._patterns.items() if pattern.matches(phase, module, op)]
            self._used.update(matching)
            self._known[place] = bool(matching)
        return self._known[place]

    @property
    def unused(self) -> tuple[str, ...]:
        """The patterns that have matched no op so far."""
        return tuple(pattern for pattern in self._patterns if pattern not in self._used)


class OpReplay(OpSelection):
    """Saves the outputs of selected ops, or restores the saved bits."""

    needs_rows = False

    def __init__(self, patterns: Sequence[str], replay: Replay) -> None:
        super().__init__(patterns)
        self._replay = replay

    def exchange(
        self, phase: str, module: str, op: str, outputs: Sequence[Any], position: int, deferred: DeferredSites
    ) -> Sequence[Any]:
        """Save or restore the outputs of a call; return them, with saved numbers."""
        place = f"{phase}/{module}:{op}"
        call = self._replay.calls[place]
        self._replay.calls[place] += 1
        values = []
        for index, output in enumerate(outputs):
            key = f"{place}#{call}.{index}"
            values.append(self._replay.exchange(key, output, op=op, deferred=deferred))
            if type(values[-1]) is not type(output):
                self._replay.note_unsaved(f"{key!r} is {values[-1]!r} there, and the live value is {output!r}")
                values[-1] = output
        return values
