"""JSON with a digest of itself: the form of what stands beside a checkpoint."""

import json
from collections.abc import Mapping
from typing import Any

from det_callbacks.digest import digest_bytes, format_digest


class UnknownVersionError(ValueError):
    """The content is whole, and of a version that is not read."""


def encode(content: Mapping[str, Any]) -> bytes:
    """Return one line: indented, 10,000 entries would take 20 times as long."""
    return json.dumps(content, allow_nan=False).encode() + b"\n"


def seal(content: Mapping[str, Any]) -> bytes:
    """Return a file's content; equal content has equal bytes."""
    return encode({**content, "digest": format_digest(digest_bytes(encode(content)))})


def unseal(raw: bytes, versions: Mapping[str, int]) -> dict[str, Any]:
    """Return what was sealed.

    Args:
        raw: a file's content.
        versions: entries, and the only value of each that is read.

    Raises:
        UnknownVersionError: one of ``versions`` is another.
        ValueError: it is truncated, damaged, or something else; the message says which.
    """
    try:
        content = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise ValueError("it is empty" if not raw else f"it is not JSON ({error})") from error
    if not isinstance(content, dict) or not versions.keys() <= content.keys():
        raise ValueError("it is none of the files that stand beside a checkpoint")
    # The digest first: a flipped bit in a version is damage and not a foreign version.
    without = {key: value for key, value in content.items() if key != "digest"}
    if content.get("digest") != format_digest(digest_bytes(encode(without))) or encode(content) != raw:
        raise ValueError("its content is not what its digest says")
    for name, known in versions.items():
        if content[name] != known:
            raise UnknownVersionError(f"{name} {content[name]!r}, and this version of det_callbacks reads {known}")
    return content
