"""The file beside a checkpoint: read as it was written, or not at all."""

import json
import random
from typing import Any

import pytest

from det_callbacks import CheckpointFormatError
from det_callbacks.checkpoint.entries import Entry
from det_callbacks.checkpoint.sealed import encode
from det_callbacks.checkpoint.sidecar import FileDigest, SaveContext, Sidecar, safe_name
from det_callbacks.digest import digest_bytes, format_digest

CONTENT = FileDigest(size=7, digest=2**63 + 1)


def sidecar(**options: Any) -> Sidecar:
    return Sidecar(
        **{
            "id": "0123456789abcdef",
            "file": CONTENT,
            "entries": {
                "state_dict": {"é": Entry(kind="tensor", type="float32", digest=5, shape=(2, 3), parameter="net")},
                "epoch": {"": Entry(kind="value", type="int", digest=6)},
                "extra": {"x": Entry(kind="opaque", type="Thing")},
            },
            "context": SaveContext(
                run={"id": "a", "mode": "record", "reference": "r"},
                step=3,
                epoch=1,
                chain=2**64 - 1,
                program=0,
                environment={"versions": {"torch": 1.5}},
            ),
            "num_ranks": 2,
            **options,
        }
    )


def changed(**values: Any) -> bytes:
    """A sidecar with other content, whose digest says that this is what was written."""
    content = {**json.loads(sidecar().to_bytes()), **values}
    content.pop("digest")
    content["digest"] = format_digest(digest_bytes(encode(content)))
    return encode(content)


@pytest.mark.parametrize(
    "one", [sidecar(), sidecar(file=None, files={"a/b": CONTENT}, num_ranks=0, context=SaveContext())]
)
def test_read_as_it_was_written(one: Sidecar) -> None:
    again = Sidecar.from_bytes(one.to_bytes(), "x")
    assert again == one
    assert again.to_bytes() == one.to_bytes()


def test_the_file_has_these_fields() -> None:
    content = json.loads(sidecar().to_bytes())
    assert content["file"] == {"size": 7, "digest": "8000000000000001"}
    assert content["entries"]["state_dict"]["é"] == {
        "digest": "0000000000000005",
        "shape": [2, 3],
        "dtype": "float32",
        "parameter": "net",
    }
    assert content["entries"]["epoch"][""] == {"value_digest": "0000000000000006", "type": "int"}
    assert content["entries"]["extra"]["x"] == {"type": "Thing"}
    assert (content["schema"], content["digest_version"], content["step"], content["chain"]) == (1, 1, 3, "f" * 16)


def test_no_flipped_bit_and_no_truncation_passes() -> None:
    raw = sidecar().to_bytes()
    for bit in range(8 * len(raw)):
        damaged = bytearray(raw)
        damaged[bit // 8] ^= 1 << bit % 8
        with pytest.raises(CheckpointFormatError):
            Sidecar.from_bytes(bytes(damaged), "x.ckpt.digests.json")
    for length in [0, 1, *random.Random(0).sample(range(len(raw)), 50), len(raw) - 1]:
        with pytest.raises(CheckpointFormatError, match="is damaged") as caught:
            Sidecar.from_bytes(raw[:length], "x.ckpt.digests.json")
    assert caught.value.path == "x.ckpt.digests.json"


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"schema": 2}, "has schema 2, and this version of det_callbacks reads 1"),
        ({"digest_version": 2}, "has digest_version 2"),
        ({"id": "../x"}, "structure"),
        ({"entries": []}, "structure"),
        ({"file": {"size": -1, "digest": "0" * 16}}, "structure"),
        ({"file": {"size": 1, "digest": "xyz"}}, "structure"),
        ({"chain": "12"}, "structure"),
        ({"resume": {"num_ranks": "two"}}, "structure"),
        ({"resume": {"folder": "x"}}, "structure"),
    ],
)
def test_foreign_versions_and_names_that_lead_elsewhere_are_refused(values: dict[str, Any], message: str) -> None:
    Sidecar.from_bytes(changed(), "x")
    with pytest.raises(CheckpointFormatError, match=message):
        Sidecar.from_bytes(changed(**values), "x")


@pytest.mark.parametrize("raw", [b"[]", b"{}", b"null", b'{"schema": 1}', b"[" * 100_000])
def test_what_is_no_sidecar_is_refused(raw: bytes) -> None:
    with pytest.raises(CheckpointFormatError, match="is damaged"):
        Sidecar.from_bytes(raw, "x")


@pytest.mark.parametrize("name", ["", ".", "..", ".a", "-a", "a/b", "a\\b", "a\0", "ä", "a\n"])
def test_names_that_are_not_plain_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match="is no plain file name"):
        safe_name(name)
    assert safe_name("rank-00000.safetensors") == "rank-00000.safetensors"
