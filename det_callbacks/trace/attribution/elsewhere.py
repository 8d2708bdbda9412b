"""Modules that other threads of a step call, and the backward pass through what they computed.

Both are counted, not recorded. Which thread is first is a matter of timing, and so is the order of
their autograd nodes: the engine sorts nodes by numbers that each thread counts separately.
"""

from collections.abc import Iterable
from threading import Lock
from typing import Any

import torch
from torch import Tensor

from det_callbacks.internals.torch import current_node
from det_callbacks.trace.state.leaves import flatten

OTHER_THREAD = "other_thread"  # reason in ``ops_skipped``

_SUMS = (torch.ops.aten.add.Tensor, torch.ops.aten.add_.Tensor)


class Elsewhere:
    """What the other threads of a step ran; its lock is never held while user code runs."""

    def __init__(self) -> None:
        self._lock = Lock()
        self.clear()

    def clear(self) -> None:
        with self._lock:
            self.num_calls = 0  # of modules and compiled regions
            self.nodes: set[Any] = set()  # of their outputs, and all nodes that those lead to

    def note_call(self, output: Any) -> None:
        """Note that a module or a compiled region returned in this thread, which is not the step's."""
        tensors = (leaf for _, leaf in flatten(output, "") if isinstance(leaf, Tensor))
        found = self._reachable(tensor.grad_fn for tensor in tensors)
        with self._lock:
            self.num_calls += 1
            self.nodes |= found

    def note_read(self, tensor: Tensor) -> None:
        """Note a tensor that no recorded op wrote: another thread made it, if it depends on a module's output there."""
        found = self._reachable([tensor.grad_fn])
        with self._lock:
            if not found.isdisjoint(self.nodes):
                self.nodes |= found

    def is_running(self, func: object = None) -> bool:
        """Return whether the engine runs one of the nodes, or an op that adds up the gradients that one receives."""
        if (node := current_node()) is None:
            return False
        return node in self.nodes or (func in _SUMS and any(one in self.nodes for one, _ in node.next_functions))

    def _reachable(self, nodes: Iterable[Any]) -> set[Any]:
        found: set[Any] = set()
        waiting = [*nodes]
        while waiting:
            node = waiting.pop()
            if node is None or node in found:
                continue
            found.add(node)
            if node not in self.nodes:
                waiting.extend(one for one, _ in node.next_functions)
        return found
