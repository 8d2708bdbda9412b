"""Changes the last bit of a step's inputs, to measure how far rounding alone carries the change."""

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

    If the batch is unknown or has no floating-point numbers, it changes those that the first op of the forward pass
    returns, such as the embeddings of tokens.
    """

    needs_rows = True

    def __init__(self) -> None:
        self._is_begun = self.is_done = False

    def begin(self, batch: Any) -> None:
        """Change the batch of the first step."""
        if not self._is_begun:
            tensors = [leaf for _, leaf in leaves(batch, "batch", is_whole=True) if isinstance(leaf, Tensor)]
            self.is_done = sum(map(_change_last_bits, tensors)) > 0
        self._is_begun = True

    def selects(self, phase: str, module: str, op: str) -> bool:
        """Return whether to change the outputs of an op."""
        return self._is_begun and not self.is_done and phase == "forward"

    def exchange(
        self, phase: str, module: str, op: str, outputs: Sequence[Any], position: int, deferred: DeferredSites
    ) -> Sequence[Any]:
        """Change the outputs of an op; see ``OutputHook``."""
        tensors = [out for out in outputs if isinstance(out, Tensor) and holds_data(out)]
        for tensor in tensors:
            deferred.before_writes((plain(tensor),))
        self.is_done = sum(map(_change_last_bits, tensors)) > 0
        return outputs

    def end_step(self) -> None:
        """Raise ``SelectionError`` if the first step had no number to change."""
        if self._is_begun and not self.is_done:
            raise SelectionError(
                "No floating-point number goes into the first step, and no op of its forward pass returns one at level "
                '"op", so what rounding does to it cannot be measured.'
            )


def _change_last_bits(tensor: Tensor) -> bool:
    """Change the last bit of each number of a tensor; return whether there was one to change."""
    if not (tensor.is_floating_point() or tensor.is_complex()):
        return False
    try:
        require_apart(tensor)
        inner = plain(tensor)
    except ReplayError:  # not a plain tensor
        return False
    with unobserved(), torch.no_grad():
        real = torch.view_as_real(inner) if inner.is_complex() else inner
        wide = real.to(torch.float64)
        is_number = wide.isfinite() & (wide != 0)
        memory = memory_of(real)
        memory.bitwise_xor_(is_number.to(memory.dtype))
        return bool(is_number.any())
