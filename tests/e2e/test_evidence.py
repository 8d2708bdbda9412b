"""The evidence that real trainings leave, and what a verdict makes of it."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from fits import Classifier, Samples
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset, default_collate
from trainers import LIGHTNING_ADVICE, quiet_trainer

from det_callbacks import DeterminismCallback
from det_callbacks.runs.evidence import EvidenceRow, evidence_path, read_evidence
from det_callbacks.runs.store import Run
from det_callbacks.training import evidence
from det_callbacks.verdict import Verdict

pytestmark = [
    LIGHTNING_ADVICE,
    # workers are forked from a process with threads, which Python 3.12 warns of
    # Python's, of processes that are forked here
    pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning"),
    # what on_divergence="warn" says
    pytest.mark.filterwarnings("ignore::det_callbacks.errors.DivergenceWarning"),
]


NUMBERED = TensorDataset(
    torch.arange(288.0).reshape(24, 12).sin(), torch.arange(24) % 3, torch.arange(24)
)
"""Samples with their numbers."""

ORDER = [*range(23, -1, -1)]


class OfNumbered(Classifier):
    trained: ClassVar[list[list[int]]] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.trained.append(batch[2].tolist())
        return super().training_step(batch[:2], batch_idx)


def rows_of(path: Path) -> list[EvidenceRow]:
    run = Run.open(path)
    stream = run.rank(0).file_of(0, int(run.rank(0).steps(0)[0])).path
    return list(read_evidence(evidence_path(stream), run_id=run.manifest.run_id))


def fit(
    callback: DeterminismCallback, loader: Any, model: type[Classifier], **options: Any
) -> None:
    torch.manual_seed(0)
    options = {"max_epochs": 1, "default_root_dir": callback.reference.parent, **options}
    quiet_trainer(callback, **options).fit(model(), loader)


def record(folder: Path, loader: Any, model: type[Classifier] = OfNumbered, **options: Any) -> Path:
    fit(DeterminismCallback(folder, mode="record"), loader, model, **options)
    return folder


def verify(
    folder: Path, loader: Any, model: type[Classifier] = OfNumbered, **options: Any
) -> Verdict:
    callback = DeterminismCallback(folder, on_divergence="warn")
    fit(callback, loader, model, **options)
    return callback.verdict


@pytest.mark.parametrize(
    "workers", [{}, {"num_workers": 2}, {"num_workers": 1, "persistent_workers": True}], ids=str
)
def test_the_indices_are_those_of_the_batch_that_is_trained_on(tmp_path, workers):
    loader = DataLoader(
        NUMBERED, 4, shuffle=True, generator=torch.Generator().manual_seed(1), **workers
    )
    OfNumbered.trained.clear()
    rows = rows_of(record(tmp_path / "run", loader, max_epochs=2))
    indices = {row.step: json.loads(row.text) for row in rows if row.kind == "indices"}
    assert list(indices) == list(range(12))
    assert [*indices.values()] == OfNumbered.trained


def test_the_first_other_sample_is_named_by_its_index(tmp_path, monkeypatch):
    monkeypatch.setattr(evidence, "MAX_INDICES", 3)  # of a batch, the first ones are kept
    other = [*ORDER[:6], 20, *ORDER[7:]]
    reference = record(tmp_path / "run", DataLoader(NUMBERED, 4, sampler=ORDER))
    texts = [json.loads(row.text) for row in rows_of(reference) if row.kind == "indices"]
    assert texts == [ORDER[start : start + 3] for start in range(0, 24, 4)]
    verdict = verify(reference, DataLoader(NUMBERED, 4, sampler=other))
    assert verdict.first_divergence.step == 1
    both = f"{ORDER[6]} in the reference, 20 in the current run"
    said = f"batch: first different sample: the sampler of train_dataloader drew at [2] {both}"
    assert said in verdict.evidence


def test_what_a_hook_makes_of_a_batch_is_told_from_what_was_loaded(tmp_path):
    def shifted(by: float) -> type[Classifier]:
        hook = {"on_after_batch_transfer": lambda self, batch, _: (batch[0] + by, batch[1])}
        return type("Shifted", (Classifier,), hook)

    for name, before in (("other", shifted(0.0)), ("none", Classifier)):
        reference = record(tmp_path / name, DataLoader(Samples(), 4), before)
        verdict = verify(reference, DataLoader(Samples(), 4), shifted(0.5))
        assert (verdict.cause, "on_after_batch_transfer" in verdict.explanation) == (
            "data_content",
            True,
        )
        assert "batch: the loader's output matches" in verdict.evidence


def test_a_verdict_stands_without_its_evidence(tmp_path):
    reference = record(tmp_path / "run", DataLoader(NUMBERED, 4, sampler=ORDER))
    path = evidence_path(Run.open(reference).rank(0).file_of(0, 0).path)
    content = path.read_bytes()
    for damaged in (content[:-900], content[:-700] + b"?" + content[-699:], None):
        path.unlink() if damaged is None else path.write_bytes(damaged)
        verdict = verify(reference, DataLoader(NUMBERED, 4, sampler=ORDER[::-1]))
        assert (verdict.verdict, verdict.cause) == ("diverged", "data_content")
        assert any("cannot be used" in line and str(path) in line for line in verdict.evidence)


@dataclass
class Sample:
    """No pytree; its attributes are looked at, but not into a set."""

    x: Any
    y: Any
    unread: Any


class OfObjects(Classifier):
    factor = 1.0

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return cross_entropy(self(batch.x) * self.factor, batch.y)


@pytest.mark.filterwarnings("ignore:.*nested tensors.*:UserWarning")  # torch calls them a prototype
def test_what_is_not_looked_into_is_told_and_may_have_given_an_argument(tmp_path, capsys):
    def loader(unread: Any, shift: float = 0.0, seed: int = 0) -> DataLoader[Any]:
        def collate(samples: list[Any]) -> Sample:
            x, y = default_collate(samples)
            return Sample(x + shift, y, unread)

        return DataLoader(
            Samples(), 8, collate_fn=collate, generator=torch.Generator().manual_seed(seed)
        )

    reference = record(tmp_path / "run", loader({1, 2}), OfObjects)
    verdict = verify(
        reference, loader({1, 2}, seed=1), type("Doubled", (OfObjects,), {"factor": 2.0})
    )
    assert (verdict.cause, verdict.coverage.opaque_regions) == (
        "forward",
        ("batch.unread (builtins.set)",),
    )
    found = verdict.first_divergence
    assert (found.op, found.kind, found.is_origin, verdict.origins) == (
        "aten.mul.Tensor",
        "argument",
        None,
        (),
    )
    assert "a part of the batch that the recorder could not inspect" in verdict.explanation
    assert "seen only from outside: batch.unread (builtins.set)" in capsys.readouterr().out
    found = verify(reference, loader(frozenset([1])), OfObjects).first_divergence
    assert (found.name, found.kind) == ("batch.unread", "structure")
    verdict = verify(reference, loader({1, 2}, 1.0), OfObjects)
    found = verdict.first_divergence
    assert (verdict.cause, found.phase, found.name, found.shape) == (
        "data_content",
        "data",
        "batch.x",
        (8, 12),
    )
    # of torch's older layout, which has no sizes
    nested = torch.nested.nested_tensor([torch.ones(3), torch.ones(4)])
    assert (
        verify(
            record(tmp_path / "nested", loader(nested), OfObjects), loader(nested), OfObjects
        ).verdict
        == "match"
    )
