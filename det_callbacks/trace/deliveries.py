"""What a collective put, or is about to put, into a tensor.

The outputs of a collective may still be under way when the op returns, so they get no digest then. Their storages carry
the number of a ``Delivery``; whoever reads them first makes a row of role "delivered".
"""

from typing import Any

import torch.distributed as dist
from torch import Tensor

from det_callbacks.runs.program import IN_FLIGHT, Site


class Delivery:
    """One output of one collective.

    Args:
        op: shown at the row where it is first read.
        phase: of the collective.
        module: of the collective.
        source: of the collective.
        output: index among the tensors that the collective writes.
        number: of the delivery in its step.
        inputs: positions of what went in on this rank.
        work: tells whether it is done; None where nobody can ask it.
        has_to_be_waited_for: it is done when ``wait_tensor`` has run, and not before (functional collectives).
        is_in_stream_order: ops read it after it has arrived, since the training's own stream waits for it.
    """

    __slots__ = (
        "has_to_be_waited_for",
        "inputs",
        "is_in_stream_order",
        "module",
        "number",
        "op",
        "output",
        "phase",
        "source",
        "work",
    )

    def __init__(
        self,
        *,
        op: str,
        phase: str,
        module: str,
        source: tuple[str, ...],
        output: int,
        number: int,
        inputs: tuple[int, ...],
        work: Any,
        has_to_be_waited_for: bool,
        is_in_stream_order: bool,
    ) -> None:
        self.op = op
        self.phase = phase
        self.module = module
        self.source = source
        self.output = output
        self.number = number
        self.inputs = inputs
        self.work = work
        self.has_to_be_waited_for = has_to_be_waited_for
        self.is_in_stream_order = is_in_stream_order

    def has_arrived(self, *, for_collective: bool = False) -> bool:
        """Return whether its bits are there for whoever reads it now.

        Args:
            for_collective: another collective reads it, on a stream of its own.
        """
        if self.has_to_be_waited_for:
            return False
        if self.work is None:
            return self.is_in_stream_order or not for_collective
        if not _is_done(self.work):
            return False
        self.work = None  # it keeps the tensors of the collective alive
        self.is_in_stream_order = True
        return True


class DeliveredName(str):
    """Name of a row of role "delivered": tells it from that of an input, and from those of other deliveries.

    Its text is compared when a step is predicted; ``tensor`` is the name that the row shows.
    """

    __slots__ = ("delivery", "tensor")

    delivery: Delivery
    tensor: str | None

    @classmethod
    def of(cls, delivery: Delivery, tensor: str | None, *, has_arrived: bool) -> "DeliveredName":
        """Return the name of the row of a delivery."""
        state = "" if has_arrived else IN_FLIGHT
        name = cls(f"{delivery.op} {delivery.number} {delivery.output} {tensor or ''} {state}")
        name.delivery = delivery
        name.tensor = tensor
        return name

    def row(self, edges: tuple[int, ...]) -> Site:
        """Return the site of a row with this name."""
        delivery = self.delivery
        return Site(
            phase=delivery.phase,
            module=delivery.module,
            op=delivery.op,
            occurrence=0,
            output=delivery.output,
            role="delivered",
            name=self.tensor,
            inputs=edges,
            source=delivery.source,
        )


def work_of(out: Any) -> Any:
    """Return what tells whether a ``c10d`` op is done, from what it returned; None where it returned no such thing.

    The op returns a boxed ``Work`` (alone or last in a tuple), which has no methods; ``Work.unbox`` gives the one that
    has them (torch 2.13).
    """
    last = out[-1] if isinstance(out, list | tuple) and out else out
    return None if last is None or isinstance(last, Tensor | list | tuple) else dist.Work.unbox(last)


def _is_done(work: Any) -> bool:
    """Return whether a collective is done.

    Gloo marks the future first and the work a moment later (torch 2.13, ``ProcessGroupGloo::finishWorkGloo``), and DDP
    waits for the future: the work alone would be seen under way in that moment.
    """
    if work.is_completed():
        return True
    try:
        return bool(work.get_future().done())
    except RuntimeError:  # works without a future (send and receive) say so in this way
        return False
