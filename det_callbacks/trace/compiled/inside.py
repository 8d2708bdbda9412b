"""What is seen of an opaque region while it runs: what a dispatch mode sees, extern kernels and custom ops.

What they wrote follows from the region's inputs and its row of role "graph": inductor reuses buffers, so that only the
region can be told to be the origin.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor

from det_callbacks.digest import Bits
from det_callbacks.runs.program import Site
from det_callbacks.runs.values import scalar_bits
from det_callbacks.trace.tree import Context, Event, module_of

if TYPE_CHECKING:
    from det_callbacks.trace.recorder import Recorder


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Inside:
    """A region that runs: what the ops in it are recorded as.

    Attributes:
        phase: of the region.
        context: where it belongs.
        reads: positions that the ops follow from.
        source: the lines that called the region: those of the code that inductor wrote would tell nobody anything.
        digests: of what the ops gave, in order.
        is_graphed: see ``TracedGraph``; its ops make no rows.
    """

    phase: str
    context: Context
    reads: tuple[int, ...]
    source: tuple[str, ...]
    digests: list[Bits]
    is_graphed: bool

    def record(self, recorder: "Recorder", func: object, name: str, outputs: Sequence[Any]) -> None:
        """Make the rows of a call.

        Args:
            recorder: whose step it is.
            func: stands for what was called.
            name: of it.
            outputs: tensors and numbers that it wrote.
        """
        parent = recorder.at
        event = parent.likely
        like: tuple[Any, ...] = (func, self.phase, self.context, [], list(self.reads), [], len(outputs))
        if event is None or not event.fits(*like):
            event = next((child for child in parent.children if child.fits(*like)), None)
            if event is None:
                event = Event(parent, *like)
                event.source = self.source
                event.rows = tuple(
                    Site(
                        phase=self.phase,
                        module=module_of(self.context),
                        op=name,
                        occurrence=0,
                        output=index,
                        role="output" if isinstance(output, Tensor) else "value",
                        inputs=self.reads,
                        source=self.source,
                    )
                    for index, output in enumerate(outputs)
                )
                recorder.tree.add(event)
            parent.likely = event
        recorder.at = event
        for output in outputs:
            if isinstance(output, Tensor):
                recorder.append(output)
            else:
                bits, tag = scalar_bits(output)
                recorder.append_bits(bits, recorder.layouts.special(tag))
            self.digests.append(recorder.late.bits_of(recorder.num_sites - 1, recorder.digests))
        recorder.late.flush()  # the region's kernels, which nobody sees, reuse this memory
