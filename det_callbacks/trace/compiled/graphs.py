"""A graph that Dynamo traced: its name, what goes in, and a digest of what it does."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import fx, nn

from det_callbacks.digest import digest_bytes
from det_callbacks.runs.program import REGION

_TORCH = str(Path(torch.__file__).parent)

TRANSPARENT_BACKENDS = frozenset(
    {
        "eager",
        "eager_noexcept",
        "eager_debug",
        "pre_dispatch_eager",
        "aot_eager",
        "aot_eager_default_partitioner",
        "aot_eager_decomp_partition",
        "aot_eager_decomp_partition_with_mode",
    }
)
"""Compilers of torch 2.13 that run each op of a graph by itself, so that every one is seen."""

_RESUMED = re.compile(r"(?P<owner>.*\.)?torch_dynamo_resume_in_(?P<function>.+)_at_(?P<line>\d+)")
_SYMBOL = re.compile(r"\b[suz]+\d+\b")
_CHILD = re.compile(r"(?:_modules|_parameters|_buffers)\['([^']+)'\]|\.(?!_)(\w+)")


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphInput:
    """One input of a graph.

    Attributes:
        name: as the code has it: "x", "batch[0]", "weight".
        path: the tensor's qualified name in the module whose code was traced; None where it is none of its tensors.
        is_buffer: whether it is a buffer of that module.
    """

    name: str
    path: str | None = None
    is_buffer: bool = False


@dataclass(frozen=True, kw_only=True, eq=False)
class TracedGraph:
    """A graph as Dynamo traced it, before a compiler got it.

    Attributes:
        name: of the region: the function whose code it is, without dots ("Net_forward"), with "_2" for the part after
            its first graph break and so on.
        backend: name of the compiler.
        inputs: of the graph, in order.
        modules: paths of the modules called inside, relative to the one whose code it is.
        num_ops: calls in the graph.
        is_graphed: its first runs warm up and capture a CUDA graph and the others replay it, so that each shows
            something else of what is inside.
        fingerprint: 64-bit digest of its calls, constants, dtypes and shapes, and of the compiler's name.
        held: tensors that the graph holds itself: Dynamo makes the parameters and states of a compiled optimizer
            attributes of the graph (torch 2.13).
    """

    name: str
    backend: str
    inputs: tuple[GraphInput, ...]
    modules: frozenset[str] = frozenset()
    num_ops: int = 0
    is_graphed: bool = False
    fingerprint: int = 0
    held: tuple[tuple[GraphInput, torch.Tensor], ...] = field(default=(), repr=False)
    entering: object = field(default_factory=object, repr=False)
    inside: object = field(default_factory=object, repr=False)
    leaving: object = field(default_factory=object, repr=False)
    """Stand for the rows of the region where an op's overload stands for those of an op."""
    _backwards: dict[tuple[str, ...], "TracedGraph"] = field(default_factory=dict, repr=False)

    def with_held(self, args: Sequence[Any]) -> list[tuple[GraphInput, Any]]:
        """Return the inputs of a call with what they are, and the tensors that the graph holds itself."""
        return [*zip(self.inputs, args, strict=True), *self.held]

    @property
    def region(self) -> str:
        """Its name as the coverage shows it."""
        return f"{REGION}{self.name}"

    @property
    def is_transparent(self) -> bool:
        """Whether the compiler runs op after op, so that all of them are seen."""
        return self.backend in TRANSPARENT_BACKENDS

    def backward(self, names: tuple[str, ...]) -> "TracedGraph":
        """Return what stands for its backward pass, whose inputs are gradients of these names."""
        known = self._backwards.get(names)
        if known is None:
            known = self._backwards[names] = TracedGraph(
                name=self.name,
                backend=self.backend,
                inputs=tuple(GraphInput(name=name) for name in names),
                num_ops=self.num_ops,
                is_graphed=self.is_graphed,
                fingerprint=self.fingerprint,
            )
        return known


class RegionNames:
    """Names of the functions whose code was compiled, with a number for the parts between graph breaks."""

    def __init__(self) -> None:
        self._parts: dict[tuple[str, str], list[str]] = {}

    def of(self, code: Any, owner: object) -> str:
        """Return the name of a traced frame.

        Args:
            code: of the frame.
            owner: what ``self`` is there, or the function that it calls: stands for code of torch's own.
        """
        qualified = code.co_qualname.rpartition("<locals>.")[2]
        line = ""
        resumed = _RESUMED.fullmatch(qualified)
        if resumed is not None:
            qualified, line = (resumed["owner"] or "") + resumed["function"], resumed["line"]
        if code.co_filename.startswith(_TORCH):
            inner = getattr(owner, "__qualname__", None)
            qualified = f"{type(owner).__name__}.forward" if isinstance(owner, nn.Module) else inner or qualified
        name = re.sub(r"\W+", "_", qualified).strip("_") or "graph"
        if not line:
            return name
        # by the order in which they are compiled: a line number would be another one after each edit above it
        parts = self._parts.setdefault((code.co_filename, name), [])
        if line not in parts:
            parts.append(line)
        return f"{name}_{parts.index(line) + 2}"


def describe_graph(graph: fx.GraphModule, *, name: str, backend: str, is_graphed: bool) -> TracedGraph:
    """Return what is kept of a graph; costs some 20 microseconds a node, once each time something is compiled."""
    nodes = list(graph.graph.nodes)
    placeholders = [node for node in nodes if node.op == "placeholder"]
    return TracedGraph(
        name=name,
        backend=backend,
        inputs=tuple(_input_of(node) for node in placeholders),
        modules=frozenset(path for node in nodes if (path := module_path(node)) is not None),
        num_ops=sum(node.op.startswith("call_") for node in nodes),
        is_graphed=is_graphed,
        fingerprint=digest_bytes(_renamed("\n".join([backend, *_lines(graph)])).encode()),
        held=tuple(_held(graph)),
    )


def module_path(node: fx.Node) -> str | None:
    """Return the innermost module whose call a node comes from, relative to the traced module; None outside any."""
    stack: Mapping[str, tuple[str, type]] = node.meta.get("nn_module_stack") or {}
    if not stack:
        return None
    path, _ = list(stack.values())[-1]
    return path_in_module(path)


def path_in_module(text: str) -> str:
    """Return "net.0.weight" for "L['self']._modules['net']._modules['0']._parameters['weight']", or its short form."""
    rest = text.partition("]")[2]
    if "['" not in rest:
        return rest.lstrip(".")
    return ".".join(first or second for first, second in _CHILD.findall(rest))


def _input_of(node: fx.Node) -> GraphInput:
    source = getattr(node, "_dynamo_source", None)
    if source is None:
        known = node.meta.get("grapharg")
        source = None if known is None else known.source
    text = _source_text(source)
    if text is None:
        return GraphInput(name=str(node.target))
    if "_parameters[" in text or "_buffers[" in text:
        path = path_in_module(text)
        return GraphInput(name=path, path=path, is_buffer="_buffers[" in text)
    return GraphInput(name=re.sub(r"^[LG]\['(\w+)'\]", r"\1", text))


def _source_text(source: Any) -> str | None:
    name = getattr(source, "name", None)
    if callable(name):  # a method up to torch 2.9
        name = name()
    return name if isinstance(name, str) else None


def _lines(graph: fx.GraphModule) -> Iterator[str]:
    numbers = {node: index for index, node in enumerate(graph.graph.nodes)}
    for node in graph.graph.nodes:
        value = node.meta.get("example_value")
        shown = _shown(value, numbers) if value is not None else ""
        if node.op in ("placeholder", "output"):
            yield f"{node.op} {_shown(node.args, numbers) if node.op == 'output' else ''} {shown}"
            continue
        arguments = f"{_shown(node.args, numbers)} {_shown(dict(node.kwargs), numbers)}"
        yield f"{node.op} {_target_name(node.target)} {arguments} {shown}"
        inner = getattr(graph, node.target, None) if node.op == "get_attr" and "." not in str(node.target) else None
        if isinstance(inner, fx.GraphModule):
            yield from (f"  {line}" for line in _lines(inner))


def _target_name(target: Any) -> str:
    if isinstance(target, str):
        return target
    name = getattr(target, "__qualname__", None) or getattr(target, "__name__", None) or str(target)
    return f"{getattr(target, '__module__', '')}.{name}"


def _shown(value: Any, numbers: Mapping[fx.Node, int]) -> str:
    """Return an argument as text that is the same in every process."""
    if isinstance(value, fx.Node):
        return f"%{numbers.get(value, -1)}"
    if isinstance(value, torch.Tensor):
        return f"{value.dtype}{[str(size) for size in value.shape]}{value.device.type}"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key}: {_shown(item, numbers)}" for key, item in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "(" + ", ".join(_shown(item, numbers) for item in value) + ")"
    if isinstance(value, slice):
        return f"slice{_shown((value.start, value.stop, value.step), numbers)}"
    text = str(value)
    return type(value).__name__ if " at 0x" in text or "\n" in text else text


def _renamed(text: str) -> str:
    """Number the symbols of sizes in the order in which they come."""
    known: dict[str, str] = {}
    return _SYMBOL.sub(lambda found: known.setdefault(found[0], f"size{len(known)}"), text)


def _held(graph: fx.GraphModule) -> Iterator[tuple[GraphInput, torch.Tensor]]:
    for name in dict.fromkeys(str(node.target) for node in graph.graph.nodes if node.op == "get_attr"):
        value = getattr(graph, name, None)
        if isinstance(value, torch.Tensor):
            yield GraphInput(name=name), value
