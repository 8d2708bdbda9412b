"""Random tensors whose digests a device's method has to get right,
and the means to try that method on the host.

As a program it does so with the Triton kernels in Triton's interpreter, which has to be asked for
before they are defined: ``TRITON_INTERPRET=1 python device_cases.py NUM_CASES``.
"""

import ctypes
import mmap
import random
import sys

import torch
from late_device import late_device

from det_callbacks.digest.components import digest_output, digest_tensor, digest_tensors
from det_callbacks.digest.host import digest_memory
from det_callbacks.digest.triton_digest import TritonDigest, disagreement

HOST = torch.device("cpu")
LEAF = 256 * 1024
QUANTISED = {torch.qint8, torch.qint32, torch.quint8, torch.quint4x2, torch.quint2x4}
DTYPES = sorted(
    {value for value in vars(torch).values() if isinstance(value, torch.dtype)} - QUANTISED, key=str
)
# torch 2.14 and 2.15 cannot conjugate it on the host
UNCONJUGATED = {getattr(torch, "bcomplex32", None)}
EDGES = (
    1,
    8,
    9,
    1023,
    1024,
    1025,
    16 * 1024 + 1,
    32 * 1024 - 1,
    32 * 1024,
    32 * 1024 + 1,
    LEAF,
    LEAF + 1,
    3 * LEAF,
)


def of_bits(dtype: torch.dtype, *shape: int, seed: int = 0) -> torch.Tensor:
    num_bytes, high = torch.Size(shape).numel() * dtype.itemsize, 2 if dtype is torch.bool else 256
    raw = torch.randint(
        0, high, (num_bytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed)
    )
    return raw.view(dtype).reshape(shape)


def tensors(
    num_cases: int, *, largest: int, seed: int, device: torch.device = HOST
) -> list[torch.Tensor]:
    draw = random.Random(seed)
    found = []
    for _ in range(num_cases):
        dtype = draw.choice(DTYPES)
        num_bytes = draw.choice([draw.randrange(40), draw.randrange(4096), draw.randrange(70_000)])
        if draw.random() < 0.05:
            num_bytes = draw.randrange(largest)
        rows = draw.choice([1, 2, 3])
        columns = num_bytes // dtype.itemsize // rows // 2
        offset = draw.randrange(9)
        numel = rows * columns * 2 + offset + 1
        raw = of_bits(dtype, numel, seed=draw.randrange(1 << 32)).view(torch.uint8)
        # as bytes: no device copies all dtypes in all layouts
        base = raw.to(device).view(dtype)[offset:]
        box = base[: rows * columns * 2].reshape(rows, columns, 2)
        transposed, permuted = box.reshape(rows, columns * 2).t(), box.permute(2, 0, 1)
        strided, expanded, zero_d = box[:, :, 1], box[:1].expand(rows, columns, 2), base[0]
        value = draw.choice([box, transposed, permuted, strided, expanded, zero_d])
        can_be_conjugate = dtype.is_complex and dtype not in UNCONJUGATED
        found.append(value.conj() if can_be_conjugate and draw.random() < 0.5 else value)
    return found


def check(method: TritonDigest, num_cases: int, *, largest: int, seed: int) -> None:
    cases = tensors(num_cases, largest=largest, seed=seed)
    expected = digest_tensors(cases)
    outputs = [digest_output(case) for case in cases[:4]]
    with late_device(method=method):
        assert digest_tensors(cases) == expected
        assert [digest_tensor(case) for case in cases[:4]] == expected[:4]
        assert [digest_output(case) for case in cases[:4]] == outputs


def check_edges_of_memory(method: TritonDigest) -> None:
    page = mmap.PAGESIZE
    area = mmap.mmap(-1, 3 * page)
    start = ctypes.addressof(ctypes.c_char.from_buffer(area))
    area[page : 2 * page] = random.Random(0).randbytes(page)
    protect = ctypes.CDLL(None, use_errno=True).mprotect
    for forbidden in (start, start + 2 * page):
        assert protect(ctypes.c_void_p(forbidden), ctypes.c_size_t(page), 0) == 0
    for num_bytes in (1, 5, 8, 13, 1023, 1025):
        for address in (start + page, start + 2 * page - num_bytes):
            flat = torch.frombuffer(
                (ctypes.c_char * num_bytes).from_address(address), dtype=torch.uint8
            )
            launched = method.launch([(flat.untyped_storage(), 0, num_bytes)], None)
            assert method.collect([launched]) == [digest_memory(address, num_bytes)]


def check_edges_of_sizes(method: TritonDigest) -> None:
    content = torch.frombuffer(
        bytearray(random.Random(1).randbytes(3 * LEAF + 8)), dtype=torch.uint8
    )
    storage = content.untyped_storage()
    spans = [(storage, offset, size) for size in EDGES for offset in (0, 3, 8)]
    found = method.collect([method.launch(spans, None)])
    assert found == [
        digest_memory(storage.data_ptr() + offset, size) for storage, offset, size in spans
    ]


def main(num_cases: int) -> None:
    import det_callbacks.digest.triton_kernels as kernels

    method = TritonDigest(kernels, HOST)
    assert disagreement(method, HOST) == ""
    check_edges_of_memory(method)
    check_edges_of_sizes(method)
    check(method, num_cases, largest=2 * LEAF, seed=num_cases)
    print(f"{num_cases} cases agree")


if __name__ == "__main__":
    main(int(sys.argv[1]))
