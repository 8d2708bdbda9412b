"""Follows the loaders of a fit, and finds the generators that they hold."""

from collections.abc import Callable, Mapping
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.loggers import Logger
from lightning.pytorch.strategies import Strategy

from det_callbacks.environment.rng import Held
from det_callbacks.internals.lightning import Loop
from det_callbacks.internals.replaced import subclass_of
from det_callbacks.internals.twins import either
from det_callbacks.training import held_generators

_LEFT = (pl.Trainer, Logger, Strategy, Loop)
"""Types whose attributes reach everything."""


def find_generators(roots: Mapping[str, object], *, left: tuple[type, ...] = ()) -> dict[str, Held]:
    """Return path -> random generator for all that the roots reach, except via Lightning's loops and ``left``."""
    return held_generators.find_generators(roots, left=(*either(*_LEFT), *left))


def follow(loader: Any, follower: Any) -> Callable[[], object]:
    """Have a loader call ``begin_iteration()``, ``begin_draw()`` and ``end_draw(batch)``; return a function to end it.

    Several followers may end in any order. While it is followed, the loader's class is a subclass with
    the same name.
    """
    if not hasattr(loader, "det_callbacks_followers"):
        loader.__class__ = _followed(type(loader))
    followers = loader.det_callbacks_followers
    followers.append(follower)

    def end() -> None:
        if follower in followers:
            followers.remove(follower)
            if not followers:
                loader.__class__ = type(loader).__base__

    return end


def _followed(base: Any) -> Any:
    """Return a subclass of a CombinedLoader's class that calls followers in the order of their registration.

    The resume is first, and restores generators before the others read them.
    """
    followers: list[Any] = []

    def begin(loader: Any) -> Any:
        for follower in followers:
            follower.begin_iteration()
        return base.__iter__(loader)

    def draw(loader: Any) -> Any:
        for follower in followers:
            follower.begin_draw()
        drawn = base.__next__(loader)
        for follower in followers:
            follower.end_draw(drawn[0])
        return drawn

    return subclass_of(base, det_callbacks_followers=followers, __iter__=begin, __next__=draw)
