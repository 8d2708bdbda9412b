"""A loader that is followed by several: who is told when, and that it is left as it was."""

from typing import Any

import pytest
from lightning.pytorch.utilities.combined_loader import CombinedLoader

from det_callbacks.callback.followed import follow


class Notes:
    """Writes down what it is told."""

    def __init__(self, name: str, told: list[str]) -> None:
        self.name = name
        self.told = told

    def begin_iteration(self) -> None:
        self.told.append(f"{self.name} begins")

    def end_iteration(self) -> None:
        self.told.append(f"{self.name} has begun")

    def begin_draw(self) -> None:
        self.told.append(f"{self.name} draws")

    def end_draw(self, batch: Any) -> None:
        self.told.append(f"{self.name} drew {batch}")


class Mine(CombinedLoader):
    """Somebody's own loader."""


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
@pytest.mark.parametrize("kind", [CombinedLoader, Mine])
def test_several_follow_and_end_in_any_order(kind: type[CombinedLoader], order: tuple[int, int]) -> None:
    loader = kind([1, 2, 3], "max_size_cycle")
    told: list[str] = []
    ends = [follow(loader, Notes(name, told)) for name in ("first", "last")]
    assert isinstance(loader, kind)
    assert (type(loader).__name__, type(loader).__module__) == (kind.__name__, kind.__module__)
    iter(loader)
    assert next(loader)[0] == 1
    assert told == [
        *("last begins", "first begins", "first has begun", "last has begun"),
        *("last draws", "first draws", "first drew 1", "last drew 1"),
    ]
    told.clear()
    ends[order[0]]()
    ends[order[0]]()  # once more does nothing
    assert next(loader)[0] == 2
    left = ("first", "last")[order[1]]
    assert told == [f"{left} draws", f"{left} drew 2"]
    ends[order[1]]()
    assert type(loader) is kind
    assert next(loader)[0] == 3
    assert len(told) == 2
