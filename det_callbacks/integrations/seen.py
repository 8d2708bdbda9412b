"""What a process did with torch, which the command says if nothing was recorded."""

import gc
import json
import os
from collections import Counter
from pathlib import Path

from det_callbacks.environment.variables import SEEN, launch_request
from det_callbacks.runs.files import writing
from det_callbacks.text import count, listed


def report_seen(text: str, *, is_of_torch: bool = True) -> None:
    """Write what this process did into a file for the command, unless the command has ended."""
    folder = Path(json.loads(launch_request() or "null")["claim"]).parent
    if folder.is_dir():
        path = folder / f"{SEEN}{os.getpid()}"
        with writing(path):
            path.write_text(json.dumps([is_of_torch, text]), encoding="utf-8")


class Seen:
    """Counts what a process does with torch; updates are those that no step of the run holds."""

    def __init__(self) -> None:
        self.made = Counter[str]()  # optimizers of torch, by class
        self.updates = Counter[str]()
        # in another thread, or after a Trainer of Lightning
        self.updates_elsewhere = Counter[str]()
        self.num_parameters: dict[str, int] = {}
        # whether one of several ranks called a module and has trained none
        self.is_parallel = False
        # iterations with an update that no step of the run holds
        self.num_backwards = self.num_iterations = 0
        self._num_backwards_before = -1  # the last such update
        self._others: list[str] = []  # optimizers of other libraries

    def note_update(self, name: str, num_parameters: int) -> None:
        self.updates[name] += 1
        self.num_parameters[name] = num_parameters
        self.num_iterations += self.num_backwards != self._num_backwards_before
        self._num_backwards_before = self.num_backwards

    def note_backward(self, of_torch: tuple[type, ...]) -> None:
        self.num_backwards += 1
        if self.num_backwards == 1 and not self.made:
            self._others = _others(of_torch)

    def text(self) -> str:
        """Return what was seen in a process that recorded no step."""
        backwards = (
            f"backward() ran {_times(self.num_backwards)}"
            if self.num_backwards
            else "backward() did not run"
        )
        if self.updates or self.updates_elsewhere:
            parts = [
                f"{name} stepped {_times(number)}, and none of its "
                f"{count(self.num_parameters[name], 'parameter')} is in a module that was called "
                "with gradients enabled"
                for name, number in self.updates.items()
            ]
            parts += [
                f"{name} stepped {_times(number)} outside of the main thread, where det-callbacks "
                "follows nothing"
                for name, number in self.updates_elsewhere.items()
            ]
            return "; ".join(parts)
        if self.made:
            return f"{listed(self.made)} did not step, and {backwards}"
        others = f" (the script has {listed(self._others)})" if self._others else ""
        if not self.num_backwards:
            called = "no module with parameters was called"
            if self.is_parallel:
                called = "calls of a module in several ranks are not followed"
            return f"torch was imported, no optimizer of torch.optim was built, and {called}"
        return f"torch was imported, no optimizer of torch.optim was built{others}, and {backwards}"


def _times(number: int) -> str:
    return "once" if number == 1 else f"{number:,} times"


def _others(of_torch: tuple[type, ...]) -> list[str]:
    """Return the classes of objects that work as optimizers, and are none of torch's."""
    kinds = {kind for kind in map(type, gc.get_objects()) if not issubclass(kind, of_torch)}
    names = []
    for kind in kinds:
        methods = {name for base in kind.__mro__ for name in vars(base)}
        if {"step", "zero_grad"} <= methods or "apply_gradients" in methods:
            names.append(f"{kind.__module__}.{kind.__qualname__}")
    return sorted(names)
