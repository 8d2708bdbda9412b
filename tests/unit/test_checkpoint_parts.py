"""What other ranks keep beside a checkpoint: it belongs to one save, and nobody else touches it."""

import os
from pathlib import Path

import pytest
import torch

from det_callbacks import check_checkpoint
from det_callbacks.checkpoint.check import Found, find_sidecar
from det_callbacks.checkpoint.entries import entries_of
from det_callbacks.checkpoint.files import digest_path
from det_callbacks.checkpoint.parts import amend_part, put_part, read_parts, remove_part
from det_callbacks.checkpoint.saving import begin_save, end_save, remove_beside
from det_callbacks.checkpoint.sidecar import SaveContext
from det_callbacks.errors import CheckpointFormatError

Contents = tuple[dict[str, bytes], list[str], list[str]]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "x.ckpt"


def save(path: Path, id: str, *, num_ranks: int = 2) -> None:
    """What rank 0 does."""
    checkpoint = {"state_dict": {"weight": torch.zeros(3)}, "id": id}
    context = SaveContext(attachments={"rank-00000.json": id.encode()}, num_ranks=num_ranks)
    begin_save(path, id=id, context=context)
    torch.save(checkpoint, path)
    end_save(path, id=id, entries=entries_of(checkpoint), context=context)


def put(path: Path, id: str, *, rank: int = 1, num_ranks: int = 2, content: bytes | None = None) -> None:
    """What another rank does."""
    put_part(path, id=id, rank=rank, num_ranks=num_ranks, files={f"rank-{rank:05d}.json": content or id.encode()})


def found(path: Path) -> Found:
    sidecar = find_sidecar(path, digest_path(path))
    assert sidecar is not None
    return sidecar


def read(path: Path, *ranks: int) -> Contents:
    return read_parts(path, found(path).sidecar, ranks or None)


def part_names(path: Path, rank: int = 1) -> list[str]:
    folder = path.with_name("x.ckpt.resume") / f"rank-{rank:05d}"
    return sorted(os.listdir(folder)) if folder.exists() else []


def test_saved_anew_amended_and_removed(path: Path) -> None:
    for id in ("a", "b", "c"):
        put(path, id)
        save(path, id)
    assert read(path) == ({"rank-00000.json": b"c", "rank-00001.json": b"c"}, [], [])
    assert check_checkpoint(path).equal
    assert amend_part(path, id="c", rank=1, files={"rank-00001.json": b"more", "other": b"new"})
    assert not amend_part(path, id="a", rank=1, files={"rank-00001.json": b"more"})
    assert amend_part(path, id="c", rank=0, files={"rank-00000.json": b"0"})
    contents = {"rank-00000.json": b"0", "rank-00001.json": b"more", "other": b"new"}
    assert read(path) == (contents, [], [])
    # the list and the files of this save, and nothing else
    assert len(part_names(path)) == 3
    remove_part(path, rank=1)
    assert part_names(path) == []
    report = check_checkpoint(path)
    assert (report.equal, report.missing_files) == (False, ("the part of rank 1",))
    put(path, "d")
    path.unlink()
    remove_beside(path)
    assert os.listdir(path.parent) == []


def test_until_the_next_checkpoint_is_in_place_the_part_of_the_one_before_stays(path: Path) -> None:
    put(path, "a")
    save(path, "a")
    put(path, "b")  # and rank 0 is killed before it saves
    put(path, "b")  # and again
    assert read(path, 1) == ({"rank-00001.json": b"a"}, [], [])
    save(path, "c")  # and rank 1 is killed before it saves
    assert read(path)[1] == ["the part of rank 1"]


def test_nothing_is_left_of_ranks_that_are_not_there_any_more(path: Path) -> None:
    for rank in (1, 2):
        put(path, "a", rank=rank, num_ranks=3)
    save(path, "a", num_ranks=3)
    assert read(path, 2)[0] == {"rank-00002.json": b"a"}
    put(path, "b")
    save(path, "b")
    assert part_names(path, 1)
    assert part_names(path, 2) == []
    save(path, "c", num_ranks=1)
    assert part_names(path, 1) == []
    assert check_checkpoint(path).equal


@pytest.mark.parametrize("change", ["part", "file", "missing", "rank", "num_ranks"])
def test_what_is_damaged_missing_or_of_another_rank_is_named(change: str, tmp_path: Path) -> None:
    path = tmp_path / "x.ckpt"
    put(path, "a")
    save(path, "a", num_ranks=3 if change == "num_ranks" else 2)
    folder = tmp_path / "x.ckpt.resume" / "rank-00001"
    (file,) = folder.glob("rank-00001.json.*")
    if change == "part":
        (folder / "a.part.json").write_bytes((folder / "a.part.json").read_bytes().replace(b'"rank": 1', b'"rank": 2'))
        with pytest.raises(CheckpointFormatError, match=r"a\.part\.json is damaged: its content is not what") as caught:
            read(path, 1)
        assert caught.value.exit_code == 2
        return
    if change == "file":
        file.write_bytes(b"other")
    elif change == "missing":
        file.unlink()
    elif change == "rank":
        os.rename(folder, folder.with_name("rank-00002"))
        put(path, "b")
        os.remove(folder / "b.part.json")
        os.rename(folder.with_name("rank-00002") / "a.part.json", folder / "b.part.json")
    expected = {
        "file": ({}, [], ["rank-00001.json"]),
        "missing": ({}, ["rank-00001.json"], []),
        "rank": ({}, ["the part of rank 1"], []),
        "num_ranks": ({}, ["the part of rank 1"], []),
    }
    assert read(path, 1) == expected[change]
