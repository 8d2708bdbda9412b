"""The order in which a checkpoint and its sidecar are written: whatever stops it, what is there agrees."""

import io
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch

from det_callbacks import CheckpointFormatError, CheckpointNotFoundError, check_checkpoint
from det_callbacks.callback.saving import Saves
from det_callbacks.checkpoint.entries import entries_of
from det_callbacks.checkpoint.files import Place
from det_callbacks.checkpoint.folders import save_folder
from det_callbacks.checkpoint.reading import find_sidecar, read_attachments
from det_callbacks.checkpoint.saving import amend, link_beside, new_id, remove_beside, save_file, settle, step_aside
from det_callbacks.checkpoint.sidecar import SaveContext, Sidecar
from det_callbacks.checkpoint.stream import DigestingWriter


def checkpoint_of(number: int) -> dict[str, Any]:
    return {"state_dict": {"weight": torch.full((100,), float(number))}, "epoch": number}


def save(path: str | Path, number: int, **attachments: bytes) -> str:
    checkpoint, id = checkpoint_of(number), new_id()
    context = SaveContext(
        step=number, attachments={name.replace("_", "."): value for name, value in attachments.items()}
    )
    save_file(checkpoint, Place.of(path), id=id, entries=entries_of(checkpoint), context=context)
    return id


def attachments(path: str | Path) -> dict[str, bytes]:
    place = Place.of(path)
    found = find_sidecar(place, place.digest())
    assert found is not None
    assert found.fits
    contents, missing, damaged = read_attachments(found)
    assert missing == damaged == []
    return contents


def names(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


@pytest.fixture(params=["disk", "memory"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    if request.param == "disk":
        yield str(tmp_path)
        return
    store = fsspec.filesystem("memory")
    yield "memory://checkpoints"
    store.rm("/checkpoints", recursive=True)


def test_saved_anew_loaded_amended_and_removed(folder: str) -> None:
    path = f"{folder}/sub/x.ckpt"
    first = save(path, 1, rank_0=b"one", other=b"two")
    assert check_checkpoint(path).equal
    assert attachments(path) == {"rank.0": b"one", "other": b"two"}
    second = save(path, 2, rank_0=b"three")
    report = check_checkpoint(path)
    assert report.equal
    assert report.sidecar is not None
    assert (report.sidecar.context.step, report.sidecar.id) == (2, second)
    assert attachments(path) == {"rank.0": b"three"}
    place = Place.of(path)
    assert not amend(place, id=first, files={"late": b"x"})
    assert amend(place, id=second, files={"late": b"four"})
    assert amend(place, id=second, files={"rank.0": b"five"})
    assert attachments(path) == {"rank.0": b"five", "late": b"four"}
    assert len(place.beside(".resume").files()) == 2
    save(path, 3)
    assert sorted(name for name in Place.of(f"{folder}/sub").files()) == ["x.ckpt", "x.ckpt.digests.json"]
    place.remove()
    remove_beside(place)
    assert not amend(place, id=second, files={"late": b"x"})
    assert Place.of(f"{folder}/sub").files() == []


def test_the_bytes_are_those_of_torch(tmp_path: Path) -> None:
    save(tmp_path / "x.ckpt", 1)
    with (tmp_path / "y.ckpt").open("wb") as file:
        torch.save(checkpoint_of(1), file)
    assert (tmp_path / "x.ckpt").read_bytes() == (tmp_path / "y.ckpt").read_bytes()


def test_names_beside_a_checkpoint_have_no_digits_and_are_no_checkpoints(tmp_path: Path) -> None:
    save(tmp_path / "hpc_ckpt_3.ckpt", 1, rank_0=b"one")
    added = [name.removeprefix("hpc_ckpt_3.ckpt") for name in os.listdir(tmp_path)]
    assert sorted(added) == ["", ".digests.json", ".resume"]
    assert not any(character.isdigit() for name in added for character in name)
    assert not any(name.endswith(".ckpt") for name in added if name)


# kills: a child process ends without a word at its n-th change of the disk

CHANGES = ("replace", "unlink", "rmdir", "mkdir", "symlink", "remove")


def run_killed(work: Callable[[], object], at: int) -> bool:
    """Run in a child that ends before its n-th change of the disk, or in the middle of a write; return if it did."""
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 99
    count = 0

    def counted(function: Callable[..., Any]) -> Callable[..., Any]:
        def changed(*args: Any, **options: Any) -> Any:
            nonlocal count
            if count == at:
                os._exit(99)
            count += 1
            return function(*args, **options)

        return changed

    def torn(self: Place, fill: Callable[..., Any]) -> Any:
        nonlocal count
        if count == at:
            buffer = io.BytesIO()
            fill(DigestingWriter(buffer))
            Path(self.path).write_bytes(buffer.getvalue()[: len(buffer.getvalue()) // 2])
            os._exit(99)
        count += 1
        return stream(self, fill)

    stream = Place.stream
    try:
        Place.stream = torn
        for name in CHANGES:
            setattr(os, name, counted(getattr(os, name)))
        work()
    finally:
        os._exit(0)


@pytest.mark.parametrize("state", ["new", "over another", "over a link", "over the rest of a kill"])
def test_a_kill_at_any_change_leaves_a_pair_that_agrees(state: str, tmp_path: Path) -> None:
    number = 0
    while True:
        folder = tmp_path / str(number)
        folder.mkdir()
        path = folder / "x.ckpt"
        if state == "over a link":
            save(folder / "target.ckpt", 1, rank=b"one")
            path.symlink_to("target.ckpt")
            link_beside(Place.of(folder / "target.ckpt"), Place.of(path))
        elif state != "new":
            save(path, 1, rank=b"one")
        if state == "over the rest of a kill":
            # the new checkpoint is there, its sidecar still the next, the earlier one aside
            sidecar = folder / "x.ckpt.digests.json"
            earlier = sidecar.read_bytes()
            save(path, 2, rank=b"one")
            sidecar.rename(f"{sidecar}.next")
            Path(f"{sidecar}.old").write_bytes(earlier)
        before = attachments(path) if path.exists() else None
        was_killed = run_killed(lambda path=path: save(path, 3, rank=b"two"), at=number)
        if path.exists():
            assert check_checkpoint(path).equal, names(folder)
            assert attachments(path) in (before, {"rank": b"two"})
            in_force = Place.of(f"{path}.digests.json").read()
            # whoever reads only this one is not misled either
            assert in_force is None or Sidecar.from_bytes(in_force, "x").file == Place.of(path).digest()
        assert {one for one in names(folder) if one.endswith(".ckpt")} <= {"x.ckpt", "target.ckpt"}
        save(path, 4)
        assert check_checkpoint(path).equal
        assert [one for one in names(folder) if one.startswith("x.ckpt")] == ["x.ckpt", "x.ckpt.digests.json"]
        if not was_killed:
            break
        number += 1
    assert number >= 6


def test_a_kill_at_any_change_of_an_amendment_leaves_a_pair_that_agrees(tmp_path: Path) -> None:
    path = tmp_path / "x.ckpt"
    for number in range(50):
        id = save(path, 1, rank=b"one")
        was_killed = run_killed(lambda id=id: amend(Place.of(path), id=id, files={"rank": b"two"}), at=number)
        assert check_checkpoint(path).equal
        assert attachments(path) in ({"rank": b"one"}, {"rank": b"two"})
        if not was_killed:
            break
    assert 3 <= number < 49
    assert attachments(path) == {"rank": b"two"}


def test_what_is_added_while_a_save_is_under_way_waits_for_it(tmp_path: Path) -> None:
    path, checkpoint, saves = tmp_path / "x.ckpt", checkpoint_of(1), Saves()
    saves.amend(str(path), {"late": b"nobody's"})
    saves.begin(str(path), "first")
    saves.amend(str(path), {"late": b"of the first"})
    saves.begin(str(path), "second")
    saves.amend(str(path), {"late": b"one"})
    saves.amend(str(path), {"late": b"two"})
    context, entries = SaveContext(), entries_of(checkpoint)
    for id in ("first", "second"):
        save_file(checkpoint, Place.of(path), id=id, entries=entries, context=context)
        assert attachments(path) == {}
        saves.end(str(path), id)
    assert attachments(path) == {"late": b"two"}
    saves.amend(str(path), {"late": b"three"})
    assert attachments(path) == {"late": b"three"}
    save(path, 2)  # by somebody else
    saves.amend(str(path), {"late": b"four"})
    assert attachments(path) == {}


def test_a_save_that_fails_leaves_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "x.ckpt"
    save(path, 1, rank=b"one")
    there = names(tmp_path)

    def fail(*_: Any) -> None:
        raise OSError("no space left")

    for method in ("rename", "stream"):
        with monkeypatch.context() as patch:
            patch.setattr(Place, method, fail)
            with pytest.raises(OSError, match="no space left"):
                save(path, 2)
        assert check_checkpoint(path).equal
    settle(Place.of(path))
    assert names(tmp_path) == there


def test_a_checkpoint_whose_sidecar_stepped_aside_is_refused_once_it_is_another(tmp_path: Path) -> None:
    path = tmp_path / "x.ckpt"
    save(path, 1)
    step_aside(Place.of(path))
    assert check_checkpoint(path).equal  # what others are about to write over is still there
    torch.save(checkpoint_of(2), path)
    report = check_checkpoint(path)
    assert not report.equal
    assert {entry.name for entry in report.entries} == {"state_dict: weight", "epoch"}


# links, attachments, folders


def test_a_link_shares_what_its_target_has(tmp_path: Path) -> None:
    target, link = tmp_path / "x.ckpt", tmp_path / "last.ckpt"
    id = save(target, 1, rank=b"one")
    link.symlink_to("x.ckpt")
    assert attachments(link) == {"rank": b"one"}  # before there is a link to the sidecar, too
    link_beside(Place.of(target), Place.of(link))
    assert os.readlink(f"{link}.digests.json") == "x.ckpt.digests.json"
    assert amend(Place.of(target), id=id, files={"rank": b"two"})
    assert attachments(link) == {"rank": b"two"}
    remove_beside(Place.of(link))
    link.unlink()
    assert attachments(target) == {"rank": b"two"}


def test_a_copy_has_its_own(tmp_path: Path) -> None:
    target, copy = tmp_path / "x.ckpt", tmp_path / "last.ckpt"
    save(target, 1, rank=b"one")
    copy.write_bytes(target.read_bytes())
    link_beside(Place.of(target), Place.of(copy))
    remove_beside(Place.of(target))
    assert attachments(copy) == {"rank": b"one"}


def test_damaged_and_missing_attachments_are_named(tmp_path: Path) -> None:
    path = tmp_path / "x.ckpt"
    save(path, 1, one=b"one", two=b"two")
    for file in (tmp_path / "x.ckpt.resume").iterdir():
        if file.name.startswith("one."):
            file.write_bytes(b"onE")
        else:
            file.unlink()
    report = check_checkpoint(path)
    assert not report.equal
    assert [entry.name for entry in report.entries] == ["resume: one"]
    assert report.missing_files == ("two",)


def test_every_rank_of_a_folder_has_its_files(tmp_path: Path) -> None:
    path = tmp_path / "x.ckpt"
    path.mkdir()
    for name in ("__0_0.distcp", "__1_0.distcp", ".metadata", "meta.pt"):
        (path / name).write_bytes(name.encode())
    for rank in (1, 0):
        entries = entries_of({"state_dict": {"weight": torch.full((2,), float(rank))}})
        context = SaveContext(attachments={"rank": b"one"})
        save_folder(Place.of(path), id=new_id(), rank=rank, num_ranks=2, entries=entries, context=context)
    assert check_checkpoint(path).equal
    assert check_checkpoint(path).sections == {"files": 4}
    rank_file = tmp_path / "x.ckpt.digests" / "rank-00001.json"
    content = rank_file.read_bytes()

    def differing() -> list[tuple[str, str]]:
        return [(entry.path, entry.kind) for entry in check_checkpoint(path).entries]

    (path / "__1_0.distcp").write_bytes(b"__1_0.distcP")
    assert differing() == [("__1_0.distcp", "content")]
    (path / "__1_0.distcp").unlink()
    (path / "new").write_bytes(b"")
    assert differing() == [("__1_0.distcp", "missing"), ("new", "extra")]
    (path / "__1_0.distcp").write_bytes(b"__1_0.distcp")
    (path / "new").unlink()
    rank_file.write_bytes(content[:-5])
    with pytest.raises(CheckpointFormatError, match=r"rank-00001\.json is damaged"):
        check_checkpoint(path)
    rank_file.unlink()
    assert differing() == [("digests of rank 1", "missing"), ("__1_0.distcp", "extra")]
    remove_beside(Place.of(path))
    assert os.listdir(tmp_path) == ["x.ckpt"]
    with pytest.raises(CheckpointNotFoundError, match="nothing to compare"):
        check_checkpoint(path)
