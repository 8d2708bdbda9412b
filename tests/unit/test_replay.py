"""Saving tensors and putting them back: every dtype and layout, autograd unharmed, damage found."""

import json
from functools import partial
from pathlib import Path

import pytest
import torch
from hypothesis import settings
from replay_cases import OF_ANY_KIND, OTHERS, PLACE, of_kind, reader, saver
from safetensors import safe_open
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.utils.flop_counter import FlopCounterMode

from det_callbacks import HashMode
from det_callbacks.digest import digest_tensor
from det_callbacks.errors import ReferenceFormatError, ReplayError
from det_callbacks.replay import ReplayCounts, SavedStep, copy_bits, new_tensor, put_back
from det_callbacks.replay.files import StepPlace


@pytest.mark.filterwarnings("ignore:ComplexHalf:UserWarning")  # torch's, of a dtype in the draw
@settings(max_examples=150, deadline=None)
@OF_ANY_KIND
def test_any_bits_come_back(
    tmp_path_factory: pytest.TempPathFactory,
    dtype: torch.dtype,
    shape: tuple[int, ...],
    layout: str,
    lazy: str,
    seed: int,
) -> None:
    make = partial(of_kind, dtype, shape, layout, lazy)
    folder = tmp_path_factory.mktemp("replay")
    original, live = make(seed), make(seed + 1)
    kept = saver(folder)
    kept.keep("key", original)
    kept.write(12)
    saved = reader(folder).take("key", like=live)
    assert saved.digest == digest_tensor(original)
    stride, version = live.stride(), live._version
    differed = digest_tensor(live) != digest_tensor(original)
    assert put_back(saved, live) is differed
    assert digest_tensor(live) == digest_tensor(original)
    assert (live.stride(), live._version) == (stride, version)
    assert digest_tensor(new_tensor(saved, like=make(seed + 2))) == digest_tensor(original)


@pytest.mark.filterwarnings("ignore:Sparse")  # torch calls sparse layouts beta
@pytest.mark.filterwarnings("ignore:.*nested tensors.*:UserWarning")  # torch calls nested tensors a prototype
@pytest.mark.filterwarnings("ignore:.*[Qq]uantiz.*")  # torch deprecates quantised tensors, and has them
@pytest.mark.parametrize("kind", sorted(OTHERS))
def test_other_layouts_come_back_by_components(tmp_path: Path, kind: str) -> None:
    original = OTHERS[kind]()
    kept = saver(tmp_path)
    kept.keep("key", original)
    kept.write(12)
    for _ in range(3):
        live = OTHERS[kind]()
        saved = reader(tmp_path).take("key", like=live)
        put_back(saved, live)
        assert digest_tensor(live) == digest_tensor(original) == saved.digest
        if kind != "four bits":  # torch has no clone for it, and no gradients
            assert digest_tensor(new_tensor(saved, like=OTHERS[kind]())) == saved.digest


def test_a_shard_comes_back(tmp_path: Path) -> None:
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        original = DTensor.from_local(torch.randn(3), mesh, [Shard(0)])
        live = DTensor.from_local(torch.randn(3), mesh, [Shard(0)])
        local = live.to_local()
        kept = saver(tmp_path)
        kept.keep("key", original)
        kept.write(12)
        assert put_back(reader(tmp_path).take("key", like=live), live)
        assert torch.equal(local, original.to_local())
    finally:
        torch.distributed.destroy_process_group()


def test_autograd_goes_on_with_the_bits_put_back() -> None:
    weight = nn.Parameter(torch.ones(3))
    saved = copy_bits(torch.tensor([2.0, 3.0, 4.0]))
    out = torch.exp(weight)  # autograd saves the output
    version = out._version
    base = out.grad_fn
    assert put_back(saved, out)
    assert (out._version, out.grad_fn, out.requires_grad) == (version, base, True)
    out.sum().backward()
    assert weight.grad is not None
    assert torch.equal(weight.grad, torch.tensor([2.0, 3.0, 4.0]))


def test_a_leaf_that_requires_grad_is_changed_where_it_lies() -> None:
    weight = nn.Parameter(torch.ones(3))
    view, address = weight.detach(), weight.data_ptr()
    (weight * weight).sum().backward()
    assert put_back(copy_bits(torch.full((3,), 5.0)), weight)
    assert weight.data_ptr() == address
    assert view.tolist() == [5.0] * 3
    assert weight.is_leaf
    assert weight.requires_grad


def test_inference_tensors_and_inference_mode() -> None:
    with torch.inference_mode():
        live = torch.ones(3)
        put_back(copy_bits(torch.full((3,), 2.0)), live)
    put_back(copy_bits(torch.full((3,), 3.0)), live)
    assert live.is_inference()
    assert live.tolist() == [3.0] * 3


def test_no_mode_sees_it(tmp_path: Path) -> None:
    live, original = torch.randn(4, 4).t(), torch.randn(4, 4)
    kept = saver(tmp_path)
    with HashMode() as mode, FlopCounterMode(display=False) as flops:
        kept.keep("key", original)
        kept.write(12)
        saved = reader(tmp_path).take("key", like=live)
        put_back(saved, live)
        new_tensor(saved, like=live)
    assert mode.trace is not None
    assert [site.op for site in mode.trace.program.sites if site.op] == []
    assert flops.get_total_flops() == 0


def test_elements_that_share_memory_cannot_be_made_different() -> None:
    live = torch.zeros(3).expand(2, 3)
    with pytest.raises(ReplayError, match="share memory"):
        put_back(copy_bits(torch.arange(6.0).reshape(2, 3)), live)
    assert live.tolist() == [[0.0] * 3] * 2


def test_what_is_kept_is_the_moment(tmp_path: Path) -> None:
    tensor = torch.ones(3)
    kept = saver(tmp_path)
    kept.keep("key", tensor)
    tensor.zero_()
    kept.write(12)
    assert put_back(reader(tmp_path).take("key", like=tensor), tensor)
    assert tensor.tolist() == [1.0] * 3


@pytest.mark.parametrize(
    ("live", "complaint"),
    [
        (torch.ones(4), r"float32 \[3\] and the live tensor is float32 \[4\]"),
        (torch.ones(3, dtype=torch.float64), "float64"),
        (torch.ones(3).to_sparse(), "sparse_coo"),
        (torch.ones(3, device="meta"), "no data"),
    ],
)
def test_what_does_not_fit_is_an_error(tmp_path: Path, live: Tensor, complaint: str) -> None:
    kept = saver(tmp_path)
    kept.keep("forward/net:aten.mm.default#0.0", torch.ones(3))
    kept.write(12)
    with pytest.raises(ReferenceFormatError, match=complaint) as error:
        reader(tmp_path).take("forward/net:aten.mm.default#0.0", like=live)
    assert "step-000000012.safetensors" in str(error.value)
    assert "aten.mm.default#0.0" in str(error.value)


def test_what_was_not_saved_or_was_taken_is_an_error(tmp_path: Path) -> None:
    kept = saver(tmp_path)
    kept.keep("one", torch.ones(3))
    kept.keep("two", torch.ones(3))
    kept.keep_value("three", 0.1)
    kept.write(12)
    step = reader(tmp_path)
    step.take("one", like=torch.ones(3))
    for key, complaint in (("one", "taken already"), ("four", "no 'four'"), ("three", "plain value")):
        with pytest.raises(ReferenceFormatError, match=complaint):
            step.take(key, like=torch.ones(3))
    assert step.untaken() == ("two", "three")
    assert step.take_value("three") == 0.1
    with pytest.raises(ReferenceFormatError, match="there is no such file"):
        reader(tmp_path, step=13).take("one", like=torch.ones(3))


def test_every_damaged_byte_is_found(tmp_path: Path) -> None:
    kept = saver(tmp_path)
    kept.keep("key", torch.randn(8))
    kept.write(12)
    path = reader(tmp_path).path
    content = path.read_bytes()
    for position in range(len(content)):
        path.write_bytes(content[:position] + bytes([content[position] ^ 0x11]) + content[position + 1 :])
        with pytest.raises(ReferenceFormatError, match="step-000000012"):
            reader(tmp_path).take("key", like=torch.randn(8))
    for length in (0, 7, 8, len(content) // 2, len(content) - 1):
        path.write_bytes(content[:length])
        with pytest.raises(ReferenceFormatError, match="step-000000012"):
            reader(tmp_path).take("key", like=torch.randn(8))


def test_another_step_or_run_is_refused(tmp_path: Path) -> None:
    kept = saver(tmp_path)
    kept.keep("key", torch.ones(1))
    kept.write(12)
    path = reader(tmp_path).path
    for change in ({"step": 13}, {"run_id": "other"}, {"rank": 1}):
        place = StepPlace(**{**PLACE.to_dict(), **change})
        with pytest.raises(ReferenceFormatError, match="another place"):
            SavedStep(path, place).take("key", like=torch.ones(1))


@pytest.mark.parametrize("key", ["../../etc/passwd", "__metadata__", "a/b", "\n", "é" * 900, "key/values"])
def test_keys_never_become_paths(tmp_path: Path, key: str) -> None:
    kept = saver(tmp_path)
    kept.keep(key, torch.ones(2))
    kept.keep("key", torch.ones(2).to_sparse())
    kept.write(12)
    files = [path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*") if path.is_file()]
    assert files == ["rank-00000/replay/attempt-000.segment-000/step-000000012.safetensors"]
    assert reader(tmp_path).take(key, like=torch.ones(2)).num_bytes == 8
    assert reader(tmp_path).take("key", like=torch.ones(2).to_sparse()).num_bytes == 24


def test_others_can_read_the_file(tmp_path: Path) -> None:
    kept = saver(tmp_path)
    kept.keep("one", torch.tensor([1.0, 2.0], dtype=torch.bfloat16))
    kept.keep("two", torch.tensor([1j, 2], dtype=torch.complex128))
    kept.write(12)
    with safe_open(reader(tmp_path).path, framework="pt") as file:
        assert torch.equal(file.get_tensor("one"), torch.tensor([1.0, 2.0], dtype=torch.bfloat16))
        assert file.get_tensor("two").dtype is torch.uint8
        header = json.loads(file.metadata()["det_callbacks_replay"])
    assert (header["format_version"], header["run_id"], header["step"]) == (1, "run", 12)
    assert header["entries"][1]["dtype"] == "complex128"


def test_the_budget_of_a_step(tmp_path: Path) -> None:
    mib = torch.zeros(2**18)
    kept = saver(tmp_path, budget_mib=2)
    kept.keep("a", mib, op="aten.one")
    kept.keep("b", mib, op="aten.two")
    with pytest.raises(ReplayError, match=r"save 3 MiB, and tensor_budget_mib is 2\..*aten.two 2 MiB, aten.one 1"):
        kept.keep("c", mib, op="aten.two")
    assert not list(tmp_path.rglob("*.safetensors"))
    kept.write(0)
    kept.keep("d", mib)  # each step has it for itself


def test_a_disk_that_would_fill_is_an_error_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = saver(tmp_path)
    kept.keep("a", torch.zeros(2**18))
    monkeypatch.setattr("shutil.disk_usage", lambda _: type("Usage", (), {"free": 64 * 2**20})())
    with pytest.raises(ReplayError, match="the disk has 64 MiB free"):
        kept.write(12)
    assert not list(tmp_path.rglob("*.safetensors"))


def test_a_step_recorded_again_replaces_what_it_saved(tmp_path: Path) -> None:
    kept = saver(tmp_path)
    kept.keep("a", torch.zeros(1))
    kept.write(12)
    kept.keep("a", torch.ones(1))
    kept.write(12)
    assert put_back(reader(tmp_path).take("a", like=torch.zeros(1)), torch.zeros(1))
    kept.write(12)  # and one that saves nothing any more leaves no file
    assert not list(tmp_path.rglob("*.safetensors"))


def test_a_key_twice_in_a_step_is_an_error(tmp_path: Path) -> None:
    kept = saver(tmp_path)
    kept.keep("a", torch.zeros(1))
    with pytest.raises(ValueError, match="'a' already"):
        kept.keep("a", torch.zeros(1))


def test_what_cannot_be_put_back_is_not_saved() -> None:
    with pytest.raises(ReplayError, match="_mkldnn"):
        copy_bits(torch.ones(4, 4).to_mkldnn())
    with pytest.raises(TypeError, match="meta"):
        copy_bits(torch.ones(4, device="meta"))


@pytest.mark.parametrize("value", [None, True, 3, -(2**70), 0.1, float("nan"), -0.0, float("inf"), "tëxt"])
def test_plain_values_come_back(tmp_path: Path, value: bool | int | float | str | None) -> None:
    kept = saver(tmp_path)
    kept.keep_value("key", value)
    kept.write(12)
    assert repr(reader(tmp_path).take_value("key")) == repr(value)


def test_counts() -> None:
    counts = ReplayCounts()
    for differs in (True, True, False):
        counts.add("aten.index_add_.default", differs=differs, num_bytes=2**20)
        counts.end_step()
    assert counts.to_dict() == {"aten.index_add_.default": {"count": 3, "differing": 2, "mib_per_step": 1.0}}
