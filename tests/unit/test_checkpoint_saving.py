"""The order in which a checkpoint and what stands beside it are written: whatever stops it, nothing misleads."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from det_callbacks import CheckpointFormatError, CheckpointNotFoundError, check_checkpoint
from det_callbacks.callback.saving import Saves
from det_callbacks.checkpoint import files
from det_callbacks.checkpoint.check import find_sidecar
from det_callbacks.checkpoint.entries import entries_of
from det_callbacks.checkpoint.files import digest_path, resolved
from det_callbacks.checkpoint.parts import amend_part, read_parts
from det_callbacks.checkpoint.saving import begin_save, end_save, new_id, remove_beside
from det_callbacks.checkpoint.sidecar import SaveContext


def checkpoint_of(number: int) -> dict[str, Any]:
    return {"state_dict": {"weight": torch.full((100,), float(number))}, "epoch": number}


def save(path: Path, number: int, *, id: str | None = None, **attachments: bytes) -> str:
    id = id or new_id()
    context = SaveContext(
        step=number, attachments={name.replace("_", "."): value for name, value in attachments.items()}
    )
    path.parent.mkdir(exist_ok=True)
    begin_save(path, id=id, context=context)
    temporary = path.with_name("temporary")
    torch.save(checkpoint_of(number), temporary)
    temporary.replace(path)  # Lightning saves atomically, too
    end_save(path, id=id, entries=entries_of(checkpoint_of(number)), context=context)
    return id


def attachments(path: Path) -> dict[str, bytes]:
    path = resolved(path)
    found = find_sidecar(path, digest_path(path))
    assert found is not None
    assert found.fits
    contents, missing, damaged = read_parts(path, found.sidecar)
    assert missing == damaged == []
    return contents


def names(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


def test_saved_anew_loaded_amended_and_removed(tmp_path: Path) -> None:
    path = tmp_path / "sub" / "x.ckpt"
    first = save(path, 1, rank_0=b"one", other=b"two")
    assert check_checkpoint(path).equal
    assert attachments(path) == {"rank.0": b"one", "other": b"two"}
    second = save(path, 2, rank_0=b"three")
    report = check_checkpoint(path)
    assert report.equal
    assert report.sidecar is not None
    assert (report.sidecar.context.step, report.sidecar.id) == (2, second)
    assert attachments(path) == {"rank.0": b"three"}
    assert not amend_part(path, id=first, rank=0, files={"late": b"x"})
    assert amend_part(path, id=second, rank=0, files={"late": b"four"})
    assert amend_part(path, id=second, rank=0, files={"rank.0": b"five"})
    assert attachments(path) == {"rank.0": b"five", "late": b"four"}
    assert len(list(path.with_name("x.ckpt.resume").rglob("*.*"))) == 3
    save(path, 3)
    assert names(path.parent) == ["x.ckpt", "x.ckpt.digests.json"]
    path.unlink()
    remove_beside(path)
    assert not amend_part(path, id=second, rank=0, files={"late": b"x"})
    assert names(path.parent) == []


def test_names_beside_a_checkpoint_have_no_digits_and_are_no_checkpoints(tmp_path: Path) -> None:
    save(tmp_path / "hpc_ckpt_3.ckpt", 1, rank_0=b"one")
    added = [name.removeprefix("hpc_ckpt_3.ckpt") for name in os.listdir(tmp_path)]
    assert sorted(added) == ["", ".digests.json", ".resume"]
    assert not any(character.isdigit() for name in added for character in name)
    assert not any(name.endswith(".ckpt") for name in added if name)


# kills: a child process ends without a word at its n-th change of the disk

CHANGES = ("replace", "rename", "unlink", "rmdir", "mkdir", "remove", "fsync")


def run_killed(work: Callable[[], object], at: int) -> bool:
    """Run in a child that ends before its n-th change of the disk; return whether it did."""
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

    try:
        for name in CHANGES:
            setattr(os, name, counted(getattr(os, name)))
        work()
    finally:
        os._exit(0)


@pytest.mark.parametrize("is_new", [True, False])
def test_a_kill_at_any_change_leaves_digests_that_agree_or_none(is_new: bool, tmp_path: Path) -> None:
    number, outcomes = 0, set()
    while True:
        path = tmp_path / str(number) / "x.ckpt"
        if not is_new:
            save(path, 1, rank=b"one")
        was_killed = run_killed(lambda path=path: save(path, 3, rank=b"two"), at=number)
        if path.exists():
            try:
                assert check_checkpoint(path).equal, names(path.parent)
                outcomes.add(attachments(path)["rank"])
            except CheckpointNotFoundError:
                outcomes.add(b"none")
        save(path, 4)
        assert check_checkpoint(path).equal
        assert [one for one in names(path.parent) if one.startswith("x.ckpt")] == ["x.ckpt", "x.ckpt.digests.json"]
        if not was_killed:
            break
        number += 1
    assert number >= 6
    assert outcomes == ({b"none", b"two"} if is_new else {b"one", b"none", b"two"})


def test_a_kill_at_any_change_of_an_amendment_leaves_the_old_files_or_the_new(tmp_path: Path) -> None:
    path = tmp_path / "x.ckpt"
    for number in range(50):
        id = save(path, 1, rank=b"one")
        work = {"id": id, "rank": 0, "files": {"rank": b"two"}}
        was_killed = run_killed(lambda work=work: amend_part(path, **work), at=number)
        assert check_checkpoint(path).equal
        assert attachments(path) in ({"rank": b"one"}, {"rank": b"two"})
        if not was_killed:
            break
    assert 3 <= number < 49
    assert attachments(path) == {"rank": b"two"}


def test_what_is_added_while_a_save_is_under_way_waits_for_it(tmp_path: Path) -> None:
    path, saves = tmp_path / "x.ckpt", Saves()
    saves.amend(str(path), {"late": b"nobody's"})
    saves.begin(str(path), "first")
    saves.amend(str(path), {"late": b"of the first"})
    saves.begin(str(path), "second")
    saves.amend(str(path), {"late": b"one"})
    saves.amend(str(path), {"late": b"two"})
    for id in ("first", "second"):
        save(path, 1, id=id, rank=b"own")
        assert attachments(path) == {"rank": b"own"}
        saves.end(str(path), id)
    assert attachments(path) == {"rank": b"own", "late": b"two"}
    saves.amend(str(path), {"late": b"three"})
    assert attachments(path)["late"] == b"three"
    save(path, 2, rank=b"somebody else's")
    saves.amend(str(path), {"late": b"four"})
    assert attachments(path) == {"rank": b"somebody else's"}


def test_a_save_that_fails_leaves_no_digests(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "x.ckpt"
    save(path, 1, rank=b"one")

    def fail(*_: Any) -> None:
        raise OSError("no space left")

    with monkeypatch.context() as patch:
        patch.setattr(files.os, "fsync", fail)
        with pytest.raises(OSError, match="no space left"):
            save(path, 2)
    with pytest.raises(CheckpointNotFoundError):
        check_checkpoint(path)


# links, attachments, folders


def test_a_link_has_what_its_target_has(tmp_path: Path) -> None:
    target, link = tmp_path / "x.ckpt", tmp_path / "last.ckpt"
    save(link, 0, rank=b"of the file that was there")
    link.unlink()
    id = save(target, 1, rank=b"one")
    link.symlink_to("x.ckpt")
    assert check_checkpoint(link).equal
    assert amend_part(target, id=id, rank=0, files={"rank": b"two"})
    assert attachments(link) == {"rank": b"two"}
    remove_beside(link)
    link.unlink()
    assert attachments(target) == {"rank": b"two"}
    assert names(tmp_path)[:2] == ["x.ckpt", "x.ckpt.digests.json"]


def test_a_remote_path_is_refused() -> None:
    with pytest.raises(
        CheckpointFormatError, match=r"memory://x\.ckpt is remote, and checkpoints are compared on a disk"
    ):
        check_checkpoint("memory://x.ckpt")


def test_damaged_and_missing_attachments_are_named(tmp_path: Path) -> None:
    path = tmp_path / "x.ckpt"
    save(path, 1, one=b"one", two=b"two")
    for file in (tmp_path / "x.ckpt.resume" / "rank-00000").iterdir():
        if file.name.startswith("one."):
            file.write_bytes(b"onE")
        elif file.name.startswith("two."):
            file.unlink()
    report = check_checkpoint(path)
    assert not report.equal
    assert [entry.name for entry in report.entries] == ["resume: one"]
    assert report.missing_files == ("two",)


def test_every_file_of_a_folder_counts(tmp_path: Path) -> None:
    path = tmp_path / "x.ckpt"
    (path / "inner").mkdir(parents=True)
    for name in ("__0_0.distcp", "__1_0.distcp", ".metadata", "inner/meta.pt"):
        (path / name).write_bytes(name.encode())
    context = SaveContext(attachments={"rank": b"one"})
    begin_save(path, id="a", context=context)
    end_save(path, id="a", entries={}, context=context)
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
