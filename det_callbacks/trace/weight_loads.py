"""Weights that are loaded into a model after it was set up: from where, and before which step."""

import sys
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from typing import Any

from torch import nn
from torch.utils.hooks import RemovableHandle

from det_callbacks.trace.source import nearest_source

_LOAD_STATE_DICT = nn.Module.load_state_dict.__code__


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightLoad:
    """One place of the code that loads weights into one module; every call of it counts.

    Attributes:
        module: qualified name of the module whose ``load_state_dict`` was called; "" is the root.
        source: the line that called it, "train.py:41 in on_fit_start".
        is_restore: Lightning did it, as it does when it restores a checkpoint: expected.
        first_step: step before which, or in which, it happened first; None is before the first step.
        num_calls: how often.
        segment: fit of the run.
        attempt: of the run.
    """

    module: str
    source: str
    is_restore: bool
    first_step: int | None
    num_calls: int = 1
    segment: int = 0
    attempt: int = 0

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON form."""
        return asdict(self)

    @classmethod
    def from_dict(cls, entry: Mapping[str, Any]) -> "WeightLoad":
        """Return a load from its JSON form; KeyError or TypeError where an entry is missing or of another kind."""
        load = cls(**{name: entry[name] for name in cls.__slots__})
        is_sound = (
            isinstance(load.module, str)
            and isinstance(load.source, str)
            and isinstance(load.is_restore, bool)
            and all(isinstance(number, int) for number in (load.num_calls, load.segment, load.attempt))
            and (load.first_step is None or isinstance(load.first_step, int))
        )
        if not is_sound:
            raise TypeError(f"an entry has no sensible value in {dict(entry)}")
        return load


Keep = Callable[[tuple[WeightLoad, ...]], object]


class LoadWatch:
    """Notes calls of ``load_state_dict`` on a module and those in it, through a hook on each while it is open.

    Notes are kept by module and line, so that their number does not grow with the steps. Copies and pickles of a hooked
    module have a hook of the standard library there that does nothing.

    Attributes:
        step: under way, or last; None before the first.
    """

    def __init__(self) -> None:
        self.step: int | None = None
        self._keep: Keep | None = None
        self._found: dict[tuple[str, str], list[Any]] = {}
        self._handles: dict[int, RemovableHandle] = {}
        self._modules: list[nn.Module] = []

    @property
    def found(self) -> tuple[WeightLoad, ...]:
        """What was noted, in the order of the first calls."""
        return tuple(
            WeightLoad(module=module, source=source, is_restore=is_restore, first_step=step, num_calls=num_calls)
            for (module, source), (is_restore, step, num_calls) in self._found.items()
        )

    def open(self, root: nn.Module, keep: Keep | None = None) -> None:
        """Watch a module and those in it; again, it adds what has come since.

        Args:
            root: the module; names are relative to it.
            keep: called with everything that was noted: now, when a line loads weights for the first time, and at the
                end, when the number of calls is known.
        """
        for name, module in root.named_modules():
            if id(module) not in self._handles:
                self._modules.append(module)  # so that its id stays its own
                self._handles[id(module)] = module.register_load_state_dict_post_hook(_Hook(self, name))
        self._keep = keep
        self._tell()

    def close(self) -> None:
        """Take every hook away and forget what was noted; may be called more than once."""
        for handle in self._handles.values():
            handle.remove()
        self._handles.clear()
        self._modules.clear()
        try:
            self._tell()
        finally:
            self._keep = self.step = None
            self._found.clear()

    def note(self, module: str) -> None:
        """Note that weights were loaded into a module by whoever is calling."""
        source, is_framework = nearest_source()
        known = self._found.get((module, source))
        if known is not None:
            known[2] += 1
            return
        self._found[module, source] = [is_framework, self.step, 1]
        self._tell()

    def _tell(self) -> None:
        if self._found and self._keep is not None:
            self._keep(self.found)


class _Hook:
    def __init__(self, watch: LoadWatch, name: str) -> None:
        self._watch = watch
        self._name = name

    def __call__(self, module: nn.Module, incompatible_keys: object) -> None:
        # torch 2.13 calls the hooks of every module inside from a recursive function within load_state_dict; only
        # those of the module that it was called on come straight from there
        caller = sys._getframe(1).f_back
        if caller is not None and caller.f_code is _LOAD_STATE_DICT:
            self._watch.note(self._name)

    def __reduce__(self) -> tuple[Any, ...]:
        # of copies and pickles: something that does nothing, and that is there where det_callbacks is not installed
        return getattr, (nullcontext(), "__exit__")
