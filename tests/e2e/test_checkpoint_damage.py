"""A bit that flips anywhere in a checkpoint is found, and a file that ends early is an error."""

import random
import shutil
from pathlib import Path

import pytest
from fits import Fit

from det_callbacks import CheckpointFormatError, DeterminismCallback, check_checkpoint

NUM_FLIPS = 200


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved")
    fit = Fit(DeterminismCallback(folder / "run", mode="record", level="state")).run()
    fit.trainer.save_checkpoint(folder / "x.ckpt")
    return folder / "x.ckpt"


def copy_of(saved: Path, folder: Path) -> Path:
    for suffix in ("", ".digests.json"):
        (folder / f"x.ckpt{suffix}").write_bytes(Path(f"{saved}{suffix}").read_bytes())
    shutil.copytree(f"{saved}.resume", folder / "x.ckpt.resume")
    return folder / "x.ckpt"


def outcome(path: Path) -> str:
    try:
        report = check_checkpoint(path)
    except CheckpointFormatError as error:
        return f"refused with {error.exit_code}"
    if report.equal:
        return "passed"
    return f"{'named' if report.entries else 'bytes only'} with {report.exit_code}"


def test_no_flipped_bit_passes(saved: Path, tmp_path: Path) -> None:
    path = copy_of(saved, tmp_path)
    content = path.read_bytes()
    assert outcome(path) == "passed"
    draw = random.Random(0)
    found = []
    for _ in range(NUM_FLIPS):
        damaged = bytearray(content)
        damaged[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
        path.write_bytes(damaged)
        found.append(outcome(path))
    assert set(found) <= {"named with 1", "bytes only with 1", "refused with 2"}
    assert found.count("named with 1") > 20  # of bits in tensors
    assert found.count("refused with 2") > 20  # of bits in what holds the file together
    path.write_bytes(content)
    assert outcome(path) == "passed"


def test_a_bit_of_a_weight_is_named(saved: Path, tmp_path: Path) -> None:
    path = copy_of(saved, tmp_path)
    content = bytearray(path.read_bytes())
    named = set()
    for position in range(0, len(content), 64):
        damaged = bytearray(content)
        damaged[position] ^= 1
        path.write_bytes(damaged)
        try:
            named |= {entry.name for entry in check_checkpoint(path).entries}
        except CheckpointFormatError:
            continue
    assert "state_dict: first.weight" in named
    assert "optimizer_states: 0/state/0/exp_avg (exp_avg of first.weight)" in named


def test_a_truncated_checkpoint_is_an_error(saved: Path, tmp_path: Path) -> None:
    path = copy_of(saved, tmp_path)
    content = path.read_bytes()
    lengths = [0, 1, 3, 4, 100, len(content) // 2, len(content) - 1, *random.Random(1).sample(range(len(content)), 60)]
    for length in lengths:
        path.write_bytes(content[:length])
        with pytest.raises(CheckpointFormatError, match="so it is truncated") as caught:
            check_checkpoint(path)
        assert caught.value.exit_code == 2


def test_a_truncated_sidecar_is_an_error(saved: Path, tmp_path: Path) -> None:
    path = copy_of(saved, tmp_path)
    sidecar = Path(f"{path}.digests.json")
    content = sidecar.read_bytes()
    for length in [0, 1, len(content) - 1, *random.Random(2).sample(range(len(content)), 60)]:
        sidecar.write_bytes(content[:length])
        with pytest.raises(CheckpointFormatError, match=r"digests\.json is damaged"):
            check_checkpoint(path)
