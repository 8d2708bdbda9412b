"""Which ops are replayed, as a user says it."""

from pathlib import Path
from typing import Any

import yaml

from det_callbacks.errors import SelectionError
from det_callbacks.patterns import as_patterns


def replay_patterns(replay: object) -> tuple[str, ...]:
    """Return the patterns that an argument ``replay`` stands for.

    Args:
        replay: patterns, or the path of a YAML file with a list of them (an audit writes ``replay.yaml``).

    Raises:
        SelectionError: it is neither, the file cannot be read, or a pattern is not one.
    """
    return as_patterns("replay", _read(replay) if isinstance(replay, str | Path) else replay)


def _read(name: str | Path) -> Any:
    path = Path(name)
    if path.suffix not in (".yaml", ".yml"):
        raise SelectionError(
            f"replay must be a list of patterns, or the path of a YAML file that holds one; got {str(name)!r}: write "
            f"[{str(name)!r}] if that is a pattern."
        )
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise SelectionError(f"replay: {path} cannot be read ({error}).") from error
    except yaml.YAMLError as error:
        raise SelectionError(f"replay: {path} is no YAML ({error}).") from error
    if not isinstance(content, list) or not all(isinstance(item, str) for item in content):
        raise SelectionError(f"replay: {path} must hold a list of patterns; it holds {content!r}.")
    return content
