"""Evidence for findings: the parameters that optimizers update, and those that get gradients."""

import json
from collections.abc import Sequence
from typing import TypeGuard

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from det_callbacks.digest.unobserved import unobserved
from det_callbacks.internals.torch import PARAMETERS as HELD_PARAMETERS
from det_callbacks.runs.evidence import EvidenceKind
from det_callbacks.runs.steps import StepTrace
from det_callbacks.trace.op.components import PLAIN
from det_callbacks.trace.state.generators import GeneratorLog
from det_callbacks.trace.state.optimizers import parameters_of
from det_callbacks.trace.state.walker import StateWalker

NUM_UPDATES = 3  # in which a trained parameter changes; if one does not, as many measurements of gradients follow
# A smaller share of the largest gradient may be a rounding error, as for a bias before a BatchNorm.
MIN_SHARE, MIN_EPSILONS = 1e-4, 16


class ParameterNotes:
    """Notes the trainable parameters of each optimizer, and which other parameters get gradients.

    It lists them at the start of an epoch. A step checks only parameters without an optimizer that had no
    gradient yet. It measures gradients, each a pass over them, only if the first updates leave a parameter as it was.
    """

    def __init__(self, module: nn.Module, optimizers: Sequence[Optimizer], ledger: GeneratorLog) -> None:
        self._module, self._optimizers, self._ledger = module, optimizers, ledger
        self._noted: dict[tuple[EvidenceKind, str], list[str]] = {}
        self._epoch: int | None = None
        self._others: dict[str, Tensor] = {}
        self._with_gradient: list[str] = []
        self._names: dict[int, str] = {}
        self._measured: dict[str, None] = {}
        self._num_updates = 0
        self._num_compared = self._num_measured = 0
        self._unchanged: dict[str, int] | None = None  # digests of those that no update has changed
        # machine epsilon by name, largest elements
        self._fetched: list[tuple[dict[str, float], Tensor]] = []

    def begin_step(self, epoch: int) -> None:
        if epoch == self._epoch:
            return
        self._epoch = epoch
        parameters = StateWalker(self._module).walk(HELD_PARAMETERS)
        trainable = {id(one): (name, one) for name, one in parameters if one.requires_grad}
        self._names = {identity: name for identity, (name, _) in trainable.items()}
        others, found = dict(trainable), dict[tuple[EvidenceKind, str], list[str]]()
        for number, optimizer in enumerate(self._optimizers):
            held = [id(one) for one in parameters_of(optimizer)]
            found["trained", str(number)] = [trainable[one][0] for one in held if one in trainable]
            for one in held:
                others.pop(one, None)
        found["untrained", ""] = [name for name, _ in others.values()]
        self._others = {name: one for name, one in others.values() if name not in self._with_gradient}
        for what, names in found.items():
            if self._noted.get(what) != names:
                self._note(*what, names)
        self._noted = found

    def measure_gradients(self) -> None:
        """Measure gradients if one is of a parameter that does not change, without waiting for the device."""
        self._num_updates += 1
        if self._num_compared <= NUM_UPDATES or not self._unchanged or self._num_measured == NUM_UPDATES:
            return
        self._num_measured += 1
        held = [one for optimizer in self._optimizers for one in parameters_of(optimizer)]
        by_device: dict[torch.device, dict[str, Tensor]] = {}
        for parameter in held:
            name, gradient = self._names.get(id(parameter)), parameter.grad
            if name is not None and _is_measured(gradient):
                by_device.setdefault(gradient.device, {})[name] = gradient
        if not any(name in self._unchanged for gradients in by_device.values() for name in gradients):
            return
        with unobserved(), torch.no_grad():
            for gradients in by_device.values():
                largest = torch.stack([gradient.abs().max().float() for gradient in gradients.values()])
                epsilons = {name: torch.finfo(gradient.dtype).eps for name, gradient in gradients.items()}
                self._fetched.append((epsilons, self._ledger.fetch(largest)))

    def note_measured(self) -> None:
        if not self._fetched:
            return
        fetched, self._fetched = self._fetched, []
        with unobserved():
            sizes = {name: size for names, copy in fetched for name, size in zip(names, copy.tolist(), strict=True)}
        least = {name: MIN_EPSILONS * eps for names, _ in fetched for name, eps in names.items()}
        largest = max(sizes.values(), default=0.0)
        beyond = [name for name, size in sizes.items() if size > largest * max(MIN_SHARE, least[name])]
        if not self._measured.keys() >= {*beyond}:
            self._measured |= dict.fromkeys(beyond)
            self._note("large_gradient", "", [*self._measured])

    def compare_state(self, trace: StepTrace) -> None:
        """Compare the parameters after one of the first updates with those after the update before it."""
        if not self._num_updates or self._num_compared > NUM_UPDATES:
            return
        self._num_updates = 0
        self._num_compared += 1
        last = len(trace.program) - 1
        held = dict[str, int]()
        # the state, and the generators after it, end each step
        while last >= 0 and (site := trace.program.rows[last].site).phase in ("state", "rng"):
            if site.name is not None:
                held[site.name] = int(trace.digests[last])
            last -= 1
        known = {name: held[name] for name in self._names.values() if name in held}
        before = self._unchanged if self._unchanged is not None else known
        self._unchanged = {name: digest for name, digest in known.items() if before.get(name) == digest}

    def end_step(self) -> None:
        found = [name for name, parameter in self._others.items() if parameter.grad is not None]
        if found:
            self._with_gradient += found
            for name in found:
                del self._others[name]
            self._note("untrained_with_gradient", "", self._with_gradient)

    def _note(self, kind: EvidenceKind, optimizer: str, names: list[str]) -> None:
        self._ledger.note("", kind, optimizer, value=len(names), text=json.dumps(names))


def _is_measured(gradient: Tensor | None) -> TypeGuard[Tensor]:
    if gradient is None or type(gradient) not in PLAIN or gradient.layout is not torch.strided:
        return False
    return gradient.is_floating_point() and gradient.numel() > 0
