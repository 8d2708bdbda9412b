"""The private names of torch (2.11 to 2.15) except Dynamo's, each with its purpose."""

import sys
from collections.abc import Callable, Iterator
from operator import attrgetter, methodcaller
from pathlib import Path
from types import CodeType, FrameType
from typing import TYPE_CHECKING, Any

import torch
from torch import Generator, Tensor, UntypedStorage, nn
from torch.utils.checkpoint import CheckpointFunction

from det_callbacks.internals.private_names import MISSING, PrivateNames

TORCH = PrivateNames("torch")

# Autograd, in the current thread.

graph_task_id: Callable[[], int] = TORCH.needed(
    "torch._C._current_graph_task_id", "the number of the running backward pass, -1 outside any"
)
current_node = TORCH.needed("torch._C._current_autograd_node", "the running autograd node")
next_sequence_number: Callable[[], int] = TORCH.needed(
    "torch._C._autograd._get_sequence_nr", "the sequence number of the next autograd node"
)
top_hooks: Callable[[bool], tuple[Any, Any] | None] = TORCH.needed(
    "torch._C._autograd._top_saved_tensors_default_hooks",
    "the saved-tensor hooks in force, as (pack, unpack)",
)
sequence_number: Callable[[Any], int] = TORCH.attribute(
    "torch.autograd.graph.Node._sequence_nr",
    "the sequence number of an autograd node",
    reads=methodcaller,
)
_run_backward = TORCH.needed(
    "torch.autograd.graph._engine_run_backward",
    "the frame of every backward pass that Python starts",
)
RUN_BACKWARD: Any = getattr(_run_backward, "__code__", None)
BACKWARD = TORCH.name_of(
    "torch.autograd._engine_run_backward",
    "what torch.autograd.backward calls; around that function itself, its warnings would name our "
    "line",
)
_call_module = TORCH.needed("torch.nn.Module._call_impl", "the frame of every call of a module")
CALL_MODULE: Any = getattr(_call_module, "__code__", None)


def keywords_of_call() -> dict[str, Any]:
    """Return the keyword arguments of the innermost module call, which global hooks do not get."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_filename == CALL_MODULE.co_filename and "kwargs" in frame.f_locals:
            return {**frame.f_locals["kwargs"]}
        frame = frame.f_back
    return {}


_DISPATCHING = ("_python_dispatch.py", "_compile.py", str(Path("_dynamo") / "eval_frame.py"))


def is_mode(filename: str, function: str) -> bool:
    """Return whether a frame belongs to a dispatch mode, or to torch's wrapper of it."""
    return function == "__torch_dispatch__" or filename.endswith(_DISPATCHING)


TORCH.needed(
    "torch.utils.checkpoint._checkpoint_hook",
    "the saved-tensor hooks of a checkpoint without reentry",
)
CHECKPOINT_FILE = CheckpointFunction.forward.__code__.co_filename
CHECKPOINT_REGIONS = {"unpack_hook": "frame", "backward": "ctx"}
"""Function in that file that recomputes a checkpointed region -> its variable
that identifies the region.
"""
# the hook's closure holds the region's frame
CHECKPOINT_PACK_HOOK = "_checkpoint_hook.__init__.<locals>.pack_hook"


TORCH.needed(
    "torch.autograd.Function._backward_cls._forward_cls",
    "the class of a Python autograd Function, from the class of its nodes",
)


def forward_code(node: object) -> CodeType | None:
    """Return the forward code of a Python autograd Function by its node,
    or None for torch's nodes.
    """
    forward = getattr(getattr(type(node), "_forward_cls", None), "forward", None)
    return getattr(forward, "__code__", None)


MAKES_SCALE = "_lazy_init_scale_growth_tracker"
_make_scale: Callable[[Any, torch.device], None] = TORCH.needed(
    f"torch.amp.GradScaler.{MAKES_SCALE}",
    "creates the tensors of a gradient scaler, which otherwise its first use does",
)


def scaler_state(scaler: Any) -> dict[str, Tensor]:
    """Return the state of a gradient scaler as tensors, since its
    ``state_dict`` waits for the device.

    It creates the tensors if the scaler is unused; otherwise the first step after a resume would
    have ops that the same step of the uninterrupted run does not have.
    """
    if scaler.is_enabled() and getattr(scaler, "_scale", MISSING) is None:
        _make_scale(scaler, torch.device(getattr(scaler, "_device", "cpu")))
    parts = {"scale": "_scale", "growth_tracker": "_growth_tracker"}
    state = {name: getattr(scaler, attribute, None) for name, attribute in parts.items()}
    return {name: tensor for name, tensor in state.items() if tensor is not None}


# Storages and memory.


storage_address: Callable[[UntypedStorage], int] = TORCH.attribute(
    "torch.UntypedStorage._cdata", "the address of a storage, which identifies it while it is alive"
)
pin_storage: Callable[[UntypedStorage], int] = TORCH.attribute(
    "torch.UntypedStorage._weak_ref",
    "a weak reference that keeps the address of a storage from being reused",
    reads=methodcaller,
)
unpin_storage: Callable[[int], None] = TORCH.needed(
    "torch.UntypedStorage._free_weak_ref", "releases such an address"
)
storage_at: Callable[[int], UntypedStorage | None] = TORCH.needed(
    "torch.UntypedStorage._new_with_weak_ptr", "the storage at such an address, None if it is freed"
)
memory_address: Callable[[Tensor], Any] = TORCH.needed(
    "torch._C._data_address",
    "the address of a tensor's storage, 0 without memory; unlike data_ptr it materialises no "
    "copy-on-write storage",
)
is_zero_tensor: Callable[[Tensor], bool] = TORCH.needed(
    "torch._is_zerotensor", "whether a tensor represents zeros, without memory"
)

# Kinds of tensors.

if TYPE_CHECKING:
    from torch._ops import OpOverload as OpOverload
    from torch.distributed._functional_collectives import (
        AsyncCollectiveTensor as AsyncCollectiveTensor,
    )
    from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode
else:
    AsyncCollectiveTensor = TORCH.needed(
        "torch.distributed._functional_collectives.AsyncCollectiveTensor",
        "the pending output of a collective",
    )
    OpOverload = TORCH.needed("torch._ops.OpOverload", "the class of ops")
    TorchDispatchMode = TORCH.needed(
        "torch.utils._python_dispatch.TorchDispatchMode",
        "sees every op of its thread",
    )
FakeTensor = TORCH.needed("torch._subclasses.fake_tensor.FakeTensor", "a tensor without data")
FunctionalTensor = TORCH.needed(
    "torch._subclasses.functional_tensor.FunctionalTensor",
    "a tensor without data",
)
DispatchKey = TORCH.needed("torch._C.DispatchKey", "names the kernels of an op")
is_functional: Callable[[Tensor], bool] = TORCH.needed(
    "torch._is_functional_tensor", "whether a tensor represents another one while functorch traces"
)
is_wrapper: Callable[[Tensor], bool] = TORCH.needed(
    "torch.utils._python_dispatch.is_traceable_wrapper_subclass",
    "whether a tensor subclass lists its inner tensors",
)
is_transformed: Callable[[Tensor], bool] = TORCH.needed(
    "torch._C._functorch.is_functorch_wrapped_tensor", "whether torch.func has wrapped a tensor"
)
is_grad_tracking: Callable[[Tensor], bool] = TORCH.needed(
    "torch._C._functorch.is_gradtrackingtensor", "whether torch.func.grad has wrapped it"
)
is_batched: Callable[[Tensor], bool] = TORCH.needed(
    "torch._C._functorch.is_legacy_batchedtensor",
    "whether torch.autograd.grad with is_grads_batched has wrapped it, which hides its memory",
)
untransformed: Callable[[Tensor], Tensor] = TORCH.needed(
    "torch._C._functorch.get_unwrapped", "the tensor inside"
)
COO_PARTS = (
    TORCH.name_of("torch.Tensor._indices", "the indices of a sparse COO tensor, coalesced or not"),
    TORCH.name_of("torch.Tensor._values", "its values, likewise"),
)
num_writes: Callable[[Tensor], int] = TORCH.attribute(
    "torch.Tensor._version", "the number of writes to a tensor that autograd knows"
)
JAGGED_CACHES = frozenset(
    {"_min_seqlen_tensor", "_max_seqlen_tensor"}
)  # attributes of a jagged tensor, set on first use

# Dispatch.

schema_of = TORCH.attribute("torch.ops.aten.abs.default._schema", "the schema of an op")
current_mode = TORCH.needed(
    "torch.utils._python_dispatch._get_current_dispatch_mode", "the innermost dispatch mode"
)
push_mode: Callable[[Any], None] = TORCH.needed(
    "torch.utils._python_dispatch._push_mode", "enters a mode again inside its handler"
)
pop_mode = TORCH.needed("torch.utils._python_dispatch._pop_mode", "leaves it")
without_modes = TORCH.needed(
    "torch.utils._python_dispatch._disable_current_modes",
    "hides the code inside from all dispatch modes",
)
num_dispatch_modes: Callable[[], int] = TORCH.needed(
    "torch._C._len_torch_dispatch_stack",
    "the number of open dispatch modes, which is faster than disabling them",
)
num_function_modes: Callable[[], int] = TORCH.needed(
    "torch._C._len_torch_function_stack",
    "the number of open torch-function modes, which is faster than disabling them",
)
without_dispatch = TORCH.needed(
    "torch._C._DisableTorchDispatch",
    "hides the code inside from dispatch modes and tensor subclasses",
)
without_function_modes = TORCH.needed(
    "torch._C.DisableTorchFunction", "hides the code inside from torch-function modes"
)
# calls an op as torch would go on with it, below torch functions;
# before torch 2.13, torch functions of the program may see the op
call_without_torch_function: Callable[..., Any] = (
    torch.overrides.redispatch_function
    if torch.__version__ >= "2.13"
    else lambda function, types, args, kwargs: function(*args, **kwargs)
)
jit_tracer: Callable[[], Any] = TORCH.needed(
    "torch._C._get_tracing_state",
    "the running torch.jit.trace, for which the size of a tensor is a tensor",
)
set_jit_tracer: Callable[[Any], None] = TORCH.needed(
    "torch._C._set_tracing_state", "hides the code between two calls from torch.jit.trace"
)
without_transforms = TORCH.needed(
    "torch._C._DisableFuncTorch", "hides the code inside from torch.func"
)
below_autograd = TORCH.needed(
    "torch._C._AutoDispatchBelowAutograd", "hides the code inside from autograd"
)
without_autocast = TORCH.needed("torch._C._DisableAutocast", "runs ops without autocast")
exclude_key = TORCH.needed(
    "torch._C._SetExcludeDispatchKeyGuard",
    "runs the ops inside a kernel with autocast, as without a mode",
)
has_kernels: Callable[[str], bool] = TORCH.needed(
    "torch._C._dispatch_has_kernel", "whether an op belongs to TorchScript only"
)
has_kernel_for: Callable[[str, str], bool] = TORCH.needed(
    "torch._C._dispatch_has_kernel_for_dispatch_key",
    "whether an op has a kernel; OpOverload.has_kernel_for_dispatch_key counts Python "
    "decompositions too",
)
all_op_names: Callable[[], list[str]] = TORCH.needed(
    "torch._C._dispatch_get_all_op_names",
    "all registered ops; dir(torch.ops.aten) has only those used so far",
)
set_deterministic: Callable[..., None] = TORCH.needed(
    "torch._C._set_deterministic_algorithms",
    "torch.use_deterministic_algorithms, without importing inductor",
)
keep_version: Callable[[Tensor], Any] = TORCH.needed(
    "torch.autograd.grad_mode._unsafe_preserve_version_counter",
    "writes saved bits into a tensor that autograd has saved",
)


TORCH.needed(
    "torch.ops.aten.abs.default._op",
    "calls an op without the frame of OpOverload.__call__",
)
_call_with_key: Callable[[Any], Callable[..., Any]] = TORCH.attribute(
    "torch.ops.aten.abs.default._op_dk",
    "calls the kernel of a composite op; OpOverload.decompose may call a Python one, with "
    "different bits",
)


def kernel_of(func: Any) -> Callable[..., Any]:
    kernel: Callable[..., Any] = func._op if type(func) is OpOverload else func
    return kernel


def pass_on(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an op that a mode does not handle, unseen by torch functions, as without the mode."""
    # with its kernel, a mode below would be skipped too
    return call_without_torch_function(func, (), args, kwargs)


def call_composite(func: Any, *args: Any, **kwargs: Any) -> Any:
    return _call_with_key(func)(DispatchKey.CompositeImplicitAutograd, *args, **kwargs)


def overload_name(func: Any) -> str:
    return func.name().partition(".")[2] or "default"


CudaGraph = TORCH.needed(
    "torch.cuda.graphs._CUDAGraph",
    "the class whose methods capture and replay every CUDA graph; empty without CUDA",
)

# Modules.

global_pre_hooks: dict[int, Any] = TORCH.needed(
    "torch.nn.modules.module._global_forward_pre_hooks",
    "global hooks under one fixed key: Dynamo recompiles for each new key, which the public "
    "functions would take",
)
global_hooks: dict[int, Any] = TORCH.needed(
    "torch.nn.modules.module._global_forward_hooks", "likewise, after a call"
)
always_called: dict[int, bool] = TORCH.needed(
    "torch.nn.modules.module._global_forward_hooks_always_called", "likewise, if a call raises"
)
_A_MODULE = nn.Module()
PARAMETERS = TORCH.name_of(
    "torch.nn.Module._parameters",
    "the dictionary of a module's parameters; named_parameters() builds all names at every call",
    example=_A_MODULE,
)
BUFFERS = TORCH.name_of(
    "torch.nn.Module._buffers", "the dictionary of its buffers", example=_A_MODULE
)
CHILDREN = TORCH.name_of(
    "torch.nn.Module._modules", "the dictionary of its submodules", example=_A_MODULE
)


def modules_in(root: nn.Module, name: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Yield what ``nn.Module.named_modules`` yields, without that method,
    which a class may replace.
    """
    waiting, seen = [(name, root)], set[int]()
    while waiting:
        name, module = waiting.pop()
        if id(module) not in seen:
            seen.add(id(module))
            yield name, module
            children = (
                (key, child)
                for key, child in getattr(module, CHILDREN).items()
                if child is not None
            )
            waiting += reversed(
                [(f"{name}.{key}" if name else key, child) for key, child in children]
            )


DDP_IGNORED = "_ddp_params_and_buffers_to_ignore"  # attribute of a module: names that DDP ignores
left_out_of_state: Callable[[nn.Module], set[str]] = attrgetter(
    TORCH.name_of(
        "torch.nn.Module._non_persistent_buffers_set",
        "the buffers of a module that its state_dict omits",
        example=_A_MODULE,
    )
)


# Data.

DataLoaderIter = TORCH.needed(
    "torch.utils.data.dataloader._BaseDataLoaderIter",
    "refers to the data set",
)


# Generators.

generator_address: Callable[[Generator], int] = TORCH.attribute(
    "torch.Generator._cdata", "identifies a generator through a new Python object"
)
# builds without CUDA have no such name
has_cuda_context: Callable[[int], bool] = lambda index: True  # noqa: E731
if torch.backends.cuda.is_built():
    has_cuda_context = TORCH.needed(
        "torch._C._cuda_hasPrimaryContext",
        "whether the process has used a CUDA device",
    )
_is_in_fork_of_mps: Callable[[], bool] = TORCH.needed(
    "torch.mps._is_in_bad_fork", "whether a process was forked after its MPS device was used"
)
_mps_generator: Callable[[], Generator] = TORCH.needed(
    "torch.mps._get_default_mps_generator", "the default generator of an MPS device"
)


def mps_generators() -> tuple[Generator, ...]:
    """Return the default generator of an MPS device; none in a process that
    was forked after its use.
    """
    return () if _is_in_fork_of_mps() else (_mps_generator(),)


# Several processes.

default_store = TORCH.needed(
    "torch.distributed.distributed_c10d._get_default_store",
    "lets processes exchange values without a collective",
)
process_group_named: Callable[[str], Any] = TORCH.needed(
    "torch.distributed.distributed_c10d._resolve_process_group",
    "the process group with a given name",
)
ddp_facts = TORCH.needed(
    "torch.nn.parallel.DistributedDataParallel._get_ddp_logging_data",
    "DDP's description of its buckets",
)
ddp_parameters = TORCH.needed(
    "torch.nn.parallel.DistributedDataParallel._build_params_for_reducer",
    "the parameters in DDP's order",
)
mark_gradient = TORCH.needed(
    "torch.distributed.Reducer._autograd_hook",
    "tells DDP that a gradient is ready",
)
rebuild_buckets: Callable[[Any], bool] = TORCH.needed(
    "torch.distributed.Reducer._rebuild_buckets", "lets DDP rebuild its buckets"
)
gradient_buckets = TORCH.needed(
    "torch.distributed.Reducer._get_zeros_like_grad_buckets",
    "the assignment of parameters to buckets",
)
