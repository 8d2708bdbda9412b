"""What of a checkpoint is digested by which name, and the files beside it: read as they were
written, or not at all.
"""

import os
import random
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch

from det_callbacks import CheckpointFormatError, CheckpointNotFoundError, check_checkpoint
from det_callbacks.checkpoint import files
from det_callbacks.checkpoint.files import MAX_FLAT, Entry, encode_plain, entries_of
from det_callbacks.cli import main
from det_callbacks.digest.components import digest_tensor
from det_callbacks.digest.host import format_digest
from det_callbacks.errors import WriteError
from det_callbacks.settings.generators import GeneratorStates


class Thing:
    pass


def test_entries_have_the_names_of_their_keys():
    weight = torch.arange(6.0).reshape(2, 3)
    loop: list[Any] = [torch.zeros(1)]
    loop.append(loop)
    found = entries_of(
        {
            "epoch": 3,
            "state_dict": OrderedDict(
                {"net.weight": weight, "a/b": weight.t(), "meta": weight.to("meta")}
            ),
            "optimizer_states": [
                {"state": {0: {"exp_avg": weight}}, "param_groups": [{"lr": 0.1, "params": [0, 1]}]}
            ],
            "empty": {},
            "hyper_parameters": {"thing": Thing(), "0": 1, 0: 2},
            "loop": loop,
            "table": {str(index): index for index in range(MAX_FLAT + 1)},
            "large": {str(index): weight for index in range(MAX_FLAT + 1)},
        },
    )
    assert found["state_dict"]["net.weight"] == Entry(
        kind="tensor", type="float32", digest=format_digest(digest_tensor(weight)), shape=(2, 3)
    )
    assert found["state_dict"]["a~1b"].shape == (3, 2)
    assert found["optimizer_states"]["0/param_groups/0/params"].type == "list"
    assert found["hyper_parameters"]["thing"] == Entry(kind="opaque", type="Thing")
    assert found["hyper_parameters"]["'0'"] != found["hyper_parameters"]["0"]
    assert (found["state_dict"]["meta"].kind, found["loop"]["1"].kind) == ("opaque", "opaque")
    assert [len(found[name]) for name in ("epoch", "empty", "table", "large")] == [
        1,
        1,
        1,
        MAX_FLAT + 1,
    ]


ALIKE = [
    (1, 1.0),
    (1, True),
    (0.0, -0.0),
    ("", b""),
    ([], ()),
    (["a", "b"], ["ab"]),
    ({"a": 1}, {"a": 1.0}),
]


def test_what_python_takes_for_equal_or_alike_is_told_apart():
    assert all(encode_plain(one) != encode_plain(other) for one, other in ALIKE)
    assert encode_plain({1, 2, 3}) == encode_plain({3, 2, 1})
    assert encode_plain([1, {"a": Thing()}]) is None


def test_no_flipped_bit_and_no_truncation_passes():
    entries = {"state_dict": {"é": Entry(kind="tensor", type="float32", digest="5", shape=(2, 3))}}
    file = files.FileDigest(size=7, digest="80")
    content = files.Sidecar(id="0f", file=file, entries=entries, run={"id": "a"}, step=3)
    raw, path = files.seal(content), Path("x.ckpt.digests.json")
    assert files.unseal(raw, path, files.Sidecar) == content
    for bit in range(8 * len(raw)):
        flipped = bytearray(raw)
        flipped[bit // 8] ^= 1 << bit % 8
        with pytest.raises(CheckpointFormatError):
            files.unseal(bytes(flipped), path, files.Sidecar)
    for length in [0, 1, *random.Random(0).sample(range(len(raw)), 50), len(raw) - 1]:
        with pytest.raises(CheckpointFormatError, match="is damaged") as caught:
            files.unseal(raw[:length], path, files.Sidecar)
    assert (caught.value.path, caught.value.exit_code) == (str(path), 2)


def test_what_is_no_sidecar_of_this_version_is_refused():
    form = {
        "schema": 1,
        "digest_version": 1,
        "id": "a",
        "file": {"size": 1, "digest": "0"},
        "entries": {},
    }
    files.unseal(files.seal(form), Path("x"), files.Sidecar)
    for raw, message in (
        (
            files.seal({**form, "schema": 2}),
            "has schema 2, but this version of det_callbacks reads 1",
        ),
        (files.seal({**form, "digest_version": 2}), "has digest_version 2"),
        (files.seal({**form, "num_ranks": "two"}), "structure"),
        *((raw, "is damaged") for raw in (b"null", b'{"schema": 1}', b"[" * 100_000)),
    ):
        with pytest.raises(CheckpointFormatError, match=message):
            files.unseal(raw, Path("x"), files.Sidecar)


POSITION = files.DataPosition(
    before_iteration=GeneratorStates({"numpy": {"state": 2**127}}), num_drawn=4
)


def save_part(path: Path, id: str, rank: int = 1) -> None:
    states: dict[str, Any] = {
        "generators": GeneratorStates.capture(),
        "position": POSITION,
        "is_epoch_over": False,
    }
    part = files.Part(id=id, rank=rank, **states, buckets=(("a", "b"),))
    files.write_part(path, part, {"gradient a": torch.arange(3.0)})


def save(path: Path, id: str, *, num_ranks: int = 2) -> None:
    """What is written beside a checkpoint, in order."""
    for rank in range(num_ranks):
        save_part(path, id, rank)
    checkpoint = {"state_dict": {"weight": torch.zeros(3)}, "id": id}
    torch.save(checkpoint, path)
    files.write_sidecar(path, id=id, entries=lambda: entries_of(checkpoint), num_ranks=num_ranks)


def test_a_part_belongs_to_the_save_that_it_is_of(tmp_path):
    path = tmp_path / "hpc_ckpt_3.ckpt"
    save(path, "a", num_ranks=3)
    save(path, "b")
    added = [name.removeprefix("hpc_ckpt_3.ckpt") for name in os.listdir(tmp_path)]
    # no digit, which Lightning would take for a version
    assert sorted(added) == ["", ".digests.json", ".resume"]
    assert check_checkpoint(path).equal
    part, tensors = files.read_part(path, files.read_sidecar(path), 1)
    assert (part.position, tensors["gradient a"].tolist()) == (POSITION, [0.0, 1.0, 2.0])
    save_part(path, "c")  # of a save that was never done
    assert check_checkpoint(path).missing_files == ("the part of rank 1",)
    save_part(path, "b")
    files.part_path(path, 0).rename(files.part_path(path, 1))
    assert check_checkpoint(path).missing_files == ("the part of rank 0", "the part of rank 1")
    save_part(path, "b")
    content = files.part_path(path, 1).read_bytes()
    for raw in (b"{}", content[:-1] + bytes([content[-1] ^ 1]), content[:-1]):
        files.part_path(path, 1).write_bytes(raw)
        with pytest.raises(
            CheckpointFormatError, match=r'01\.state is damaged.* and resume with resume="plain"'
        ):
            check_checkpoint(path)


def test_equal_entries_in_a_file_with_other_bytes_exit_with_1_and_say_so(tmp_path, capsys):
    path = tmp_path / "x.ckpt"
    save(path, "a")
    torch.save({**torch.load(path)}, path, _use_new_zipfile_serialization=False)
    assert main(["check-checkpoint", str(path)]) == 1
    shown = " ".join(capsys.readouterr().out.split())
    assert "x.ckpt is not the file that was saved: its bytes differ. 2 of 2 entries match" in shown
    assert "No entry differs: the checkpoint was saved again" in shown
    assert "delete x.ckpt.digests.json" in shown
    assert not check_checkpoint(path).entries


def test_what_cannot_be_compared_is_refused(tmp_path):
    torch.save([1], tmp_path / "list.ckpt")
    torch.save({}, tmp_path / "x.ckpt")
    (tmp_path / "folder").mkdir()
    torch.save({"thing": Thing()}, tmp_path / "thing.ckpt")
    for paths, message in (
        (("memory://x.ckpt",), r"There is no checkpoint memory://x\.ckpt on this disk"),
        (
            (tmp_path / "list.ckpt", tmp_path / "x.ckpt"),
            "it holds a list instead of a checkpoint's dictionary",
        ),
        (
            (tmp_path / "x.ckpt", tmp_path / "thing.ckpt"),
            r"thing\.ckpt cannot be read \(UnpicklingError: Weights only",
        ),
        (
            (tmp_path / "x.ckpt", tmp_path / "folder"),
            "cannot be read: of two, both have to be files",
        ),
    ):
        with pytest.raises((CheckpointFormatError, CheckpointNotFoundError), match=message):
            check_checkpoint(*paths)


def test_every_file_of_a_folder_counts(tmp_path):
    path = tmp_path / "x.ckpt"
    (path / "inner").mkdir(parents=True)
    for name in ("__0_0.distcp", "__1_0.distcp", ".metadata", "inner/meta.pt"):
        (path / name).write_bytes(name.encode())
    files.write_sidecar(path, id="a", entries=dict)
    assert check_checkpoint(path).equal
    assert check_checkpoint(path).sections == {"files": 4}
    shard = path / "__1_0.distcp"
    for change, differing in (
        (lambda: shard.write_bytes(b"__1_0.distcP"), [("__1_0.distcp", "content")]),
        (lambda: shard.write_bytes(b"longer"), [("__1_0.distcp", "structure")]),
        (lambda: shard.rename(path / "new"), [("__1_0.distcp", "missing"), ("new", "extra")]),
    ):
        change()
        report = check_checkpoint(path)
        assert (report.equal, [(entry.path, entry.kind) for entry in report.entries]) == (
            False,
            differing,
        )
    path.with_name("x.ckpt.digests.json").unlink()
    with pytest.raises(
        CheckpointNotFoundError, match=r"nothing to compare .* copy that file and .*\.resume/, too"
    ):
        check_checkpoint(path)


@pytest.mark.parametrize("name", ["x.ckpt.digests.json.tmp", "x.ckpt.resume"])
def test_no_link_next_to_a_checkpoint_is_written_through(tmp_path, name):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "rank-00000.state.tmp").write_text("theirs")
    place = tmp_path / "x.ckpt"
    torch.save({}, place)
    is_folder = name.endswith(".resume")
    (tmp_path / name).symlink_to(elsewhere if is_folder else elsewhere / "rank-00000.state.tmp")
    target = files.part_path(place, 0) if is_folder else files.beside(place, files.SIDECAR)
    with pytest.raises(WriteError, match="is a link to"):
        files._write(target, b"ours")
    assert [(one.name, one.read_text()) for one in elsewhere.iterdir()] == [
        ("rank-00000.state.tmp", "theirs")
    ]
    if is_folder:
        (elsewhere / target.name).write_text("theirs")
        with pytest.raises(CheckpointFormatError, match="is a link to"):
            files._read(target)
