"""The files beside a checkpoint: read as they were written, or not at all."""

import json
import os
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from det_callbacks import CheckpointFormatError, CheckpointNotFoundError, check_checkpoint
from det_callbacks.checkpoint.entries import Entry, entries_of
from det_callbacks.checkpoint.parts import Part, holds_part, part_path, read_part, write_part
from det_callbacks.checkpoint.sidecar import (
    FileDigest,
    SaveContext,
    Sidecar,
    read_sidecar,
    remove_beside,
    seal,
    write_sidecar,
)

CONTENT = FileDigest(size=7, digest=2**63 + 1)


def sidecar(**options: Any) -> Sidecar:
    return Sidecar(
        **{
            "id": "0123456789abcdef",
            "file": CONTENT,
            "entries": {
                "state_dict": {"é": Entry(kind="tensor", type="float32", digest=5, shape=(2, 3), parameter="net")},
                "epoch": {"": Entry(kind="value", type="int", digest=6)},
                "extra": {"x": Entry(kind="opaque", type="Thing")},
            },
            "context": SaveContext(
                run={"id": "a", "mode": "record", "reference": "r"},
                step=3,
                epoch=1,
                chain=2**64 - 1,
                program=0,
                environment={"versions": {"torch": 1.5}},
            ),
            "num_ranks": 2,
            **options,
        }
    )


def part(id: str, rank: int = 1, num_ranks: int = 2) -> Part:
    return Part(id=id, rank=rank, num_ranks=num_ranks, state={"step": 7}, tensors={"gradient a": torch.arange(3.0)})


def changed(**values: Any) -> bytes:
    """A sidecar with other content, whose digest says that this is what was written."""
    content = {**json.loads(sidecar().to_bytes()), **values}
    content.pop("digest")
    return seal(content)


@pytest.mark.parametrize(
    "one", [sidecar(), sidecar(file=None, files={"a/b": CONTENT}, num_ranks=0, context=SaveContext())]
)
def test_a_sidecar_is_read_as_it_was_written(one: Sidecar) -> None:
    again = Sidecar.from_bytes(one.to_bytes(), "x")
    assert again == one
    assert again.to_bytes() == one.to_bytes()


def test_the_sidecar_has_these_fields() -> None:
    content = json.loads(sidecar().to_bytes())
    assert content["file"] == {"size": 7, "digest": "8000000000000001"}
    assert content["entries"]["state_dict"]["é"] == {
        "digest": "0000000000000005",
        "shape": [2, 3],
        "dtype": "float32",
        "parameter": "net",
    }
    assert content["entries"]["epoch"][""] == {"value_digest": "0000000000000006", "type": "int"}
    assert content["entries"]["extra"]["x"] == {"type": "Thing"}
    assert (content["schema"], content["digest_version"], content["step"], content["chain"]) == (1, 1, 3, "f" * 16)


@pytest.mark.parametrize("kind", [Sidecar, Part])
def test_no_flipped_bit_and_no_truncation_passes(kind: Any) -> None:
    raw = sidecar().to_bytes() if kind is Sidecar else part("a").to_bytes()
    for bit in range(8 * len(raw)):
        damaged = bytearray(raw)
        damaged[bit // 8] ^= 1 << bit % 8
        with pytest.raises(CheckpointFormatError):
            kind.from_bytes(bytes(damaged), "x.ckpt.digests.json")
    for length in [0, 1, *random.Random(0).sample(range(len(raw)), 50), len(raw) - 1]:
        with pytest.raises(CheckpointFormatError, match="is damaged") as caught:
            kind.from_bytes(raw[:length], "x.ckpt.digests.json")
    assert (caught.value.path, caught.value.exit_code) == ("x.ckpt.digests.json", 2)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"schema": 2}, "has schema 2, and this version of det_callbacks reads 1"),
        ({"digest_version": 2}, "has digest_version 2"),
        ({"entries": []}, "structure"),
        ({"file": {"size": -1, "digest": "0" * 16}}, "structure"),
        ({"file": {"size": 1, "digest": "xyz"}}, "structure"),
        ({"resume": {"num_ranks": "two"}}, "structure"),
    ],
)
def test_foreign_versions_and_structures_are_refused(values: dict[str, Any], message: str) -> None:
    Sidecar.from_bytes(changed(), "x")
    with pytest.raises(CheckpointFormatError, match=message):
        Sidecar.from_bytes(changed(**values), "x")


@pytest.mark.parametrize("raw", [b"[]", b"{}", b"null", b'{"schema": 1}', b"[" * 100_000])
def test_what_is_no_sidecar_is_refused(raw: bytes) -> None:
    with pytest.raises(CheckpointFormatError, match="is damaged"):
        Sidecar.from_bytes(raw, "x")


def save(path: Path, id: str, *, num_ranks: int = 2) -> None:
    """What is written beside a checkpoint, in order."""
    for rank in range(num_ranks):
        write_part(path, part(id, rank, num_ranks))
    checkpoint = {"state_dict": {"weight": torch.zeros(3)}, "id": id}
    torch.save(checkpoint, path)
    write_sidecar(path, id=id, entries=entries_of(checkpoint), context=SaveContext(), num_ranks=num_ranks)


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
    assert (read.state, read.tensors["gradient a"].tolist()) == ({"step": 7}, [0.0, 1.0, 2.0])
    assert holds_part(path, 1, "b")
    assert not holds_part(path, 1, "a")
    write_part(path, part("c"))  # of a save that was never done
    assert read_part(path, found, 1) is None
    assert check_checkpoint(path).missing_files == ("the part of rank 1",)
    write_part(path, part("b"))
    part_path(path, 0).rename(part_path(path, 1))
    assert check_checkpoint(path).missing_files == ("the part of rank 0", "the part of rank 1")
    part_path(path, 0).write_bytes(b"{}")
    with pytest.raises(CheckpointFormatError, match=r"rank-00000\.state is damaged"):
        check_checkpoint(path)
    path.unlink()
    remove_beside(path)
    assert not holds_part(path, 1, "b")
    assert os.listdir(tmp_path) == []


def test_a_link_has_what_its_target_has(tmp_path: Path) -> None:
    target, link = tmp_path / "x.ckpt", tmp_path / "last.ckpt"
    save(target, "a", num_ranks=1)
    link.symlink_to("x.ckpt")
    assert check_checkpoint(link).equal
    remove_beside(link)
    link.unlink()
    assert check_checkpoint(target).equal


def test_a_remote_path_is_refused() -> None:
    with pytest.raises(
        CheckpointFormatError, match=r"memory://x\.ckpt is remote, and checkpoints are compared on a disk"
    ):
        check_checkpoint("memory://x.ckpt")


def test_every_file_of_a_folder_counts(tmp_path: Path) -> None:
    path = tmp_path / "x.ckpt"
    (path / "inner").mkdir(parents=True)
    for name in ("__0_0.distcp", "__1_0.distcp", ".metadata", "inner/meta.pt"):
        (path / name).write_bytes(name.encode())
    write_sidecar(path, id="a", entries={}, context=SaveContext(), num_ranks=0)
    assert check_checkpoint(path).equal
    assert check_checkpoint(path).sections == {"files": 4}

    def differing() -> list[tuple[str, str]]:
        return [(entry.path, entry.kind) for entry in check_checkpoint(path).entries]

    (path / "__1_0.distcp").write_bytes(b"__1_0.distcP")
    assert differing() == [("__1_0.distcp", "content")]
    (path / "__1_0.distcp").unlink()
    (path / "new").write_bytes(b"")
    assert differing() == [("__1_0.distcp", "missing"), ("new", "extra")]
    remove_beside(path)
    assert os.listdir(tmp_path) == ["x.ckpt"]
    with pytest.raises(CheckpointNotFoundError, match="nothing to compare"):
        check_checkpoint(path)
