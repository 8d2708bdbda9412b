"""Reads JSON files, and seals lines of JSON: each has a digest of its content and of the run's id."""

from pathlib import Path
from typing import TypeVar

import msgspec

from det_callbacks.digest.host import digest_bytes, format_digest
from det_callbacks.runs.files import READ_ERRORS, damaged, read_file

Content = TypeVar("Content")


def read_json(path: Path, kind: type[Content]) -> Content:
    """Return the content of a JSON file; raise ReferenceFormatError, which names a field of the wrong type."""
    try:
        return msgspec.json.decode(read_file(path), type=kind)
    except READ_ERRORS as error:
        raise damaged(path, error) from error


class _Sealed(msgspec.Struct):
    digest: str
    content: msgspec.Raw


def seal(content: object, *, run_id: str) -> bytes:
    """Return a line of JSON with a digest of the content and the run's id."""
    text = msgspec.json.encode(content)
    return msgspec.json.encode(_Sealed(digest=_seal_digest(text, run_id), content=msgspec.Raw(text)))


def unseal(line: bytes, kind: type[Content], *, run_id: str) -> Content:
    """Return the sealed content; raise ValueError if it was changed, or is from another run."""
    sealed = msgspec.json.decode(line, type=_Sealed)
    if sealed.digest != _seal_digest(bytes(sealed.content), run_id):
        raise ValueError("its content does not match its digest")
    return msgspec.json.decode(sealed.content, type=kind)


def _seal_digest(content: bytes, run_id: str) -> str:
    return format_digest(digest_bytes(run_id.encode() + content))
