"""The saved tensors of one step and process: one safetensors file, written and read without torch.

Tensors keep their dtype if safetensors has it, so any reader of that format can read them; others
are flat bytes. The metadata describes the tensors as JSON, and a digest covers the whole header.
Keys never become paths.
"""

import json
import math
import os
import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from math import prod
from pathlib import Path
from typing import Any, Self

import numpy as np

from det_callbacks.digest.host import digest_bytes, format_digest
from det_callbacks.digest.numbers import Measure, Tolerance, measure
from det_callbacks.runs.files import (
    MAX_BYTES,
    READ_ERRORS,
    damaged,
    make_folder,
    open_file,
    open_to_write,
    require_at_most,
    writing,
)
from det_callbacks.runs.program import Site
from det_callbacks.runs.store import Run
from det_callbacks.verdict import Divergence

TENSORS_FORMAT_VERSION = 1

MIB = 2**20
REPLAY = "replay"  # tensors that verify restores
KEPT = "kept"  # tensors whose numbers the comparison measures
# key of a value: why a call of the step was not kept, for the first such call
LEFT_OUT = "left_out"

_METADATA = "det_callbacks"
_SEAL = "det_callbacks_digest"
_STREAM = re.compile(r"(attempt-\d{3,})(\.segment-\d{3,})?\.arrows")

# Dtypes that every reader of the format supports.
_SAFETENSORS = {
    **{"bool": "BOOL", "uint8": "U8", "bfloat16": "BF16"},
    **{f"int{bits}": f"I{bits}" for bits in (8, 16, 32, 64)},
    **{f"float{bits}": f"F{bits}" for bits in (16, 32, 64)},
}


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlace:
    """The step that a file belongs to; ``segment`` is the fit."""

    run_id: str
    rank: int
    segment: int
    step: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SavedTensor:
    """The bits of a tensor at one moment (of a DTensor, the local shard),
    and the file's further ``options``.
    """

    dtype: str
    shape: tuple[int, ...]
    bits: np.ndarray
    """The bytes of the elements, row-major, uint8; those of a device tensor arrive
    when the step is settled.
    """
    first: int = 0
    every: int = 1
    """``bits`` has every n-th element, n a power of 2, from ``first`` on."""
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def num_saved(self) -> int:
        """Number of elements saved."""
        return len(range(self.first, prod(self.shape), self.every))

    def thinned(self, place: int, every: int) -> "SavedTensor":
        """Return every n-th element of the whole tensor, n a multiple of ``self.every``;
        see ``sample_start``.
        """
        width = self.bits.nbytes // max(self.num_saved, 1)
        first = place % every
        elements = self.bits.reshape(self.num_saved, width)[
            (first - self.first) // self.every :: every // self.every
        ]
        return replace(self, bits=elements, first=first, every=every)

    @property
    def digest(self) -> int:
        """The digest of the bits."""
        return digest_bytes(self.bits.data)


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptCounts:
    """How many tensors were kept, and how many calls were not:
    ``reason`` gives the step and the cause of the first.

    Of ``num_sampled`` tensors, only a sample of the elements was kept.
    """

    num_tensors: int = 0
    num_bytes: int = 0
    num_sampled: int = 0
    num_missing: int = 0
    reason: str = ""

    def __add__(self, other: "KeptCounts") -> "KeptCounts":
        names = "num_tensors", "num_bytes", "num_sampled", "num_missing"
        numbers = {name: getattr(self, name) + getattr(other, name) for name in names}
        return KeptCounts(**numbers, reason=self.reason or other.reason)


def key_of(site: Site) -> str:
    """Return the key of the tensor kept at a site."""
    return f"{site.phase}/{site.module}:{site.op}#{site.occurrence}.{site.output}"


def sample_start(name: str) -> int:
    """Return a number derived from a name: modulo n, the first element of a
    sample of every n-th element.

    So two runs sample the same elements of tensors with the same name,
    and a smaller sample is part of a larger one.
    """
    return digest_bytes(name.encode())


def common_elements(
    reference: SavedTensor, current: SavedTensor
) -> tuple[SavedTensor, SavedTensor]:
    """Return two tensors of the same shape, reduced to the elements that both have."""
    every = max(reference.every, current.every)
    place = max(reference, current, key=lambda side: side.every).first
    if reference.every != every:
        reference = reference.thinned(place, every)
    if current.every != every:
        current = current.thinned(place, every)
    return reference, current


def measure_saved(
    reference: SavedTensor, current: SavedTensor, tolerance: Tolerance | None = None
) -> Measure:
    """Return by how much two tensors of the same shape differ, in the elements that both have."""
    size, known = None, reference.options.get("statistics")
    if known is not None:
        num = prod(reference.shape) * (2 if reference.dtype.startswith("complex") else 1)
        size = math.sqrt(known["squares"] / max(num - known["nan"] - known["inf"], 1))
    reference, current = common_elements(reference, current)
    dtypes = reference.dtype, current.dtype
    bits = np.ravel(reference.bits), np.ravel(current.bits)
    return measure(*bits, dtypes, tolerance=tolerance, root_mean_square=size)


def joined(parts: Sequence[SavedTensor], dim: int) -> SavedTensor | None:
    """Return tensors joined in a dimension; None if they differ in another one, or are samples."""
    first = parts[0]
    if len(parts) == 1:
        return first
    others = {(*part.shape[:dim], -1, *part.shape[dim + 1 :]) for part in parts}
    is_whole = all(part.dtype == first.dtype and part.every == 1 for part in parts)
    if len(others) > 1 or not is_whole or dim >= len(first.shape):
        return None
    # the last dimension holds the bytes of an element
    filled = [part.bits.reshape(*part.shape, -1) for part in parts if part.bits.size]
    bits = np.concatenate(filled, axis=dim).reshape(-1) if filled else first.bits
    length = sum(part.shape[dim] for part in parts)
    shape = (*first.shape[:dim], length, *first.shape[dim + 1 :])
    return SavedTensor(dtype=first.dtype, shape=shape, bits=bits)


def tensor_path(stream: Path, kind: str, step: int) -> Path:
    """Return the file with the tensors of one kind, ``REPLAY`` or ``KEPT``,
    of a step in a stream.
    """
    return _folder(stream, kind) / f"step-{step:09d}.safetensors"


def _folder(stream: Path, kind: str) -> Path:
    known = _STREAM.fullmatch(stream.name)
    if known is None:
        raise ValueError(f"{stream} is not a stream of steps")
    return stream.parent / kind / (known[1] + (known[2] or ".segment-000"))


class StepWriter:
    """Writes the saved tensors of each step to a file next to the stream,
    before the step is appended.

    A kill in between leaves a file without a step; nothing reads it,
    and recording the step again replaces it.
    """

    def __init__(
        self, stream: Path, kind: str, *, run_id: str, rank: int = 0, segment: int = 0
    ) -> None:
        self._stream, self._kind = stream, kind
        self._place = StepPlace(run_id=run_id, rank=rank, segment=segment, step=-1)

    def start_segment(self, stream: Path, segment: int) -> None:
        """Continue with the steps of another fit."""
        self._stream, self._place = stream, replace(self._place, segment=segment)

    def write(
        self, step: int, tensors: Mapping[str, SavedTensor], values: Mapping[str, Any]
    ) -> None:
        """Write the tensors and plain values of a settled step atomically;
        delete an earlier file of the step.
        """
        path = tensor_path(self._stream, self._kind, step)
        with writing(path):
            path.unlink(missing_ok=True)
        if not tensors and not values:
            return
        sections = _sections(tensors)
        entries = {
            key: {
                **{name: getattr(saved, name) for name in ("dtype", "shape", "first", "every")},
                "digest": format_digest(saved.digest),
                **saved.options,
            }
            for key, saved in tensors.items()
        }
        content = {
            "format_version": TENSORS_FORMAT_VERSION,
            "entries": entries,
            "values": dict(values),
        }
        text = json.dumps(content | asdict(replace(self._place, step=step)))
        write_tensors(path, tensors, {_METADATA: text, _SEAL: _seal(text, sections)})

    def delete(self) -> None:
        """Delete all files written next to the stream, when its attempt is discarded."""
        shutil.rmtree(_folder(self._stream, self._kind), ignore_errors=True)


class SavedStep:
    """The saved tensors of one kind of one step, read on demand;
    a step that saved nothing has no file.

    A file that is damaged, or has a different version or ``place``, raises ReferenceFormatError.
    """

    def __init__(self, path: Path, place: StepPlace) -> None:
        self.path, self.place = path, place

    @classmethod
    def of(cls, run: Run, *, rank: int, segment: int, step: int, kind: str = REPLAY) -> Self:
        """Return the saved tensors of a recorded step; raise KeyError if there is no such step."""
        place = StepPlace(run_id=run.manifest.run_id, rank=rank, segment=segment, step=step)
        return cls(tensor_path(run.rank(rank).file_of(segment, step).path, kind, step), place)

    @property
    def exists(self) -> bool:
        """Whether the step saved anything."""
        return os.path.lexists(self.path)

    @property
    def entries(self) -> Mapping[str, Mapping[str, Any]]:
        """Key -> dtype, shape, digest and options of a tensor, in the order of saving."""
        return self._content[0]["entries"]

    @property
    def values(self) -> Mapping[str, Any]:
        """Key -> plain value."""
        return self._content[0]["values"]

    def read(self, key: str) -> SavedTensor:
        """Return a tensor, checked against its digest."""
        entry, (_, bounds) = dict(self.entries[key]), self._content
        begin, end = bounds[key]
        try:
            with open_file(self.path) as file:
                bits = np.fromfile(file, dtype=np.uint8, count=end - begin, offset=begin)
            known = {name: entry.pop(name) for name in ("dtype", "first", "every")}
            saved = SavedTensor(**known, shape=tuple(entry.pop("shape")), bits=bits, options=entry)
            if len(bits) % max(1, saved.num_saved):
                raise ValueError("its elements do not fit its bits")
        except READ_ERRORS as error:
            raise damaged(self.path, f"{key!r} cannot be read ({error})") from error
        if len(bits) != end - begin or format_digest(saved.digest) != entry.pop("digest", None):
            raise damaged(self.path, f"the bits of {key!r} are not those that were saved")
        return saved

    def find(self, divergence: Divergence, digest: str) -> SavedTensor | None:
        """Return the tensor kept at a site with this digest; several such tensors are equal."""
        place = {name: getattr(divergence, name) for name in ("phase", "module", "op", "output")}
        place["site_digest"] = digest
        keys = (key for key, entry in self.entries.items() if place.items() <= entry.items())
        return next(map(self.read, keys), None)

    @cached_property
    def _content(self) -> tuple[dict[str, dict[str, Any]], dict[str, tuple[int, int]]]:
        """The content of the header, and the bounds of each tensor in the file."""
        if not self.exists:
            return {"entries": {}, "values": {}}, {}
        try:
            with open_file(self.path) as file:
                num_bytes = os.fstat(file.fileno()).st_size
                length = int.from_bytes(file.read(8), "little")
                require_at_most(MAX_BYTES, length, "bytes in its header")
                sections = json.loads(file.read(length))
            metadata = sections.pop("__metadata__")
            text = metadata[_METADATA]
            content = json.loads(text)
            if (version := content["format_version"]) != TENSORS_FORMAT_VERSION:
                raise ValueError(
                    f"its format version is {version!r}, but this version reads "
                    f"{TENSORS_FORMAT_VERSION}"
                )
            is_sealed = metadata.get(_SEAL) == _seal(text, sections)
            place = asdict(self.place)
            found = {name: content[name] for name in place}
            first = 8 + length
            bounds = {
                key: [first + offset for offset in one["data_offsets"]]
                for key, one in sections.items()
            }
            is_inside = all(first <= begin <= end <= num_bytes for begin, end in bounds.values())
            is_whole = is_inside and num_bytes == first + sum(
                end - begin for begin, end in bounds.values()
            )
            is_described = content["entries"].keys() <= bounds.keys() and all(
                isinstance(one.get("statistics") or {}, dict) for one in content["entries"].values()
            )
        except READ_ERRORS as error:
            raise damaged(
                self.path, f"it is not a safetensors file written by det_callbacks ({error!r})"
            ) from error
        if not is_sealed:
            raise damaged(self.path, "its header does not match its digest")
        if found != place:
            raise damaged(self.path, f"it belongs to another place: {found} instead of {place}")
        if not is_whole or not is_described:
            raise damaged(self.path, "it is longer or shorter than what it lists")
        return content, {key: (begin, end) for key, (begin, end) in bounds.items()}


def _sections(tensors: Mapping[str, SavedTensor]) -> dict[str, Any]:
    """Return the header's entry of each tensor: large elements first, like safetensors,
    which aligns all of them.
    """
    sections: dict[str, Any] = {}
    offset = 0
    for key in sorted(
        tensors, key=lambda key: -tensors[key].bits.nbytes // max(tensors[key].num_saved, 1)
    ):
        name, size = _SAFETENSORS.get(tensors[key].dtype), tensors[key].bits.nbytes
        whole = [*tensors[key].shape] if tensors[key].every == 1 else [tensors[key].num_saved]
        shape = whole if name else [size]
        sections[key] = {
            "dtype": name or "U8",
            "shape": shape,
            "data_offsets": [offset, offset + size],
        }
        offset += size
    return sections


def write_tensors(
    path: Path, tensors: Mapping[str, SavedTensor], metadata: Mapping[str, str]
) -> None:
    """Write a safetensors file atomically."""
    sections = _sections(tensors)
    header = json.dumps({"__metadata__": metadata, **sections}).encode()
    header += b" " * (-len(header) % 8)
    make_folder(path.parent)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with writing(path):
        try:
            with open_to_write(temporary, "wb") as file:
                file.write(len(header).to_bytes(8, "little") + header)
                for key in sections:
                    file.write(tensors[key].bits.data)
            temporary.replace(path)
        except BaseException:  # including Ctrl-C
            temporary.unlink(missing_ok=True)
            raise


def _seal(text: str, sections: Mapping[str, Any]) -> str:
    return format_digest(digest_bytes(json.dumps([text, sections], sort_keys=True).encode()))
