"""What is appended to a step in another way than an ordinary tensor that an op wrote."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor

from det_callbacks.runs.values import scalar_bits
from det_callbacks.trace.components import has_parts, holds_data, parts_of

if TYPE_CHECKING:
    from det_callbacks.trace.recorder import Recorder


def append_output(recorder: "Recorder", tensor: Tensor, writers: Sequence[int]) -> None:
    """Append a module's output; the digest of the one site that wrote the same bytes is taken over."""
    slot = recorder.layouts.of(tensor)
    if len(writers) == 1 and slot.is_raw:
        (writer,) = writers
        written = recorder.layouts.at(recorder.layout_indices[writer])
        is_same = written is slot or (written.is_raw and written.num_bytes == slot.num_bytes)
        if is_same and tensor.untyped_storage().nbytes() == slot.num_bytes:
            recorder.append_bits(recorder.late.take_over(len(recorder.digests), writer, recorder.digests), slot)
            return
    recorder.append(tensor)


def append_special(recorder: "Recorder", output: Any, *, is_fresh: bool) -> None:
    """Append a number, or a tensor that is not an ordinary strided one.

    A fresh one (sparse, a wrapper) may be made around tensors that exist; their bytes keep their writers.
    """
    if not isinstance(output, Tensor):
        bits, tag = scalar_bits(output)
        recorder.append_bits(bits, recorder.layouts.special(tag))
        return
    position = recorder.num_sites
    if not holds_data(output):
        recorder.append_bits(0, recorder.layouts.special("no data"))
        return
    recorder.append(output)
    parts = list(parts_of(output)) if has_parts(output) else [output]
    for part in parts:
        if not (is_fresh and part.untyped_storage()._cdata in recorder.ledger.writers):
            recorder.ledger.write(part, position)
    if not parts:
        recorder.ledger.write_whole(output, position)
