"""Digests that are computed where a tensor is: the bits of the host, whichever way, and which way that is."""

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import device_cases
import pytest
import torch

from det_callbacks.digest import digest_output, digest_tensor, digest_tensors
from det_callbacks.digest.device import Choice, choice, copied, device_choice, disagreement
from det_callbacks.digest.device.copied import CopiedDigest, CopiedLaunch

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
    "num_cases",
    [pytest.param(24, marks=pytest.mark.slow), pytest.param(300, marks=pytest.mark.soak)],
    ids=lambda number: f"{number} cases",
)
def test_triton_in_its_interpreter_gives_the_bits_of_the_host(num_cases: int) -> None:
    pytest.importorskip("triton", reason=NEEDS_TRITON)
    output = run_python(str(Path(device_cases.__file__)), str(num_cases), TRITON_INTERPRET="1")
    assert f"{num_cases} cases agree" in output


COMPILE = """
from types import SimpleNamespace
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

launched = []


class Driver:
    # what Triton asks of a GPU's driver: this one compiles for a GPU and notes the launches
    utils = SimpleNamespace(
        get_device_properties=lambda device: {"max_shared_mem": 200_000},
        load_binary=lambda name, kernel, shared, device: (object(), name, 40, 0, 1024),
    )

    def __init__(self, capability):
        self.capability = capability
        self.is_compiled = False

    def get_current_device(self):
        assert not self.is_compiled, "looked up in a launch"
        return 0

    def get_current_stream(self, device):
        return self.get_current_device()

    def get_current_target(self):
        return GPUTarget("cuda", self.capability, 32)

    def launcher_cls(self, source, metadata):
        return lambda *arguments: launched.append((arguments[4], arguments[:4], arguments[9:]))


def compile_for(capability):
    launched.clear()
    driver.set_active(Driver(capability))
    from det_callbacks.digest.device import triton_kernels as kernels
    functions = (kernels._sum_blocks, kernels._hash_leaves, kernels._hash_words)
    for function in functions:
        function.device_caches.clear()
    launchers = kernels.Launchers()
    for compiled in (compiled for function in functions for compiled in function.device_caches[0][0].values()):
        compiled._init_handles()
    driver.active.is_compiled = True
    big = 1 << 46
    spans = [0, 0] * 15 + [big + 3, 7]
    for sums, first in ((big, 16), (big + 16, 1), (16, big)):
        launchers.sum_blocks(5, 77, big, sums, first, 1, *spans[:-2], 0, first)
        launchers.hash_leaves(6, 77, big, sums, first)
        launchers.hash_words(7, 77, big, sums)
    for function in functions:
        (compiled,) = function.device_caches[0][0].values()
        assert compiled.asm["cubin"] and "ld.global" in compiled.asm["ptx"], capability
        print(function.__name__, capability)
    # aligned spans are read 16 bytes at a time
    (compiled,) = kernels._sum_blocks.device_caches[0][0].values()
    assert "ld.global.v2" in compiled.asm["ptx"]
    assert [name for name, _, _ in launched] == ["_sum_blocks", "_hash_leaves", "_hash_words"] * 3
    assert launched[0][1:] == ((5, 1, 1, 77), (big, big, 16, 1, *spans[:-2], 0, 16)), launched[0]
    assert launched[1][1:] == ((6, 1, 1, 77), (big, big, 16)), launched[1]
    assert launched[2][1:] == ((7, 1, 1, 77), (big, big)), launched[2]
    assert launched[6][2] == (big, 16, big, 1, *spans[:-2], 0, big)


for capability in (80, 90):
    compile_for(capability)
"""


@pytest.mark.slow
def test_the_kernels_compile_once_for_gpus_that_are_not_there(tmp_path: Path) -> None:
    pytest.importorskip("triton", reason=NEEDS_TRITON)
    output = run_python("-c", COMPILE, TRITON_CACHE_DIR=str(tmp_path))
    names = ["_sum_blocks", "_hash_leaves", "_hash_words"]
    assert output.splitlines() == [f"{name} {capability}" for capability in (80, 90) for name in names]


def test_copies_give_the_bits_of_the_host() -> None:
    device_cases.check(CopiedDigest(), 60, largest=5 * 256 * 1024, seed=7)


def test_a_tensor_by_itself_is_queued_when_it_is_large(monkeypatch: pytest.MonkeyPatch) -> None:
    launched = []
    monkeypatch.setattr(
        CopiedDigest, "launch", lambda self, spans, stream: launched.append(len(spans)) or [7] * len(spans)
    )
    monkeypatch.setattr(CopiedDigest, "collect", lambda self, parts: [digest for part in parts for digest in part])
    small, large = torch.arange(25), torch.arange(26)
    expected = digest_tensor(small)
    with device_cases.as_on_a_device(CopiedDigest(), alone_bytes=large.nbytes):
        assert (digest_tensor(small), digest_output(small.view(5, 5).t()), launched) == (expected, expected, [])
        assert (digest_tensor(large), launched) == (7, [1])
        assert (digest_tensors([small, small]), launched) == ([7, 7], [1, 2])


class Streamed(CopiedDigest):
    """Copies that arrive when they are waited for, on the host."""

    num_arrived = 0

    def _to_host(self, content: torch.Tensor) -> tuple[torch.Tensor, torch.Event | None]:
        copied, content = torch.zeros_like(content), content.clone()

        def arrive() -> None:
            self.num_arrived += 1
            copied.copy_(content)

        return copied, SimpleNamespace(synchronize=arrive)


def test_copies_are_waited_for_at_the_end_or_when_they_hold_much(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copied, "MAX_COPIED_BYTES", 2500)
    method = Streamed()
    values = [torch.full((size,), size % 251, dtype=torch.uint8) for size in (900, 900, 600, 900, 500)]
    launched = [method.launch([(value.untyped_storage(), 0, value.nbytes)], None) for value in values]
    assert method.num_arrived == 2  # 2,000 bytes are left
    assert method.collect(launched) == digest_tensors(values)
    assert method.num_arrived == 5


class Lying(CopiedDigest):
    """Wrong in one bit of the digests of tensors above a leaf."""

    name = "a lie"

    def collect(self, launched: Sequence[CopiedLaunch]) -> list[int]:
        first, *others = super().collect(launched)
        return [first ^ 1, *others]


def test_a_method_that_gives_other_bits_is_found() -> None:
    assert disagreement(CopiedDigest(), device_cases.HOST) is None
    found = disagreement(Lying(), device_cases.HOST)
    assert found == "a lie gave other bits than the host for 263173 bytes at 0"


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        (None, "copies to the host; no Triton: ModuleNotFoundError"),
        ("gave other bits", "a copy to the host; no Triton: ModuleNotFoundError"),
        (NotImplementedError("no such op"), "a copy to the host; no Triton: ModuleNotFoundError"),
    ],
)
def test_without_triton_copies_are_taken_and_say_why(
    monkeypatch: pytest.MonkeyPatch, answer: object, says: str
) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)
    monkeypatch.delitem(sys.modules, "det_callbacks.digest.device.triton_kernels", raising=False)

    def trial(method: object, device: torch.device) -> object:
        if isinstance(answer, Exception):
            raise answer
        return answer

    monkeypatch.setattr(choice, "disagreement", trial)
    found = device_choice.__wrapped__(torch.device("cuda", 0))
    assert isinstance(found.method, CopiedDigest) == (answer is None)
    assert str(found).startswith(says)
    assert answer is None or str(answer) in str(found)


def test_other_devices_are_copied_one_by_one() -> None:
    assert device_choice(torch.device("hpu", 0)) == Choice(method=None, reasons=())


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_gpu_triton_is_chosen_and_agrees() -> None:
    found = device_choice(torch.device("cuda", torch.cuda.current_device()))
    assert str(found).startswith("Triton"), found
    there, here = (
        device_cases.tensors(500, largest=40 << 20, seed=1, device=torch.device(device)) for device in ("cuda", "cpu")
    )
    assert digest_tensors(there) == digest_tensors(here)
    assert [digest_tensor(case) for case in there] == [digest_tensor(case) for case in here]
