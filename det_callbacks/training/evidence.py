"""Evidence that can explain a difference: generators, batches, metrics, what optimizers update."""

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from inspect import getattr_static
from types import FunctionType
from typing import Any, TypeGuard

import torch
from torch import Tensor, as_tensor, float64, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.utils.data import DataLoader, Sampler

from det_callbacks.digest.components import digest_tensor
from det_callbacks.digest.host import digest_bytes, format_digest
from det_callbacks.digest.unobserved import hidden, unobserved
from det_callbacks.environment.variables import NUM_WORKERS
from det_callbacks.errors import SettingsError
from det_callbacks.internals.torch import BUFFERS, PARAMETERS, modules_in
from det_callbacks.runs.evidence import KIND_OF_SAMPLER, LOADER, EvidenceKind
from det_callbacks.runs.metrics import Metric, ReadRow
from det_callbacks.runs.steps import StepTrace
from det_callbacks.settings.generators import Held
from det_callbacks.trace.components import PLAIN, has_parts, holds_data
from det_callbacks.trace.generators import GeneratorLog, GeneratorReader
from det_callbacks.trace.leaves import StateWalker, attributes_of, flatten
from det_callbacks.trace.optimizers import parameters_of
from det_callbacks.training.loading import Draws
from det_callbacks.training.training import LoaderFollower, Training

_FIT_START = "fit start"
MAX_INDICES = 256  # recorded for a batch; a digest covers all

# in which a trained parameter changes; if one does not, as many measurements of gradients follow
NUM_UPDATES = 3
# A smaller share of the largest gradient may be a rounding error, as for a bias before a BatchNorm.
MIN_SHARE, MIN_EPSILONS = 1e-4, 16


class EvidenceLog(GeneratorLog, LoaderFollower):
    """The ledger of one fit, with hooks, options, loaders and batches;
    costs 40 microseconds a step.
    """

    def __init__(self, training: Training, reader: GeneratorReader, *, is_resumed: bool) -> None:
        super().__init__(reader)
        self._training = training
        self._draws = Draws()
        self._indices: list[dict[str, Any]] = []  # of each batch of the step, by loader
        if NUM_WORKERS in os.environ and training.loaders is not None:
            set_workers([], os.environ[NUM_WORKERS])  # raises: iteration has begun
        if not is_resumed:
            self.begin(_FIT_START)
        self.mark(_FIT_START, with_seeds=True)
        module = training.module
        with unobserved():
            constants = [
                name
                for name, tensor in StateWalker(module).walk(PARAMETERS, BUFFERS)
                if _is_constant(tensor)
            ]
        self.note(_FIT_START, "constants", value=len(constants), text=json.dumps(constants))
        if scripted := _scripted(module):
            self.note(_FIT_START, "scripted", text=json.dumps(scripted))
        self._options: dict[tuple[int, str], list[object]] = {}
        self._modules: list[tuple[str, nn.Module]] = []
        self._modes: list[bool] = []
        self._epoch: int | None = None  # in which the modules were listed
        for (order, hook), who in training.hooks.items():
            self.note(_FIT_START, "hook", hook, order, text=who)

    def note_options(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        """Note numeric options of the optimizers that changed since the last update."""
        for number, optimizer in enumerate(optimizers):
            for option in optimizer.param_groups[0] if optimizer.param_groups else ():
                values = [group.get(option) for group in optimizer.param_groups]
                # no tensors: reading one waits for its device
                if (
                    isinstance(values[0], int | float)
                    and self._options.get((number, option)) != values
                ):
                    self._options[number, option] = values
                    numbers = [
                        value if isinstance(value, int | float) else None for value in values
                    ]
                    self.note("", "option", str(number), option, text=json.dumps(numbers))

    def note_modes(self) -> None:
        """Note which modules are in train mode, if that changed since the last call."""
        if self._epoch != self._training.epoch:
            self._epoch = self._training.epoch
            self._modules = [*modules_in(self._training.module)]
        modes = [module.training for _, module in self._modules]
        if modes != self._modes:
            self._modes = modes
            names = [name for name, _ in self._modules]
            self.note(
                "", "modes", text=json.dumps(_own_modes(dict(zip(names, modes, strict=True))))
            )

    @hidden
    def begin_loaders(
        self,
        loaders: Mapping[str, Any],
        held: Mapping[str, Held],
        *,
        is_in_turn: bool,
        draws: Draws | None = None,
    ) -> None:
        if draws is None:
            self.detach()
        else:
            self._draws = draws
        if NUM_WORKERS in os.environ:
            set_workers([*loaders.values()], os.environ[NUM_WORKERS])
        self.held = held
        for name, one in loaders.items():
            for setting, text in _settings_of(one):
                self.note(LOADER, "loader", name, setting, text=text)
            # if loaders are exhausted in turn, the loader of a draw is unknown
            if draws is None and (not is_in_turn or len(loaders) == 1):
                self._draws.follow(name, one)

    def detach(self) -> None:
        self._draws.detach()

    def begin_iteration(self) -> None:
        self._draws.waiting.clear()
        self.mark(LOADER)

    def begin_draw(self) -> None:
        self.mark("before a batch is drawn")

    def end_draw(self, batch: Any) -> None:
        self._draws.add(batch)

    def forget_drawn(self) -> None:
        self._draws.waiting.clear()

    @hidden
    def begin_step(self, batch: Any) -> None:
        """Note how the batch of a training step was loaded, after its trace has begun."""
        self.mark("batch start", with_seeds=True)
        self.note_modes()
        drawn = self._last_drawn(self._training.num_batches)
        self._indices = [indices for _, indices in drawn]
        if not drawn:
            return
        # the loader's tensors, if the training step gets others: moved, or transformed
        loaded = drawn[0][0] if len(drawn) == 1 else [one for one, _ in drawn]
        given = {id(value) for _, value in flatten(batch, "batch", is_whole=True)}
        with unobserved():
            for name, value in flatten(loaded, "batch", is_whole=True):
                if isinstance(value, Tensor) and id(value) not in given and holds_data(value):
                    self.note_tensor("loaded", name, value)

    def add_batch(self) -> None:
        """Note that the step under way got the batch that was loaded last."""
        if self._indices:
            self._indices += [indices for _, indices in self._last_drawn(1)]

    def end_step(self) -> None:
        """Note which samples the batches of the step hold, in the order in
        which samplers drew them.
        """
        for loader in self._indices[0] if self._indices else ():
            parts = [_whole_numbers(of_batch.get(loader)) for of_batch in self._indices]
            if None not in parts:
                indices = [number for part in parts for number in part or ()]
                shown = json.dumps(indices[:MAX_INDICES])
                self.note("", "indices", loader, value=_digest_numbers(indices), text=shown)
                self.note("", "sorted_indices", loader, value=_digest_numbers(sorted(indices)))
        self._indices = []

    def _last_drawn(self, number: int) -> list[tuple[Any, dict[str, Any]]]:
        """Return the last batches that the training got, with their indices by loader;
        [] if they are unknown.
        """
        waiting = self._draws.waiting
        last = len(waiting) - self._training.num_drawn_ahead
        return [waiting[place] for place in range(last - number, last)] if last >= number else []


def _digest_numbers(numbers: list[int]) -> int:
    return digest_bytes(repr(numbers).encode())


def _own_modes(modes: Mapping[str, bool]) -> dict[str, bool]:
    """Return the modes of the modules that have another one than the module around them."""
    around = {name: modes.get(name.rpartition(".")[0]) for name in modes}
    return {name: mode for name, mode in modes.items() if not name or mode != around[name]}


def _scripted(root: torch.nn.Module) -> list[str]:
    """Return the names of the outermost modules that are TorchScript or hold its functions."""
    found: list[str] = []
    for name, module in modules_in(root):
        holds = isinstance(module, torch.jit.ScriptModule) or any(
            isinstance(value, torch.jit.ScriptFunction) for value in vars(module).values()
        )
        if holds and not any(name.startswith(f"{outer}.") for outer in found):
            found.append(name)
    return found


def _is_constant(tensor: Tensor) -> bool:
    """Return whether the first 4,096 elements are equal, as they are in new biases and scales."""
    if not holds_data(tensor) or has_parts(tensor) or tensor.numel() < 2:
        return tensor.numel() == 1
    head = tensor.detach().flatten()[:4096]
    return bool((head == head[0]).all())


def _settings_of(loader: Any) -> Iterator[tuple[str, str]]:
    yield "type", type(loader).__qualname__
    if not isinstance(loader, DataLoader):
        return
    yield "data set", type(loader.dataset).__qualname__
    dataset: Any = loader.dataset
    # the only method of the program that is called: its samplers, and a
    # progress bar, call it as well
    if getattr_static(type(dataset), "__len__", None) is not None:
        yield "length of the data set", str(len(dataset))
    batch_sampler = loader.batch_sampler
    # accelerate wraps it to skip or share out batches, and sets the size on the innermost only
    while (inner := attributes_of(batch_sampler).get("batch_sampler")) is not None:
        batch_sampler = inner
    size = loader.batch_size
    if size is None:
        size = attributes_of(batch_sampler).get("batch_size")
    yield "batch_size", str(size)
    for name in ("num_workers", "drop_last", "persistent_workers", "in_order"):
        yield name, str(getattr(loader, name, None))
    samplers = loader.sampler, loader.batch_sampler
    # a loader that gets its batch sampler has a sequential sampler that draws nothing
    yield "sampler", _kind_of(getattr_static(batch_sampler, "sampler", loader.sampler))
    yield "set_epoch", str(any(getattr_static(sampler, "set_epoch", None) for sampler in samplers))
    collate = loader.collate_fn
    yield (
        "collate_fn",
        (collate if isinstance(collate, FunctionType) else type(collate)).__qualname__,
    )
    yield "separate generator", str(isinstance(loader.generator, torch.Generator))


def _kind_of(sampler: Any) -> str:
    """Return the class of a sampler, and the class of torch that it derives
    from: "Mine, a RandomSampler".
    """
    own, *bases = type(sampler).__mro__
    of_torch = (
        base
        for base in bases
        if base.__module__.startswith("torch.utils.data") and base is not Sampler
    )
    is_fixed = own.__module__.startswith("torch.") or not getattr(sampler, "shuffle", True)
    base = None if is_fixed else next(of_torch, None)
    return (
        own.__qualname__
        if base is None
        else f"{own.__qualname__}{KIND_OF_SAMPLER}{base.__qualname__}"
    )


def _whole_numbers(index: Any) -> list[int] | None:
    try:
        return [int(value) for value in (index if isinstance(index, list | tuple) else [index])]
    except (TypeError, ValueError):
        return None


def set_workers(loaders: Sequence[Any], number: str) -> None:
    """Set the number of workers of loaders (``check --vary workers``)
    before their first iteration.
    """
    known = [loader for loader in loaders if isinstance(loader, DataLoader)]
    if not known or not number.isdecimal():
        raise SettingsError(
            f"{NUM_WORKERS}={number}, but the training has no torch DataLoader whose number of "
            "workers can still be set. Omit workers from det-callbacks check --vary, or unset the "
            "variable."
        )
    for loader in known:
        loader.num_workers = int(number)
        if not loader.num_workers:
            loader.timeout = 0
        elif loader.prefetch_factor is None:
            loader.prefetch_factor = 2


class ParameterNotes:
    """Notes the trainable parameters of each optimizer, and which other parameters get gradients.

    It lists them at the start of an epoch. A step checks only parameters without an optimizer that
    had no gradient yet. It measures gradients, each a pass over them, only if the first updates
    leave a parameter as it was.
    """

    def __init__(
        self, module: nn.Module, optimizers: Sequence[Optimizer], ledger: GeneratorLog
    ) -> None:
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
        parameters = StateWalker(self._module).walk(PARAMETERS)
        trainable = {id(one): (name, one) for name, one in parameters if one.requires_grad}
        self._names = {identity: name for identity, (name, _) in trainable.items()}
        others, found = dict(trainable), dict[tuple[EvidenceKind, str], list[str]]()
        for number, optimizer in enumerate(self._optimizers):
            held = [id(one) for one in parameters_of(optimizer)]
            found["trained", str(number)] = [trainable[one][0] for one in held if one in trainable]
            for one in held:
                others.pop(one, None)
        found["untrained", ""] = [name for name, _ in others.values()]
        self._others = {
            name: one for name, one in others.values() if name not in self._with_gradient
        }
        for what, names in found.items():
            if self._noted.get(what) != names:
                self._note(*what, names)
        self._noted = found

    def measure_gradients(self) -> None:
        """Measure gradients if one is of a parameter that does not change,
        without waiting for the device.
        """
        self._num_updates += 1
        if (
            self._num_compared <= NUM_UPDATES
            or not self._unchanged
            or self._num_measured == NUM_UPDATES
        ):
            return
        self._num_measured += 1
        held = [one for optimizer in self._optimizers for one in parameters_of(optimizer)]
        by_device: dict[torch.device, dict[str, Tensor]] = {}
        for parameter in held:
            name, gradient = self._names.get(id(parameter)), parameter.grad
            if name is not None and _is_measured(gradient):
                by_device.setdefault(gradient.device, {})[name] = gradient
        if not any(
            name in self._unchanged for gradients in by_device.values() for name in gradients
        ):
            return
        with unobserved(), torch.no_grad():
            for gradients in by_device.values():
                largest = torch.stack(
                    [gradient.abs().max().float() for gradient in gradients.values()]
                )
                epsilons = {
                    name: torch.finfo(gradient.dtype).eps for name, gradient in gradients.items()
                }
                self._fetched.append((epsilons, self._ledger.fetch(largest)))

    def note_measured(self) -> None:
        if not self._fetched:
            return
        fetched, self._fetched = self._fetched, []
        with unobserved():
            sizes = {
                name: size
                for names, copy in fetched
                for name, size in zip(names, copy.tolist(), strict=True)
            }
        least = {name: MIN_EPSILONS * eps for names, _ in fetched for name, eps in names.items()}
        largest = max(sizes.values(), default=0.0)
        beyond = [
            name for name, size in sizes.items() if size > largest * max(MIN_SHARE, least[name])
        ]
        if not self._measured.keys() >= {*beyond}:
            self._measured |= dict.fromkeys(beyond)
            self._note("large_gradient", "", [*self._measured])

    def compare_state(self, trace: StepTrace) -> None:
        """Compare the parameters after one of the first updates with those
        after the update before it.
        """
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
        self._unchanged = {
            name: digest for name, digest in known.items() if before.get(name) == digest
        }

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


def metric_of(value: Tensor | float) -> Metric:
    """Return a metric with its digest; for a DTensor, of its local part.

    A Python float keeps its 64 bits.
    """
    if isinstance(value, int) and value.bit_length() > 63:
        return Metric(
            dtype="int",
            shape=(),
            digest=format_digest(digest_bytes(str(value).encode())),
            value=str(value),
        )
    tensor = as_tensor(value, dtype=float64 if isinstance(value, float) else None).detach()
    tensor = (tensor.to_local() if isinstance(tensor, DTensor) else tensor).cpu()
    shown = tensor.item() if tensor.numel() == 1 else tensor.tolist()
    dtype, digest = str(tensor.dtype).removeprefix("torch."), format_digest(digest_tensor(tensor))
    return Metric(dtype=dtype, shape=tuple(tensor.shape), digest=digest, value=repr(shown))


def generator_states(reader: GeneratorReader) -> tuple[ReadRow, ...]:
    ledger = GeneratorLog(reader)
    ledger.mark("")
    return tuple(ReadRow("generator", row.of, format_digest(row.value)) for row in ledger.take(0))
