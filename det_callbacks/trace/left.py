"""What a CUDA graph may have left in memory: the row of whoever reads it first."""

from dataclasses import dataclass

from det_callbacks.trace.program import Site

GRAPH = "cuda_graph."
"""Namespace of the sites of CUDA graphs: ``cuda_graph.1.replay``, ``cuda_graph.1.memory``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Replay:
    """One replay of a CUDA graph.

    Attributes:
        name: of the graph in its step.
        phase: of the replay.
        module: of the replay.
        source: of the replay.
    """

    name: str
    phase: str
    module: str
    source: tuple[str, ...] = ()


class LeftName(str):
    """Name of a row of role "left": tells it from that of an input, and from those behind other graphs.

    Its text is compared when a step is predicted; ``tensor`` is the name that the row shows.
    """

    __slots__ = ("replay", "tensor")

    replay: Replay
    tensor: str | None

    @classmethod
    def of(cls, replay: Replay, tensor: str | None) -> "LeftName":
        """Return the name of the row of a tensor that is read after a replay."""
        name = cls(f"{replay.name} {tensor or ''}")
        name.replay = replay
        name.tensor = tensor
        return name

    def row(self, edges: tuple[int, ...]) -> Site:
        """Return the site of a row with this name."""
        replay = self.replay
        return Site(
            phase=replay.phase,
            module=replay.module,
            op=f"{replay.name}.memory",
            occurrence=0,
            output=0,
            role="left",
            name=self.tensor,
            inputs=edges,
            source=replay.source,
        )
