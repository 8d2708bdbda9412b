"""A graph run node by node, each op as one of the module and the line that it was traced from."""

from collections.abc import Sequence
from typing import Any

from torch import fx

from det_callbacks.trace.modules import ModuleStack
from det_callbacks.trace.source import shown_source
from det_callbacks.trace.tree import Attribution


class NodeByNode(fx.Interpreter):
    """Runs a graph as eager code would: the same ops, autograd and in-place writes included.

    Args:
        graph: whose nodes have "module" and "source" in their ``meta``.
        modules: told where each node belongs.
        owner: qualified name of the module whose code was traced.
    """

    def __init__(self, graph: fx.GraphModule, modules: ModuleStack, owner: str) -> None:
        super().__init__(graph)
        self._modules = modules
        known: dict[tuple[str, tuple[str, ...]], Attribution] = {}
        self._contexts: dict[fx.Node, Attribution] = {}
        names = modules.names_known
        for node in graph.graph.nodes:
            key = (_qualified(node.meta.get("module"), owner, names), shown_source(node.meta.get("source", ())))
            self._contexts[node] = known.setdefault(key, Attribution(module=key[0], source=key[1]))

    def run_as_eager(self, args: Sequence[Any]) -> Any:
        """Return what the graph returns for these inputs."""
        try:
            return self.run(*args)
        finally:
            self._modules.return_to_stack()

    def run_node(self, n: fx.Node) -> Any:
        """Run one node."""
        self._modules.current = self._contexts[n]
        return super().run_node(n)


def _qualified(path: str | None, owner: str, names: frozenset[str]) -> str:
    """Return the qualified name of a module, given by its path from the traced one; the traced one where unknown."""
    if not path:
        return owner
    prefix = f"{owner}." if owner and owner != "?" else ""
    candidates = (prefix + path, f"{prefix}_orig_mod.{path}", path)
    return next((name for name in candidates if name in names), owner if names else candidates[0])
