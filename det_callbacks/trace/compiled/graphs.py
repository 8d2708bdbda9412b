"""Describes a graph that Dynamo traced, before a compiler gets it."""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn

from det_callbacks.digest.host import digest_bytes
from det_callbacks.internals.dynamo import GRAPH_MEMBER, GRAPH_SOURCE
from det_callbacks.runs.program import REGION
from det_callbacks.runs.source_text import FUSED
from det_callbacks.trace.source import RESUMED, line_of_trace

_TORCH = str(Path(torch.__file__).parent)
_SYMBOL = re.compile(r"\b[suz]+\d+\b")
_ADDRESS = re.compile(r"0x[0-9a-f]+")


class UserOp(NamedTuple):
    """What the user wrote for a node."""

    op: str  # "gelu"
    line: str  # "model.py:12 in forward"


@dataclass(frozen=True, kw_only=True, eq=False)
class TracedGraph:
    region: str  # name in the coverage, from the traced function ("compiled.Net_forward")
    backend: str
    inputs: tuple[str, ...]  # names in the code, or, for its ``members``, in the traced module
    members: frozenset[str]
    held: tuple[tuple[str, Tensor], ...] = field(
        repr=False
    )  # tensors in the graph, such as those of compiled optimizers
    num_ops: int
    is_graphed: bool  # whether it runs as a CUDA graph, so its runs show different inner ops
    fingerprint: int  # digest of its code, its inputs' dtypes and shapes, and the compiler's name
    lines: Mapping[str, UserOp] = field(repr=False)  # by node


def describe_graph(
    graph: fx.GraphModule, output: Any, example_inputs: Sequence[Any]
) -> TracedGraph:
    """Return the description of a graph; costs about 20 microseconds a node,
    once per compilation.
    """
    compiler = output.compiler_fn
    backend = str(getattr(compiler, "compiler_name", None) or getattr(compiler, "__name__", None))
    nodes = list(graph.graph.nodes)
    placeholders = [node for node in nodes if node.op == "placeholder"]
    code = [
        module.graph.python_code("self").src
        for module in graph.modules()
        if isinstance(module, fx.GraphModule)
    ]
    examples = [node.meta.get("example_value") for node in placeholders]
    shapes = [
        f"{example.dtype}{list(example.shape)}" if isinstance(example, Tensor) else ""
        for example in examples
    ]
    symbols: dict[str, str] = {}  # sizes, numbered in order of appearance
    text = _ADDRESS.sub("", "\n".join([backend, *shapes, *code]))
    text = _SYMBOL.sub(lambda match: symbols.setdefault(match[0], f"size{len(symbols)}"), text)
    attributes = dict.fromkeys(str(node.target) for node in nodes if node.op == "get_attr")
    held = ((name, getattr(graph, name, None)) for name in attributes)
    inputs = [_input_of(node) for node in placeholders]
    return TracedGraph(
        region=f"{REGION}{_name_of(output.root_tx)}",
        backend=backend,
        inputs=tuple(name for name, _ in inputs),
        members=frozenset(name for name, is_member in inputs if is_member),
        held=tuple((name, value) for name, value in held if isinstance(value, Tensor)),
        num_ops=sum(node.op.startswith("call_") for node in nodes),
        is_graphed=_runs_as_cuda_graph(compiler, backend, example_inputs),
        fingerprint=digest_bytes(text.encode()),
        lines=_lines(graph),
    )


def _lines(graph: fx.GraphModule) -> dict[str, UserOp]:
    lines: dict[str, UserOp] = {}
    for module in graph.modules():
        for node in module.graph.nodes if isinstance(module, fx.GraphModule) else ():
            if node.op.startswith("call_") and (line := line_of_trace(node.stack_trace or "")):
                op = (
                    node.target
                    if isinstance(node.target, str)
                    else getattr(node.target, "__name__", node.name)
                )
                lines[node.name] = UserOp(op, line)
    return lines


def fused_source(traced: Iterable[UserOp]) -> tuple[str, ...]:
    """Return the source of a kernel: all ops with their lines if there are several,
    then each line once.
    """
    traced = dict.fromkeys(traced)
    shown = ", ".join(f"{op} ({line.partition(' in ')[0]})" for op, line in traced)
    lines = dict.fromkeys(line for _, line in traced)
    return (f"{FUSED}{shown}", *lines) if len(traced) > 1 else tuple(lines)


def _input_of(node: fx.Node) -> tuple[str, bool]:
    source = getattr(node, GRAPH_SOURCE, None) or getattr(node.meta.get("grapharg"), "source", None)
    text = getattr(source, "name", None)
    if not isinstance(text, str):
        return str(node.target), False
    if GRAPH_MEMBER.fullmatch(text):
        return ".".join(re.findall(r"\['([^']+)'\]", text)[1:]), True
    return re.sub(r"^[LG]\['(\w+)'\]", r"\1", text), False


def _name_of(frame: Any) -> str:
    """Return the name of a traced frame: its function or, for torch's code,
    the module that it calls.
    """
    qualified: str = frame.f_code.co_qualname.rpartition("<locals>.")[2]
    if frame.f_code.co_filename.startswith(_TORCH):
        owner = frame.f_locals.get("self", frame.f_locals.get("fn"))
        module = owner if isinstance(owner, nn.Module) else getattr(owner, "__self__", None)
        is_module = isinstance(module, nn.Module)
        qualified = (
            f"{type(module).__name__}.forward"
            if is_module
            else getattr(owner, "__qualname__", qualified)
        )
    return re.sub(r"\W+", "_", RESUMED.sub(r"\1", qualified)).strip("_") or "graph"


def _runs_as_cuda_graph(compiler: Any, backend: str, inputs: Sequence[Any]) -> bool:
    config: dict[str, Any] = getattr(compiler, "get_compiler_config", dict)()
    is_on_gpu = any(isinstance(value, Tensor) and value.is_cuda for value in inputs)
    return is_on_gpu and (backend == "cudagraphs" or bool(config.get("triton.cudagraphs")))
