"""The ledger: what state every random generator was in at each point of a fit."""

from collections.abc import Mapping
from typing import Any

from torch import Generator, Tensor

from det_callbacks.digest import Bits, LateDigests, tensor_bits, value_of
from det_callbacks.rng import PROCESS, digest_generator, is_readable, used_generators
from det_callbacks.runs.evidence import SEED, Row


class Ledger:
    """Collects the evidence of the step under way; some 5 microseconds a point.

    Attributes:
        held: name -> further generator whose state is noted: torch's, NumPy's or Python's.
    """

    def __init__(self) -> None:
        self.held: Mapping[str, Any] = {}
        self._rows: list[tuple[str, str, Bits, str]] = []
        self._late = LateDigests()

    def mark(self, point: str, *, with_seeds: bool = False) -> None:
        """Note the states of all generators; while a graph is captured, not those of devices.

        Args:
            point: where the run is.
            with_seeds: also note what torch's were seeded with.
        """
        add = self._rows.append
        for name, held in (*PROCESS.items(), *used_generators(), *self.held.items()):
            if not is_readable(held):
                continue
            add((point, name, digest_generator(held), ""))
            if with_seeds and isinstance(held, Generator):
                add((point, SEED + name, _bits(held.initial_seed()), ""))

    def note(self, point: str, name: str, value: int = 0, text: str = "") -> None:
        """Note something else at a point."""
        self._rows.append((point, name, value, text))

    def note_tensor(self, point: str, name: str, tensor: Tensor) -> None:
        """Note the digest of a tensor, read now in the order of its device's work."""
        bits = tensor_bits(tensor, self._late)
        self._late.flush()  # nobody tells of writes to it
        self._rows.append((point, name, bits, ""))

    def take(self, step: int) -> list[Row]:
        """Return what was collected since the last time, as rows of a step; waits for devices that were read."""
        known = self._late.finish()
        rows, self._rows = self._rows, []
        return [Row(step, point, name, value_of(bits, known), text) for point, name, bits, text in rows]


def _bits(seed: int) -> int:
    return seed & 0xFFFF_FFFF_FFFF_FFFF
