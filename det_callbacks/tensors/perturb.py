"""Changing the last bit of what goes into a step, to see how far rounding alone carries it."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from det_callbacks.digest.unobserved import unobserved
from det_callbacks.errors import ReplayError, SelectionError
from det_callbacks.tensors.copies import memory_of, plain, require_apart
from det_callbacks.trace.op.components import holds_data
from det_callbacks.trace.op.deferred_sites import DeferredSites
from det_callbacks.trace.state.leaves import leaves


class Perturbation:
    """Changes the last bit of each number in the first step's batch, once; zeros, infinities and NaN stay.

    A batch without floating-point numbers, or one that nobody tells of, has none to change: then those that the first
    op of the forward pass returns are changed, such as the embeddings of tokens.
    """

    needs_rows = True

    def __init__(self) -> None:
        self._is_begun = self.is_done = False

    def begin(self, batch: Any) -> None:
        """Change what the first step is given."""
        if not self._is_begun:
            tensors = [leaf for _, leaf in leaves(batch, "batch", is_whole=True) if isinstance(leaf, Tensor)]
            self.is_done = sum(map(_change_last_bits, tensors)) > 0
        self._is_begun = True

    def selects(self, phase: str, module: str, op: str) -> bool:
        """Return whether an op is the one whose outputs are changed."""
        return self._is_begun and not self.is_done and phase == "forward"

    def exchange(
        self, phase: str, module: str, op: str, outputs: Sequence[Any], position: int, deferred: DeferredSites
    ) -> Sequence[Any]:
        """Change what an op wrote; see ``OutputHook``."""
        tensors = [out for out in outputs if isinstance(out, Tensor) and holds_data(out)]
        for tensor in tensors:
            deferred.before_writes((plain(tensor),))
        self.is_done = sum(map(_change_last_bits, tensors)) > 0
        return outputs

    def end_step(self) -> None:
        """Raise ``SelectionError`` where the first step has no number that could be changed."""
        if self._is_begun and not self.is_done:
            raise SelectionError(
                "No floating-point number goes into the first step, and no op of its forward pass returns one at level "
                '"op", so what rounding does to it cannot be measured.'
            )


def _change_last_bits(tensor: Tensor) -> bool:
    """Change the last bit of the numbers of a tensor; return whether there were any that could be changed."""
    if not (tensor.is_floating_point() or tensor.is_complex()):
        return False
    try:
        require_apart(tensor)
        inner = plain(tensor)
    except ReplayError:  # no plain memory of its own
        return False
    with unobserved(), torch.no_grad():
        real = torch.view_as_real(inner) if inner.is_complex() else inner
        wide = real.to(torch.float64)
        is_number = wide.isfinite() & (wide != 0)
        memory = memory_of(real)
        memory.bitwise_xor_(is_number.to(memory.dtype))
        return bool(is_number.any())
