"""Which ops are replayed, as a user says it."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from det_callbacks.errors import SelectionError, SettingsError
from det_callbacks.patterns import OpPattern

BUDGET_MIB = 256.0
TOTAL_MIB = 16384.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayChoice:
    """The ops whose outputs are saved while recording and put back while verifying.

    Attributes:
        patterns: ``[phase/][module:]op`` each.
        budget_mib: MiB that a step may save.
        total_mib: MiB that a run may save.
    """

    patterns: tuple[str, ...] = ()
    budget_mib: float = BUDGET_MIB
    total_mib: float = TOTAL_MIB

    def __post_init__(self) -> None:
        for pattern in self.patterns:
            try:
                OpPattern.parse(pattern)
            except SettingsError as error:
                raise SelectionError(f"replay: {error}") from error
        for name, value in (("replay_budget_mib", self.budget_mib), ("replay_total_mib", self.total_mib)):
            if isinstance(value, bool) or not isinstance(value, int | float) or not value >= 0:
                raise SelectionError(f"{name} must be a number of MiB from 0 on; got {value!r}.")

    @classmethod
    def of(cls, replay: object, *, budget_mib: float = BUDGET_MIB, total_mib: float = TOTAL_MIB) -> "ReplayChoice":
        """Return the choice that an argument ``replay`` stands for.

        Args:
            replay: patterns, or the path of a YAML file with a list of them (an audit writes ``replay.yaml``).
            budget_mib: MiB that a step may save.
            total_mib: MiB that a run may save.

        Raises:
            SelectionError: it is neither, the file cannot be read, a pattern or a budget is not one.
        """
        if isinstance(replay, str | Path):
            replay = _read(replay)
        if not isinstance(replay, Sequence) or not all(isinstance(item, str) for item in replay):
            raise SelectionError(
                f"replay must be a list of patterns, or the path of a YAML file that holds one; got {replay!r}."
            )
        return cls(patterns=tuple(dict.fromkeys(replay)), budget_mib=budget_mib, total_mib=total_mib)


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
