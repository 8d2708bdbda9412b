"""The outputs of modules and their gradients, as named sites (level module)."""

from functools import partial
from threading import RLock
from typing import Any

import torch
from torch import Tensor

from det_callbacks.digest.unobserved import hidden
from det_callbacks.trace.backward import scope_in
from det_callbacks.trace.components import has_parts, unwrapped
from det_callbacks.trace.named_sites import NamedSites
from det_callbacks.trace.places import Places


class ModuleOutputs:
    """Records outputs of selected modules, and their gradients.

    Full backward hooks break in-place activations, so it uses hooks of tensors.
    """

    def __init__(self, named: NamedSites, places: Places, lock: RLock) -> None:
        self._named, self._places, self._lock = named, places, lock
        self._open_token: object = None  # hooks that outlive their step hold another

    def open(self) -> None:
        self._open_token = object()
        self._places.modules.on_output = self._record

    def close(self) -> None:
        self._open_token = None
        self._places.modules.on_output = None

    @hidden
    def _record(self, module: str, output: Any) -> None:
        places = self._places
        phase, scope = places.phase, scope_in(module, recomputed=False)
        is_recorded = places.selects(phase, scope)
        is_followed = places.selects("backward", scope) and torch.is_grad_enabled()
        if not (is_recorded or is_followed):
            return
        entries = (
            (("output", output),)
            if isinstance(output, Tensor)
            else self._named.readable(output, "output")
        )
        for name, tensor in entries:
            if not isinstance(tensor, Tensor):
                continue
            inner = unwrapped(tensor)
            if is_recorded:
                with self._lock:
                    self._named.record_output(phase, module, name, inner)
            if is_followed and inner is tensor and tensor.requires_grad and not has_parts(tensor):
                node = tensor.grad_fn
                number = None if node is None else tensor.output_nr
                receive = partial(
                    self._record_gradient, self._open_token, module, f"grad of {name}", number
                )
                # a hook of the tensor would be among those that the
                # program sees; a leaf has no node
                (tensor.register_hook if node is None else node.register_prehook)(receive)

    @hidden
    def _record_gradient(
        self, token: object, module: str, name: str, number: int | None, gradients: Any
    ) -> None:
        """Record what the hook of a tensor (``number`` is None) or of a node gets."""
        gradient: Tensor | None = gradients if number is None else gradients[number]
        # None is a zero gradient that autograd did not materialise
        if (
            gradient is not None
            and token is self._open_token
            and not self._places.elsewhere.is_running()
        ):
            with self._lock:
                self._named.record_output("backward", module, name, unwrapped(gradient))
