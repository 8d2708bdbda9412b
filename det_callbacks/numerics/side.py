"""One of the two modules: runs on copies of its parameters and buffers, and is put back as it was."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch._dynamo.eval_frame import OptimizedModule
from torch.nn.parameter import is_lazy

from det_callbacks.equivalence.copies import is_special
from det_callbacks.numerics.attributes import Attributes, tensor_attributes
from det_callbacks.numerics.leaves import copies_of
from det_callbacks.numerics.names import plain_name

OptimizerFactory = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]


class Side:
    """A module with the state that it has in a comparison, which is not the state that it was given with.

    While it is ``loaded``, its parameters, buffers and tensor attributes point to copies of their own memory (the
    objects stay, and so do ties, optimizers and compiled code), so that two sides may share a module. Memory: a copy of
    what the module holds, on the host where a device is given, and there again while it is loaded.

    Args:
        label: "base" or "control".
        module: itself; not trained.
        device: where it runs; None leaves it where it is.

    Attributes:
        label: as given.
        module: as given.
        optimizer: made when it is first loaded.
        prefix: what its names begin with, and those of the other side do not.
    """

    def __init__(self, label: str, module: nn.Module, device: torch.device | None) -> None:
        self.label = label
        self.module = module
        self.optimizer: torch.optim.Optimizer | None = None
        self.prefix = ""
        self._device = device
        self._tensors = _tensors_of(label, module)
        self._given = [tensor.data for tensor in self._tensors]
        self._given_grads = [tensor.grad if tensor.is_leaf else None for tensor in self._tensors]
        self._values = copies_of(self._given, None if device is None else torch.device("cpu"))
        self._given_attributes = Attributes(module)
        self._attributes: Attributes | None = None
        self._state_devices: dict[tuple[int, str], torch.device] = {}

    @contextmanager
    def loaded(self) -> Iterator[None]:
        """Give the module its own state for the block; afterwards it has again what it was given with."""
        try:
            if self._attributes is not None:
                self._attributes.put_back()
            values = self._values
            if self._device is not None:
                values = copies_of(values, self._device)
                self._move_optimizer(self._device)
            for tensor, value in zip(self._tensors, values, strict=True):
                tensor.data = value
                if tensor.is_leaf:
                    tensor.grad = None
            yield
            self._keep()
        finally:
            self._put_back()

    def parameters(self) -> list[tuple[str, nn.Parameter]]:
        """Return names and parameters; of what is tied each name."""
        return self._named(self.module.named_parameters(remove_duplicate=False))

    def buffers(self) -> list[tuple[str, Tensor]]:
        """Return names and buffers."""
        return self._named(self.module.named_buffers(remove_duplicate=False))

    def name_of(self, name: str) -> str:
        """Return the name that both sides have in common."""
        return plain_name(name).removeprefix(self.prefix)

    def make_optimizer(self, factory: OptimizerFactory) -> torch.optim.Optimizer | None:
        """Return the optimizer, made at the first call; None where no parameter needs a gradient."""
        if self.optimizer is None:
            parameters = [parameter for parameter in self.module.parameters() if parameter.requires_grad]
            if parameters:
                self.optimizer = factory(parameters)
        return self.optimizer

    @property
    def is_compiled(self) -> bool:
        """Whether torch.compile was applied to the module or to one in it."""
        return has_compiled(self.module)

    @property
    def description(self) -> str:
        """Class of the module, and whether it is compiled."""
        module = self.module
        if isinstance(module, OptimizedModule):
            return f"compiled {type(module._orig_mod).__name__}"
        return f"{'partly compiled ' if self.is_compiled else ''}{type(module).__name__}"

    def _named(self, entries: Iterable[tuple[str, Any]]) -> list[tuple[str, Any]]:
        named: dict[str, Any] = {}
        for name, value in entries:
            named.setdefault(self.name_of(name), value)
        return list(named.items())

    def _keep(self) -> None:
        values = [tensor.data for tensor in self._tensors]
        if self._device is not None:
            values = copies_of(values, torch.device("cpu"))
            self._move_optimizer(None)
        self._values = values
        self._attributes = Attributes(self.module)

    def _put_back(self) -> None:
        self._given_attributes.put_back()
        for tensor, value, grad in zip(self._tensors, self._given, self._given_grads, strict=True):
            tensor.data = value
            if tensor.is_leaf:
                tensor.grad = grad

    def _move_optimizer(self, device: torch.device | None) -> None:
        """Move the optimizer's tensors to the host, or back to where they were."""
        if self.optimizer is None:
            return
        for index, state in enumerate(self.optimizer.state.values()):
            for name, value in state.items():
                if not isinstance(value, Tensor):
                    continue
                key = (index, name)
                if device is None:
                    self._state_devices[key] = value.device
                    state[name] = value.cpu()
                else:
                    state[name] = value.to(self._state_devices.get(key, value.device))


def has_compiled(module: nn.Module) -> bool:
    """Return whether torch.compile was applied to a module or to one in it."""
    return any(isinstance(part, OptimizedModule) or part._compiled_call_impl is not None for part in module.modules())


def _tensors_of(label: str, module: nn.Module) -> list[Tensor]:
    """Return the tensors of a module that get copies, each once.

    Raises:
        ValueError: there is one that cannot be copied and put back.
    """
    found: dict[int, Tensor] = {}
    named = [*module.named_parameters(), *module.named_buffers()]
    for name, tensor in [*named, *(("an attribute", tensor) for tensor in tensor_attributes(module))]:
        if is_lazy(tensor):
            raise ValueError(
                f"{name} of the {label} is not initialised yet, and would be drawn anew on each side; run the module "
                "once before it is compared"
            )
        if tensor.is_meta or (tensor.requires_grad and is_special(tensor)):
            raise ValueError(
                f"{name} of the {label} is a {_kind(tensor)}, which cannot be trained here and put back; compare "
                "modules whose parameters are ordinary strided tensors"
            )
        if type(tensor).__torch_dispatch__ is Tensor.__torch_dispatch__:  # a frozen weight of another class stays
            found[id(tensor)] = tensor
    return list(found.values())


def _kind(tensor: Tensor) -> str:
    if tensor.is_meta:
        return "meta tensor"
    if tensor.layout is not torch.strided:
        return f"tensor of layout {tensor.layout}"
    return type(tensor).__qualname__
