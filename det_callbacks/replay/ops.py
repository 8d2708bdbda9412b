"""Outputs of ops chosen by pattern: saved while recording, put back while verifying."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from det_callbacks.errors import ReferenceFormatError
from det_callbacks.patterns import OpPattern
from det_callbacks.replay.counts import ReplayCounts
from det_callbacks.replay.late import replay
from det_callbacks.replay.reading import SavedStep
from det_callbacks.replay.saving import SavedTensors
from det_callbacks.trace.late_sites import LateSites


class OpSelection:
    """Which ops patterns mean, and the keys of their outputs.

    Args:
        patterns: ``[phase/][module:]op`` each.
    """

    def __init__(self, patterns: Sequence[str]) -> None:
        self._patterns = {pattern: OpPattern.parse(pattern) for pattern in patterns}
        self._known: dict[tuple[str, str, str], bool] = {}
        self._calls: Counter[str] = Counter()
        self._unused = set(patterns)

    def selects(self, phase: str, module: str, op: str) -> bool:
        """Return whether a pattern means an op at this place."""
        place = (phase, module, op)
        is_selected = self._known.get(place)
        if is_selected is None:
            matching = [text for text, pattern in self._patterns.items() if pattern.matches(phase, module, op)]
            self._unused.difference_update(matching)
            is_selected = self._known[place] = bool(matching)
        return is_selected

    def begin_step(self) -> None:
        """Count calls anew."""
        self._calls.clear()

    @property
    def unused(self) -> tuple[str, ...]:
        """The patterns that have meant no op so far."""
        return tuple(pattern for pattern in self._patterns if pattern in self._unused)

    def keys(self, phase: str, module: str, op: str, num_outputs: int) -> list[str]:
        """Return the keys of the outputs of the next call at a place."""
        place = f"{phase}/{module}:{op}"
        call = self._calls[place]
        self._calls[place] += 1
        return [f"{place}#{call}.{output}" for output in range(num_outputs)]


class OpSaver(OpSelection):
    """Saves the outputs of the ops that patterns mean.

    Args:
        patterns: which ops.
        saved: where they go.
    """

    def __init__(self, patterns: Sequence[str], saved: SavedTensors) -> None:
        super().__init__(patterns)
        self._saved = saved
        self.counts = ReplayCounts()

    def exchange(
        self, phase: str, module: str, op: str, outputs: Sequence[Any], late: LateSites | None = None
    ) -> Sequence[Any]:
        """Save the outputs; return them.

        Raises:
            ReplayError: the budget does not suffice.
        """
        for key, output in zip(self.keys(phase, module, op, len(outputs)), outputs, strict=True):
            if isinstance(output, Tensor):
                self._saved.keep(key, output, op=op, late=late, counts=self.counts)
            else:
                self._saved.keep_value(key, output)
                self.counts.add(op, differs=False, num_bytes=0)
        return outputs


class OpReplayer(OpSelection):
    """Puts the saved outputs of the ops that patterns mean into the live ones.

    Args:
        patterns: which ops: those that the reference was recorded with.
    """

    def __init__(self, patterns: Sequence[str]) -> None:
        super().__init__(patterns)
        self.counts = ReplayCounts()
        self._step: SavedStep | None = None

    def begin(self, step: SavedStep | None) -> None:
        """Start a step with what was saved of it; None for a step that the reference does not have."""
        self.begin_step()
        self._step = step

    def exchange(
        self, phase: str, module: str, op: str, outputs: Sequence[Any], late: LateSites | None = None
    ) -> Sequence[Any]:
        """Put the saved bits into the outputs; return them, numbers as they were saved.

        Raises:
            ReferenceFormatError: what was saved is missing, damaged or does not fit.
        """
        if self._step is None:
            return outputs
        replayed = []
        for key, output in zip(self.keys(phase, module, op, len(outputs)), outputs, strict=True):
            if isinstance(output, Tensor):
                saved = self._step.take(key, like=output)
                replay(saved, output, late=late, counts=self.counts, op=op)
                replayed.append(output)
            else:
                value = self._step.take_value(key)
                if type(value) is not type(output):
                    raise ReferenceFormatError(
                        f"{self._step.path}: {key!r} is {value!r} there, and the live value is {output!r}. Record the "
                        "reference again with the same code.",
                        str(self._step.path),
                    )
                self.counts.add(op, differs=value != output and value == value, num_bytes=0)
                replayed.append(value)
        return replayed


class OpResaver:
    """Saves the outputs of the ops that patterns mean, or puts them back where the step was recorded before.

    Args:
        saver: of steps that are new.
        replayer: of steps that an earlier attempt of the run recorded.
    """

    def __init__(self, saver: OpSaver, replayer: OpReplayer) -> None:
        self._saver = saver
        self._replayer = replayer
        self._current: OpSaver | OpReplayer = saver

    @property
    def unused(self) -> tuple[str, ...]:
        """The patterns that have meant no op so far."""
        return tuple(pattern for pattern in self._saver.unused if pattern in self._replayer.unused)

    @property
    def counts(self) -> ReplayCounts:
        """Of the steps that are new."""
        return self._saver.counts

    def begin(self, step: SavedStep | None) -> None:
        """Start a step with what was saved of it; None for a new one."""
        self._saver.begin_step()
        self._replayer.begin(step)
        self._current = self._saver if step is None else self._replayer

    def selects(self, phase: str, module: str, op: str) -> bool:
        """Return whether a pattern means an op at this place."""
        return self._current.selects(phase, module, op)

    def exchange(
        self, phase: str, module: str, op: str, outputs: Sequence[Any], late: LateSites | None = None
    ) -> Sequence[Any]:
        """Save the outputs, or put the saved bits into them; return them.

        Raises:
            ReplayError: the budget does not suffice.
            ReferenceFormatError: what was saved is missing, damaged or does not fit.
        """
        return self._current.exchange(phase, module, op, outputs, late)
