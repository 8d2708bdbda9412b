"""A device that yields digests only when it is waited for: the host's memory,
seen as if it were another's.

Within ``late_device()`` every tensor says that it is not on the CPU, and the package has its
digests computed by ``LateDevice``: it reads memory when a launch is due, as a GPU's stream would,
and yields at ``collect``. Whoever collects within a step, or has a tensor's elements come to the
host there, is noted. What is fetched is garbage until the copies are waited for.
"""

import ctypes
import sys
import warnings
from collections.abc import Hashable, Iterator, Sequence, Set
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any
from unittest import mock

import torch

from det_callbacks.digest import deferred
from det_callbacks.digest.deferred import DeferredDigests, Known
from det_callbacks.digest.host import digest_memory
from det_callbacks.digest.triton_digest import Choice, Span
from det_callbacks.digest.unobserved import unobserved
from det_callbacks.trace.components import address_of
from det_callbacks.trace.deferred_sites import DeferredSites
from det_callbacks.trace.recorder import Recorder

_FETCHES = ("item", "tolist", "cpu", "numpy", "__bool__", "__int__", "__float__")


def bytes_of(span: Span) -> torch.Tensor:
    """Return a span as a tensor of bytes that shares its memory."""
    storage, offset, size = span
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(
        storage, offset, (size,), (1,)
    )


class LateDevice:
    """See ``det_callbacks.digest.triton_digest.TritonDigest``;
    a ``mask`` tells its digests from the host's.
    """

    name = "a late device"

    def __init__(self, mask: int = 0) -> None:
        self.mask = mask
        self.num_launched: list[int] = []
        self.num_skipped = 0
        self.num_collected = 0
        # where something waited for the device within a step: must stay empty
        self.waits: list[str] = []
        self.current: Hashable = None  # stream
        self.orders: list[tuple[Hashable, Hashable]] = []  # one stream waits for another
        self.num_steps = 0
        self.num_watched = 0  # steps that came to their end within ``in_every_step``

    def stream(self) -> Hashable:
        return self.current

    def wait_for(self, stream: Hashable) -> None:
        self.orders.append((self.current, stream))

    def launch(
        self, spans: Sequence[Span], stream: Hashable, skip_record_stream: Set[int] = frozenset()
    ) -> list[torch.Tensor]:
        self.num_launched.append(len(spans))
        self.num_skipped += sum(storage._cdata in skip_record_stream for storage, _, _ in spans)
        return [bytes_of(span).clone() for span in spans]

    def collect(self, launched: Sequence[list[torch.Tensor]]) -> list[int]:
        self.num_collected += 1
        if self.num_steps:
            self.waits.append("collect")
        return [
            digest_memory(copy.data_ptr(), copy.nbytes) ^ self.mask
            for part in launched
            for copy in part
        ]


@contextmanager
def late_device(
    mask: int = 0, dtype: torch.dtype | None = None, method: Any = None
) -> Iterator[Any]:
    """Have the package take all tensors, or those of a dtype,
    for those of a device that yields at a step's end.
    """
    device = method or LateDevice(mask)
    settle, finish = DeferredSites.settle, DeferredDigests.finish
    # copies, which arrive when they are waited for
    due: list[tuple[DeferredDigests, torch.Tensor, torch.Tensor]] = []

    def is_on_cpu(tensor: torch.Tensor) -> bool:
        # torch's own code goes on as on the CPU
        asks = sys._getframe(1).f_globals.get("__name__", "")
        return not asks.startswith("det_callbacks.") or dtype not in (None, tensor.dtype)

    def fetch(deferred: DeferredDigests, tensor: torch.Tensor) -> torch.Tensor:
        with unobserved(), torch.no_grad():
            copy = torch.empty_like(tensor, memory_format=torch.contiguous_format)
            if copy.numel():
                copy.untyped_storage().fill_(0xA5)  # type: ignore[no-untyped-call]  # torch's
            due.append((deferred, copy, tensor.detach().clone()))
            return copy

    def finishing(deferred: DeferredDigests) -> Known:
        known = finish(deferred)
        with unobserved(), torch.no_grad():
            for _, copy, source in (entry for entry in due if entry[0] is deferred):
                copy.copy_(source)
        due[:] = [entry for entry in due if entry[0] is not deferred]
        return known

    def settling(sites: DeferredSites, *args: Any) -> Any:
        with mock.patch.object(device, "num_steps", 0):
            return settle(sites, *args)

    with (
        mock.patch.object(torch.Tensor, "is_cpu", property(is_on_cpu)),
        mock.patch.object(deferred, "device_choice", return_value=Choice(method=device)),
        mock.patch.multiple(DeferredDigests, fetch=fetch, finish=finishing),
        mock.patch.object(DeferredSites, "settle", settling),
    ):
        yield device


doubles_are_late = partial(late_device, dtype=torch.float64)


def overwrite_unseen(tensor: torch.Tensor) -> None:
    """Write as C++ code does that was given the tensor."""
    ctypes.memset(address_of(tensor), 7, tensor.nbytes)


@contextmanager
def as_in_a_step(device: LateDevice) -> Iterator[None]:
    """Note whatever of the package waits for the device in here, as
    ``set_sync_debug_mode("error")`` would raise.
    """
    originals = {name: getattr(torch.Tensor, name) for name in _FETCHES}

    def noting(name: str) -> Any:
        def fetch(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            caller = sys._getframe(1)
            module = caller.f_globals.get("__name__", "")
            if module.startswith("det_callbacks.") and device.num_steps:
                device.waits.append(f"{module}:{caller.f_lineno} {name}")
            return originals[name](tensor, *args, **kwargs)

        return fetch

    fetches = {name: noting(name) for name in _FETCHES}
    with mock.patch.object(device, "num_steps", 1), mock.patch.multiple(torch.Tensor, **fetches):
        yield


def forbid_waiting(is_forbidden: bool) -> None:
    """Make everything raise that torch knows to wait for a real CUDA device, or allow it again."""
    with warnings.catch_warnings():
        # said once a process
        warnings.filterwarnings("ignore", message="Synchronization debug mode is a prototype")
        torch.cuda.set_sync_debug_mode("error" if is_forbidden else "default")


@contextmanager
def in_every_step(device: LateDevice) -> Iterator[None]:
    """Note the same between a recorder's ``begin`` and its ``finish``, or ``abandon``;
    one records at a time.
    """
    begin, finish, abandon = Recorder.begin, Recorder.finish, Recorder.abandon
    step = ExitStack()

    def beginning(recorder: Recorder, *args: Any) -> None:
        step.close()
        step.enter_context(as_in_a_step(device))
        begin(recorder, *args)

    def finishing(recorder: Recorder) -> Any:
        step.close()
        device.num_watched += 1
        return finish(recorder)

    def abandoning(recorder: Recorder) -> None:
        step.close()
        abandon(recorder)

    with mock.patch.multiple(Recorder, begin=beginning, finish=finishing, abandon=abandoning):
        yield
