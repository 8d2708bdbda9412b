"""The saved tensors of one step and process: one safetensors file, written and read without torch.

    rank-00000/replay/attempt-000.segment-000/step-000000012.safetensors     what is put back while verifying
    rank-00000/kept/attempt-000.segment-000/step-000000012.safetensors       what tells by how much ops differ

The folder is named like the stream that holds the step. Tensors have their own dtype where safetensors has it, so any
reader of that format reads them; others are flat bytes. What they are stands as JSON in the file's metadata, and a
digest covers the whole header. Keys are text in the header: they never become paths.
"""

import json
import os
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from det_callbacks.errors import ReferenceFormatError
from det_callbacks.host_digest import digest_bytes, format_digest
from det_callbacks.runs.files import damaged

TENSORS_FORMAT_VERSION = 1

REPLAY = "replay"
KEPT = "kept"

_METADATA = "det_callbacks"
_SEAL = "det_callbacks_digest"
_STREAM = re.compile(r"(attempt-\d{3,})(\.segment-\d{3,})?\.arrows")

# What safetensors 0.8 has under torch, with the bytes of an element; everything else is written as bytes.
_SAFETENSORS = {
    "bool": ("BOOL", 1),
    "uint8": ("U8", 1),
    "int8": ("I8", 1),
    "uint16": ("U16", 2),
    "int16": ("I16", 2),
    "uint32": ("U32", 4),
    "int32": ("I32", 4),
    "uint64": ("U64", 8),
    "int64": ("I64", 8),
    "float16": ("F16", 2),
    "bfloat16": ("BF16", 2),
    "float32": ("F32", 4),
    "float64": ("F64", 8),
    "complex64": ("C64", 8),
    "float8_e4m3fn": ("F8_E4M3", 1),
    "float8_e4m3fnuz": ("F8_E4M3FNUZ", 1),
    "float8_e5m2": ("F8_E5M2", 1),
    "float8_e5m2fnuz": ("F8_E5M2FNUZ", 1),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlace:
    """Which step of which run a file belongs to: run_id, rank, segment (fit of the run) and step."""

    run_id: str
    rank: int
    segment: int
    step: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SavedTensor:
    """The bits of a tensor at one moment.

    Attributes:
        dtype: "float32".
        shape: sizes in elements; of the local shard for a DTensor.
        bits: its bytes, row-major: uint8.
        options: what else the file says of it; JSON-able.
    """

    dtype: str
    shape: tuple[int, ...]
    bits: np.ndarray
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def digest(self) -> int:
        """The digest of the tensor in row-major order, computed now."""
        return digest_bytes(self.bits.data)


def tensor_folder(stream: Path, kind: str) -> Path:
    """Return the folder of the tensors of one kind whose steps are in a stream (``attempt-000.segment-001.arrows``)."""
    known = _STREAM.fullmatch(stream.name)
    if known is None:
        raise ValueError(f"{stream} is no stream of steps")
    return stream.parent / kind / (known[1] + (known[2] or ".segment-000"))


def tensor_path(stream: Path, kind: str, step: int) -> Path:
    """Return the file of the tensors of one kind of a step that is in a stream."""
    return tensor_folder(stream, kind) / f"step-{step:09d}.safetensors"


def write_tensors(
    path: Path, place: StepPlace, tensors: Mapping[str, SavedTensor], values: Mapping[str, Any] | None = None
) -> int:
    """Write the saved tensors of a step, so that a reader sees all of it or nothing; return the file's bytes.

    Not fsynced, like the stream: a kill loses nothing that was written, a power cut may.

    Args:
        path: of the file, see ``tensor_path``.
        place: the step that they belong to.
        tensors: by key.
        values: plain values (None, bool, int, str, or what stands for another number) by key.
    """
    sizes = {key: _SAFETENSORS.get(saved.dtype, ("U8", 1))[1] for key, saved in tensors.items()}
    order = sorted(tensors, key=lambda key: -sizes[key])  # large elements first, as the format's own writer: aligned
    sections: dict[str, Any] = {}
    offset = 0
    for key in order:
        saved = tensors[key]
        known, shape = _SAFETENSORS.get(saved.dtype), list(saved.shape)
        sections[key] = {
            "dtype": known[0] if known else "U8",
            "shape": shape if known else [saved.bits.nbytes],
            "data_offsets": [offset, offset + saved.bits.nbytes],
        }
        offset += saved.bits.nbytes
    entries = {
        key: {
            "dtype": saved.dtype,
            "shape": list(saved.shape),
            "digest": format_digest(saved.digest),
            **saved.options,
        }
        for key, saved in tensors.items()
    }
    content = {
        "format_version": TENSORS_FORMAT_VERSION,
        **asdict(place),
        "entries": entries,
        "values": dict(values or {}),
    }
    text = json.dumps(content)
    header = json.dumps({"__metadata__": {_METADATA: text, _SEAL: _seal(text, sections)}, **sections}).encode()
    header += b" " * (-len(header) % 8)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:
            file.write(len(header).to_bytes(8, "little") + header)
            for key in order:
                file.write(tensors[key].bits.data)
        temporary.replace(path)
    except BaseException:  # Ctrl-C too: raised again
        temporary.unlink(missing_ok=True)
        raise
    return 8 + len(header) + offset


class TensorFile:
    """What a file holds. The header is read here, a tensor when it is asked for.

    Args:
        path: of the file.
        place: the step that it must belong to.

    Attributes:
        entries: key -> dtype, shape, digest and options of a tensor, in the order in which they were saved.
        values: key -> plain value.

    Raises:
        ReferenceFormatError: it is missing, damaged, of another version, or of another step or run.
    """

    def __init__(self, path: Path, place: StepPlace) -> None:
        self.path = path
        try:
            with path.open("rb") as file:
                num_bytes = os.fstat(file.fileno()).st_size
                length = int.from_bytes(file.read(8), "little")
                self._sections = json.loads(file.read(min(length, num_bytes)))
            metadata = self._sections.pop("__metadata__")
            text = metadata[_METADATA]
            content = json.loads(text)
            version = content["format_version"]
        except FileNotFoundError as error:
            raise damaged(path, "it is missing") from error
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise damaged(path, f"it is no safetensors file of ours ({error!r})") from error
        if version != TENSORS_FORMAT_VERSION:
            raise ReferenceFormatError(
                f"{path} has format version {version!r}, and this version of det_callbacks reads "
                f"{TENSORS_FORMAT_VERSION}. Use the version that recorded it, or record the run again.",
                str(path),
            )
        if metadata.get(_SEAL) != _seal(text, self._sections):
            raise damaged(path, "its header is not what its digest says")
        found = {name: content[name] for name in asdict(place)}
        if found != asdict(place):
            raise damaged(path, f"it belongs to another place: {found} instead of {asdict(place)}")
        self._start = 8 + length
        self.entries: dict[str, dict[str, Any]] = content["entries"]
        self.values: dict[str, Any] = content["values"]
        if num_bytes != self._start + sum(end - begin for begin, end in map(self._bounds, self.entries)):
            raise damaged(path, "it is longer or shorter than what it lists")

    def read(self, key: str) -> SavedTensor:
        """Return a tensor, checked against its digest; raise ReferenceFormatError where it is not what was saved."""
        entry = dict(self.entries[key])
        begin, end = self._bounds(key)
        try:
            bits = np.fromfile(self.path, dtype=np.uint8, count=end - begin, offset=self._start + begin)
        except OSError as error:
            raise damaged(self.path, f"{key!r} cannot be read ({error})") from error
        saved = SavedTensor(dtype=entry.pop("dtype"), shape=tuple(entry.pop("shape")), bits=bits, options=entry)
        if len(bits) != end - begin or format_digest(saved.digest) != entry.pop("digest"):
            raise damaged(self.path, f"the bits of {key!r} are not those that were saved")
        return saved

    def _bounds(self, key: str) -> tuple[int, int]:
        begin, end = self._sections[key]["data_offsets"]
        return begin, end


def _seal(text: str, sections: Mapping[str, Any]) -> str:
    return format_digest(digest_bytes(json.dumps([text, sections], sort_keys=True).encode()))
