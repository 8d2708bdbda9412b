"""tensor -> 64 bits."""

from det_callbacks.digest.components import (
    INTEGERS,
    digest_output,
    digest_tensor,
    digest_tensors,
    inner_tensors,
    is_dense,
    output_bits,
    require_storage,
    tensor_bits,
    tensor_numbers,
)
from det_callbacks.digest.device.deferred import Bits, DeferredBits, DeferredDigests, derived, value_of
from det_callbacks.digest.device.triton_digest import device_choice
from det_callbacks.digest.state import StateDigest, digest_state
from det_callbacks.digest.unobserved import unobserved
from det_callbacks.host_digest import (
    DIGEST_VERSION,
    digest_bytes,
    digest_file,
    digest_memory,
    digest_rows,
    digest_spans,
    format_digest,
)

__all__ = [
    "DIGEST_VERSION",
    "INTEGERS",
    "Bits",
    "DeferredBits",
    "DeferredDigests",
    "StateDigest",
    "derived",
    "device_choice",
    "digest_bytes",
    "digest_file",
    "digest_memory",
    "digest_output",
    "digest_rows",
    "digest_spans",
    "digest_state",
    "digest_tensor",
    "digest_tensors",
    "format_digest",
    "inner_tensors",
    "is_dense",
    "output_bits",
    "require_storage",
    "tensor_bits",
    "tensor_numbers",
    "unobserved",
    "value_of",
]
