"""Graphs that torch.compile compiled: what goes into them, what comes out, and what runs inside.

graphs.py describes a graph when Dynamo hands it to a compiler; hook.py is where that is noticed, and where the compiled
graph runs later; regions.py makes the sites of it.
"""

from det_callbacks.trace.compiled.hook import WATCHERS
from det_callbacks.trace.compiled.regions import CompiledRegions

__all__ = ["WATCHERS", "CompiledRegions"]
