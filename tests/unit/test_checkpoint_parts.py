"""What other ranks keep beside a checkpoint: it belongs to one save, and nobody else touches it."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch

from det_callbacks import check_checkpoint
from det_callbacks.checkpoint.entries import entries_of
from det_callbacks.checkpoint.files import Place
from det_callbacks.checkpoint.parts import (
    KEPT_SAVES,
    amend_part,
    copy_parts,
    put_part,
    read_kept,
    read_part,
    remove_part,
)
from det_callbacks.checkpoint.reading import Found, find_sidecar
from det_callbacks.checkpoint.saving import amend, link_beside, remove_beside, save_file
from det_callbacks.checkpoint.sidecar import SaveContext
from det_callbacks.errors import CheckpointFormatError


@pytest.fixture(params=["disk", "memory"])
def path(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    if request.param == "disk":
        yield str(tmp_path / "x.ckpt")
        return
    yield "memory://parts/x.ckpt"
    fsspec.filesystem("memory").rm("/parts", recursive=True)


def save(path: Any, id: str, *, num_ranks: int = 2) -> None:
    """What rank 0 does."""
    checkpoint = {"state_dict": {"weight": torch.zeros(3)}, "id": id}
    context = SaveContext(attachments={"rank-00000.json": id.encode()}, num_ranks=num_ranks)
    save_file(checkpoint, Place.of(path), id=id, entries=entries_of(checkpoint), context=context)


def put(path: Any, id: str, *, rank: int = 1, num_ranks: int = 2, content: bytes | None = None) -> None:
    """What another rank does."""
    attachments = {f"rank-{rank:05d}.json": content or id.encode()}
    put_part(Place.of(path), id=id, rank=rank, num_ranks=num_ranks, attachments=attachments)


def found(path: Any) -> Found:
    place = Place.of(path)
    sidecar = find_sidecar(place, place.digest())
    assert sidecar is not None
    return sidecar


def part_names(path: Any, rank: int = 1) -> list[str]:
    return Place.of(path).beside(".resume").inside(f"rank-{rank:05d}").files()


def test_saved_anew_amended_and_removed(path: str) -> None:
    for id in ("a", "b", "c"):
        put(path, id)
        save(path, id)
    assert read_kept(found(path)) == ({"rank-00000.json": b"c", "rank-00001.json": b"c"}, [], [])
    assert check_checkpoint(path).equal
    assert amend_part(Place.of(path), id="c", rank=1, files={"rank-00001.json": b"more", "other": b"new"})
    assert not amend_part(Place.of(path), id="a", rank=1, files={"rank-00001.json": b"more"})
    assert amend(Place.of(path), id="c", files={"rank-00000.json": b"0"})
    contents = {"rank-00000.json": b"0", "rank-00001.json": b"more", "other": b"new"}
    assert read_kept(found(path)) == (contents, [], [])
    # lists and files of the latest saves, and nothing else
    assert len(part_names(path)) == 2 * KEPT_SAVES + 1
    remove_part(Place.of(path), rank=1)
    assert part_names(path) == []
    assert read_part(found(path), 1) is None
    report = check_checkpoint(path)
    assert (report.equal, report.missing_files) == (False, ("the part of rank 1",))
    put(path, "d")
    place = Place.of(path)
    place.remove()
    remove_beside(place)
    assert place.sibling("").files() == []


def test_until_the_next_checkpoint_is_in_place_the_part_of_the_one_before_stays(path: str) -> None:
    put(path, "a")
    save(path, "a")
    put(path, "b")  # and rank 0 is killed before it saves
    assert read_part(found(path), 1) == ({"rank-00001.json": b"a"}, [], [])
    save(path, "c")  # and rank 1 is killed before it saves
    assert read_part(found(path), 1) is None
    assert read_kept(found(path))[1] == ["the part of rank 1"]


def test_nothing_is_left_of_ranks_that_are_not_there_any_more(path: str) -> None:
    for rank in (1, 2):
        put(path, "a", rank=rank, num_ranks=3)
    save(path, "a", num_ranks=3)
    assert read_kept(found(path), (2,))[0] == {"rank-00000.json": b"a", "rank-00002.json": b"a"}
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
            read_part(found(path), 1)
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
        "rank": None,
        "num_ranks": None,
    }
    assert read_part(found(path), 1) == expected[change]


def test_a_copy_of_a_checkpoint_has_the_parts_and_a_link_leads_to_them(tmp_path: Path) -> None:
    target, link, copy = tmp_path / "x.ckpt", tmp_path / "link.ckpt", tmp_path / "copy.ckpt"
    put(target, "a")
    save(target, "a")
    os.symlink("x.ckpt", link)
    assert link_beside(Place.of(target), Place.of(link)) is None
    copy.write_bytes(target.read_bytes())
    copied = link_beside(Place.of(target), Place.of(copy))
    assert copied is not None
    copy_parts(copied, Place.of(copy))
    for one in (link, copy):
        assert read_kept(found(one)) == ({"rank-00000.json": b"a", "rank-00001.json": b"a"}, [], [])
    assert not (tmp_path / "link.ckpt.resume").exists()
    assert not any(character.isdigit() for name in os.listdir(tmp_path) for character in name)


def test_the_files_of_one_process_are_what_they_always_were(tmp_path: Path) -> None:
    save(tmp_path / "x.ckpt", "a", num_ranks=1)
    assert b"num_ranks" not in (tmp_path / "x.ckpt.digests.json").read_bytes()
    assert len(list((tmp_path / "x.ckpt.resume").iterdir())) == 1
