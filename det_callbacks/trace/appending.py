"""What is appended to a step without being digested a second time."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from torch import Tensor

from det_callbacks.trace.layouts import digest_as_laid_out

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
            recorder.append_bits(recorder.digests[writer], slot)
            return
    recorder.append_bits(digest_as_laid_out(tensor, slot), slot)
