"""Batches that are no pytrees: their tensors are named, and what cannot be looked into is no secret."""

from collections import UserDict
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from styles import Classifier, train
from torch.nn.functional import cross_entropy
from torch.utils.data import default_collate
from trainers import LIGHTNING_ADVICE

from det_callbacks import DeterminismCallback, DivergenceError, Verdict

pytestmark = LIGHTNING_ADVICE


class Graph:
    """Keeps its tensors in a storage that it shows as attributes, as torch_geometric's batches do."""

    def __init__(self, **tensors: Any) -> None:
        self.__dict__["_store"] = UserDict(tensors)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return self._store[name]

    def keys(self) -> list[str]:
        return list(self._store)


@dataclass
class Sample:
    x: Any
    y: Any
    unread: Any = None


class OfObjects(Classifier):
    """Its batches are objects with ``x`` and ``y``; a test changes an element, or what the step computes with."""

    make: Callable[..., Any] = Sample
    is_changed = False
    factor = 1.0

    def collate(self, samples: list[Any]) -> Any:
        x, y = default_collate(samples)
        if self.is_changed:
            x[3, 4] += 1
        return type(self).make(x=x, y=y)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return cross_entropy(self(batch.x) * self.factor, batch.y)


def model(make: Callable[..., Any], **changes: Any) -> type[OfObjects]:
    return type("Model", (OfObjects,), {"make": staticmethod(make), **changes})


def verify(folder: Path, reference: type[OfObjects], current: type[OfObjects]) -> Verdict:
    """Record one training, verify another."""
    if not (folder / "reference").exists():
        train(reference, DeterminismCallback(folder / "reference", mode="record"), epochs=1)
    callback = DeterminismCallback(folder / "reference", current=folder / "current", on_divergence="collect")
    with suppress(DivergenceError):
        train(current, callback, epochs=1)
    assert callback.verdict is not None
    assert callback.verdict.first_divergence is not None
    return callback.verdict


def test_a_changed_sample_is_named_by_its_attribute(tmp_path: Path) -> None:
    other = verify(tmp_path, model(Graph), model(Graph, is_changed=True))
    assert other.coverage.opaque_regions == ()
    assert (other.verdict, other.cause) == ("diverged", "data_content")
    found = other.first_divergence
    assert (found.phase, found.name, found.shape) == ("data", "batch.x", (8, 12))


def unread(x: Any, y: Any) -> Sample:
    return Sample(x, y, unread={1, 2})


def test_what_is_not_looked_into_is_told_and_may_have_given_an_argument(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    verdict = verify(tmp_path, model(unread), model(unread, factor=2.0))
    assert verdict.coverage.opaque_regions == ("batch.unread (builtins.set)",)
    found = verdict.first_divergence
    assert (found.op, found.kind, found.is_origin, verdict.origins) == ("aten.mul.Tensor", "argument", None, ())
    assert "the batch holds a builtins.set, which cannot be looked into" in verdict.explanation
    assert "not looked into: batch.unread (builtins.set)" in capsys.readouterr().out
    # another type is another structure
    found = verify(tmp_path, model(unread), model(lambda x, y: Sample(x, y, unread=frozenset([1])))).first_divergence
    assert (found.name, found.kind) == ("batch.unread", "structure")
