"""The files beside a checkpoint: read as they were written, or not at all."""

import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from det_callbacks import CheckpointFormatError, CheckpointNotFoundError, check_checkpoint
from det_callbacks.checkpoint.entries import Entry, entries_of
from det_callbacks.checkpoint.files import (
    FileDigest,
    Part,
    Sidecar,
    has_part,
    part_path,
    read_part,
    read_sidecar,
    remove_beside,
    seal,
    unseal,
    write_part,
    write_sidecar,
)
from det_callbacks.checkpoint.state import DataPosition, Reduction, ResumeState, problems_of
from det_callbacks.rng import GeneratorStates

CONTENT = FileDigest(size=7, digest="8000000000000001")
STATE = ResumeState(
    step=7,
    epoch=1,
    is_epoch_over=False,
    generators=GeneratorStates.capture(),
    position=DataPosition(before_iteration=GeneratorStates({"numpy": {"state": 2**127}}), num_drawn=4),
    values={"a": "0", "the list of frozen parameters": []},
    reduction=Reduction(buckets=(("a", "b"), ("c",)), syncs_buffers=False),
)
SIDECAR = Sidecar(
    id="0123456789abcdef",
    file=CONTENT,
    entries={
        "state_dict": {"é": Entry(kind="tensor", type="float32", digest="5", shape=(2, 3), parameter="net")},
        "epoch": {"": Entry(kind="value", type="int", digest="6")},
        "extra": {"x": Entry(kind="opaque", type="Thing")},
    },
    run={"id": "a", "mode": "record", "reference": None},
    step=3,
    epoch=1,
    num_ranks=2,
)
PART = Part(id="a", rank=1, num_ranks=2, state=STATE, tensors=CONTENT)


@pytest.mark.parametrize("one", [SIDECAR, Sidecar(id="a", file=None, entries={}), PART])
def test_what_is_written_is_read(one: Any) -> None:
    again = unseal(seal(one), "x", type(one))
    assert again == one
    assert seal(again) == seal(one)


def test_no_flipped_bit_and_no_truncation_passes() -> None:
    raw = seal(SIDECAR)
    for bit in range(8 * len(raw)):
        flipped = bytearray(raw)
        flipped[bit // 8] ^= 1 << bit % 8
        with pytest.raises(CheckpointFormatError):
            unseal(bytes(flipped), "x.ckpt.digests.json", Sidecar)
    for length in [0, 1, *random.Random(0).sample(range(len(raw)), 50), len(raw) - 1]:
        with pytest.raises(CheckpointFormatError, match="is damaged") as caught:
            unseal(raw[:length], "x.ckpt.digests.json", Sidecar)
    assert (caught.value.path, caught.value.exit_code) == ("x.ckpt.digests.json", 2)


SIDECAR_FORM = {"schema": 1, "digest_version": 1, "id": "a", "file": None, "entries": {}}


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (seal({**SIDECAR_FORM, "schema": 2}), "has schema 2, and this version of det_callbacks reads 1"),
        (seal({**SIDECAR_FORM, "digest_version": 2}), "has digest_version 2"),
        (seal({**SIDECAR_FORM, "entries": []}), "structure"),
        (seal({**SIDECAR_FORM, "file": {"size": 1}}), "structure"),
        (seal({**SIDECAR_FORM, "num_ranks": "two"}), "structure"),
        *((raw, "is damaged") for raw in (b"[]", b"{}", b"null", b'{"schema": 1}', b"[" * 100_000)),
    ],
)
def test_what_is_no_sidecar_of_this_version_is_refused(raw: bytes, message: str) -> None:
    unseal(seal(SIDECAR_FORM), "x", Sidecar)
    with pytest.raises(CheckpointFormatError, match=message):
        unseal(raw, "x", Sidecar)


def save_part(path: Path, id: str, rank: int = 1, num_ranks: int = 2) -> None:
    write_part(path, STATE, {"gradient a": torch.arange(3.0)}, id=id, rank=rank, num_ranks=num_ranks)


def save(path: Path, id: str, *, num_ranks: int = 2) -> None:
    """What is written beside a checkpoint, in order."""
    for rank in range(num_ranks):
        save_part(path, id, rank, num_ranks)
    checkpoint = {"state_dict": {"weight": torch.zeros(3)}, "id": id}
    torch.save(checkpoint, path)
    write_sidecar(path, id=id, entries=lambda: entries_of(checkpoint), num_ranks=num_ranks)


def test_a_part_belongs_to_the_save_that_it_is_of(tmp_path: Path) -> None:
    path = tmp_path / "hpc_ckpt_3.ckpt"
    save(path, "a", num_ranks=3)
    save(path, "b")
    added = [name.removeprefix("hpc_ckpt_3.ckpt") for name in os.listdir(tmp_path)]
    assert sorted(added) == ["", ".digests.json", ".resume"]  # no digit, which Lightning would take for a version
    assert check_checkpoint(path).equal
    found = read_sidecar(path)
    assert found is not None
    read = read_part(path, found, 1)
    assert read is not None
    assert (read[0], read[1]["gradient a"].tolist()) == (STATE, [0.0, 1.0, 2.0])
    assert (has_part(path, 1, "b"), has_part(path, 1, "a")) == (True, False)
    save_part(path, "c")  # of a save that was never done
    assert read_part(path, found, 1) is None
    assert check_checkpoint(path).missing_files == ("the part of rank 1",)
    save_part(path, "b")
    part_path(path, 0).rename(part_path(path, 1))
    assert check_checkpoint(path).missing_files == ("the part of rank 0", "the part of rank 1")
    save_part(path, "b")
    content = bytearray(part_path(path, 1).read_bytes())
    content[-1] ^= 1
    for raw in (b"{}", bytes(content), bytes(content[:-1])):
        part_path(path, 1).write_bytes(raw)
        with pytest.raises(CheckpointFormatError, match=r"rank-00001\.state is damaged"):
            check_checkpoint(path)
    path.unlink()
    remove_beside(path)
    assert not has_part(path, 1, "b")
    assert os.listdir(tmp_path) == []


def test_a_remote_path_is_refused() -> None:
    with pytest.raises(CheckpointFormatError, match=r"memory://x\.ckpt is remote, and checkpoints are compared on a"):
        check_checkpoint("memory://x.ckpt")


def test_every_file_of_a_folder_counts(tmp_path: Path) -> None:
    path = tmp_path / "x.ckpt"
    (path / "inner").mkdir(parents=True)
    for name in ("__0_0.distcp", "__1_0.distcp", ".metadata", "inner/meta.pt"):
        (path / name).write_bytes(name.encode())
    write_sidecar(path, id="a", entries=dict)
    assert check_checkpoint(path).equal
    assert check_checkpoint(path).sections == {"files": 4}
    changes: dict[str, tuple[Callable[[], object], list[tuple[str, str]]]] = {
        "content": (lambda: (path / "__1_0.distcp").write_bytes(b"__1_0.distcP"), [("__1_0.distcp", "content")]),
        "longer": (lambda: (path / "__1_0.distcp").write_bytes(b"longer"), [("__1_0.distcp", "structure")]),
        "missing": (lambda: (path / "__1_0.distcp").unlink(), [("__1_0.distcp", "missing")]),
        "new": (lambda: (path / "new").write_bytes(b""), [("__1_0.distcp", "missing"), ("new", "extra")]),
    }
    for change, differing in changes.values():
        change()
        report = check_checkpoint(path)
        assert (report.equal, [(entry.path, entry.kind) for entry in report.entries]) == (False, differing)
    remove_beside(path)
    assert os.listdir(tmp_path) == ["x.ckpt"]
    with pytest.raises(CheckpointNotFoundError, match="nothing to compare"):
        check_checkpoint(path)


def test_a_reason_names_the_ranks_that_have_it() -> None:
    row = STATE.row()
    assert problems_of([row, row]) == []
    (apart,) = problems_of([row, {**row, "step": 8, "accumulates": 2}])
    assert apart.endswith("at the same moment, by rank: step is 7, 8; accumulates is 1, 2")
    rows = [{**row, "problems": problems} for problems in (["all", "some"], ["all"], ["all", "some"])]
    assert problems_of(rows) == ["all", "rank 0, 2: some"]
