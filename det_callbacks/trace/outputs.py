"""Outputs of modules and the gradients that come back to them."""

from typing import Any

import torch
from torch import Tensor

from det_callbacks.trace.components import has_parts, unwrapped
from det_callbacks.trace.leaves import flatten
from det_callbacks.trace.named import record_output
from det_callbacks.trace.recorder import Recorder


class ModuleOutputs:
    """Records what selected modules return, and by tensor hooks the gradients of it.

    Tensor hooks, since full backward hooks break in-place activations. At level op an output that one recorded op
    wrote is not digested a second time.
    """

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._follows_gradients = "backward" in recorder.selection.phases
        self._step: object = None

    def open(self) -> None:
        """Listen from here on."""
        self._step = object()
        self._recorder.modules.on_output = self._record

    def close(self) -> None:
        """Stop listening; gradients of graphs that outlive the step are not recorded."""
        self._step = None
        self._recorder.modules.on_output = None

    def _record(self, module: str, output: Any) -> None:
        recorder = self._recorder
        phase = recorder.phase
        if not recorder.selects(phase, module):
            return
        is_followed = self._follows_gradients and torch.is_grad_enabled()
        entries = (("output", output),) if isinstance(output, Tensor) else flatten(output, "output")
        for name, tensor in entries:
            if not isinstance(tensor, Tensor):
                continue
            inner = unwrapped(tensor)
            record_output(recorder, phase, module, name, inner)
            if is_followed and inner is tensor and tensor.requires_grad and not has_parts(tensor):
                tensor.register_hook(_GradientHook(self, self._step, module, name))

    def record_gradient(self, step: object, module: str, name: str, gradient: Tensor) -> None:
        """Record the gradient of an output, when its step is still under way."""
        if step is self._step:
            with self._recorder.passing.lock:
                record_output(self._recorder, "backward", module, f"grad of {name}", gradient)


class _GradientHook:
    __slots__ = ("_module", "_name", "_outputs", "_step")

    def __init__(self, outputs: ModuleOutputs, step: object, module: str, name: str) -> None:
        self._outputs = outputs
        self._step = step
        self._module = module
        self._name = name

    def __call__(self, gradient: Tensor | None) -> None:
        if gradient is None:  # undefined: autograd runs the hooks of a node with zeros that it does not make
            return
        self._outputs.record_gradient(self._step, self._module, self._name, gradient)
