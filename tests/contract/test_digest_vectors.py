"""Pinned digests: recorded references are compared with them,
so none may change under DIGEST_VERSION 1.

They are made from byte i of the pattern being the top byte of i * 2654435761 modulo 2**32.
"""

import numpy as np
import pytest
import torch
from beta_tensors import BETA_TENSORS

from det_callbacks.digest import host as host_digest
from det_callbacks.digest.components import digest_output, digest_tensor, digest_tensors
from det_callbacks.digest.host import format_digest

KIB = 1024
MIB = 1024 * KIB


def pattern(num_bytes: int) -> np.ndarray:
    return (np.arange(num_bytes, dtype=np.uint32) * np.uint32(2654435761) >> np.uint32(24)).astype(
        np.uint8
    )


BYTES = {
    0: "2d06800538d394c2",
    1: "de5f15ab6daf7941",
    1023: "a211f03b98f52b2c",
    1024: "e99def1145f12936",
    1025: "97427b373696ced2",
    256 * KIB: "2eb9d78a803979a4",
    256 * KIB + 1: "3cc32433fec267a2",
    16 * MIB: "236a4c4d513c1c05",
    16 * MIB + 1025: "d411d789c46962a6",
    33 * MIB + 513: "105ff93815a32ecb",
}

TENSORS = {
    "int64": (lambda: torch.arange(-5, 5), "e8a9ec9ed5a47b76"),
    "float32": (lambda: torch.arange(24.0).reshape(2, 3, 4), "2c864c8f2361e00d"),
    "float32 transposed": (lambda: torch.arange(24.0).reshape(4, 6).t(), "b49a5720c788bbb6"),
    "bfloat16": (lambda: torch.arange(600, dtype=torch.bfloat16), "7e8d5cbfe2de60f5"),
    "complex64 conjugate": (
        lambda: (torch.arange(4.0) + 1j * torch.arange(1.0, 5.0)).conj(),
        "ad412480881c47ae",
    ),
    "0-d": (lambda: torch.tensor(1.5), "b648a01d1b398851"),
    "empty": (lambda: torch.empty(3, 0), "2d06800538d394c2"),
    "sparse coo": (
        lambda: torch.sparse_coo_tensor(
            [[0, 1], [2, 0]], [3.0, 4.0], (2, 3), check_invariants=True
        ),
        "828d4db0011fd054",
    ),
    "sparse csr": (lambda: torch.eye(3).to_sparse_csr(), "a0025dd4def7592e"),
    "sparse bsc": (lambda: torch.eye(4).to_sparse_bsc((2, 2)), "2de2e43dd7becd20"),
    "quantised per tensor": (
        lambda: torch.quantize_per_tensor(torch.full((300,), 2.0), 0.5, 3, torch.qint8),
        "76dc580ca07ad115",
    ),
    "nested jagged": (
        lambda: torch.nested.nested_tensor_from_jagged(torch.arange(6.0), torch.tensor([0, 2, 6])),
        "81535a1ca4013c13",
    ),
}


@pytest.mark.parametrize(("num_bytes", "expected"), BYTES.items())
def test_bytes(num_bytes, expected, tmp_path):
    data = pattern(num_bytes + 2048)[:num_bytes]  # what lies behind it plays no part
    (tmp_path / "file").write_bytes(data)
    size, of_file = host_digest.digest_file(tmp_path / "file")
    of_bytes = [
        host_digest.digest_bytes(data),
        host_digest.digest_memory(data.ctypes.data, num_bytes),
        of_file,
    ]
    tensor = torch.from_numpy(data)
    of_tensor = [digest_tensor(tensor), digest_output(tensor), *digest_tensors([tensor])]
    assert {format_digest(one) for one in (*of_bytes, *of_tensor)} == {expected}
    assert size == num_bytes


@BETA_TENSORS
@pytest.mark.parametrize(("make", "expected"), TENSORS.values(), ids=TENSORS)
def test_tensors(make, expected):
    tensor = make()
    assert format_digest(digest_tensor(tensor)) == expected
    assert [format_digest(one) for one in digest_tensors([tensor])] == [expected]
    if tensor.layout is not torch.strided or tensor.is_contiguous():
        assert format_digest(digest_output(tensor)) == expected
