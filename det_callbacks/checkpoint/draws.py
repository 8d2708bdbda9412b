"""Calls somebody when the batches of a loader are drawn. Nothing here changes what is drawn."""

from collections.abc import Callable
from typing import Any, Protocol

from lightning.pytorch.utilities.combined_loader import CombinedLoader


class Follower(Protocol):
    """Is called at each iteration over a loader and at each batch."""

    def begin_iteration(self) -> None:
        """Called before the loader makes its iterators."""

    def begin_draw(self) -> None:
        """Called before a batch is drawn."""

    def end_draw(self, batch: Any) -> None:
        """Called with a batch that was drawn."""


class _Followed(CombinedLoader):
    """A loader that calls its followers; those that came last are called first before, and last after."""

    _followers: list[Follower]

    def __iter__(self) -> Any:
        for follower in self._followers[::-1]:
            follower.begin_iteration()
        return super().__iter__()

    def __next__(self) -> Any:
        for follower in self._followers[::-1]:
            follower.begin_draw()
        drawn = super().__next__()
        for follower in self._followers:
            follower.end_draw(drawn[0])
        return drawn


def follow(loader: CombinedLoader, follower: Follower) -> Callable[[], object]:
    """Call a follower at what a loader does; return a function that ends that, in whatever order several end.

    Python looks ``__iter__`` and ``__next__`` up in the class, so as long as it is followed the loader has a subclass
    of its own, under the same name.
    """
    base = type(loader)
    if not issubclass(base, _Followed):
        names = {"__module__": base.__module__, "__qualname__": base.__qualname__, "_followers": []}
        # ours first, so that its super() is the loader's own class
        loader.__class__ = type(base.__name__, (_Followed, base), names)
    followed: Any = type(loader)
    followed._followers.append(follower)

    def end() -> None:
        if follower in followed._followers:
            followed._followers.remove(follower)
        if not followed._followers and type(loader) is followed:
            loader.__class__ = followed.__bases__[1]

    return end
