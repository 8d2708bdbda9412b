"""Plans for recording each ``OpOverload``, and the tensors that a call reads and writes.

The tables have facts that schemas lack; ``tests/unit/test_overloads.py`` checks each entry against
the installed torch.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor
from torch.overrides import enable_reentrant_dispatch

from det_callbacks.internals.torch import (
    DispatchKey,
    OpOverload,
    exclude_key,
    has_kernel_for,
    has_kernels,
    kernel_of,
    overload_name,
    schema_of,
)
from det_callbacks.trace.components import has_parts

OPAQUE_OUTPUTS: Mapping[str, frozenset[int]] = {
    # workspaces and reserved buffers
    "aten.mkldnn_rnn_layer": frozenset({3}),
    "aten._cudnn_rnn": frozenset({3, 4}),
    "aten.miopen_rnn": frozenset({3, 4}),
    "aten.cudnn_batch_norm": frozenset({3}),
    "aten._batch_norm_with_update": frozenset({3}),
    "aten._batch_norm_with_update_functional": frozenset({3}),
    "aten._scaled_dot_product_cudnn_attention": frozenset({6, 7, 8}),
    "aten._cudnn_attention_forward": frozenset({6, 7, 8}),
    "aten._scaled_dot_product_fused_attention_overrideable": frozenset({6, 7, 8}),
    "aten._scaled_dot_product_flash_attention": frozenset({6, 7, 8}),
    "aten._flash_attention_forward": frozenset({2, 3, 4}),
    "aten._scaled_dot_product_efficient_attention": frozenset({1, 2, 3}),
    "aten._efficient_attention_forward": frozenset({1, 2, 3}),
    # total weight: not written on CUDA without a reduction (cuda/NLLLoss2d.cu)
    "aten.nll_loss2d_forward": frozenset({1}),
    # log_alpha, written only up to the lengths
    "aten._ctc_loss": frozenset({1}),
    # FSDP2's buffer, where only this rank's part (output 0) is written
    "fsdp.all_gather_copy_in": frozenset({1}),
}
"""Op -> indices of returned tensors that are not digested, because some of
their bits are never written.
"""

AUTOCASTS_INSIDE = frozenset({"aten._trilinear", "aten.linalg_pinv"})
"""Ops without an autocast rule whose kernels call ops with one (found by
running all ops in torch 2.13).
"""

HIDDEN_WRITES: Mapping[str, tuple[str, ...]] = {
    "aten.native_batch_norm": ("running_mean", "running_var"),
    "aten.cudnn_batch_norm": ("running_mean", "running_var"),
    "aten.miopen_batch_norm": ("running_mean", "running_var"),
    "aten.batch_norm_update_stats": ("running_mean", "running_var"),
    "aten.batch_norm_gather_stats": ("running_mean", "running_var"),
    "aten.batch_norm_gather_stats_with_counts": ("running_mean", "running_var"),
}
"""Op -> undeclared writes (running statistics); if the op has an argument ``training``,
only if that is true.
"""

WRITTEN_IF: Mapping[str, tuple[str, str]] = {
    "aten.rrelu_with_noise": ("noise", "training"),
    "aten.rrelu_with_noise_": ("noise", "training"),
    "aten._fused_adam_": ("grads", "grad_scale"),
    "aten._fused_adamw_": ("grads", "grad_scale"),
    "aten._fused_sgd_": ("grads", "grad_scale"),
    "aten._fused_adagrad_": ("grads", "grad_scale"),
}
"""Op -> a declared write, and the argument that it requires."""

OPAQUE_WRITES: Mapping[str, frozenset[str]] = {
    "aten.mkldnn_rnn_layer_backward": frozenset({"workspace"}),
    # derivatives.yaml passes them a clone if the graph is retained
    "aten._cudnn_rnn_backward": frozenset({"reserve"}),
    "aten.miopen_rnn_backward": frozenset({"reserve"}),
    "aten.cudnn_batch_norm_backward": frozenset({"reserveSpace"}),
    "aten.batch_norm_backward": frozenset({"reserve"}),
}
"""Op -> arguments that it uses as scratch memory: opaque outputs of another op."""

HIDDEN_STATES: Mapping[str, str] = {
    "aten._cudnn_rnn": "dropout_state",
    "aten.miopen_rnn": "dropout_state",
}
"""Op -> argument with the state of a random generator, which the kernel advances undeclared."""

UNINITIALISED = frozenset(
    f"aten.{name}"
    for name in (
        *("empty", "empty_like", "empty_strided", "empty_permuted", "empty_quantized", "new_empty"),
        *("new_empty_strided", "_empty_affine_quantized", "_empty_per_channel_affine_quantized"),
    )
)
"""Ops that return memory unwritten."""

UNDECLARED_VIEWS = frozenset(
    {
        *("aten._unsafe_view", "aten.unsafe_split", "aten.unsafe_split_with_sizes"),
        *("inductor._alloc_from_pool", "inductor._reinterpret_tensor"),
    }
)
"""Views that the schema does not declare."""

OVERWRITES = frozenset(
    f"aten.{name}"
    for name in (
        *(
            "copy_",
            "zero_",
            "fill_",
            "_foreach_copy_",
            "_foreach_zero_",
            "normal_",
            "uniform_",
            "random_",
        ),
        *("bernoulli_", "exponential_", "geometric_", "cauchy_", "log_normal_"),
    )
)
"""Ops that overwrite their first argument without reading it;
schemas show which ops are out variants.
"""

RELAYOUTS = frozenset(
    f"aten.{name}"
    for name in (
        *("set_", "resize_", "resize_as_", "_resize_output_", "record_stream"),
        "shallow_copy_data_",  # since torch 2.14
    )
) | {"inductor.resize_storage_bytes_"}
"""Ops that change a tensor's storage or its size."""

_OWN_KERNELS = ("CPU", "CUDA", "MPS", "XPU", "PrivateUse1", "CompositeExplicitAutograd")
_IGNORED_NAMESPACES = frozenset(
    {"prim", "prims_internal", "profiler", "debugprims", "det_callbacks"}
)
_COLLECTIVE_NAMESPACES = frozenset(
    {"c10d", "_c10d_functional", "_c10d_functional_autograd", "symm_mem"}
)


class OpKind(Enum):
    DIGEST = "digest"
    VIEW = "view"
    UNINITIALISED = "uninitialised"
    RELAYOUT = "relayout"
    COLLECTIVE = "collective"
    COMPOSITE = "composite"
    OPAQUE = "opaque"
    IGNORED = "no_tensors"


@dataclass(frozen=True, slots=True, kw_only=True)
class ArgumentWrite:
    index: int
    name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class OpPlan:
    """How to record calls of one overload.

    Attributes:
        base: ``namespace.op``.
        call: runs the op without ``OpOverload.__call__``.
        number_arguments: arguments that take any Python number, so that 1, 1.0 and True differ.
        is_functional: whether it writes no argument and returns only fresh tensors.
        writes: arguments that it writes in place, declared or hidden, in the order of the schema.
        sole_write: position of the tensor argument that it writes, if it
            writes nothing else, or -1.
        fresh_returns: indices of returns that alias no argument.
        written_if: argument among ``writes`` -> the argument that the write requires.
        is_overwrite: whether it does not read the written arguments.
        is_plain: whether a returned tensor is digested directly.
        may_be_in_flight: whether, with ``non_blocking``, its output may be incomplete until the
            device is synchronised.
        whole: for a composite op, the plan of a call that is not decomposed.
        is_reducing: see ``REDUCING``.
    """

    name: str  # ``namespace.op.overload``
    base: str
    kind: OpKind
    call: Callable[..., Any]
    argument_names: tuple[str, ...] = ()
    defaults: Mapping[str, Any] = field(default_factory=dict)
    number_arguments: frozenset[str] = frozenset()
    is_functional: bool = False
    writes: tuple[ArgumentWrite, ...] = ()
    sole_write: int = -1
    fresh_returns: tuple[int, ...] = ()
    returns_one: bool = False
    written_if: Mapping[str, str] = field(default_factory=dict)
    is_overwrite: bool = False
    is_plain: bool = False
    opaque_outputs: frozenset[int] = frozenset()
    draws_random: bool = False
    may_be_in_flight: bool = False
    is_reducing: bool = False
    whole: "OpPlan | None" = None

    def inputs(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[tuple[str, Any]]:
        """Yield the arguments of a call by name, except those that
        it overwrites without reading.
        """
        overwritten = {write.name for write in self.writes} if self.is_overwrite else ()
        for name, value in (*zip(self.argument_names, args, strict=False), *kwargs.items()):
            if name not in overwritten:
                yield name, value

    def argument(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        index = self.argument_names.index(name)
        return args[index] if index < len(args) else kwargs.get(name)


@cache
def make_plan(func: Any) -> OpPlan:
    """Return the plan for an overload; costs about 200 microseconds the first time."""
    if not isinstance(func, OpOverload):
        name = f"higher_order.{func}"
        return OpPlan(name=name, base=name, kind=OpKind.OPAQUE, call=func)
    schema = schema_of(func)
    arguments, returns = schema.arguments, schema.returns
    names = tuple(argument.name for argument in arguments)
    base = f"{func.namespace}.{schema.name.partition('::')[2]}"
    name = f"{base}.{overload_name(func)}"
    hidden = HIDDEN_WRITES.get(base, ())
    written = [
        ArgumentWrite(index=index, name=argument.name)
        for index, argument in enumerate(arguments)
        if argument.name in hidden
        or (argument.alias_info is not None and argument.alias_info.is_write)
    ]
    conditions = dict.fromkeys(hidden, "training") if "training" in names else {}
    if base in WRITTEN_IF:
        conditions = dict([WRITTEN_IF[base]])
    is_declared = returns and all(
        returned.alias_info and not returned.alias_info.is_write for returned in returns
    )
    is_view = not written and bool(is_declared or base in UNDECLARED_VIEWS)
    call = kernel_of(func)
    may_be_in_flight = "non_blocking" in names
    fresh_returns = tuple(
        index for index, returned in enumerate(returns) if returned.alias_info is None
    )
    sole_write = -1
    if len(written) == 1 and not hidden and not may_be_in_flight and not fresh_returns:
        argument = arguments[written[0].index]
        if str(argument.type) == "Tensor" and not argument.kwarg_only:
            sole_write = written[0].index
    plan = OpPlan(
        name=name,
        base=base,
        kind=_kind_of(func, base, is_view=is_view),
        call=partial(_call_with_autocast, call) if base in AUTOCASTS_INSIDE else call,
        argument_names=names,
        defaults={
            argument.name: argument.default_value
            for argument in arguments
            if argument.has_default_value()
        },
        number_arguments=frozenset(
            argument.name
            for argument in arguments
            if re.search("number|Tensor", str(argument.type))
        ),
        is_functional=not written and len(fresh_returns) == len(returns),
        writes=tuple(written),
        sole_write=sole_write,
        fresh_returns=fresh_returns,
        returns_one=len(returns) == 1,
        written_if=conditions,
        is_overwrite=base in OVERWRITES or _is_out_variant(func, written),
        is_plain=base not in OPAQUE_OUTPUTS and not may_be_in_flight,
        opaque_outputs=OPAQUE_OUTPUTS.get(base, frozenset()),
        draws_random=torch.Tag.nondeterministic_seeded in func.tags,
        may_be_in_flight=may_be_in_flight,
        is_reducing=name in REDUCING,
    )
    is_taken_apart = plan.kind in (OpKind.DIGEST, OpKind.VIEW) and _is_composite(func.name())
    return replace(plan, kind=OpKind.COMPOSITE, whole=plan) if is_taken_apart else plan


def _call_with_autocast(call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Run an op with the autocast state of its call, since handlers run without autocast."""
    with ExitStack() as stack:
        for device in {tensor.device.type for tensor in tensors_in((*args, *kwargs.values()))}:
            with enable_reentrant_dispatch():
                is_on = torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(
                    device
                )
            if is_on:
                key = getattr(DispatchKey, f"Autocast{device.upper()}")
                stack.enter_context(exclude_key(key, False))
        return call(*args, **kwargs)


REDUCING: dict[str, str | None] = {
    "aten.zero_.default": None,
    "aten._local_scalar_dense.default": None,
    "aten.mul.out": "self",
    "aten.div_.Scalar": "self",
    "aten.copy_.default": "src",
}
"""Op that DDP's reducer calls for unused parameters (``mark_variable_ready_dense``)
-> its gradient argument.
"""


def _is_out_variant(func: OpOverload, written: Sequence[ArgumentWrite]) -> bool:
    """Return whether an op is an out variant: it only writes its results into arguments.

    Since torch 2.13 such ops have ``torch.Tag.out``, but not in all namespaces.
    """
    arguments = schema_of(func).arguments
    has_only_results = bool(written) and all(arguments[write.index].kwarg_only for write in written)
    return has_only_results or "out" in overload_name(func).split("_")


def _is_composite(name: str) -> bool:
    """Return whether an op's only kernel calls other ops.

    Autograd decomposes it before a mode sees it, except in inference mode
    and for inference tensors.
    """
    if not has_kernels(name):
        return False  # a TorchScript op on numbers
    has_own = any(has_kernel_for(name, key) for key in _OWN_KERNELS)
    return has_kernel_for(name, "CompositeImplicitAutograd") and not has_own


def _kind_of(func: OpOverload, base: str, *, is_view: bool) -> OpKind:
    if func.namespace in _IGNORED_NAMESPACES or base == "inductor.accumulate_grad_":
        return OpKind.IGNORED
    if func.namespace in _COLLECTIVE_NAMESPACES:
        return OpKind.COLLECTIVE
    if base in UNINITIALISED:
        return OpKind.UNINITIALISED
    if base in RELAYOUTS:
        return OpKind.RELAYOUT
    if is_view:
        return OpKind.VIEW
    return OpKind.DIGEST


def written_arguments(plan: OpPlan, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    """Return the tensors among the arguments that a call writes, in the order of the schema."""
    written: list[Tensor] = []
    for write in plan.writes:
        if plan.written_if and (condition := plan.written_if.get(write.name)):
            flag = plan.argument(condition, args, kwargs)
            if flag is None or flag is False:
                continue
        value = args[write.index] if write.index < len(args) else kwargs.get(write.name)
        if isinstance(value, Tensor):
            written.append(value)
        elif isinstance(value, list | tuple):
            written.extend(item for item in value if isinstance(item, Tensor))
    return written


def written_by_call(
    plan: OpPlan, out: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Sequence[Any]:
    """Return everything that a call wrote: fresh tensors and numbers,
    then its written arguments.
    """
    if not plan.fresh_returns:
        return written_arguments(plan, args, kwargs)
    returned = out if isinstance(out, list | tuple) and not plan.returns_one else (out,)
    outputs: list[Any] = []
    for index in plan.fresh_returns:
        if index in plan.opaque_outputs or index >= len(returned):
            continue
        value = returned[index]
        if isinstance(value, list | tuple):
            outputs.extend(item for item in value if item is not None)
        elif value is not None:
            outputs.append(value)
    if plan.writes:
        outputs.extend(written_arguments(plan, args, kwargs))
    return outputs


def tensors_read(plan: OpPlan, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    """Return the tensors among the arguments that a call reads but does not write."""
    written = {id(tensor) for tensor in written_arguments(plan, args, kwargs)}
    if kwargs.get("beta") == 0:  # baddbmm and similar ops ignore their first input
        args = args[1:]
    read: list[Tensor] = []
    for value in (*args, *kwargs.values()):
        items = value if isinstance(value, list | tuple) else (value,)
        read.extend(item for item in items if isinstance(item, Tensor) and id(item) not in written)
    return read


def in_flight(
    plan: OpPlan, out: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[list[Tensor], set[torch.device]] | None:
    """Return the tensors that a call copies to the host asynchronously,
    and from which devices; None for any other.
    """
    is_non_blocking = plan.argument("non_blocking", args, kwargs)
    written = (
        written_arguments(plan, args, kwargs)
        if plan.writes
        else [out]
        if isinstance(out, Tensor)
        else []
    )
    on_host = [tensor for tensor in written if tensor.is_cpu] if is_non_blocking else []
    devices = {value.device for value in tensors_in(args) if not value.is_cpu} if on_host else set()
    return (on_host, devices) if devices else None


def tensors_in(values: Iterable[Any]) -> Iterator[Tensor]:
    """Yield the tensors among values and in nested lists."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from tensors_in(value)


def comes_apart(plan: OpPlan, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return whether a mode has to decompose an op, because autograd did not.

    Autograd does not decompose ops called inside a kernel, or ops with kernels for special tensors,
    such as nested ones.
    """
    if plan.whole is None:
        return False
    tensors = list(tensors_in((*args, *kwargs.values())))
    if any(has_parts(tensor) or tensor.is_nested or tensor.is_quantized for tensor in tensors):
        return False
    return torch.is_inference_mode_enabled() or (
        bool(tensors) and all(tensor.is_inference() for tensor in tensors)
    )
