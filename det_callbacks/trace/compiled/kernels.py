"""The kernels that inductor generated: globals of a Python module,
whose function ``call`` runs them.

A C++ kernel is a function, a Triton kernel an object with a method ``run``. While a recorded graph
runs, the globals are ours, for both kinds: nothing is compiled again, and outside a recorded step
everything is as inductor left it.
"""

import ast
import re
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import wraps
from operator import getitem
from pathlib import Path
from sys import _getframe
from threading import RLock, get_ident
from types import FrameType, ModuleType
from typing import Any, NamedTuple, Protocol

from torch import Tensor, fx

from det_callbacks.internals.dynamo import (
    generated_modules,
    key_of_lowered,
    module_key,
    node_of_buffer,
    nodes_of_kernel,
    triton_arguments,
    triton_launchers,
    written_by_triton,
)
from det_callbacks.runs.program import KERNEL
from det_callbacks.trace.compiled.graphs import Traced
from det_callbacks.trace.overloads import OpKind, make_plan
from det_callbacks.trace.source import line_of_trace

_CPP, _TRITON = "cpp_pybinding", "triton"  # the functions that compile a kernel
_ALLOCATES = "empty_strided_"
# what a node of inductor's graph was before decompositions: the op, and nodes of Dynamo's graph
ORIGINAL_OP, FROM_NODE = "original_aten", "from_node"
_NOTE = re.compile(
    r"\s*# (?:Topologically Sorted|Unsorted) Source Nodes: \[(.*?)\], Original ATen: \[(.*?)\]"
)
_SIGNATURE = re.compile(r'extern "C".*?\((.*?)\)\s*\{', re.DOTALL)


@dataclass(frozen=True, slots=True, eq=False)
class Kernel:
    """What a kernel does with its arguments, by index."""

    op: str
    writes: frozenset[int] = frozenset()
    updates: frozenset[int] = frozenset()  # those of ``writes`` that it also reads
    scratch: frozenset[int] = frozenset()  # workspaces, whose contents mean nothing


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Note:
    """Inductor's comment on a kernel or a call: nodes of Dynamo's graph by name, and ops."""

    nodes: tuple[str, ...]
    ops: tuple[str, ...]


@dataclass(slots=True, eq=False, kw_only=True)
class GeneratedCode:
    """The text of a generated module, as far as a recording needs it.

    Attributes:
        key: names the module.
        unseen: why its kernels cannot be seen; "" if they can.
        compiled_by: by kernel, the function that compiles it.
        kernels: what each kernel does; those of Triton on their first call.
        first_writes: by line of a call, the arguments whose memory holds nothing yet that the call
            may read, although another buffer may have used it before.
        notes: comments by line, of the kernel's definition or of a call.
        buffers: by line of a call, the buffers that a kernel is given ("" for other arguments), or
            the one that another op makes.
        lines: by kernel, the line of its definition.
    """

    key: str = ""
    unseen: str = ""
    compiled_by: dict[str, str] = field(default_factory=dict)
    kernels: dict[str, Kernel] = field(default_factory=dict)
    first_writes: dict[int, frozenset[int]] = field(default_factory=dict)
    notes: dict[int, Note] = field(default_factory=dict)
    buffers: dict[int, tuple[str, ...]] = field(default_factory=dict)
    lines: dict[str, int] = field(default_factory=dict)

    def kernel(self, name: str, compiled: Any) -> Kernel:
        known = self.kernels.get(name)
        if known is None:
            known = self.kernels[name] = _triton_kernel(name, compiled)
        return known


def read_code(key: str, text: str) -> GeneratedCode:
    """Return what a generated module contains; costs about 10 milliseconds per
    1,000 lines, once per module.
    """
    code = GeneratedCode(key=key, notes=_notes(text))
    if "CppWrapperCodeCache" in text:
        code.unseen = "cpp_wrapper"
        return code
    tree = ast.parse(text)
    for statement in tree.body:
        match statement:
            case ast.Assign(
                targets=[ast.Name(id=name)],
                value=ast.Call(
                    func=ast.Attribute(value=ast.Name(id="async_compile"), attr=how), args=args
                ),
            ):
                code.compiled_by[name], code.lines[name] = how, statement.lineno
                if how == _CPP:
                    code.kernels[name] = _cpp_kernel(
                        name, ast.literal_eval(args[0]), ast.literal_eval(args[1])
                    )
                elif how != _TRITON:
                    code.unseen = how
    for function in ast.walk(tree):
        if isinstance(function, ast.FunctionDef):
            code.first_writes.update(_first_writes(function, code.compiled_by))
            code.buffers.update(_buffers(function, code.compiled_by))
    return code


def _notes(text: str) -> dict[int, Note]:
    """Return inductor's comments by the line of code that follows."""
    notes: dict[int, Note] = {}
    note: Note | None = None
    for number, line in enumerate(text.splitlines(), start=1):
        if (found := _NOTE.match(line)) is not None:
            nodes, ops = (tuple(filter(None, part.split(", "))) for part in found.groups())
            note = Note(nodes=nodes, ops=ops)
        elif note is not None and line.strip() and not line.lstrip().startswith("#"):
            notes[number], note = note, None
    return notes


def _cpp_kernel(name: str, types: Sequence[str], source: str) -> Kernel:
    found = _SIGNATURE.search(source)
    names = [argument.split()[-1].lstrip("*") for argument in found[1].split(",")] if found else []
    writes = {
        at for at, kind in enumerate(types) if kind.endswith("*") and not kind.startswith("const ")
    }
    updates = {at for at in writes if at >= len(names) or names[at].startswith("in_out_ptr")}
    return Kernel(f"{KERNEL}{name}", frozenset(writes), frozenset(updates))


def _triton_kernel(name: str, compiled: Any) -> Kernel:
    names = list(triton_arguments(compiled)["signature"])
    changed = set(written_by_triton(compiled))
    updates = {
        at for at, known in enumerate(names) if known in changed or known.startswith("in_out_ptr")
    }
    writes = updates | {at for at, known in enumerate(names) if known.startswith("out_ptr")}
    scratch = {at for at, known in enumerate(names) if known.startswith("ws_ptr")}
    return Kernel(
        f"{KERNEL}{name}",
        frozenset(writes - scratch),
        frozenset(updates - scratch),
        frozenset(scratch),
    )


def _first_writes(
    function: ast.FunctionDef, kernels: dict[str, str]
) -> Iterator[tuple[int, frozenset[int]]]:
    """Yield the line of each call of a kernel, and which arguments are buffers
    that nothing has written yet.

    A buffer may have the memory of an earlier one: ``buf3 = buf1; del buf1``, or a
    ``reinterpret_tensor`` of it.
    """
    unwritten: set[str] = set()
    statements = [
        node for node in ast.walk(function) if isinstance(node, ast.Assign | ast.Expr | ast.Delete)
    ]
    deleted = {
        (node.lineno, target.id)
        for node in statements
        if isinstance(node, ast.Delete)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    for node in sorted(statements, key=lambda one: (one.lineno, one.col_offset)):
        match node:
            case ast.Assign(targets=[ast.Name(id=name)], value=value):
                memory = _buffer(value)
                is_allocated = isinstance(value, ast.Call) and _called(value).startswith(
                    (_ALLOCATES, "alloc_from")
                )
                if is_allocated or (node.lineno, memory) in deleted or memory in unwritten:
                    unwritten.add(name)
                else:
                    unwritten.discard(name)
            case ast.Expr(value=ast.Call(args=args, keywords=keywords) as call):
                given = [_buffer(argument) for argument in args]
                if _called(call) in kernels:
                    yield (
                        node.lineno,
                        frozenset(at for at, name in enumerate(given) if name in unwritten),
                    )
                unwritten.difference_update(given, (_buffer(keyword.value) for keyword in keywords))


def _buffers(
    function: ast.FunctionDef, kernels: Mapping[str, str]
) -> Iterator[tuple[int, tuple[str, ...]]]:
    for node in ast.walk(function):
        match node:
            case ast.Expr(value=ast.Call(args=args) as call) if _called(call) in kernels:
                yield node.lineno, tuple(map(_buffer, args))
            case ast.Expr(value=ast.Call(keywords=keywords)):
                outs = [_buffer(keyword.value) for keyword in keywords if keyword.arg == "out"]
                if outs:
                    yield node.lineno, tuple(outs)
            case ast.Assign(targets=[ast.Name(id=name)], value=ast.Call()):
                yield node.lineno, (name,)


def _called(call: ast.Call) -> str:
    """Return the name of a called function, or of the object whose method ``run`` is called."""
    match call.func:
        case ast.Name(id=name) | ast.Attribute(value=ast.Name(id=name), attr="run"):
            return name
    return ""


def _buffer(value: ast.expr) -> str:
    """Return the name of a buffer, or of the one that an expression reinterprets;
    "" for anything else.
    """
    match value:
        case (
            ast.Name(id=name)
            | ast.Call(func=ast.Name(id="reinterpret_tensor"), args=[ast.Name(id=name), *_])
        ):
            return name
    return ""


class EagerCall(NamedTuple):
    """The call of an op in eager code that makes a tensor: number ``call`` of the ``calls`` of this
    op in this line that a graph computes; the line is "" if only torch's code calls the op.
    """

    op: str
    line: str
    call: int
    calls: int


class KernelNodes:
    """What the kernels compiled in this process compute: the nodes of C++ kernels, whose code does
    not say so, unlike that of Triton's; and what buffers hold.

    Inductor takes other kernels from its caches. For those, nothing is known.
    """

    def __init__(self) -> None:
        self._held: dict[str, dict[str, EagerCall]] = {}
        self._lowered: list[tuple[Any, str, tuple[tuple[str, Traced], ...]]] = []
        self._known: dict[tuple[str, str], tuple[tuple[str, Traced], ...]] = {}

    def forget_lowered(self) -> None:
        """Release the graphs that were compiled and never ran."""
        self._lowered.clear()

    def note(self, scheduled: Any, kernel: str) -> None:
        """Note which nodes a kernel computes, when inductor generates it."""
        graph, nodes = nodes_of_kernel(scheduled)
        computing = [node for node in nodes if not _is_view(node.target)] or nodes
        self._lowered.append((graph, kernel, tuple(map(_traced, computing))))

    def note_module(self, graph: Any) -> None:
        """Note what the buffers of a graph hold, when inductor has generated its module."""
        self._held[key_of_lowered(graph)] = dict(_eager_calls(graph))

    def held_by(self, key: str, buffers: Sequence[str]) -> list[EagerCall | None]:
        """Return which call of eager code makes what each buffer holds; None if it is unknown."""
        held = self._held.get(key, {})
        return [held.get(name) for name in buffers]

    def of(self, key: str, kernel: str, lines: Mapping[str, Traced]) -> list[Traced]:
        """Return the nodes of a kernel of the module with this key; none if they are unknown.

        A node of Dynamo's graph, of which ``lines`` are those, has the name that the user wrote.
        """
        lowered, self._lowered = self._lowered, []
        for graph, name, nodes in lowered:
            if known := key_of_lowered(graph):
                self._known[known, name] = nodes
            else:  # another thread is compiling it
                self._lowered.append((graph, name, nodes))
        nodes = self._known.get((key, kernel), ())
        by_user = [lines.get(name, one) for name, one in nodes if one.line]
        found = [one for _, one in nodes if one.line]
        return [
            user if user.line == one.line else one for user, one in zip(by_user, found, strict=True)
        ]


def _eager_calls(graph: Any) -> Iterator[tuple[str, EagerCall]]:
    """Yield the buffers of a graph that hold an output of an op of eager code.

    An op may have been decomposed into several nodes. Of those with one shape, the last one is its
    output.
    """
    groups: dict[Hashable, list[fx.Node]] = {}
    for node in graph.graph.nodes:
        is_op = node.op == "call_function" and ORIGINAL_OP in node.meta
        # a backward pass also computes values of the forward pass again
        if is_op and bool(node.meta.get(FROM_NODE)) != graph.is_backward:
            groups.setdefault(_call_of(node), []).append(node)
    places = {
        group: (str(nodes[0].meta[ORIGINAL_OP]), line_of_trace(nodes[0].stack_trace or ""))
        for group, nodes in groups.items()
    }
    num_calls = Counter(places.values())
    numbers = Counter[tuple[str, str]]()
    outputs: dict[fx.Node, EagerCall] = {}
    for group, nodes in groups.items():
        place = places[group]
        last = {shape: node for node in nodes if (shape := _shape_of(node)) is not None}
        call = EagerCall(*place, call=numbers[place], calls=num_calls[place])
        outputs.update(dict.fromkeys(last.values(), call))
        numbers[place] += 1
    for buffer in graph.buffers:
        if (made := outputs.get(node_of_buffer(buffer)())) is not None:
            yield buffer.get_name(), made


def _call_of(node: fx.Node) -> Hashable:
    """Return what is equal for the nodes of one call of an op that was decomposed."""
    if node.target is getitem and isinstance(made := node.args[0], fx.Node):
        return _call_of(made)
    op = str(node.meta[ORIGINAL_OP])
    return node if str(node.target) == op else (op, node.meta.get("seq_nr"))


def _shape_of(node: fx.Node) -> tuple[Any, ...] | None:
    value = node.meta.get("val")
    return tuple(value.shape) if isinstance(value, Tensor) else None


def _is_view(target: Any) -> bool:
    return make_plan(target).kind is OpKind.VIEW


def _traced(node: fx.Node) -> tuple[str, Traced]:
    """Return the name of a node's origin in Dynamo's graph, and the op with its line."""
    origins = node.meta.get(FROM_NODE) or ()
    op = getattr(node.meta.get(ORIGINAL_OP) or node.target, "__name__", str(node.target)).partition(
        "."
    )[0]
    return origins[0].name if origins else "", Traced(op, line_of_trace(node.stack_trace or ""))


@dataclass(frozen=True, slots=True, eq=False)
class KernelCall:
    """One call of a kernel; ``line`` is that of the generated module."""

    code: GeneratedCode
    name: str
    kernel: Kernel
    run: Callable[[], Any]
    arguments: tuple[Any, ...]
    line: int
    compiled: Any

    @property
    def choice(self) -> dict[str, Any]:
        """The configuration that autotuning has chosen, when the kernel has run; empty for C++."""
        if self.code.compiled_by[self.name] != _TRITON:
            return {}
        launchers = triton_launchers(self.compiled)
        if len(launchers) != 1:
            return {}
        config = launchers[0].config
        return {**config.kwargs, "num_warps": config.num_warps, "num_stages": config.num_stages}

    @property
    def note(self) -> Note | None:
        """The comment on the call, or on the kernel's definition; None if there is none."""
        return self.code.notes.get(self.line) or self.code.notes.get(self.code.lines[self.name])


class KernelWatcher(Protocol):
    """Sees what the generated code of a thread does."""

    def run_kernel(self, call: KernelCall) -> Any:
        """Run a kernel, and return its result."""

    def note_allocation(self, tensor: Tensor) -> None:
        """Note that generated code has allocated memory."""


class SeenKernels:
    """The generated modules whose kernels are replaced, and by thread who sees them."""

    def __init__(self) -> None:
        self._lock = RLock()
        self._watchers: dict[int, KernelWatcher] = {}
        # by module: how many calls of it run, its names, and by name what was there and ours
        self._replaced: dict[int, tuple[int, dict[str, Any], dict[str, tuple[Any, Any]]]] = {}
        self._codes: dict[str, GeneratedCode] = {}
        self._compiled: dict[str, ModuleType] = {}  # while we saw it, by key

    def note_module(self, module: ModuleType) -> None:
        """Keep a module that inductor has just generated: without its caches, it forgets the module
        and deletes the file.
        """
        if "key" in vars(module):  # else it is no module of Python code
            self._compiled[vars(module)["key"]] = module
            self.code_of(module)

    def modules_of(self, graph: Any) -> list[ModuleType]:
        """Return the modules that inductor generated for a compiled graph: one, or one for each set
        of its constants.
        """
        found = generated_modules(graph)
        kept = self._compiled.get(module_key(graph))
        return found if found or kept is None else [kept]

    def code_of(self, module: ModuleType) -> GeneratedCode:
        """Return what a generated module contains, by its key:
        two modules with one key have the same code.
        """
        key = vars(module)["key"]
        code = self._codes.get(key)
        if code is None:
            path = Path(str(module.__file__))
            text = path.read_text(encoding="utf-8") if path.exists() else ""
            code = self._codes[key] = (
                read_code(key, text) if text else GeneratedCode(unseen="no code")
            )
        return code

    def code_in(self, frame: FrameType) -> GeneratedCode | None:
        """Return the generated module whose code a frame runs, or None."""
        names = frame.f_globals
        return self._codes.get(names["key"]) if id(names) in self._replaced else None

    @contextmanager
    def of(self, modules: Sequence[ModuleType], watcher: KernelWatcher) -> Iterator[None]:
        """Have a watcher run the kernels of these modules that this thread calls."""
        thread = get_ident()
        outer = self._watchers.get(thread)
        entered: list[ModuleType] = []
        try:
            for module in modules:
                entered.append(module)
                self._replace(module, self.code_of(module))
            self._watchers[thread] = watcher
            yield
        finally:
            if outer is None:
                self._watchers.pop(thread, None)
            else:
                self._watchers[thread] = outer
            for module in reversed(entered):
                self._restore(module)

    def _replace(self, module: ModuleType, code: GeneratedCode) -> None:
        with self._lock:
            names = vars(module)
            users, _, replaced = self._replaced.get(id(names), (0, names, {}))
            self._replaced[id(names)] = users + 1, names, replaced
            if users:  # another thread runs it, or it runs itself
                return
            for name, found in list(names.items()):
                if name in code.compiled_by:
                    ours = self._kernel(code, name, found)
                elif name.startswith(_ALLOCATES):
                    ours = self._allocation(found)
                else:
                    continue
                replaced[name] = found, ours
                names[name] = ours

    def _restore(self, module: ModuleType) -> None:
        with self._lock:
            users, names, replaced = self._replaced.pop(id(vars(module)), (1, {}, {}))
            if users > 1:
                self._replaced[id(names)] = users - 1, names, replaced
                return
            for name, (found, ours) in replaced.items():
                if names.get(name) is ours:
                    names[name] = found

    def _kernel(self, code: GeneratedCode, name: str, compiled: Any) -> Any:
        kernel, run = code.kernel(name, compiled), getattr(compiled, "run", compiled)

        @wraps(run)
        def ours(*args: Any, **kwargs: Any) -> Any:
            watcher = self._watchers.get(get_ident())
            if watcher is None:
                return run(*args, **kwargs)
            line = _getframe(1).f_lineno
            return watcher.run_kernel(
                KernelCall(code, name, kernel, lambda: run(*args, **kwargs), args, line, compiled)
            )

        return ours if run is compiled else _Launcher(compiled, ours)

    def _allocation(self, allocate: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def ours(*args: Any, **kwargs: Any) -> Tensor:
            tensor = allocate(*args, **kwargs)
            if (watcher := self._watchers.get(get_ident())) is not None:
                watcher.note_allocation(tensor)
            return tensor

        return ours


class _Launcher:
    """Stands for a Triton kernel in its module."""

    def __init__(self, compiled: Any, run: Callable[..., Any]) -> None:
        self._compiled, self.run = compiled, run

    def __getattr__(self, name: str) -> Any:
        return getattr(self._compiled, name)


SEEN_KERNELS = SeenKernels()
KERNEL_NODES = KernelNodes()
