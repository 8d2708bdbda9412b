"""What a training step changes, held so that the step can be run again from the same place."""

import array
import collections
import datetime
import enum
import functools
import io
import itertools
import logging
import pathlib
import random
import re
import threading
import types
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._mode_utils import no_dispatch  # looked at in torch 2.13: hides what runs inside from open modes
from torch.utils.data import DataLoader, Dataset

from det_callbacks.device_generators import KeptStates, keep_states
from det_callbacks.digest import digest_tensor
from det_callbacks.errors import StepNotRepeatableError

_ATOMS: tuple[Any, ...] = (
    *(bool, int, float, complex, str, bytes, type(None), type(Ellipsis), type, enum.Enum, range, slice),
    *(types.ModuleType, types.BuiltinFunctionType, types.CodeType, re.Pattern, pathlib.PurePath),
    *(datetime.date, datetime.time, datetime.timedelta, datetime.tzinfo),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size, np.dtype, np.generic),
    *(weakref.ref, threading.Thread, logging.Logger),
)
"""What holds nothing that changes, or nothing that a training step should be blamed for."""

_LEFT = (DataLoader, Dataset)
"""Data: large, and not what a step changes."""

_ITERATORS: tuple[Any, ...] = (
    *map(type, (iter([]), iter(()), iter(""), iter(b""), iter(range(0)), iter({}), iter(set()))),
    *(itertools.count, itertools.cycle, itertools.chain, itertools.islice, itertools.repeat),
    *(zip, map, filter, enumerate, reversed),
)
_RUNNING = (types.GeneratorType, types.CoroutineType, types.AsyncGeneratorType)


@dataclass(frozen=True, slots=True)
class _Held:
    """One thing: makes itself again what it was, and says whether it had changed."""

    name: str
    put_back: Callable[[], bool]


@dataclass(frozen=True, slots=True)
class _Fixed:
    """One thing that cannot be put back, with a number that tells whether it moved on."""

    name: str
    read: Callable[[], Any]
    before: Any


class HeldState:
    """The state of some objects and of all they reach, and of the random generators.

    Held: attributes, lists, dicts, sets, deques, closures; tensors with content, layout and gradient; NumPy arrays;
    generators of random numbers. Files, iterators and running Python generators are looked at, since they cannot be put
    back. Not seen: what only C code holds, globals of modules, class attributes, data sets, other processes.

    Costs a copy of every tensor that is reached and some microseconds an object.

    Args:
        roots: name -> object.
        left: types whose instances are left alone, beside data loaders and data sets.
    """

    def __init__(self, roots: Mapping[str, object], *, left: tuple[type, ...] = ()) -> None:
        self._held: list[_Held] = []
        self._fixed: list[_Fixed] = []
        skipped = (*_ATOMS, *_LEFT, *left)
        seen: dict[int, object] = {}
        with no_dispatch():
            self._hold_global_generators()
            pending = collections.deque(roots.items())
            while pending:
                name, value = pending.popleft()
                if isinstance(value, skipped) or id(value) in seen:
                    continue
                seen[id(value)] = value
                pending.extend(self._hold(name, value))
        self._seen = seen  # alive, so that no identity is used twice

    def put_back(self) -> list[str]:
        """Make everything again what it was; return the names of what had changed.

        Raises:
            StepNotRepeatableError: something moved on that cannot be put back; all the rest has been.
        """
        with no_dispatch(), torch.no_grad():
            changed = [held.name for held in self._held if held.put_back()]
        moved = [fixed.name for fixed in self._fixed if fixed.read() != fixed.before]
        if moved:
            raise StepNotRepeatableError(
                f"The training step changed what cannot be put back: {', '.join(moved[:5])}"
                + (f" and {len(moved) - 5} more" if len(moved) > 5 else "")
                + '. Everything else was put back. Keep that out of the step, or use audit="ops", which repeats ops.'
            )
        return changed

    def _hold_global_generators(self) -> None:
        self._hold_by("Python's generator", random.getstate, random.setstate)
        self._hold_by("NumPy's generator", lambda: np.random.get_state(legacy=False), np.random.set_state)
        self._hold_by("torch's CPU generator", torch.get_rng_state, torch.set_rng_state)
        for kept in keep_states():
            self._hold_device_generators(kept)

    def _hold_device_generators(self, kept: KeptStates) -> None:
        self._hold_by(f"{kept.kind.upper()}'s generators", kept.read, lambda _: kept.put_back())

    def _hold_by(self, name: str, read: Callable[[], Any], write: Callable[[Any], object]) -> None:
        before = read()

        def put_back() -> bool:
            if _is_same(read(), before):
                return False
            write(before)
            return True

        self._held.append(_Held(name, put_back))

    def _hold(self, name: str, value: Any) -> Iterator[tuple[str, object]]:
        """Hold one object; yield what it reaches."""
        if isinstance(value, Tensor):
            yield from self._hold_tensor(name, value)
        elif isinstance(value, np.ndarray) and value.dtype != object:
            self._hold_array(name, value)
        elif isinstance(value, random.Random):
            self._hold_by(name, value.getstate, value.setstate)
        elif isinstance(value, np.random.RandomState):
            self._hold_by(name, lambda: value.get_state(legacy=False), value.set_state)
        elif isinstance(value, np.random.Generator | np.random.BitGenerator):
            bits: Any = getattr(value, "bit_generator", value)
            self._hold_by(name, lambda: bits.state, functools.partial(setattr, bits, "state"))
        elif isinstance(value, torch.Generator):
            self._hold_by(name, value.get_state, value.set_state)
        elif isinstance(value, _RUNNING):
            self._fix(f"{name} (a Python generator)", functools.partial(_position_of_code, value))
        elif isinstance(value, io.IOBase):
            self._fix(f"{name} (a file)", functools.partial(_position_of_file, value))
        elif isinstance(value, _ITERATORS):
            self._fix(f"{name} (an iterator)", functools.partial(_position_of_iterator, value))
        elif isinstance(value, types.MethodType):
            yield name, value.__self__
            yield name, value.__func__
        elif isinstance(value, functools.partial):
            yield from ((name, part) for part in (value.func, value.args, value.keywords))
        elif isinstance(value, types.FunctionType):
            yield from self._hold_closure(name, value)
        else:
            yield from self._hold_content(name, value)
            yield from self._hold_attributes(name, value)

    def _fix(self, name: str, read: Callable[[], Any]) -> None:
        self._fixed.append(_Fixed(name, read, read()))

    def _hold_tensor(self, name: str, tensor: Tensor) -> Iterator[tuple[str, object]]:
        if tensor.is_meta:
            return
        data = tensor.data  # the same memory without autograd's version counter, which must not see the way back
        copy = data.clone()
        before = (_place(tensor), digest_tensor(data))
        gradient = tensor.grad if tensor.is_leaf else None
        hooks = dict(tensor._backward_hooks) if tensor._backward_hooks else None

        def put_back() -> bool:
            is_changed = (_place(tensor), digest_tensor(tensor.data)) != before
            if is_changed:
                with torch.inference_mode(tensor.is_inference()):
                    if tensor.layout is not torch.strided:
                        tensor.data = copy.clone()  # its parts may be others now
                    else:
                        if _place(tensor) != before[0]:
                            tensor.data = data
                        data.copy_(copy)
            if tensor.is_leaf and tensor.grad is not gradient:
                tensor.grad = gradient
                is_changed = True
            if hooks is not None and tensor._backward_hooks is not None and dict(tensor._backward_hooks) != hooks:
                tensor._backward_hooks.clear()
                tensor._backward_hooks.update(hooks)
                is_changed = True
            return is_changed

        self._held.append(_Held(name, put_back))
        if hooks is None and tensor.requires_grad:
            self._fix(f"{name} (hooks on a tensor)", lambda: bool(tensor._backward_hooks))
        if gradient is not None:
            yield f"{name}.grad", gradient

    def _hold_array(self, name: str, values: np.ndarray) -> None:
        before = values.copy()

        def put_back() -> bool:
            if values.tobytes() == before.tobytes():
                return False
            values[...] = before
            return True

        if values.flags.writeable:
            self._held.append(_Held(name, put_back))
        else:
            self._fix(f"{name} (a read-only array)", values.tobytes)

    def _hold_closure(self, name: str, function: types.FunctionType) -> Iterator[tuple[str, object]]:
        for variable, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            full_name = f"{name}.<{variable}>"
            yield full_name, cell
            try:
                yield full_name, cell.cell_contents
            except ValueError:  # an empty cell holds nothing
                continue

    def _hold_content(self, name: str, value: Any) -> Iterator[tuple[str, object]]:
        """Hold what a container contains, or a cell of a closure."""
        if isinstance(value, types.CellType):
            try:
                content = value.cell_contents
            except ValueError:  # empty: filled later, and then not by a step
                return
            self._held.append(_Held(name, functools.partial(_refill_cell, value, content)))
        elif isinstance(value, dict):
            items = dict(_kind_of_dict(value).items(value))
            self._held.append(_Held(name, functools.partial(_refill_dict, value, items)))
            for key, item in items.items():
                label = repr(key) if isinstance(key, str | int) else f"<{type(key).__name__}>"
                yield f"{name}[{label}]", item
                yield f"key of {name}", key
        elif isinstance(value, list | collections.deque | array.array | bytearray):
            sequence = list(value)
            self._held.append(_Held(name, functools.partial(_refill_sequence, value, sequence)))
            if isinstance(value, list | collections.deque):
                yield from ((f"{name}[{index}]", item) for index, item in enumerate(sequence))
        elif isinstance(value, set):
            members = set(value)
            self._held.append(_Held(name, functools.partial(_refill_set, value, members)))
            yield from ((f"{name}{{...}}", item) for item in members)
        elif isinstance(value, tuple | frozenset):
            yield from ((f"{name}[{index}]", item) for index, item in enumerate(value))
        elif isinstance(value, np.ndarray):  # of objects
            objects = value.copy()
            self._held.append(_Held(name, functools.partial(_refill_objects, value, objects)))
            yield from ((f"{name}[{index}]", item) for index, item in enumerate(objects.flat))

    def _hold_attributes(self, name: str, value: Any) -> Iterator[tuple[str, object]]:
        try:
            attributes = object.__getattribute__(value, "__dict__")
        except AttributeError:
            attributes = None
        if isinstance(attributes, dict):
            before = dict(attributes)
            is_module = isinstance(value, torch.nn.Module)
            for attribute, item in before.items():
                if is_module and attribute in ("_parameters", "_buffers", "_modules"):
                    # first, so that they are known by the names that the user gave them
                    yield from ((f"{name}.{inner}", entry) for inner, entry in item.items())
                yield f"{name}.{attribute}", item
            self._held.append(_Held(f"attributes of {name}", functools.partial(_refill_dict, attributes, before)))
        for kind in type(value).__mro__:
            slots = kind.__dict__.get("__slots__", ())
            for slot in (slots,) if isinstance(slots, str) else slots:
                member = kind.__dict__.get(slot)
                if isinstance(member, types.MemberDescriptorType) and hasattr(value, slot):
                    item = member.__get__(value)
                    self._held.append(_Held(f"{name}.{slot}", functools.partial(_set_slot, value, member, item)))
                    yield f"{name}.{slot}", item


def _place(tensor: Tensor) -> tuple[Any, ...]:
    """Return where a tensor lies and how; it changes when another tensor was put into its place."""
    if tensor.layout is not torch.strided:
        return (id(tensor), tuple(tensor.shape))
    return (
        tensor.untyped_storage()._cdata,
        tensor.storage_offset(),
        tuple(tensor.shape),
        tensor.stride(),
        tensor.dtype,
    )


def _is_same(now: Any, before: Any) -> bool:
    if isinstance(now, Tensor):
        return torch.equal(now, before)
    if isinstance(now, np.ndarray):
        return np.array_equal(now, before)
    if isinstance(now, dict):
        return now.keys() == before.keys() and all(_is_same(value, before[key]) for key, value in now.items())
    if isinstance(now, list):
        return len(now) == len(before) and all(map(_is_same, now, before))
    return bool(now == before)


def _is_unchanged(now: list[Any], before: list[Any]) -> bool:
    return len(now) == len(before) and all(map(lambda one, other: one is other, now, before))


def _refill_dict(value: dict[Any, Any], before: dict[Any, Any]) -> bool:
    kind = _kind_of_dict(value)
    if _is_unchanged(list(kind.keys(value)), list(before)) and _is_unchanged(
        list(kind.values(value)), list(before.values())
    ):
        return False
    kind.clear(value)
    for key, item in before.items():
        kind.__setitem__(value, key, item)
    return True


def _kind_of_dict(value: dict[Any, Any]) -> type[dict[Any, Any]]:
    """Return whose methods to use: what a class of the user's does in its own is not wanted here."""
    return collections.OrderedDict if isinstance(value, collections.OrderedDict) else dict


def _refill_sequence(value: Any, before: list[Any]) -> bool:
    if isinstance(value, array.array | bytearray):
        if list(value) == before:
            return False
        del value[:]
        value.extend(before)
        return True
    if _is_unchanged(list(value), before):
        return False
    value.clear()
    value.extend(before)
    return True


def _refill_set(value: set[Any], before: set[Any]) -> bool:
    if {id(item) for item in value} == {id(item) for item in before}:
        return False
    value.clear()
    value.update(before)
    return True


def _refill_objects(value: np.ndarray, before: np.ndarray) -> bool:
    if _is_unchanged(list(value.flat), list(before.flat)):
        return False
    value[...] = before
    return True


def _refill_cell(cell: types.CellType, before: Any) -> bool:
    if cell.cell_contents is before:
        return False
    cell.cell_contents = before
    return True


def _set_slot(value: Any, member: types.MemberDescriptorType, before: Any) -> bool:
    if member.__get__(value) is before:
        return False
    member.__set__(value, before)
    return True


def _position_of_code(running: Any) -> tuple[Any, ...]:
    """Return where a Python generator or coroutine stands; its frame is gone when it has ended."""
    prefix = next(prefix for prefix in ("gi", "cr", "ag") if hasattr(running, f"{prefix}_frame"))
    frame = getattr(running, f"{prefix}_frame")
    if frame is None:
        return ("ended",)
    return (frame.f_lasti, tuple((name, id(value)) for name, value in frame.f_locals.items()))


def _position_of_file(file: io.IOBase) -> object:
    if file.closed:
        return "closed"
    return file.tell() if file.seekable() else None


def _position_of_iterator(iterator: Any) -> tuple[Any, ...]:
    """Return what pickling would keep of an iterator, by value where that is a number, else by identity."""

    def fold(part: Any, depth: int) -> Any:
        if isinstance(part, int | float | str):
            return part
        if isinstance(part, tuple) and depth:
            return tuple(fold(item, depth - 1) for item in part)
        if isinstance(part, _ITERATORS) and depth:
            return _position_of_iterator(part)
        return id(part) if not isinstance(part, list | tuple) or part else "empty"

    return tuple(fold(part, 3) for part in iterator.__reduce__()[1:])
