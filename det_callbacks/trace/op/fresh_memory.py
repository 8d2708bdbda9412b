"""Finds memory that an op allocated and nothing has written, by marking each word of it."""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, UntypedStorage

from det_callbacks.internals.torch import memory_address, pin_storage, storage_address, storage_at, unpin_storage
from det_callbacks.trace.op.components import STRIDED, has_parts

_MARK = 0x5AC3_91E7_2DB4_6F38  # a computed word has this value with probability 2 ** -64
_OTHER_BITS = 0x2A2A_2A2A_2A2A_2A2A
_WORD = 8  # bytes
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}
_MAX_DEAD = 64  # number of allocations at which those with freed memory are dropped


@dataclass(frozen=True, slots=True)
class UnwrittenWords:
    """Words of a storage that nothing has written and that a call is about to read."""

    words: Tensor  # the whole storage, as int64
    is_unwritten: Tensor  # bool by word
    held: Tensor  # the contents of all words when they were allocated
    is_number: bool  # whether the call reads them as floating-point numbers

    def put(self, *, others: bool = False) -> None:
        """Restore the words; with ``others``, write different bits, in which no integer is a large index."""
        held = self.held
        if others:
            held = held ^ _OTHER_BITS if self.is_number else (held == 0).to(torch.int64)
        self.words.copy_(torch.where(self.is_unwritten, held, self.words))


class FreshMemory:
    """Tracks the allocations in a block; its methods must run without dispatch modes.

    The training sees no marks: before a call reads unwritten words, ``begin_read`` restores their contents. Only code
    that reads without a call (NumPy, a raw kernel) sees the marks. Allocations below 8 bytes, a word, are not tracked.
    """

    def __init__(self) -> None:
        self._held: dict[int, Tensor] = {}  # address of a storage -> its words when it was allocated

    def __bool__(self) -> bool:
        return bool(self._held)

    def allocate(self, tensor: Tensor) -> None:
        """Mark memory that an op has allocated and not written."""
        if not _is_ordinary(tensor) or tensor.untyped_storage().nbytes() < _WORD or not memory_address(tensor):
            return
        if len(self._held) >= _MAX_DEAD:
            for address in [address for address in self._held if storage_at(address) is None]:
                self._forget(address)
        storage = tensor.untyped_storage()
        if storage_address(storage) in self._held:
            return
        words = _words_of(storage)
        self._held[pin_storage(storage)] = words.clone()
        words.fill_(_MARK)

    def begin_read(self, read: Iterable[Tensor], updated: Iterable[Tensor]) -> list[UnwrittenWords]:
        """Restore the unwritten words that a call reads or updates; return those that it reads."""
        for tensor in updated:
            self.give_back(tensor)
        found: list[UnwrittenWords] = []
        for tensor in read:
            if not _is_ordinary(tensor) or (held := self._held_by(tensor)) is None:
                continue
            words = _words_of(tensor.untyped_storage())
            is_marked = words == _MARK
            if not is_marked.any():
                self._forget(storage_address(tensor.untyped_storage()))
                continue
            is_unwritten = is_marked & _covered_words(tensor)
            if is_unwritten.any():
                is_number = tensor.is_floating_point() or tensor.is_complex()
                found.append(UnwrittenWords(words, is_unwritten, held, is_number))
        for one in found:
            one.put()
        return found

    def end_read(self, found: Iterable[UnwrittenWords], written: Iterable[Tensor]) -> None:
        """Mark these words again after a call, except those that it has written."""
        ordinary = [tensor for tensor in written if _is_ordinary(tensor)]
        for one in found:
            address = storage_address(one.words.untyped_storage())
            is_unwritten = one.is_unwritten
            for tensor in ordinary:
                if storage_address(tensor.untyped_storage()) == address:
                    is_unwritten = is_unwritten & ~_covered_words(tensor)
            one.words.masked_fill_(is_unwritten, _MARK)

    def give_back(self, tensor: Tensor) -> None:
        """Restore the memory of a tensor and stop following it."""
        if _is_ordinary(tensor) and self._held_by(tensor) is not None:
            self._give_back(storage_address(tensor.untyped_storage()))

    def close(self) -> None:
        """Restore all memory that nothing has written."""
        for address in list(self._held):
            self._give_back(address)

    def _held_by(self, tensor: Tensor) -> Tensor | None:
        storage = tensor.untyped_storage()
        held = self._held.get(storage_address(storage))
        if held is not None and held.numel() != storage.nbytes() // _WORD:  # something unseen resized it
            self._forget(storage_address(storage))
            return None
        return held

    def _give_back(self, address: int) -> None:
        storage, held = storage_at(address), self._held[address]
        if storage is not None and storage.nbytes() // _WORD == held.numel():
            words = _words_of(storage)
            words.copy_(torch.where(words == _MARK, held, words))
        self._forget(address)

    def _forget(self, address: int) -> None:
        del self._held[address]
        unpin_storage(address)


def _is_ordinary(tensor: Tensor) -> bool:
    return not has_parts(tensor) and tensor.layout is STRIDED and not tensor.is_nested and not tensor.is_meta


def _words_of(storage: UntypedStorage) -> Tensor:
    words = torch.empty(0, dtype=torch.int64, device=storage.device)
    return words.set_(storage, 0, (storage.nbytes() // _WORD,), (1,))


def _covered_words(tensor: Tensor) -> Tensor:
    """Return a bool for each word of a storage: whether the tensor has bytes in it."""
    num_words = tensor.untyped_storage().nbytes() // _WORD
    scratch = torch.zeros(tensor.untyped_storage().nbytes() + _WORD, dtype=torch.uint8, device=tensor.device)
    elements = torch.empty(0, dtype=_INTEGERS[tensor.itemsize], device=tensor.device)
    elements.set_(scratch.untyped_storage(), tensor.storage_offset(), tensor.shape, tensor.stride())
    elements.fill_(1 if tensor.itemsize < 16 else 1 + 1j)
    return scratch[: num_words * _WORD].view(num_words, _WORD).ne(0).any(1)
