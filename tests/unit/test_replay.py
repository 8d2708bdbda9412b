"""Saving tensors to put them back, or to keep them: on the host,
and on a device that yields at the step's end.
"""

import json
from array import array
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from beta_tensors import BETA_DTYPES, BETA_TENSORS
from compiling import opaque_backend, twice
from device_cases import DTYPES, of_bits
from hypothesis import given, settings
from hypothesis import strategies as st
from late_device import LateDevice, as_in_a_step, late_device
from safetensors import safe_open
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from verdicts import DIVERGENCE

from det_callbacks.compare.numbers import with_numbers
from det_callbacks.digest.components import digest_tensor
from det_callbacks.digest.host import format_digest
from det_callbacks.errors import DetCallbacksError, ReferenceFormatError, ReplayError, WriteError
from det_callbacks.runs.files import stream_path
from det_callbacks.runs.steps import StepTrace
from det_callbacks.tensors.copies import TensorBudget
from det_callbacks.tensors.files import (
    KEPT,
    REPLAY,
    SavedStep,
    SavedTensor,
    StepPlace,
    StepWriter,
    common_elements,
    tensor_path,
)
from det_callbacks.tensors.replay import Keeper, Replay
from det_callbacks.trace.deferred_sites import DeferredSites
from det_callbacks.trace.hash_mode import HashMode
from det_callbacks.verdict import Divergence

PLACE = StepPlace(run_id="run", rank=0, segment=0, step=12)
KEY = "forward/net:aten.mm.default#0.0"


def saver(folder: Path) -> Replay:
    (folder / "rank-00000").mkdir(exist_ok=True)
    stream = folder / "rank-00000" / "attempt-000.arrows"
    return Replay(StepWriter(stream, REPLAY, run_id="run"), TensorBudget(1024.0))


def reader(folder: Path, step: int = 12) -> Replay:
    path = tensor_path(folder / "rank-00000" / "attempt-000.arrows", REPLAY, step)
    replay = Replay()
    replay.begin(SavedStep(path, PLACE))
    return replay


def save(folder: Path, *tensors: Tensor) -> Path:
    saving = saver(folder)
    for index, tensor in enumerate(tensors):
        saving.exchange_apart(str(index) if index else KEY, tensor, op="op", deferred=None)
    saving.write(12)
    (path,) = folder.rglob("*.safetensors")
    return path


@contextmanager
def step_on(device: LateDevice | None) -> Iterator[DeferredSites | None]:
    if device is None:
        yield None
        return
    deferred = DeferredSites()
    with as_in_a_step(device):
        yield deferred
    assert device.waits == []
    deferred.settle(array("Q"))


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": lambda tensor: tensor,
    "transposed": lambda tensor: tensor.transpose(0, -1) if tensor.dim() else tensor,
    "offset": lambda tensor: tensor[1:] if tensor.dim() else tensor,
    "strided": lambda tensor: tensor[..., ::2] if tensor.dim() else tensor,
}


@BETA_DTYPES
@settings(max_examples=60, deadline=None)
@given(
    dtype=st.sampled_from(DTYPES),
    shape=st.lists(st.integers(0, 4), max_size=3).map(tuple),
    layout=st.sampled_from(sorted(LAYOUTS)),
    is_late=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_any_bits_come_back(tmp_path_factory, dtype, shape, layout, is_late, seed):
    folder = tmp_path_factory.mktemp("replay")
    original, live, apart = (
        LAYOUTS[layout](of_bits(dtype, *shape, seed=seed + more)) for more in (0, 1, 2)
    )
    wanted, differed = digest_tensor(original), digest_tensor(original) != digest_tensor(live)
    before = live.stride(), live._version, live.data_ptr(), digest_tensor(apart)
    # of a gradient, and torch cannot clone the others
    is_number = dtype.is_floating_point or dtype.is_complex
    with late_device() if is_late else nullcontext() as device:
        saving = saver(folder)
        with step_on(device) as deferred:
            saving.exchange("key", original, op="op", deferred=deferred)
            original.untyped_storage().fill_(0)  # later in the step
        saving.write(12)
        replaying = reader(folder)
        with step_on(device) as deferred:
            assert replaying.exchange("key", live, op="op", deferred=deferred) is live
            assert bool(replaying.to_dict()) != is_late, "on a device it is not known yet"
            new = apart
            if is_number:
                new = replaying.exchange_apart("key", apart, op="apart", deferred=deferred)
    assert digest_tensor(live) == wanted
    assert not is_number or digest_tensor(apart if new is None else new) == wanted
    assert digest_tensor(apart) == before[3]
    assert (live.stride(), live._version, live.data_ptr()) == before[:3]
    assert replaying.to_dict()["op"]["differing"] == differed
    assert saving.to_dict()["op"]["count"] == 1


FREED = torch.ones(8)
FREED.untyped_storage().resize_(0)


@BETA_TENSORS
@pytest.mark.parametrize(
    ("make", "says"),
    [
        (
            lambda: torch.quantize_per_tensor(torch.randn(4, 3), 0.1, 3, torch.quint8),
            "is quantised",
        ),
        (lambda: torch.eye(3).to_sparse(), "layout sparse_coo"),
        (lambda: torch.ones(4, 4).to_mkldnn(), "layout _mkldnn"),
        (lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]), "is nested"),
        (
            lambda: torch.nested.nested_tensor([torch.ones(2)], layout=torch.jagged),
            "is made of 2 tensors",
        ),
        (lambda: torch.ones(2, dtype=torch.complex64).conj(), "is a lazy view"),
        (lambda: torch._neg_view(torch.ones(2)), "is a lazy view"),
        (lambda: torch.ones(2, device="meta"), "holds no data"),
        (lambda: torch.ones(3).expand(2, 3), "share memory .shape .2, 3., strides .0, 1.*clone"),
        (lambda: torch.ones(4).as_strided((2, 2), (1, 1)), "share memory"),
        (lambda: FREED, "needs 32 bytes of storage, which has 0"),
    ],
)
@pytest.mark.parametrize("is_late", [False, True], ids=["host", "late"])
def test_odd_layouts_are_refused_by_name_before_anything_is_written(tmp_path, is_late, make, says):
    save(tmp_path, torch.ones(2, 3))
    with late_device() if is_late else nullcontext():
        for replay in (saver(tmp_path), reader(tmp_path)):
            with pytest.raises(DetCallbacksError, match=says):
                replay.exchange(KEY, make(), op="op", deferred=DeferredSites() if is_late else None)


def test_a_shard_comes_back(tmp_path):
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        original, live, apart = (
            DTensor.from_local(torch.randn(3), mesh, [Shard(0)]) for _ in range(3)
        )
        local = live.to_local()
        save(tmp_path, original)
        reader(tmp_path).exchange(KEY, live, op="op", deferred=None)
        assert torch.equal(local, original.to_local())
        new = reader(tmp_path).exchange_apart(KEY, apart, op="op", deferred=None)
        assert isinstance(new, DTensor)
        assert torch.equal(new.to_local(), original.to_local())
    finally:
        torch.distributed.destroy_process_group()


def test_autograd_goes_on_with_the_bits_put_back(tmp_path):
    weight = nn.Parameter(torch.ones(3))
    save(
        tmp_path,
        torch.tensor([2.0, 3.0, 4.0]),
        torch.full((3,), 5.0),
        torch.tensor([1.0, 2.0]).expand(3, 2),
    )
    replaying = reader(tmp_path)
    out = torch.exp(weight)  # autograd saves the output
    before = (out._version, out.grad_fn, out.requires_grad)
    replaying.exchange(KEY, out, op="op", deferred=None)
    assert (out._version, out.grad_fn, out.requires_grad) == before
    out.sum().backward()
    assert torch.equal(weight.grad, torch.tensor([2.0, 3.0, 4.0]))
    view = weight.detach()
    (weight * weight).sum().backward()
    # a leaf that requires grad, where it lies
    replaying.exchange("1", weight, op="op", deferred=None)
    assert (view.tolist(), weight.is_leaf) == ([5.0] * 3, True)
    with torch.inference_mode():
        live = torch.ones(3)
    replaying.exchange("1", live, op="op", deferred=None)
    assert (live.tolist(), live.is_inference()) == ([5.0] * 3, True)
    live = torch.zeros(2).expand(3, 2)  # a gradient may share memory, and comes back apart
    new = replaying.exchange_apart("2", live, op="op", deferred=None)
    assert (new.tolist(), live.tolist()) == ([[1.0, 2.0]] * 3, [[0.0, 0.0]] * 3)


def test_no_mode_sees_it(tmp_path):
    live, original, apart = torch.randn(4, 4).t(), torch.randn(4, 4), torch.zeros(4, 4)
    with HashMode() as mode:
        save(tmp_path, original)
        reader(tmp_path).exchange(KEY, live, op="op", deferred=None)
        reader(tmp_path).exchange_apart(KEY, apart, op="op", deferred=None)
    assert [site.op for site in mode.trace.program.sites if site.op] == []


def test_what_was_not_saved_or_does_not_fit_is_an_error(tmp_path):
    saving = saver(tmp_path)
    for key, value in (("one", torch.ones(3)), ("two", torch.ones(3)), ("three", 0.1)):
        saving.exchange(key, value, op="op", deferred=None)
    with pytest.raises(ValueError, match="'one' already"):
        saving.exchange("one", torch.ones(3), op="op", deferred=None)
    saving.write(12)
    for key, value, complaint in (
        ("four", torch.ones(3), "no tensor 'four'; it has 'one', 'two'"),
        ("three", torch.ones(3), "no tensor 'three'"),
        ("two", 0.1, "no plain value 'two'"),
        (
            "one",
            torch.ones(4),
            r"'one' does not fit: it is float32 \[3\] and the live tensor is float32 \[4\]",
        ),
        ("one", torch.ones(3, dtype=torch.float64), "step-000000012.safetensors.*float64"),
    ):
        replaying = reader(tmp_path)
        assert replaying.exchange(key, value, op="op", deferred=None) is value
        replaying.end_step(differs=True)  # the comparison found out that the step is another one
        with pytest.raises(ReferenceFormatError, match=complaint):
            replaying.end_step(differs=False)
    with pytest.raises(ReferenceFormatError, match="there is no such file"):
        reader(tmp_path, step=13).exchange("one", torch.ones(3), op="op", deferred=None)
    for change in ({"step": 13}, {"run_id": "other"}, {"rank": 1}):
        with pytest.raises(ReferenceFormatError, match="another place"):
            SavedStep(next(tmp_path.rglob("*.safetensors")), replace(PLACE, **change)).read("one")


def test_every_damaged_byte_and_another_version_are_found(tmp_path, monkeypatch):
    path = save(tmp_path, torch.randn(8))
    content = path.read_bytes()
    damaged = [
        content[:at] + bytes([content[at] ^ 0x11]) + content[at + 1 :]
        for at in range(0, len(content), 3)
    ]
    damaged += [content[:length] for length in (0, 7, 8, len(content) // 2, len(content) - 1)] + [
        content + b"\0"
    ]
    for other in damaged:
        path.write_bytes(other)
        with pytest.raises(ReferenceFormatError, match="step-000000012"):
            reader(tmp_path).exchange(KEY, torch.randn(8), op="op", deferred=None)
    path.write_bytes(content)
    monkeypatch.setattr("det_callbacks.tensors.files.TENSORS_FORMAT_VERSION", 3)
    with pytest.raises(
        ReferenceFormatError,
        match=r"step-000000012.*its format version is 1, but this version reads 3",
    ):
        reader(tmp_path).exchange(KEY, torch.randn(8), op="op", deferred=None)


@BETA_DTYPES
def test_others_can_read_the_file(tmp_path):
    tensors = [of_bits(dtype, 3, 2, seed=1) for dtype in DTYPES]
    with safe_open(save(tmp_path, *tensors), framework="pt") as file:
        found = [file.get_tensor(str(index) if index else KEY) for index in range(len(tensors))]
        header = json.loads(file.metadata()["det_callbacks"])
    assert sum(one.dtype is other.dtype for one, other in zip(found, tensors, strict=True)) == 10
    for one, other in zip(found, tensors, strict=True):
        assert one.dtype in (other.dtype, torch.uint8)
        assert digest_tensor(one) == digest_tensor(other)
    assert (header["format_version"], header["run_id"], header["step"]) == (1, "run", 12)
    assert header["entries"][KEY]["dtype"] == str(DTYPES[0]).removeprefix("torch.")


def test_a_step_recorded_again_replaces_what_it_saved(tmp_path):
    saving = saver(tmp_path)
    for value in (0.0, 1.0):
        saving.exchange("a", torch.tensor([value]), op="op", deferred=None)
        saving.write(12)
    live = torch.zeros(1)
    reader(tmp_path).exchange("a", live, op="op", deferred=None)
    assert live.item() == 1.0
    counts = {"count": 2, "differing": 0, "mib_per_step": round(4 / 2**20, 6)}
    assert saving.to_dict() == {"op": counts}
    saving.write(12)  # and one that saves nothing any more leaves no file
    assert not list(tmp_path.rglob("*.safetensors"))


# Keeping what ops wrote.

ADD = replace(DIVERGENCE, step=0, module="", op="aten.add.Tensor", shape=(2,))


def keeper(folder: Path, *patterns: str, budget_mib: float = 8.0) -> Keeper:
    stream = stream_path(folder, 0, 0, 0)
    stream.parent.mkdir(parents=True, exist_ok=True)
    return Keeper(patterns, StepWriter(stream, KEPT, run_id=folder.name), budget_mib)


def trace(keeping: Keeper, body: Callable[[], Any], step: int = 0) -> StepTrace:
    with HashMode() as mode:
        mode.recorder.output_hooks.every = (keeping,)
        keeping.begin()
        body()
    keeping.write(mode.trace, step)
    return mode.trace


def assert_kept(folder: Path, place: Divergence, output: Tensor, step: int = 0) -> None:
    path = tensor_path(stream_path(folder, 0, 0, 0), KEPT, step)
    saved = SavedStep(path, StepPlace(run_id=folder.name, rank=0, segment=0, step=step))
    kept = saved.find(place, format_digest(digest_tensor(output)))
    assert kept.bits.view("float32").tolist() == output.flatten().tolist()


def test_an_argument_that_varies_does_not_shift_what_is_kept(tmp_path):
    """Its site stands before those of the outputs."""
    keeping = keeper(tmp_path / "run", "aten.add.Tensor")
    for step, alpha in enumerate((2.0, 3.0)):
        found = trace(keeping, partial(torch.add, torch.ones(2), torch.ones(2), alpha=alpha), step)
        assert "argument" in [site.role for site in found.program.sites]
        assert_kept(tmp_path / "run", ADD, torch.full((2,), 1 + alpha), step)


def test_what_cannot_be_copied_or_written_is_left_out_and_said(tmp_path, monkeypatch):
    keeping = keeper(tmp_path / "run", "aten._to_sparse.default", "aten.ones.default")
    trace(keeping, lambda: torch.ones(3, 3).to_sparse())
    assert (keeping.counts.num_tensors, keeping.counts.num_missing) == (1, 1)
    assert "has the layout sparse_coo, so its bits cannot be saved" in keeping.counts.reason
    for name, error in (
        ("replay.copy_bits", torch.OutOfMemoryError()),
        ("files.StepWriter.write", WriteError("full")),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(f"det_callbacks.tensors.{name}", mock.Mock(side_effect=error))
            trace(keeping, lambda: torch.ones(2))
    assert (keeping.counts.num_tensors, keeping.counts.num_missing) == (1, 3)


def test_replay_saves_whole_tensors_within_the_budget_of_a_step(tmp_path):
    replay = Replay(
        StepWriter(stream_path(tmp_path / "run", 0, 0, 0), REPLAY, run_id="run"),
        TensorBudget(0.002),
    )
    replay.exchange("key", torch.ones(256), op="op", deferred=None)  # a half of the budget
    with pytest.raises(
        ReplayError, match=r"save 0\.00338 MiB with op, and tensor_budget_mib is 0\.002\."
    ):
        replay.exchange("more", torch.ones(629), op="op", deferred=None)
    replay.begin(None)
    replay.exchange("each step has it for itself", torch.ones(512), op="op", deferred=None)


def kept_in(folder: Path, step: int = 0) -> dict[str, SavedTensor]:
    path = tensor_path(stream_path(folder, 0, 0, 0), KEPT, step)
    saved = SavedStep(path, StepPlace(run_id=folder.name, rank=0, segment=0, step=step))
    return {key: saved.read(key) for key in saved.entries}


@pytest.mark.parametrize("is_late", [False, True], ids=["host", "late"])
def test_above_the_budget_the_same_even_sample_of_elements_is_kept_with_statistics_of_all(
    tmp_path, is_late
):
    values = torch.randn(3, 1000)
    values[1, 7] = torch.nan

    def body() -> None:
        (values.t() + 0).contiguous()  # not contiguous itself
        values + 0
        torch.ones(5) + 0

    # whole: 24,020 bytes; at most 1,000 elements, and at most 125 elements of each tensor
    kept = {}
    for budget in (8.0, 0.008, 0.001):
        folder = tmp_path / str(budget)
        keeping = keeper(folder, "aten.add.Tensor", budget_mib=budget)
        with late_device() if is_late else nullcontext() as device:
            trace(keeping, body)
        assert device is None or device.waits == []
        kept[budget] = [*kept_in(folder).values()]
        assert keeping.counts.num_bytes <= budget * 2**20
        assert keeping.counts.num_sampled == (0 if budget == 8 else 2)
    whole, some, few = ([tensor.every for tensor in kept[budget]] for budget in kept)
    assert (whole, some, few) == ([1, 1, 1], [4, 4, 1], [32, 32, 1])
    for one, other in ((8.0, 0.008), (0.008, 0.001), (8.0, 0.001)):
        for ours, theirs in zip(kept[one], kept[other], strict=True):
            assert (ours.shape, ours.options["statistics"]) == (
                theirs.shape,
                theirs.options["statistics"],
            )
            left, right = common_elements(ours, theirs)
            assert right is theirs
            assert left.bits.tobytes() == right.bits.tobytes()
    flat = values.flatten()
    of_values = kept[0.001][1]
    sample = flat[of_values.first :: 32]
    assert of_values.bits.tobytes() == sample.numpy().tobytes()
    finite = flat[flat.isfinite()].double()
    statistics = of_values.options["statistics"]
    assert (statistics["nan"], statistics["inf"]) == (1, 0)
    assert statistics["squares"] == pytest.approx(float(finite.square().sum()))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own, when it compiles
@pytest.mark.usefixtures("compiles_anew")
def test_an_op_inside_a_compiled_region_is_kept_too(tmp_path):
    compiled = torch.compile(lambda values: twice(values) + 1, backend=opaque_backend())
    with HashMode():
        compiled(torch.ones(2, 4))  # compiled before what is kept
    trace(keeper(tmp_path / "run", "det_tests.twice.default"), lambda: compiled(torch.ones(2, 4)))
    assert_kept(
        tmp_path / "run", replace(ADD, op="det_tests.twice.default"), torch.full((2, 4), 2.0)
    )


def test_patterns_that_nobody_could_have_asked_for_are_damage(tmp_path):
    manifest = SimpleNamespace(keep_tensors=["forward/aten.add.Tensor:a:b"])
    run: Any = SimpleNamespace(path=tmp_path, manifest=manifest)
    with pytest.raises(ReferenceFormatError, match=r"run\.json is damaged: keep_tensors"):
        with_numbers(run, run, {})
