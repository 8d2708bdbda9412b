"""Whose tensors are kept, as a user says it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from typing import Any

from det_callbacks.errors import SelectionError, SettingsError
from det_callbacks.patterns import OpPattern

KEEP_BUDGET_MIB = 1024.0


@dataclass(frozen=True, slots=True, kw_only=True)
class KeepChoice:
    """The ops whose outputs, and what they read, are kept with the steps of a run.

    Attributes:
        patterns: ``[phase/][module:]op`` each.
        budget_mib: MiB that a process may keep in all; what comes after is not kept, and counted.
    """

    patterns: tuple[str, ...] = ()
    budget_mib: float = KEEP_BUDGET_MIB

    def __post_init__(self) -> None:
        self.parsed()
        value = self.budget_mib
        if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0 or not isfinite(value):
            raise SelectionError(f"keep_budget_mib must be a number of MiB above 0; got {value!r}.")

    @classmethod
    def of(cls, keep_tensors: object, *, budget_mib: float = KEEP_BUDGET_MIB) -> "KeepChoice":
        """Return the choice that an argument ``keep_tensors`` stands for.

        Raises:
            SelectionError: it is no list of patterns, or the budget is none.
        """
        is_list = isinstance(keep_tensors, Sequence) and not isinstance(keep_tensors, str | bytes)
        if not is_list or not all(isinstance(item, str) for item in keep_tensors):  # type: ignore[attr-defined]  # a list
            raise SelectionError(
                f'keep_tensors must be a list of patterns, such as ["forward/net.head:aten.addmm.default"]; got '
                f"{keep_tensors!r}."
            )
        return cls(patterns=tuple(dict.fromkeys(keep_tensors)), budget_mib=budget_mib)  # type: ignore[call-overload]  # a list

    @classmethod
    def from_manifest(cls, manifest: Mapping[str, Any]) -> "KeepChoice":
        """Return the choice that a run was recorded with; raise ``SelectionError`` when run.json holds none."""
        return cls.of(manifest.get("keep_tensors", ()), budget_mib=manifest.get("keep_budget_mib", KEEP_BUDGET_MIB))

    def parsed(self) -> tuple[OpPattern, ...]:
        """Return the patterns, parsed."""
        try:
            return tuple(map(OpPattern.parse, self.patterns))
        except SettingsError as error:
            raise SelectionError(f"keep_tensors: {error}") from error
