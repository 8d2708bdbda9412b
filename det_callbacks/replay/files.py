"""The saved tensors of one step and process: one safetensors file.

    rank-00000/replay/attempt-000.segment-000/step-000000012.safetensors

The folder is named like the stream that holds the step. Tensors have their own dtype where safetensors has it, so any
reader of that format reads them; others are flat uint8. What they are stands as JSON under ``det_callbacks_replay`` in
the file's metadata, with a digest over itself. Keys are text in that JSON: they never become paths.
"""

import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from det_callbacks.digest import digest_bytes, digest_memory, format_digest, unobserved
from det_callbacks.errors import ReferenceFormatError
from det_callbacks.replay.parts import Part, SavedTensor
from det_callbacks.runs.files import damaged

REPLAY_FORMAT_VERSION = 1
REPLAY = "replay"

_METADATA = "det_callbacks_replay"
_RESERVED = "__metadata__"
_STREAM = re.compile(r"(attempt-\d{3,})(\.segment-\d{3,})?\.arrows")

# What safetensors 0.8 both writes and reads under torch; everything else is written as bytes.
_NATIVE = frozenset(
    {
        torch.bool,
        torch.uint8,
        torch.int8,
        torch.uint16,
        torch.int16,
        torch.uint32,
        torch.int32,
        torch.uint64,
        torch.int64,
        torch.float16,
        torch.bfloat16,
        torch.float32,
        torch.float64,
        torch.complex64,
        torch.float8_e4m3fn,
        torch.float8_e4m3fnuz,
        torch.float8_e5m2,
        torch.float8_e5m2fnuz,
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlace:
    """Which step of which run a file belongs to: run_id, rank, segment (fit of the run) and step."""

    run_id: str
    rank: int
    segment: int
    step: int

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON form."""
        return {"run_id": self.run_id, "rank": self.rank, "segment": self.segment, "step": self.step}


@dataclass(frozen=True, slots=True, kw_only=True)
class StepFile:
    """What a file says it holds.

    Attributes:
        entries: key -> what was saved, with the names that its parts have in the file.
        values: key -> plain value (None, bool, int, float as hexadecimal text, str) that stood where a tensor could.
    """

    entries: Mapping[str, dict[str, Any]] = field(default_factory=dict)
    values: Mapping[str, Any] = field(default_factory=dict)


def stream_folder(stream: Path, kind: str) -> Path:
    """Return the folder of the tensors of one kind whose steps are in a stream (``attempt-000.segment-001.arrows``)."""
    known = _STREAM.fullmatch(stream.name)
    if known is None:
        raise ValueError(f"{stream} is no stream of steps")
    return stream.parent / kind / (known[1] + (known[2] or ".segment-000"))


def step_path(stream: Path, kind: str, step: int) -> Path:
    """Return the file of the tensors of one kind of a step that is in a stream."""
    return stream_folder(stream, kind) / f"step-{step:09d}.safetensors"


def replay_folder(stream: Path) -> Path:
    """Return the folder of the saved tensors whose steps are in a stream."""
    return stream_folder(stream, REPLAY)


def replay_path(stream: Path, step: int) -> Path:
    """Return the file of the saved tensors of a step that is in a stream."""
    return step_path(stream, REPLAY, step)


def write_step(
    path: Path, place: StepPlace, tensors: Mapping[str, SavedTensor], values: Mapping[str, Any] | None = None
) -> int:
    """Write the saved tensors of a step, so that a reader sees all of it or nothing; return the file's bytes.

    Not fsynced, like the stream: a kill loses nothing that was written, a power cut may.
    """
    content: dict[str, Tensor] = {}
    entries = []
    with unobserved():
        for key, saved in tensors.items():
            parts = []
            for part in saved.parts:
                name = _unused(f"{key}/{part.name}" if part.name else key, content)
                is_native = part.dtype in _NATIVE
                content[name] = part.bits.view(part.dtype).reshape(part.shape) if is_native else part.bits
                parts.append(
                    {
                        "tensor": name,
                        "part": part.name,
                        "dtype": str(part.dtype).removeprefix("torch."),
                        "shape": list(part.shape),
                        "digest": format_digest(_digest(part.bits)),
                    }
                )
            entries.append(
                {
                    "key": key,
                    "dtype": saved.dtype,
                    "shape": list(saved.shape),
                    "layout": saved.layout,
                    "digest": format_digest(saved.digest),
                    "options": dict(saved.options),
                    "parts": parts,
                }
            )
        header = {
            "format_version": REPLAY_FORMAT_VERSION,
            **place.to_dict(),
            "entries": entries,
            "values": dict(values or {}),
        }
        header["digest"] = _header_digest(header)
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
        try:
            save_file(content, temporary, metadata={_METADATA: json.dumps(header)})
            num_bytes = temporary.stat().st_size
            temporary.replace(path)
        except BaseException:  # Ctrl-C too: raised again
            temporary.unlink(missing_ok=True)
            raise
    return num_bytes


def read_header(path: Path, place: StepPlace) -> StepFile:
    """Return what a file holds.

    Raises:
        ReferenceFormatError: it is missing, damaged, of another version, or of another step or run.
    """
    try:
        with safe_open(path, framework="pt") as file:
            text = (file.metadata() or {}).get(_METADATA)
            names = set(file.keys())
    except FileNotFoundError as error:
        raise damaged(path, "it is missing") from error
    except (SafetensorError, OSError, ValueError) as error:
        raise damaged(path, f"it is not safetensors ({error})") from error
    if text is None:
        raise damaged(path, f"its metadata has no {_METADATA}")
    try:
        header = json.loads(text)
        version = header["format_version"]
        if version != REPLAY_FORMAT_VERSION:
            raise ReferenceFormatError(
                f"{path} has format version {version!r}, and this version of det_callbacks reads "
                f"{REPLAY_FORMAT_VERSION}. Use the version that recorded it, or record the run again.",
                str(path),
            )
        is_whole = header["digest"] == _header_digest(header)
        found = {name: header[name] for name in place.to_dict()}
        content = StepFile(entries={entry["key"]: entry for entry in header["entries"]}, values=header["values"])
        wanted = {part["tensor"] for entry in content.entries.values() for part in entry["parts"]}
    except ReferenceFormatError:
        raise
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise damaged(path, f"its metadata cannot be read ({error!r})") from error
    if not is_whole:
        raise damaged(path, "its metadata is not what its digest says")
    if found != place.to_dict():
        raise damaged(path, f"it belongs to another place: {found} instead of {place.to_dict()}")
    if wanted != names:
        raise damaged(path, f"it does not hold the tensors that it lists: {sorted(wanted ^ names)[:3]}")
    return content


def read_tensor(path: Path, entry: Mapping[str, Any]) -> SavedTensor:
    """Return one saved tensor, each part checked against its digest.

    Raises:
        ReferenceFormatError: its bits are not those that were saved; file and key are named.
    """
    key = entry["key"]
    parts = []
    try:
        with unobserved(), safe_open(path, framework="pt") as file:
            for row in entry["parts"]:
                dtype = getattr(torch, row["dtype"])
                held = file.get_tensor(row["tensor"])
                bits = held.reshape(-1).view(torch.uint8)
                if format_digest(_digest(bits)) != row["digest"]:
                    raise damaged(path, f"the bits of {key!r} are not those that were saved")
                parts.append(Part(name=row["part"], dtype=dtype, shape=tuple(row["shape"]), bits=bits))
    except FileNotFoundError as error:
        raise damaged(path, f"it went away before {key!r} was read") from error
    except ReferenceFormatError:
        raise
    except (SafetensorError, OSError, ValueError, KeyError, TypeError, AttributeError, RuntimeError) as error:
        raise damaged(path, f"{key!r} cannot be read ({error})") from error
    return SavedTensor(
        dtype=entry["dtype"],
        shape=tuple(entry["shape"]),
        layout=entry["layout"],
        digest=int(entry["digest"], 16),
        parts=tuple(parts),
        options=entry["options"],
        place=f"{path}, {key!r}:",
    )


def _unused(name: str, content: Mapping[str, Tensor]) -> str:
    while name in content or name == _RESERVED:
        name += "'"
    return name


def _digest(bits: Tensor) -> int:
    """Return the digest of bytes on the host; no switch of a test or a program makes them another device's."""
    return digest_memory(bits.data_ptr(), bits.numel())


def _header_digest(header: Mapping[str, Any]) -> str:
    rest = {key: value for key, value in header.items() if key != "digest"}
    return format_digest(digest_bytes(json.dumps(rest, sort_keys=True).encode()))
