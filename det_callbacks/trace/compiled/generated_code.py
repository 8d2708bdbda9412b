"""The text of a Python module that inductor generated: its kernels, and what it says of them."""

import ast
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from det_callbacks.internals.dynamo import triton_arguments, written_by_triton
from det_callbacks.runs.program import KERNEL

TRITON = "triton"
_CPP = "cpp_pybinding"  # like TRITON, the function that compiles a kernel
ALLOCATES = "empty_strided_"
_COMMENT = re.compile(
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
class KernelComment:
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
        first_writes: by line of a call, the arguments whose buffer no earlier call of the function
            has written; their memory may still hold the bytes of a buffer that was freed.
        comments: comments by line, of the kernel's definition or of a call.
        buffers: by line of a call, the buffers that a kernel is given ("" for other arguments), or
            the one that another op makes.
        lines: by kernel, the line of its definition.
    """

    key: str = ""
    unseen: str = ""
    compiled_by: dict[str, str] = field(default_factory=dict)
    kernels: dict[str, Kernel] = field(default_factory=dict)
    first_writes: dict[int, frozenset[int]] = field(default_factory=dict)
    comments: dict[int, KernelComment] = field(default_factory=dict)
    buffers: dict[int, tuple[str, ...]] = field(default_factory=dict)
    lines: dict[str, int] = field(default_factory=dict)

    def kernel(self, name: str, compiled: Any) -> Kernel:
        kernel = self.kernels.get(name)
        if kernel is None:
            kernel = self.kernels[name] = _triton_kernel(name, compiled)
        return kernel


def read_code(key: str, text: str) -> GeneratedCode:
    """Return what a generated module contains; costs about 10 milliseconds per
    1,000 lines, once per module.
    """
    code = GeneratedCode(key=key, comments=_comments(text))
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
                elif how != TRITON:
                    code.unseen = how
    for function in ast.walk(tree):
        if isinstance(function, ast.FunctionDef):
            code.first_writes.update(_first_writes(function, code.compiled_by))
            code.buffers.update(_buffers(function, code.compiled_by))
    return code


def _comments(text: str) -> dict[int, KernelComment]:
    """Return inductor's comments by the line of code that follows."""
    comments: dict[int, KernelComment] = {}
    comment: KernelComment | None = None
    for number, line in enumerate(text.splitlines(), start=1):
        if (match := _COMMENT.match(line)) is not None:
            nodes, ops = (tuple(filter(None, part.split(", "))) for part in match.groups())
            comment = KernelComment(nodes=nodes, ops=ops)
        elif comment is not None and line.strip() and not line.lstrip().startswith("#"):
            comments[number], comment = comment, None
    return comments


def _cpp_kernel(name: str, types: Sequence[str], source: str) -> Kernel:
    match = _SIGNATURE.search(source)
    names = [argument.split()[-1].lstrip("*") for argument in match[1].split(",")] if match else []
    writes = {
        index
        for index, kind in enumerate(types)
        if kind.endswith("*") and not kind.startswith("const ")
    }
    updates = {
        index for index in writes if index >= len(names) or names[index].startswith("in_out_ptr")
    }
    return Kernel(f"{KERNEL}{name}", frozenset(writes), frozenset(updates))


def _triton_kernel(name: str, compiled: Any) -> Kernel:
    names = list(triton_arguments(compiled)["signature"])
    changed = set(written_by_triton(compiled))
    updates = {
        index
        for index, argument in enumerate(names)
        if argument in changed or argument.startswith("in_out_ptr")
    }
    writes = updates | {index for index, arg in enumerate(names) if arg.startswith("out_ptr")}
    scratch = {index for index, arg in enumerate(names) if arg.startswith("ws_ptr")}
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
    for node in sorted(statements, key=lambda node: (node.lineno, node.col_offset)):
        match node:
            case ast.Assign(targets=[ast.Name(id=name)], value=value):
                memory = _buffer(value)
                is_allocated = isinstance(value, ast.Call) and _called(value).startswith(
                    (ALLOCATES, "alloc_from")
                )
                if is_allocated or (node.lineno, memory) in deleted or memory in unwritten:
                    unwritten.add(name)
                else:
                    unwritten.discard(name)
            case ast.Expr(value=ast.Call(args=args, keywords=keywords) as call):
                buffers = [_buffer(argument) for argument in args]
                if _called(call) in kernels:
                    yield (
                        node.lineno,
                        frozenset(at for at, name in enumerate(buffers) if name in unwritten),
                    )
                unwritten.difference_update(
                    buffers, (_buffer(keyword.value) for keyword in keywords)
                )


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
