"""What a call of an op reads: the sites that wrote its inputs, and input sites where nobody recorded did."""

from typing import TYPE_CHECKING, Any

from torch import Generator, Tensor

from det_callbacks.trace.components import has_parts, parts_of
from det_callbacks.trace.generators import digest_generator, generator_of
from det_callbacks.trace.overloads import OpPlan
from det_callbacks.trace.storages import byte_extent

if TYPE_CHECKING:
    from det_callbacks.trace.recorder import Recorder


class Reads:
    """Collects the reads of one call after the other; the recorder itself handles the common case.

    Args:
        recorder: whose ledger is asked and whose input sites are made.

    Attributes:
        row_edges: for each input site made for the call under way, the sites that it follows from.
    """

    def __init__(self, recorder: "Recorder") -> None:
        self._recorder = recorder
        self.row_edges: list[tuple[int, ...]] = []

    def read(self, tensor: Tensor, reads: list[int], names: list[str | None]) -> None:
        """Collect who wrote the bytes of a tensor; make an input site where nobody recorded did."""
        if has_parts(tensor):
            for part in parts_of(tensor):
                self.read(part, reads, names)
            return
        recorder = self._recorder
        ledger = recorder.ledger
        storage = tensor.untyped_storage()
        known = ledger.writers.get(storage._cdata)
        if isinstance(known, int):
            reads.append(known)
            return
        if tensor.numel() == 0 or tensor.is_meta:
            return
        edges: tuple[int, ...] = ()
        if known is not None:
            low, high = byte_extent(tensor)
            edges = tuple(known.writers(low, high))
            reads.extend(edges)
            if known.is_born or known.covers(low, high):
                return
        position = len(recorder.digests)
        names.append(recorder.names.of(tensor))
        self.row_edges.append(edges)
        slot = recorder.append(tensor)
        reads.append(position)
        if known is None and slot.is_dense and slot.num_bytes == storage.nbytes():
            ledger.writers[ledger.pin(tensor)] = position
        else:
            ledger.write(tensor, position, is_dense=slot.is_dense)

    def gather(self, value: Any, consts: list[Any], reads: list[int], names: list[str | None]) -> None:
        """Collect one argument of any kind."""
        if isinstance(value, Tensor):
            self.read(value, reads, names)
        elif isinstance(value, list | tuple) and any(isinstance(item, Tensor) for item in value):
            for item in value:
                if isinstance(item, Tensor):
                    self.read(item, reads, names)
                else:
                    consts.append(item)
        else:
            consts.append(None if value.__class__ is Generator else value)

    def gather_unwritten(
        self,
        plan: OpPlan,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        consts: list[Any],
        reads: list[int],
        names: list[str | None],
    ) -> None:
        """Collect all arguments of a call but those that it overwrites without reading."""
        written = {write.name for write in plan.writes}
        for name, value in (*zip(plan.argument_names, args, strict=False), *kwargs.items()):
            if name not in written:
                self.gather(value, consts, reads, names)

    def read_generator(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], reads: list[int], names: list[str | None]
    ) -> None:
        """Make a site of the state of the generator that a call draws from."""
        name, generator = generator_of(args, kwargs)
        position = len(self._recorder.digests)
        names.append(name)
        self.row_edges.append(self._recorder.generators.read(name, position))
        self._recorder.append_bits(digest_generator(generator), self._recorder.layouts.none)
        reads.append(position)

    def roll_back(self, mark: int) -> None:
        """Undo the input sites of a call that raised."""
        del self._recorder.digests[mark:]
        del self._recorder.layout_indices[mark:]
        self.row_edges.clear()
        self._recorder.ledger.drop_from(mark)
