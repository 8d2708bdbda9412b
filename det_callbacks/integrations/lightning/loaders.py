"""The loaders of a fit: a follower of what they do, and the generators that they hold."""

from collections.abc import Callable, Mapping
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.loggers import Logger
from lightning.pytorch.strategies import Strategy

from det_callbacks.environment.rng import Held
from det_callbacks.internals.lightning import Loop
from det_callbacks.internals.twins import either
from det_callbacks.training import held_generators

_LEFT = (pl.Trainer, Logger, Strategy, Loop)
"""These lead to everything."""


def find_generators(roots: Mapping[str, object], *, left: tuple[type, ...] = ()) -> dict[str, Held]:
    """Return path -> random generator for those that the roots reach, but through Lightning's loops and ``left``."""
    return held_generators.find_generators(roots, left=(*either(*_LEFT), *left))


def follow(loader: Any, follower: Any) -> Callable[[], object]:
    """Call ``begin_iteration()``, ``begin_draw()`` and ``end_draw(batch)`` of a follower; return what ends that.

    Several may end in any order. As long as it is followed, the loader has a subclass of its own,
    under the same name.
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
    """Return a subclass of a CombinedLoader's class that calls followers in the order in which they came.

    A resume, which comes first, restores generators before the others read them.
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

    names = {"__module__": base.__module__, "__qualname__": base.__qualname__, "det_callbacks_followers": followers}
    return type(base.__name__, (base,), {**names, "__iter__": begin, "__next__": draw})
