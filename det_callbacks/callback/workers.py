"""Another number of workers for the loaders of a training, without a change of its code."""

import os
from collections.abc import Iterable
from typing import Any

from torch.utils.data import DataLoader

from det_callbacks.check import NUM_WORKERS_VARIABLE
from det_callbacks.errors import SettingsError


class NumWorkers:
    """The number of workers that the environment asks for, ``det-callbacks check --vary workers`` for one.

    Raises:
        SettingsError: it asks for what is no number.
    """

    def __init__(self) -> None:
        text = os.environ.get(NUM_WORKERS_VARIABLE)
        if text is not None and not text.isdecimal():
            raise SettingsError(
                f"{NUM_WORKERS_VARIABLE} is the number of workers of the training's DataLoaders, from 0 on; got "
                f"{text!r}. Unset it, or give it a whole number."
            )
        self._asked = None if text is None else int(text)
        self._is_done = False

    def apply(self, loaders: Iterable[Any]) -> None:
        """Give loaders that were not iterated over yet so many workers, and what goes with them.

        Looked at in torch 2.13: a loader asks for its number when it makes an iterator. One without workers has no
        ``prefetch_factor`` and refuses a ``timeout``; ``persistent_workers`` counts only where there are some.
        """
        if self._asked is None:
            return
        for loader in loaders:
            if not isinstance(loader, DataLoader):
                continue
            loader.num_workers = self._asked
            if self._asked and loader.prefetch_factor is None:
                loader.prefetch_factor = 2
            if not self._asked:
                loader.timeout = 0
            self._is_done = True

    def require(self) -> None:
        """Raise ``SettingsError`` where workers were asked for, and no loader could be given them."""
        if self._asked is not None and not self._is_done:
            raise SettingsError(
                f"{NUM_WORKERS_VARIABLE}={self._asked}, but the training has no torch DataLoader whose number of "
                "workers could be set before it is first iterated over. Unset the variable, or set the number in the "
                "program."
            )
