"""Saves one call of an op, with its inputs, so that a file of plain torch can repeat it.

For a backward op it also saves the forward call whose gradient the op computes,
if that ran in the same module.
"""

import json
import keyword
import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Generator, Tensor

from det_callbacks.digest.unobserved import unobserved
from det_callbacks.errors import DetCallbacksError, ReplayError
from det_callbacks.internals.torch import (
    current_node,
    graph_task_id,
    next_sequence_number,
    sequence_number,
    storage_address,
)
from det_callbacks.runs.steps import StepTrace
from det_callbacks.tensors.copies import TensorBudget, plain
from det_callbacks.tensors.files import SavedTensor, write_tensors
from det_callbacks.trace.backward import MAX_BETWEEN, is_maker
from det_callbacks.trace.components import PLAIN
from det_callbacks.trace.deferred_sites import DeferredSites
from det_callbacks.trace.overloads import OpKind, OpPlan

CALL = "call"
"""Key of the file's metadata with the call, as JSON; see ``_Call.to_dict``."""
GENERATOR = "generator"
"""Name of the tensor with the state of the CPU's generator before the call."""


@dataclass(slots=True, kw_only=True)
class _Call:
    """A call, with copies of its tensors; ``problem`` says why it cannot be repeated."""

    plan: OpPlan
    arguments: list[str] = field(default_factory=list)  # Python, in which a tensor has its name
    # name -> layout in its saved tensor
    tensors: dict[str, dict[str, Any]] = field(default_factory=dict)
    saved: dict[str, SavedTensor] = field(default_factory=dict)
    written: list[str] = field(default_factory=list)  # names of the tensors that it overwrites
    outputs: list[list[int]] = field(default_factory=list)  # shapes
    addresses: dict[str, int] = field(default_factory=dict)  # of the storages, while the call runs
    problem: str = ""

    def to_dict(self) -> dict[str, Any]:
        return {
            "op": self.plan.name,
            "arguments": self.arguments,
            "tensors": self.tensors,
            "written": self.written,
            "opaque": sorted(self.plan.opaque_outputs),
            "outputs": self.outputs,
            "problem": self.problem,
        }


class CallCapture:
    """Saves the call that ``wanted`` names: step, segment, rank, phase, module, op, occurrence,
    and the path to write.

    An ``OutputHook``, which knows the place of a call but runs after it; ``around`` copies the
    inputs before it. All calls of the step that may be the wanted one, or its forward call, are
    copied, and dropped unless they are.
    """

    needs_rows = True

    def __init__(self, wanted: str, budget_mib: float) -> None:
        self._wanted: Mapping[str, Any] = json.loads(wanted)
        self._budget_mib = budget_mib
        self.begin(is_wanted=False)

    def begin(self, *, is_wanted: bool) -> None:
        """Start a step, and drop what an earlier one left."""
        self._is_wanted = is_wanted
        self._last: _Call | None = None
        # position of the first site, call, forward call
        self._calls: list[tuple[int, _Call, _Call | None]] = []
        self._forward: dict[int, _Call] = {}  # by the number of the autograd node
        self._budget = TensorBudget(self._budget_mib)

    def is_of(self, *, rank: int, segment: int, step: int) -> bool:
        """Return whether the wanted call is in a step."""
        place = {"rank": rank, "segment": segment, "step": step}
        return place.items() <= self._wanted.items()

    @property
    def _is_backward(self) -> bool:
        return bool(self._wanted["phase"] == "backward")

    def around(self, plan: OpPlan) -> Callable[..., Any]:
        """Return what runs an op, and copies the inputs of a call that may be wanted."""
        run = plan.call
        if plan.name != self._wanted["op"] and not (
            self._is_backward and plan.kind is OpKind.DIGEST
        ):
            return run

        def call(*args: Any, **kwargs: Any) -> Any:
            is_backward = graph_task_id() != -1
            if not self._is_wanted or (plan.name != self._wanted["op"] and is_backward):
                return run(*args, **kwargs)
            copied = self._copy(plan, args, kwargs)
            out = run(*args, **kwargs)
            self._last = copied
            return out

        return call

    def _copy(self, plan: OpPlan, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Call:
        copied = _Call(plan=plan)
        copier = _Copier(copied, TensorBudget(self._budget_mib))
        try:
            with unobserved(), torch.no_grad():
                copier.copy(args, kwargs)
        except (DetCallbacksError, torch.OutOfMemoryError) as error:  # the training goes on
            copied.problem, copied.saved = str(error), {}
        return copied

    def selects(self, phase: str, module: str, op: str) -> bool:
        """Return whether an op may be the wanted one, or its forward op."""
        wanted = self._wanted
        if not self._is_wanted or module != wanted["module"]:
            return False
        return (phase, op) == (wanted["phase"], wanted["op"]) or (
            self._is_backward and phase == "forward"
        )

    def exchange(
        self,
        phase: str,
        module: str,
        op: str,
        outputs: Sequence[Any],
        position: int,
        deferred: DeferredSites,
    ) -> Sequence[Any]:
        """Keep the last call; see ``OutputHook``."""
        call, self._last = self._last, None
        if call is None or call.plan.name != op:
            return outputs
        call.outputs = [list(out.shape) for out in outputs if isinstance(out, Tensor)]
        if phase == self._wanted["phase"]:
            self._calls.append(
                (position, call, self._forward_of_node() if self._is_backward else None)
            )
            return outputs
        number = next_sequence_number() - 1
        if number not in self._forward:  # else this call has made no node
            self._forward[number] = call
            self._budget.num_bytes += sum(saved.bits.nbytes for saved in call.saved.values())
            if self._budget.num_bytes > self._budget_mib * 2**20:
                call.saved, call.problem = {}, "the calls of its module exceed tensor_budget_mib"
        return outputs

    def _forward_of_node(self) -> _Call | None:
        """Return the forward call that made the running autograd node; see ``BackwardMap``."""
        node = current_node()
        if node is None:
            return None
        number = sequence_number(node)
        calls = (self._forward.get(number + between) for between in range(MAX_BETWEEN))
        call = next(filter(None, calls), None)
        return call if call is not None and is_maker(call.plan.base, node.name()) else None

    def end_step(self, trace: StepTrace) -> None:
        """Write the wanted call, if the step had it."""
        if not self._is_wanted:
            return
        sites, wanted = trace.program.sites, self._wanted
        for position, call, forward in self._calls:
            of_call = [site for site in sites[position : position + 2] if site.role != "argument"]
            site = of_call[0] if of_call else None
            if site is not None and (site.op, site.occurrence) == (
                wanted["op"],
                wanted["occurrence"],
            ):
                self._write(call, forward)
        self.begin(is_wanted=False)

    def _write(self, call: _Call, forward: _Call | None) -> None:
        saved = dict(call.saved)
        content: dict[str, Any] = {"call": call.to_dict()}
        if forward is not None and (gradient := _gradient_of(call, forward)):
            content |= {"forward": forward.to_dict(), "gradient": gradient}
            saved |= {f"forward.{name}": tensor for name, tensor in forward.saved.items()}
        write_tensors(Path(self._wanted["path"]), saved, {CALL: json.dumps(content)})


def _gradient_of(call: _Call, forward: _Call) -> tuple[str, int] | None:
    """Return the argument of a backward op that holds the gradient of a forward output,
    and the output's number.

    It has the output's shape. Several may: then by its name, else it is no input of the forward op,
    else the last one, as in ``index_add(zeros, dim, index, gradient)``.
    """
    pairs = [
        ((name.startswith("grad"), address not in forward.addresses.values(), place), name, number)
        for place, (name, address) in enumerate(call.addresses.items())
        for number, shape in enumerate(forward.outputs)
        if call.tensors.get(name, {}).get("shape") == shape
    ]
    return max(pairs)[1:] if pairs else None


class _Copier:
    """Fills a call with its arguments as Python, and with copies of its tensors.

    A contiguous tensor is saved as it is. Of others the memory that they span is saved, so that the
    copy has the same strides, and tensors that share memory still do.
    """

    def __init__(self, call: _Call, budget: TensorBudget) -> None:
        self._call, self._budget = call, budget
        self._named: dict[str, Tensor] = {}
        self._argument_of: dict[str, str] = {}  # a list of tensors is one argument

    def copy(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        call, plan = self._call, self._call.plan
        pairs = zip(plan.argument_names, args, strict=False)
        call.arguments = [self._text(name, value) for name, value in pairs]
        call.arguments += [f"{name}={self._text(name, value)}" for name, value in kwargs.items()]
        writes = {write.name for write in plan.writes}
        call.written = [name for name in self._named if self._argument_of[name] in writes]
        groups = defaultdict[int, list[str]](list)
        for name, tensor in self._named.items():
            call.addresses[name] = address = storage_address(tensor.untyped_storage())
            groups[address].append(name)
        for names in groups.values():
            self._save(names)
        if plan.draws_random:  # from the generator of the process: one that is given was refused
            call.saved[GENERATOR] = self._budget.copy(
                torch.default_generator.get_state(), plan.name, None
            )

    def _text(self, name: str, value: Any, argument: str | None = None) -> str:
        argument = name if argument is None else argument
        if isinstance(value, Tensor):
            name = f"{name}_" if keyword.iskeyword(name) else name
            self._named[name], self._argument_of[name] = self._checked(value), argument
            return name
        if isinstance(value, list | tuple):
            items = (
                self._text(f"{name}_{index}", item, argument) for index, item in enumerate(value)
            )
            return f"[{', '.join(items)}]"
        if isinstance(value, torch.device):
            return f'torch.device("{value.type}")'
        if isinstance(value, float) and not math.isfinite(value):
            return f'float("{value}")'
        if isinstance(value, Generator):
            raise ReplayError(f"Its argument {name} is a generator, which is not saved.")
        if value is None or isinstance(value, bool | int | float | complex | str):
            return repr(value)
        if isinstance(value, torch.dtype | torch.layout | torch.memory_format):
            return str(value)
        raise ReplayError(
            f"Its argument {name} is a {type(value).__name__}, which cannot be written as text."
        )

    def _checked(self, tensor: Tensor) -> Tensor:
        if tensor.__class__ not in PLAIN:
            raise ReplayError(
                f"One of its inputs is a {type(tensor).__name__}, and repro.py passes plain "
                "tensors."
            )
        return plain(tensor)

    def _save(self, names: Sequence[str]) -> None:
        """Save the memory of tensors that share a storage, as one tensor with the first name."""
        tensors = [self._named[name] for name in names]
        first, is_alone = tensors[0], len(tensors) == 1
        if any(tensor.dtype != first.dtype for tensor in tensors):
            raise ReplayError("Two of its inputs share memory and have different dtypes.")
        begin, end = min(tensor.storage_offset() for tensor in tensors), max(map(_end_of, tensors))
        whole = first
        if not (is_alone and first.is_contiguous()):
            whole = torch.empty(0, dtype=first.dtype, device=first.device)
            whole.set_(first.untyped_storage(), begin, (max(end - begin, 0),), (1,))
        self._call.saved[names[0]] = self._budget.copy(whole, self._call.plan.name, None)
        for name, tensor in zip(names, tensors, strict=True):
            self._call.tensors[name] = {
                "of": names[0],
                "dtype": str(tensor.dtype),
                "shape": list(tensor.shape),
                "stride": None if whole is tensor else list(tensor.stride()),
                "offset": tensor.storage_offset() - begin,
                "device": tensor.device.type,
                "requires_grad": tensor.requires_grad,
            }


def _end_of(tensor: Tensor) -> int:
    if not tensor.numel():
        return int(tensor.storage_offset())
    reach = sum(
        (length - 1) * stride for length, stride in zip(tensor.shape, tensor.stride(), strict=True)
    )
    return int(tensor.storage_offset() + reach + 1)
