"""Trainings whose tensors lie on a device that yields at a step's end:
nothing of ours waits for it within a step.
"""

import itertools
import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import nondeterministic_ops as planted
import numpy as np
import pytest
import torch
from fits import Classifier, train
from late_device import in_every_step, late_device
from lightning.pytorch.loggers import CSVLogger
from safetensors import safe_open
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.utils._python_dispatch import _disable_current_modes  # looked at in torch 2.13
from trainers import LIGHTNING_ADVICE, has_same_weights

from det_callbacks import (
    DeterminismCallback,
    DivergenceError,
    observe,
    observe_grad,
    observe_non_deterministic,
    observe_non_deterministic_grad,
)
from det_callbacks.runs.evidence import evidence_path, read_evidence
from det_callbacks.runs.files import stream_path
from det_callbacks.runs.store import Run
from det_callbacks.verdict import Verdict

pytestmark = LIGHTNING_ADVICE


def disturb(gradient: Tensor) -> Tensor:
    with _disable_current_modes():
        # its own gradient is what it would be without
        return gradient + gradient.detach() * planted.entropy()


class Noisy(Classifier):
    """Not deterministic in an op in place, in a value and in a gradient;
    and it does much in place.
    """

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        inputs, labels = batch
        hidden = self.first(inputs)
        observe("hidden", hidden)
        scratch = torch.zeros_like(hidden)
        planted.noisy_(scratch[:, 1:])
        noise = torch.from_numpy(np.full((8, 16), planted.entropy(), np.float32))
        observe_non_deterministic("noise", noise)
        hidden = hidden + scratch + noise
        observe_grad("hidden", hidden)
        hidden.register_hook(disturb)
        observe_non_deterministic_grad("hidden", hidden)
        for written in (scratch, noise, self.loaded):
            written.zero_()
        loss = cross_entropy(self.last(torch.relu(self.norm(hidden))), labels)
        self.log("loss", loss.detach())
        return loss

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        inputs, labels = batch
        self.loaded = inputs  # digested as well, since the training step gets another tensor
        return inputs * 2, labels


def fit(
    folder: Path, callback: DeterminismCallback, model: type[Classifier] = Noisy
) -> pl.LightningModule:
    return train(model, callback, epochs=1, logger=CSVLogger(folder), log_every_n_steps=1)[0]


def record(folder: Path, model: type[Classifier] = Noisy) -> pl.LightningModule:
    replay, kept = ["planted.noisy_.*"] if model is Noisy else None, ["aten.addmm.*"]
    return fit(
        folder,
        DeterminismCallback(folder / "run", mode="record", replay=replay, keep_tensors=kept),
        model,
    )


def verify(folder: Path, model: type[Classifier] = Noisy) -> tuple[Verdict, pl.LightningModule]:
    callback = DeterminismCallback(folder / "run", current=folder / "current")
    trained = fit(folder, callback, model)
    return callback.verdict, trained


class Faulty(Classifier):
    """Computes something else in step 1."""

    def forward(self, inputs: Tensor) -> Tensor:
        scores = super().forward(inputs)
        return scores * 1.5 if self.global_step == 1 else scores


def test_a_fault_is_named_as_on_the_host_and_nobody_disturbs_the_training(tmp_path):
    recorded = record(tmp_path, Classifier)
    with late_device() as device, in_every_step(device):
        verdict, verified = verify(tmp_path, Classifier)
    assert (device.waits, device.num_watched, verdict.verdict) == ([], 4, "match")
    assert 4 <= device.num_collected <= 13, (
        "what makes up the fit's start and end is fetched outside its steps"
    )
    alone = fit(tmp_path, DeterminismCallback(tmp_path / "run", mode="disabled"), Classifier)
    assert has_same_weights(recorded, alone)
    assert has_same_weights(verified, alone)
    found = []
    for folder, place in (("on the host", nullcontext()), ("late", late_device())):
        callback = DeterminismCallback(tmp_path / "run", current=tmp_path / folder)
        with place, pytest.raises(DivergenceError) as caught:
            fit(tmp_path, callback, Faulty)
        verdict = caught.value.verdict
        found.append(
            (verdict.first_divergence, verdict.origins, verdict.cause, verdict.explanation)
        )
    assert found[0] == found[1]
    assert found[0][0].step == 1
    assert [origin.is_origin for origin in found[0][1]] == [True]


def files(folder: Path, kind: str) -> list[tuple[dict[str, Any], dict[str, list[int]]]]:
    found = []
    for file in sorted((folder / "run" / "rank-00000" / kind).rglob("*.safetensors")):
        with safe_open(file, framework="pt") as held:
            entries = json.loads(held.metadata()["det_callbacks"])["entries"]
            # no mapping
            found.append((entries, {key: held.get_tensor(key).tolist() for key in held.keys()}))  # noqa: SIM118
    return found


def test_what_is_written_is_what_the_host_writes_and_nothing_waits_for_it(tmp_path, monkeypatch):
    names, places = ("host", "late", "masked"), (None, late_device(0), late_device(2**64 - 1))
    for name, place in zip(names, places, strict=True):
        calls = itertools.count(1)
        monkeypatch.setattr(planted, "entropy", lambda calls=calls: next(calls) / 1000)
        if place is None:
            record(tmp_path / name)
            continue
        with place as device, in_every_step(device):
            recorded = record(tmp_path / name)
            verdict, verified = verify(tmp_path / name)
        assert (device.waits, device.num_watched) == ([], 8)
        assert (verdict.verdict, verdict.counts.sites_differing) == ("match", 0)
        replayed = {
            name: (entry["count"], entry["differing"])
            for name, entry in verdict.coverage.replayed.items()
        }
        assert replayed == {
            "planted.noisy_.default": (4, 4),
            "noise": (4, 4),
            "grad of hidden": (4, 4),
        }
        assert has_same_weights(recorded, verified)
    runs = [Run.open(tmp_path / name / "run") for name in names]
    for step in range(4):
        views = [run.view(0, 0, step) for run in runs]
        digests, late_digests, masked_digests = (view.record.digests.tolist() for view in views)
        assert digests == late_digests
        pairs = zip(views[0].program.sites, digests, masked_digests, strict=True)
        same = [site for site, digest, masked_digest in pairs if digest == masked_digest]
        # samples and values are the host's: bits that are sorted, or of what was fetched
        assert not [site for site in same if site.role in ("named", "output")]
    for kind in ("replay", "kept"):
        host_files, late_files, masked_files = (files(tmp_path / name, kind) for name in names)
        assert len(host_files) == 4
        assert host_files == late_files
        assert [tensors for _, tensors in masked_files] == [tensors for _, tensors in host_files]
    rows = []
    for run in runs:
        evidence = read_evidence(
            evidence_path(stream_path(run.path, 0, 0, 0)), run_id=run.manifest.run_id
        )
        rows.append([row.value for row in evidence if row.kind == "loaded"])
    assert len(rows[0]) == 4
    assert rows[1] == rows[0] == [value ^ (2**64 - 1) for value in rows[2]]
