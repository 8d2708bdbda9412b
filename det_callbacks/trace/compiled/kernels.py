"""The kernels that inductor generated: globals of a Python module,
whose function ``call`` runs them.

A C++ kernel is a function, a Triton kernel an object with a method ``run``. While a recorded graph
runs, the globals are ours, for both kinds: nothing is compiled again, and outside a recorded step
everything is as inductor left it.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from sys import _getframe
from threading import RLock, get_ident
from types import FrameType, ModuleType
from typing import Any, Protocol

from torch import Tensor

from det_callbacks.internals.dynamo import generated_modules, module_key, triton_launchers
from det_callbacks.trace.compiled.generated_code import (
    ALLOCATES,
    TRITON,
    GeneratedCode,
    Kernel,
    KernelComment,
    read_code,
)


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
        if self.code.compiled_by[self.name] != TRITON:
            return {}
        launchers = triton_launchers(self.compiled)
        if len(launchers) != 1:
            return {}
        config = launchers[0].config
        return {**config.kwargs, "num_warps": config.num_warps, "num_stages": config.num_stages}

    @property
    def comment(self) -> KernelComment | None:
        """The comment on the call, or on the kernel's definition; None if there is none."""
        comments = self.code.comments
        return comments.get(self.line) or comments.get(self.code.lines[self.name])


class KernelWatcher(Protocol):
    """Sees what the generated code of a thread does."""

    def run_kernel(self, call: KernelCall) -> Any:
        """Run a kernel, and return its result."""

    def note_allocation(self, tensor: Tensor) -> None:
        """KernelComment that generated code has allocated memory."""


class SeenKernels:
    """The generated modules whose kernels are replaced, and by thread who sees them."""

    def __init__(self) -> None:
        self._lock = RLock()
        self._watchers: dict[int, KernelWatcher] = {}
        # by module: how many calls of it run, its names, and by name what was there and ours
        self._replaced: dict[int, tuple[int, dict[str, Any], dict[str, tuple[Any, Any]]]] = {}
        self._codes: dict[str, GeneratedCode] = {}
        self._compiled: dict[str, ModuleType] = {}  # while we saw it, by key

    def keep_module(self, module: ModuleType) -> None:
        """Keep a module that inductor has just generated: without its caches, it forgets the module
        and deletes the file.
        """
        if "key" in vars(module):  # else it is not a module of Python code
            self._compiled[vars(module)["key"]] = module
            self.code_of(module)

    def modules_of(self, graph: Any) -> list[ModuleType]:
        """Return the modules that inductor generated for a compiled graph: one, or one for each set
        of its constants.
        """
        modules = generated_modules(graph)
        kept = self._compiled.get(module_key(graph))
        return modules if modules or kept is None else [kept]

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
            for name, original in list(names.items()):
                if name in code.compiled_by:
                    ours = self._kernel(code, name, original)
                elif name.startswith(ALLOCATES):
                    ours = self._allocation(original)
                else:
                    continue
                replaced[name] = original, ours
                names[name] = ours

    def _restore(self, module: ModuleType) -> None:
        with self._lock:
            users, names, replaced = self._replaced.pop(id(vars(module)), (1, {}, {}))
            if users > 1:
                self._replaced[id(names)] = users - 1, names, replaced
                return
            for name, (original, ours) in replaced.items():
                if names.get(name) is ours:
                    names[name] = original

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
