"""Digests that are computed where a tensor is: the bits of the host, whichever way, and which way that is."""

import itertools
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import device_cases
import pytest
import torch

from det_callbacks.digest import device as device_module
from det_callbacks.digest import digest_output, digest_tensor, digest_tensors, integer_ops
from det_callbacks.digest.device import Choice, IntegerDigest, device_choice, disagreement

ROOT = Path(__file__).parents[2]
NEEDS_TRITON = "needs Triton, which the dev extra brings on Linux"

# every dtype is digested, those that torch calls experimental too
pytestmark = pytest.mark.filterwarnings(
    "ignore:ComplexHalf support is experimental:UserWarning"
)  # torch says so of the dtype


def run_python(*arguments: str, **variables: str) -> str:
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH")))),
        **variables,
    }
    done = subprocess.run([sys.executable, *arguments], env=environment, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize(
    "num_cases", [24, pytest.param(300, marks=pytest.mark.slow)], ids=lambda number: f"{number} cases"
)
def test_triton_in_its_interpreter_gives_the_bits_of_the_host(num_cases: int) -> None:
    pytest.importorskip("triton", reason=NEEDS_TRITON)
    output = run_python(str(Path(device_cases.__file__)), str(num_cases), TRITON_INTERPRET="1")
    assert f"{num_cases} cases agree" in output


COMPILE = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from det_callbacks.digest import triton_kernels as kernels
signature = {"table": "*i64", "rows": "*i64", "num_rows": "i32", "sums": "*i64"}
for capability in (80, 90):
    target = GPUTarget("cuda", capability, 32)
    tile = {"TILE": kernels.TILE_BLOCKS}
    blocks = ASTSource(fn=kernels._sum_blocks, signature={**signature, "TILE": "constexpr"}, constexprs=tile)
    leaves = ASTSource(fn=kernels._hash_leaves, signature=signature, constexprs={})
    for source, num_warps in ((blocks, 4), (leaves, 1)):
        compiled = triton.compile(source, target=target, options={"num_warps": num_warps})
        assert compiled.asm["cubin"] and "ld.global" in compiled.asm["ptx"], capability
        print(source.fn.__name__, capability)
"""


@pytest.mark.slow
def test_the_kernels_compile_for_gpus_that_are_not_there(tmp_path: Path) -> None:
    pytest.importorskip("triton", reason=NEEDS_TRITON)
    output = run_python("-c", COMPILE, TRITON_CACHE_DIR=str(tmp_path))
    assert output.split() == ["_sum_blocks", "80", "_hash_leaves", "80", "_sum_blocks", "90", "_hash_leaves", "90"]


@pytest.mark.parametrize("num_bytes", [1, 1 << 28, (1 << 28) + 5, 9 << 30], ids=lambda number: f"{number} bytes")
def test_launches_hold_every_leaf_once(num_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton", reason=NEEDS_TRITON)
    from det_callbacks.digest import triton_kernels as kernels

    levels = []
    monkeypatch.setattr(kernels, "_run", lambda launches, device: levels.append(launches))
    digests = kernels.digest_device_spans([(64, num_bytes), (0, 0), (8, 100)], device_cases.HOST)
    expected = num_bytes
    for number, launches in enumerate(levels):
        rows = [row for launch in launches for row in zip(*[iter(launch.rows)] * 6, strict=True)]
        assert sum(row[1] for row in rows) == expected + (100 if number == 0 else 0)
        for launch in launches:
            assert launch.num_blocks * 1024 <= kernels.LAUNCH_BYTES
            last = list(zip(*[iter(launch.rows)] * 6, strict=True))[-1]
            assert launch.num_leaves == last[3] + -(-last[1] // (256 * 1024))
            assert launch.num_tiles == last[2] + -(-last[1] // (32 * 1024))
        own = rows[:-1] if number == 0 else rows
        for one, other in itertools.pairwise(own):
            assert other[0] == one[0] + one[1]
            assert other[5] == one[5] + 8 * (one[1] // (256 * 1024))
        expected = 8 * -(-expected // (256 * 1024))
    assert len(levels) == (1 if num_bytes <= 256 * 1024 else 3 if num_bytes > 8 << 30 else 2)
    assert levels[-1][0].rows[5] == digests.data_ptr()


@pytest.mark.parametrize("seed", range(3))
def test_integer_ops_give_the_bits_of_the_host(seed: int) -> None:
    device_cases.check(IntegerDigest(min_bytes=0), 60, largest=5 * 256 * 1024, seed=seed)


def test_integer_ops_of_several_chunks_and_levels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(integer_ops, "CHUNK_BYTES", 2 * 256 * 1024)
    parts = [torch.arange(5 * 256 * 1024 // 8 + 3), torch.arange(4 * 256 * 1024 // 4, dtype=torch.int32)]
    expected = digest_tensors(parts)
    with device_cases.as_on_a_device(IntegerDigest(min_bytes=0)):
        assert digest_tensors(parts) == expected


def test_small_tensors_are_copied_together_and_large_ones_are_not() -> None:
    device_cases.check(IntegerDigest(min_bytes=2000), 60, largest=300_000, seed=7)


def test_one_small_tensor_is_copied_and_many_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    launched = []
    monkeypatch.setattr(
        IntegerDigest, "launch", lambda self, spans, stream: launched.append(len(spans)) or [7] * len(spans)
    )
    small, large = torch.arange(25), torch.arange(26)
    expected = digest_tensor(small)
    with device_cases.as_on_a_device(IntegerDigest(), alone_bytes=large.nbytes):
        assert (digest_tensor(small), digest_output(small.view(5, 5).t()), launched) == (expected, expected, [])
        assert (digest_tensor(large), launched) == (7, [1])
        assert (digest_tensors([small, small]), launched) == ([7, 7], [1, 2])


def test_integer_ops_leave_what_they_read_alone() -> None:
    value = torch.arange(300_000)
    version = value._version
    integer_ops.digest_flat(value)
    assert torch.equal(value, torch.arange(300_000))
    assert value._version == version


class Lying(IntegerDigest):
    """Wrong in one bit of the digests of tensors above a leaf."""

    name = "a lie"

    def collect(self, launched: Sequence[list[int | torch.Tensor]]) -> list[int]:
        first, *others = super().collect(launched)
        return [first ^ 1, *others]


def test_a_method_that_gives_other_bits_is_found() -> None:
    assert disagreement(IntegerDigest(min_bytes=0), device_cases.HOST) is None
    found = disagreement(Lying(min_bytes=0), device_cases.HOST)
    assert found == "a lie gave other bits than the host for 263173 bytes at 0"


def choice_with(monkeypatch: pytest.MonkeyPatch, *, answer: object) -> Choice:
    """Return the choice for a GPU where Triton is missing and the trial of integer ops ends like this."""
    monkeypatch.setitem(sys.modules, "triton", None)
    monkeypatch.delitem(sys.modules, "det_callbacks.digest.triton_kernels", raising=False)

    def trial(method: object, device: torch.device) -> str | None:
        if isinstance(answer, Exception):
            raise answer
        return answer

    monkeypatch.setattr(device_module, "disagreement", trial)
    return device_choice.__wrapped__(torch.device("cuda", 0))


def test_without_triton_integer_ops_are_taken_and_say_why(monkeypatch: pytest.MonkeyPatch) -> None:
    choice = choice_with(monkeypatch, answer=None)
    assert isinstance(choice.method, IntegerDigest)
    assert str(choice).startswith("torch's integer ops; no Triton: ModuleNotFoundError")


@pytest.mark.parametrize("answer", ["gave other bits", NotImplementedError("gave other bits")], ids=["bits", "error"])
def test_without_either_the_host_is_taken_and_says_why(answer: object, monkeypatch: pytest.MonkeyPatch) -> None:
    choice = choice_with(monkeypatch, answer=answer)
    assert choice.method is None
    assert str(choice).startswith("a copy to the host; no Triton: ModuleNotFoundError")
    assert str(choice).endswith("gave other bits")


def test_devices_without_integer_ops_are_copied() -> None:
    assert device_choice(torch.device("hpu", 0)) == Choice(method=None, reasons=())


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_gpu_triton_is_chosen_and_agrees() -> None:
    choice = device_choice(torch.device("cuda", torch.cuda.current_device()))
    assert str(choice).startswith("Triton"), choice
    cases = device_cases.tensors(2000, largest=40 << 20, seed=1)
    assert digest_tensors([case.cuda() for case in cases]) == digest_tensors(cases)
