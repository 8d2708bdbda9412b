"""The loaders of a fit: a follower of what they do, and the generators that they hold."""

from collections.abc import Callable, Mapping
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.loggers import Logger
from lightning.pytorch.strategies import Strategy
from lightning.pytorch.utilities.combined_loader import CombinedLoader

from det_callbacks.internals.lightning import Loop
from det_callbacks.rng import Held
from det_callbacks.training import held_generators

_LEFT = (pl.Trainer, Logger, Strategy, Loop)
"""These lead to everything."""


def find_generators(roots: Mapping[str, object], *, left: tuple[type, ...] = ()) -> dict[str, Held]:
    """Return path -> random generator for those that the roots reach, but through Lightning's loops and ``left``."""
    return held_generators.find_generators(roots, left=(*_LEFT, *left))


class _Followed(CombinedLoader):
    """A loader that calls its followers in the order in which they came: a resume restores before others read."""

    _followers: list[Any]

    def __iter__(self) -> Any:
        for follower in self._followers:
            follower.begin_iteration()
        return super().__iter__()

    def __next__(self) -> Any:
        for follower in self._followers:
            follower.begin_draw()
        drawn = super().__next__()
        for follower in self._followers:
            follower.end_draw(drawn[0])
        return drawn


def follow(loader: Any, follower: Any) -> Callable[[], object]:
    """Call ``begin_iteration()``, ``begin_draw()`` and ``end_draw(batch)`` of a follower; return what ends that.

    Several may end in any order. As long as it is followed, the loader has a subclass of its own, under the same name.
    """
    if not isinstance(loader, _Followed):
        base = type(loader)
        names = {"__module__": base.__module__, "__qualname__": base.__qualname__, "_followers": []}
        # ours first, so that its super() is the loader's own class
        loader.__class__ = type(base.__name__, (_Followed, base), names)
    followers = loader._followers
    followers.append(follower)

    def end() -> None:
        if follower in followers:
            followers.remove(follower)
            if not followers:
                loader.__class__ = type(loader).__bases__[1]

    return end
