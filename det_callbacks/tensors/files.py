"""The saved tensors of one step and process: one safetensors file, written and read without torch.

Tensors have their own dtype where safetensors has it, so any reader of that format reads them; others are flat bytes.
What they are stands as JSON in the metadata, and a digest covers the whole header. Keys never become paths.
"""

import json
import os
import re
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from math import prod
from pathlib import Path
from typing import Any, Self

import numpy as np

from det_callbacks.digest.host import digest_bytes, format_digest
from det_callbacks.runs.disk import make_folder, writing
from det_callbacks.runs.files import damaged
from det_callbacks.runs.store import Run
from det_callbacks.verdict import Divergence

TENSORS_FORMAT_VERSION = 2

MIB = 2**20
REPLAY = "replay"  # what is put back while verifying
KEPT = "kept"  # what tells by how much ops differ
LEFT_OUT = "left_out"  # among the values of a step of which not all was kept: why the first call was not

_METADATA = "det_callbacks"
_SEAL = "det_callbacks_digest"
_STREAM = re.compile(r"(attempt-\d{3,})(\.segment-\d{3,})?\.arrows")

# Dtypes that every reader of the format has; tensors of others are written as bytes.
_SAFETENSORS = {
    **{"bool": "BOOL", "uint8": "U8", "bfloat16": "BF16"},
    **{f"int{bits}": f"I{bits}" for bits in (8, 16, 32, 64)},
    **{f"float{bits}": f"F{bits}" for bits in (16, 32, 64)},
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
    """The bits of a tensor at one moment (for a DTensor of the local shard), and what else the file says of it."""

    dtype: str
    shape: tuple[int, ...]
    bits: np.ndarray
    """The bytes of its elements, row-major: uint8; of a device's tensor they arrive when its step is settled."""
    first: int = 0
    every: int = 1
    """Which elements ``bits`` has: every n-th, n a power of 2, from ``first`` on."""
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def num_saved(self) -> int:
        """How many of its elements were saved."""
        return len(range(self.first, prod(self.shape), self.every))

    def thinned(self, place: int, every: int) -> "SavedTensor":
        """Return every n-th element of the whole tensor, n a multiple of ``self.every``; see ``sample_start``."""
        width = self.bits.nbytes // max(self.num_saved, 1)
        first = place % every
        elements = self.bits.reshape(self.num_saved, width)[(first - self.first) // self.every :: every // self.every]
        return replace(self, bits=elements, first=first, every=every)

    @property
    def digest(self) -> int:
        """The digest of the tensor in row-major order, computed now."""
        return digest_bytes(self.bits.data)


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptCounts:
    """What was kept of the tensors of ops, and how many calls were not, with the step and the reason of the first.

    ``num_sampled`` of the tensors have a sample of their elements only.
    """

    num_tensors: int = 0
    num_bytes: int = 0
    num_sampled: int = 0
    num_missing: int = 0
    reason: str = ""

    def __add__(self, other: "KeptCounts") -> "KeptCounts":
        return KeptCounts(
            num_tensors=self.num_tensors + other.num_tensors,
            num_bytes=self.num_bytes + other.num_bytes,
            num_sampled=self.num_sampled + other.num_sampled,
            num_missing=self.num_missing + other.num_missing,
            reason=self.reason or other.reason,
        )


def sample_start(name: str) -> int:
    """Return a number that a name stands for: modulo n it is the first of every n-th element that is kept.

    So two runs keep the same elements of what has the same name, and a smaller sample is part of a larger one.
    """
    return digest_bytes(name.encode())


def common_elements(one: SavedTensor, other: SavedTensor) -> tuple[SavedTensor, SavedTensor]:
    """Return two tensors of one shape with the elements that both have."""
    every = max(one.every, other.every)
    place = max(one, other, key=lambda side: side.every).first
    ours, theirs = (side if side.every == every else side.thinned(place, every) for side in (one, other))
    return ours, theirs


def tensor_path(stream: Path, kind: str, step: int) -> Path:
    """Return the file of the tensors of one kind, ``REPLAY`` or ``KEPT``, of a step that is in a stream."""
    return _folder(stream, kind) / f"step-{step:09d}.safetensors"


def _folder(stream: Path, kind: str) -> Path:
    known = _STREAM.fullmatch(stream.name)
    if known is None:
        raise ValueError(f"{stream} is no stream of steps")
    return stream.parent / kind / (known[1] + (known[2] or ".segment-000"))


class StepWriter:
    """Writes the saved tensors of each step of a stream as one file beside it, before the step is appended.

    A kill in between leaves a file of a step that is not there: never read, and replaced when it is recorded again.
    """

    def __init__(self, stream: Path, kind: str, *, run_id: str, rank: int = 0, segment: int = 0) -> None:
        self._stream, self._kind = stream, kind
        self._place = StepPlace(run_id=run_id, rank=rank, segment=segment, step=-1)

    def start_segment(self, stream: Path, segment: int) -> None:
        """Go on with the steps of another fit."""
        self._stream, self._place = stream, replace(self._place, segment=segment)

    def write(self, step: int, tensors: Mapping[str, SavedTensor], values: Mapping[str, Any]) -> None:
        """Write the tensors of a step that is settled, and plain values by key, atomically; an earlier file goes."""
        path = tensor_path(self._stream, self._kind, step)
        with writing(path):
            path.unlink(missing_ok=True)
        if not tensors and not values:
            return
        # large elements first, as the format's own writer does, so that all of them are aligned
        order = sorted(tensors, key=lambda key: -tensors[key].bits.nbytes // max(tensors[key].num_saved, 1))
        sections: dict[str, Any] = {}
        offset = 0
        for key in order:
            name, size = _SAFETENSORS.get(tensors[key].dtype), tensors[key].bits.nbytes
            whole = [*tensors[key].shape] if tensors[key].every == 1 else [tensors[key].num_saved]
            shape = whole if name else [size]
            sections[key] = {"dtype": name or "U8", "shape": shape, "data_offsets": [offset, offset + size]}
            offset += size
        entries = {
            key: {
                **{name: getattr(saved, name) for name in ("dtype", "shape", "first", "every")},
                "digest": format_digest(saved.digest),
                **saved.options,
            }
            for key, saved in tensors.items()
        }
        content = {"format_version": TENSORS_FORMAT_VERSION, "entries": entries, "values": dict(values)}
        text = json.dumps(content | asdict(replace(self._place, step=step)))
        header = json.dumps({"__metadata__": {_METADATA: text, _SEAL: _seal(text, sections)}, **sections}).encode()
        header += b" " * (-len(header) % 8)
        make_folder(path.parent)
        temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
        with writing(path):
            try:
                with temporary.open("wb") as file:
                    file.write(len(header).to_bytes(8, "little") + header)
                    for key in order:
                        file.write(tensors[key].bits.data)
                temporary.replace(path)
            except BaseException:  # Ctrl-C too: raised again
                temporary.unlink(missing_ok=True)
                raise

    def delete(self) -> None:
        """Delete everything that was written beside the stream: its attempt is taken back."""
        shutil.rmtree(_folder(self._stream, self._kind), ignore_errors=True)


class SavedStep:
    """The saved tensors of one kind of one step, read when they are asked for; a step that saved nothing has no file.

    What is damaged, of another version, or of another ``place`` raises ReferenceFormatError.
    """

    def __init__(self, path: Path, place: StepPlace) -> None:
        self.path, self.place = path, place

    @classmethod
    def of(cls, run: Run, *, rank: int, segment: int, step: int, kind: str = REPLAY) -> Self:
        """Return those of a recorded step, of the attempt that counts; raise KeyError where there is no such step."""
        place = StepPlace(run_id=run.manifest.run_id, rank=rank, segment=segment, step=step)
        return cls(tensor_path(run.rank(rank).file_of(segment, step).path, kind, step), place)

    @property
    def exists(self) -> bool:
        """Whether anything was saved."""
        return self.path.exists()

    @property
    def entries(self) -> Mapping[str, Mapping[str, Any]]:
        """Key -> dtype, shape, digest and options of a tensor, in the order in which they were saved."""
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
            bits = np.fromfile(self.path, dtype=np.uint8, count=end - begin, offset=begin)
        except OSError as error:
            raise damaged(self.path, f"{key!r} cannot be read ({error})") from error
        known = {name: entry.pop(name) for name in ("dtype", "first", "every")}
        saved = SavedTensor(**known, shape=tuple(entry.pop("shape")), bits=bits, options=entry)
        if len(bits) != end - begin or format_digest(saved.digest) != entry.pop("digest"):
            raise damaged(self.path, f"the bits of {key!r} are not those that were saved")
        return saved

    def find(self, divergence: Divergence, digest: str) -> SavedTensor | None:
        """Return what was kept of a site with this digest; several at a place that have it are equal tensors."""
        place = {name: getattr(divergence, name) for name in ("phase", "module", "op", "output")}
        place["site_digest"] = digest
        keys = (key for key, entry in self.entries.items() if place.items() <= entry.items())
        return next(map(self.read, keys), None)

    @cached_property
    def _content(self) -> tuple[dict[str, dict[str, Any]], dict[str, tuple[int, int]]]:
        """What the header says, and where each tensor lies."""
        if not self.exists:
            return {"entries": {}, "values": {}}, {}
        try:
            with self.path.open("rb") as file:
                num_bytes = os.fstat(file.fileno()).st_size
                length = int.from_bytes(file.read(8), "little")
                sections = json.loads(file.read(min(length, num_bytes)))
            metadata = sections.pop("__metadata__")
            text = metadata[_METADATA]
            content = json.loads(text)
            if (version := content["format_version"]) != TENSORS_FORMAT_VERSION:
                raise ValueError(f"its format version is {version!r}, and {TENSORS_FORMAT_VERSION} is read here")
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise damaged(self.path, f"it is no safetensors file of ours ({error!r})") from error
        if metadata.get(_SEAL) != _seal(text, sections):
            raise damaged(self.path, "its header is not what its digest says")
        place = asdict(self.place)
        if (found := {name: content[name] for name in place}) != place:
            raise damaged(self.path, f"it belongs to another place: {found} instead of {place}")
        offsets = {key: section["data_offsets"] for key, section in sections.items()}
        if num_bytes != 8 + length + sum(end - begin for begin, end in offsets.values()):
            raise damaged(self.path, "it is longer or shorter than what it lists")
        return content, {key: (8 + length + begin, 8 + length + end) for key, (begin, end) in offsets.items()}


def _seal(text: str, sections: Mapping[str, Any]) -> str:
    return format_digest(digest_bytes(json.dumps([text, sections], sort_keys=True).encode()))
