"""Metrics of a run, and generator states that may explain a difference."""

from torch import Tensor, as_tensor, float64
from torch.distributed.tensor import DTensor

from det_callbacks.digest.components import digest_tensor
from det_callbacks.digest.host import digest_bytes, format_digest
from det_callbacks.runs.metrics import Metric, ReadRow
from det_callbacks.trace.state.generators import GeneratorLog, GeneratorReader


def metric_of(value: Tensor | float) -> Metric:
    """Return a metric with its digest; for a DTensor, of its local part. A Python float keeps its 64 bits."""
    if isinstance(value, int) and value.bit_length() > 63:
        return Metric(dtype="int", shape=(), digest=format_digest(digest_bytes(str(value).encode())), value=str(value))
    tensor = as_tensor(value, dtype=float64 if isinstance(value, float) else None).detach()
    tensor = (tensor.to_local() if isinstance(tensor, DTensor) else tensor).cpu()
    shown = tensor.item() if tensor.numel() == 1 else tensor.tolist()
    dtype, digest = str(tensor.dtype).removeprefix("torch."), format_digest(digest_tensor(tensor))
    return Metric(dtype=dtype, shape=tuple(tensor.shape), digest=digest, value=repr(shown))


def generator_states(reader: GeneratorReader) -> tuple[ReadRow, ...]:
    ledger = GeneratorLog(reader)
    ledger.mark("")
    return tuple(ReadRow("generator", row.of, format_digest(row.value)) for row in ledger.take(0))
