"""The private names of torch (2.11 to 2.15) except Dynamo's, each with its purpose and what is lost without it."""

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

# Purposes of names, in addition to recording.
EQUIVALENCE = "BitwiseEquivalenceMode"
OPS = "det-callbacks ops"
COMPARING = "compare_modules"
OF_BUCKETS = "exact resume under DDP"

# Autograd, in the current thread.

_UNNAMED = "ops of backward passes have no module and no source line"
_UNNAMED_REPEATED = "ops that activation checkpointing recomputes have no module"

graph_task_id: Callable[[], int] = TORCH.needed(
    "torch._C._current_graph_task_id", "the number of the running backward pass, -1 outside any"
)
current_node = TORCH.optional(
    "torch._C._current_autograd_node",
    "the running autograd node",
    without=lambda: None,
    lost=_UNNAMED,
)
next_sequence_number: Callable[[], int] = TORCH.optional(
    "torch._C._autograd._get_sequence_nr",
    "the sequence number of the next autograd node",
    without=lambda: -1,
    lost=_UNNAMED,
)
top_hooks: Callable[[bool], tuple[Any, Any] | None] = TORCH.optional(
    "torch._C._autograd._top_saved_tensors_default_hooks",
    "the saved-tensor hooks in force, as (pack, unpack)",
    without=lambda ignores_tracing: None,
    lost=_UNNAMED_REPEATED,
)
sequence_number: Callable[[Any], int] = TORCH.attribute(
    "torch.autograd.graph.Node._sequence_nr", "the sequence number of an autograd node", reads=methodcaller
)
_run_backward = TORCH.optional(
    "torch.autograd.graph._engine_run_backward",
    "the frame of every backward pass that Python starts",
    lost="ops of autograd's formulas look like ops of hooks, and have no source line",
)
RUN_BACKWARD: CodeType | None = None if _run_backward is None else _run_backward.__code__
BACKWARD = TORCH.name_of(
    "torch.autograd._engine_run_backward",
    "what torch.autograd.backward calls; around that function itself, its warnings would name our line",
)
_call_module = TORCH.optional(
    "torch.nn.Module._call_impl",
    "the frame of every call of a module",
    lost="ops in the backward of Python autograd Functions have no module",
)
CALL_MODULE: CodeType | None = None if _call_module is None else _call_module.__code__


def keywords_of_call() -> dict[str, Any]:
    """Return the keyword arguments of the innermost module call, which global hooks do not get."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and CALL_MODULE is not None:
        if frame.f_code.co_filename == CALL_MODULE.co_filename and "kwargs" in frame.f_locals:
            return {**frame.f_locals["kwargs"]}
        frame = frame.f_back
    return {}


_DISPATCHING = ("_python_dispatch.py", "_compile.py", str(Path("_dynamo") / "eval_frame.py"))


def is_mode(filename: str, function: str) -> bool:
    """Return whether a frame belongs to a dispatch mode, or to torch's wrapper of it."""
    return function == "__torch_dispatch__" or filename.endswith(_DISPATCHING)


TORCH.optional(
    "torch.utils.checkpoint._checkpoint_hook",
    "the saved-tensor hooks of a checkpoint without reentry",
    lost=_UNNAMED_REPEATED,
)
CHECKPOINT_FILE = CheckpointFunction.forward.__code__.co_filename
CHECKPOINT_REGIONS = {"unpack_hook": "frame", "backward": "ctx"}
"""Function in that file that recomputes a checkpointed region -> its variable that identifies the region."""
CHECKPOINT_PACK_HOOK = "_checkpoint_hook.__init__.<locals>.pack_hook"  # the hook's closure holds the region's frame


TORCH.optional(
    "torch.autograd.Function._backward_cls._forward_cls",
    "the class of a Python autograd Function, from the class of its nodes",
    lost="ops in the backward of Python autograd Functions have no module and no source line",
)


def forward_code(node: object) -> CodeType | None:
    """Return the forward code of a Python autograd Function by its node, or None for torch's nodes."""
    forward = getattr(getattr(type(node), "_forward_cls", None), "forward", None)
    return getattr(forward, "__code__", None)


MAKES_SCALE = "_lazy_init_scale_growth_tracker"
_make_scale: Callable[[Any, torch.device], None] = TORCH.optional(
    f"torch.amp.GradScaler.{MAKES_SCALE}",
    "creates the tensors of a gradient scaler, which otherwise its first use does",
    without=lambda scaler, device: None,
    lost="at level op a resumed run with a gradient scaler differs from an uninterrupted run",
)


def scaler_state(scaler: Any) -> dict[str, Tensor]:
    """Return the state of a gradient scaler as tensors, since its ``state_dict`` waits for the device.

    It creates the tensors if the scaler is unused; otherwise the first step after a resume would have
    ops that the same step of the uninterrupted run does not have.
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
unpin_storage: Callable[[int], None] = TORCH.needed("torch.UntypedStorage._free_weak_ref", "releases such an address")
storage_at: Callable[[int], UntypedStorage | None] = TORCH.needed(
    "torch.UntypedStorage._new_with_weak_ptr", "the storage at such an address, None if it is freed"
)
memory_address: Callable[[Tensor], Any] = TORCH.needed(
    "torch._C._data_address",
    "the address of a tensor's storage, 0 without memory; unlike data_ptr it materialises no copy-on-write storage",
)
is_zero_tensor: Callable[[Tensor], bool] = TORCH.optional(
    "torch._is_zerotensor",
    "whether a tensor represents zeros, without memory",
    without=lambda tensor: False,
    lost="efficient zero tensors, which forward-mode differentiation makes, have no digests",
)
set_conjugate: Callable[[Tensor, bool], None] = TORCH.needed(
    "torch._C._set_conj", "copies the conjugate bit of a tensor", for_=EQUIVALENCE
)
set_negative: Callable[[Tensor, bool], None] = TORCH.needed(
    "torch._C._set_neg", "copies the negative bit of a tensor", for_=EQUIVALENCE
)

# Kinds of tensors.

if TYPE_CHECKING:
    from torch._ops import OpOverload as OpOverload
    from torch.distributed._functional_collectives import AsyncCollectiveTensor as AsyncCollectiveTensor
    from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode
else:
    AsyncCollectiveTensor = TORCH.needed_class(
        "torch.distributed._functional_collectives.AsyncCollectiveTensor", "the pending output of a collective"
    )
    OpOverload = TORCH.needed_class("torch._ops.OpOverload", "the class of ops")
    TorchDispatchMode = TORCH.needed_class(
        "torch.utils._python_dispatch.TorchDispatchMode", "sees every op of its thread"
    )
FakeTensor = TORCH.needed_class("torch._subclasses.fake_tensor.FakeTensor", "a tensor without data")
FunctionalTensor = TORCH.needed_class("torch._subclasses.functional_tensor.FunctionalTensor", "a tensor without data")
DispatchKey = TORCH.needed("torch._C.DispatchKey", "names the kernels of an op")
is_functional: Callable[[Tensor], bool] = TORCH.optional(
    "torch._is_functional_tensor",
    "whether a tensor represents another one while functorch traces",
    without=lambda tensor: False,
    lost="digests refuse a functional tensor with a different message",
)
is_wrapper: Callable[[Tensor], bool] = TORCH.needed(
    "torch.utils._python_dispatch.is_traceable_wrapper_subclass", "whether a tensor subclass lists its inner tensors"
)
is_transformed: Callable[[Tensor], bool] = TORCH.needed(
    "torch._C._functorch.is_functorch_wrapped_tensor", "whether torch.func has wrapped a tensor"
)
is_grad_tracking: Callable[[Tensor], bool] = TORCH.needed(
    "torch._C._functorch.is_gradtrackingtensor", "whether torch.func.grad has wrapped it"
)
is_batched: Callable[[Tensor], bool] = TORCH.optional(
    "torch._C._functorch.is_legacy_batchedtensor",
    "whether torch.autograd.grad with is_grads_batched has wrapped it, which hides its memory",
    without=lambda tensor: False,
    lost="a gradient of batched gradients ends the recording",
)
untransformed: Callable[[Tensor], Tensor] = TORCH.needed("torch._C._functorch.get_unwrapped", "the tensor inside")
MKLDNN = TORCH.optional(
    "torch._mkldnn",
    "the layout of tensors packed by oneDNN",
    lost="digests refuse tensors of that layout",
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
current_mode = TORCH.needed("torch.utils._python_dispatch._get_current_dispatch_mode", "the innermost dispatch mode")
push_mode: Callable[[Any], None] = TORCH.needed(
    "torch.utils._python_dispatch._push_mode", "enters a mode again inside its handler"
)
pop_mode = TORCH.needed("torch.utils._python_dispatch._pop_mode", "leaves it")
without_modes = TORCH.needed(
    "torch.utils._python_dispatch._disable_current_modes", "hides the code inside from all dispatch modes"
)
num_dispatch_modes: Callable[[], int] = TORCH.optional(
    "torch._C._len_torch_dispatch_stack",
    "the number of open dispatch modes, which is faster than disabling them",
    without=lambda: 1,
    lost="replay and BitwiseEquivalenceMode are slower",
)
num_function_modes: Callable[[], int] = TORCH.optional(
    "torch._C._len_torch_function_stack",
    "the number of open torch-function modes, which is faster than disabling them",
    without=lambda: 1,
    lost="digests of tensors are slower",
)
without_dispatch = TORCH.needed(
    "torch._C._DisableTorchDispatch", "hides the code inside from dispatch modes and tensor subclasses"
)
without_function_modes = TORCH.needed(
    "torch._C.DisableTorchFunction", "hides the code inside from torch-function modes"
)
call_without_torch_function: Callable[..., Any] = TORCH.optional(
    "torch._C._skip_one_hop_torch_function",
    "calls an op again as torch would go on with it, below torch functions",
    without=lambda function, types, args, kwargs: function(*args, **kwargs),
    lost="torch functions of the program also see the ops that run Python code, at level op",
)
jit_tracer: Callable[[], Any] = TORCH.optional(
    "torch._C._get_tracing_state",
    "the running torch.jit.trace, for which the size of a tensor is a tensor",
    without=lambda: None,
    lost="torch.jit.trace inside a step ends the recording",
)
set_jit_tracer: Callable[[Any], None] = TORCH.optional(
    "torch._C._set_tracing_state", "hides the code between two calls from torch.jit.trace", lost="likewise"
)
without_transforms = TORCH.needed("torch._C._DisableFuncTorch", "hides the code inside from torch.func")
below_autograd = TORCH.needed("torch._C._AutoDispatchBelowAutograd", "hides the code inside from autograd")
without_autocast = TORCH.needed("torch._C._DisableAutocast", "runs ops without autocast")
exclude_key = TORCH.needed(
    "torch._C._SetExcludeDispatchKeyGuard", "runs the ops inside a kernel with autocast, as without a mode"
)
has_kernels: Callable[[str], bool] = TORCH.needed(
    "torch._C._dispatch_has_kernel", "whether an op belongs to TorchScript only"
)
has_kernel_for: Callable[[str, str], bool] = TORCH.needed(
    "torch._C._dispatch_has_kernel_for_dispatch_key",
    "whether an op has a kernel; OpOverload.has_kernel_for_dispatch_key counts Python decompositions too",
)
all_op_names: Callable[[], list[str]] = TORCH.needed(
    "torch._C._dispatch_get_all_op_names",
    "all registered ops; dir(torch.ops.aten) has only those used so far",
    for_=OPS,
)
set_deterministic: Callable[..., None] = TORCH.optional(
    "torch._C._set_deterministic_algorithms",
    "torch.use_deterministic_algorithms, without importing inductor",
    without=torch.use_deterministic_algorithms,
    lost="the first op without a deterministic implementation takes seconds",
)
keep_version: Callable[[Tensor], Any] | None = TORCH.optional(
    "torch.autograd.grad_mode._unsafe_preserve_version_counter",
    "writes saved bits into a tensor that autograd has saved",
    lost="observations in a compiled function are not restored",
)


TORCH.optional(
    "torch.ops.aten.abs.default._op",
    "calls an op without the frame of OpOverload.__call__",
    lost="recording takes longer for every op",
)
_call_with_key: Callable[[Any], Callable[..., Any]] = TORCH.attribute(
    "torch.ops.aten.abs.default._op_dk",
    "calls the kernel of a composite op; OpOverload.decompose may call a Python one, with different bits",
)


def kernel_of(func: Any) -> Callable[..., Any]:
    kernel: Callable[..., Any] = getattr(func, "_op", func) if type(func) is OpOverload else func
    return kernel


def pass_on(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an op that a mode does not handle, unseen by torch functions, as without the mode."""
    return call_without_torch_function(func, (), args, kwargs)  # with its kernel, a mode below would be skipped too


def call_composite(func: Any, *args: Any, **kwargs: Any) -> Any:
    return _call_with_key(func)(DispatchKey.CompositeImplicitAutograd, *args, **kwargs)


def overload_name(func: Any) -> str:
    return func.name().partition(".")[2] or "default"


CudaGraph = TORCH.needed(
    "torch.cuda.graphs._CUDAGraph", "the class whose methods capture and replay every CUDA graph; empty without CUDA"
)

# Modules.

global_pre_hooks: dict[int, Any] = TORCH.needed(
    "torch.nn.modules.module._global_forward_pre_hooks",
    "global hooks under one fixed key: Dynamo recompiles for each new key, which the public functions would take",
)
global_hooks: dict[int, Any] = TORCH.needed("torch.nn.modules.module._global_forward_hooks", "likewise, after a call")
always_called: dict[int, bool] = TORCH.needed(
    "torch.nn.modules.module._global_forward_hooks_always_called", "likewise, if a call raises"
)
_A_MODULE = nn.Module()
PARAMETERS = TORCH.name_of(
    "torch.nn.Module._parameters",
    "the dictionary of a module's parameters; named_parameters() builds all names at every call",
    example=_A_MODULE,
)
BUFFERS = TORCH.name_of("torch.nn.Module._buffers", "the dictionary of its buffers", example=_A_MODULE)
CHILDREN = TORCH.name_of("torch.nn.Module._modules", "the dictionary of its submodules", example=_A_MODULE)


def modules_in(root: nn.Module, name: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Yield what ``nn.Module.named_modules`` yields, without that method, which a class may replace."""
    waiting, seen = [(name, root)], set[int]()
    while waiting:
        name, module = waiting.pop()
        if id(module) not in seen:
            seen.add(id(module))
            yield name, module
            children = ((key, child) for key, child in getattr(module, CHILDREN).items() if child is not None)
            waiting += reversed([(f"{name}.{key}" if name else key, child) for key, child in children])


DDP_IGNORED = "_ddp_params_and_buffers_to_ignore"  # attribute of a module: names that DDP ignores
left_out_of_state: Callable[[nn.Module], set[str]] = attrgetter(
    TORCH.name_of(
        "torch.nn.Module._non_persistent_buffers_set",
        "the buffers of a module that its state_dict omits",
        example=_A_MODULE,
    )
)


# Data.

DataLoaderIter = TORCH.needed_class("torch.utils.data.dataloader._BaseDataLoaderIter", "refers to the data set")
leaves_with_path: Callable[[Any], list[tuple[Any, Any]]] = TORCH.needed(
    "torch.utils._pytree.tree_leaves_with_path", "the tensors in a module's arguments and results", for_=COMPARING
)
path_text: Callable[[Any], str] = TORCH.needed("torch.utils._pytree.keystr", "their names", for_=COMPARING)


# Generators.

generator_address: Callable[[Generator], int] = TORCH.attribute(
    "torch.Generator._cdata", "identifies a generator through a new Python object"
)
_UNUSED = "generators of CUDA devices that the process has not used are also recorded"
has_cuda_context: Callable[[int], bool] = lambda index: True  # noqa: E731  # builds without CUDA have no such name
if torch.backends.cuda.is_built():
    has_cuda_context = TORCH.optional(
        "torch._C._cuda_hasPrimaryContext",
        "whether the process has used a CUDA device",
        without=has_cuda_context,
        lost=_UNUSED,
    )
_NO_MPS = "the generator of an MPS device is not recorded"
_is_in_fork_of_mps: Callable[[], bool] = TORCH.optional(
    "torch.mps._is_in_bad_fork",
    "whether a process was forked after its MPS device was used",
    without=lambda: True,
    lost=_NO_MPS,
)
_mps_generator: Callable[[], Generator] | None = TORCH.optional(
    "torch.mps._get_default_mps_generator", "the default generator of an MPS device", lost=_NO_MPS
)


def mps_generators() -> tuple[Generator, ...]:
    """Return the default generator of an MPS device; none in a process that was forked after its use."""
    return () if _mps_generator is None or _is_in_fork_of_mps() else (_mps_generator(),)


# Several processes.

default_store = TORCH.needed(
    "torch.distributed.distributed_c10d._get_default_store", "lets processes exchange values without a collective"
)
process_group_named: Callable[[str], Any] = TORCH.needed(
    "torch.distributed.distributed_c10d._resolve_process_group", "the process group with a given name"
)
ddp_facts = TORCH.needed(
    "torch.nn.parallel.DistributedDataParallel._get_ddp_logging_data",
    "DDP's description of its buckets",
    for_=OF_BUCKETS,
)
ddp_parameters = TORCH.needed(
    "torch.nn.parallel.DistributedDataParallel._build_params_for_reducer",
    "the parameters in DDP's order",
    for_=OF_BUCKETS,
)
mark_gradient = TORCH.needed(
    "torch.distributed.Reducer._autograd_hook", "tells DDP that a gradient is ready", for_=OF_BUCKETS
)
rebuild_buckets: Callable[[Any], bool] = TORCH.needed(
    "torch.distributed.Reducer._rebuild_buckets", "lets DDP rebuild its buckets", for_=OF_BUCKETS
)
gradient_buckets = TORCH.needed(
    "torch.distributed.Reducer._get_zeros_like_grad_buckets", "the assignment of parameters to buckets", for_=OF_BUCKETS
)
