"""One pass of a model over a batch, whose ops' outputs are divided into samples.

Of each output a pass keeps one digest for each sample, and its tensor only until the op returns.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from typing_extensions import override

from det_callbacks.digest.components import is_dense
from det_callbacks.digest.host import digest_rows
from det_callbacks.digest.unobserved import unobserved
from det_callbacks.internals.torch import (
    FakeTensor,
    FunctionalTensor,
    memory_address,
    storage_address,
)
from det_callbacks.numerics.batch_report import Kind
from det_callbacks.runs.selection import Selection
from det_callbacks.settings.generators import RewindPoint
from det_callbacks.trace.components import PLAIN, holds_data, is_special
from det_callbacks.trace.dispatch import TAKE_APART
from det_callbacks.trace.modules import source_of
from det_callbacks.trace.overloads import (
    OpKind,
    OpPlan,
    comes_apart,
    make_plan,
    tensors_in,
    written_by_call,
)
from det_callbacks.trace.places import Places
from det_callbacks.trace.storages import StorageWriters

Shape = tuple[int, ...]
Key = tuple[str, str, int, frozenset[Any]]
"""Module, op, index of the output, and dtypes and numbers of dimensions of
the tensors that the op got.
"""
Alignment = Sequence[tuple[Key, int | None]]
"""The outputs of a pass in order, each with its row of an earlier pass."""
_REDUCES = "its output has no dimension of samples"
PassType = TypeVar("PassType", bound="OpPass")


class Axis(NamedTuple):
    """Where a tensor has its samples: element (o * size + sample) * inner + i of a dimension."""

    dim: int
    outer: int = 1
    inner: int = 1


class Part(NamedTuple):
    """A batch to run: which samples it has, and which of its positions are compared."""

    samples: tuple[int, ...]
    compared: tuple[int, ...]

    @property
    def compared_samples(self) -> list[int]:
        """The samples at these positions."""
        return [self.samples[position] for position in self.compared]


@dataclass(slots=True, kw_only=True)
class Row:
    """An output of an op, or of the model, in the pass over the whole batch."""

    key: Key
    shape: Shape
    input_shapes: tuple[Shape, ...]  # of the tensors that the op got
    occurrence: int = 0
    source: tuple[str, ...] = ()
    axis: Axis | None = None
    why: Kind | None = None  # why its samples are not told apart
    detail: str = ""
    draws: bool = False
    reads: tuple[int, ...] = ()
    digests: np.ndarray | None = None  # one for each sample


class OpPass:
    """Sees the ops of one pass; a subclass says what becomes of an output."""

    def begin(self, model: nn.Module, size: int) -> None:
        """Start a pass over a batch of some size."""
        self.size = size
        self._places = Places(Selection(), model)
        self._places.modules.open()

    def end(self) -> None:
        """End the pass; may follow an exception."""
        self._places.modules.close()

    def add_input(self, tensor: Tensor) -> None:
        """Note a tensor of the batch."""

    def add_output(self, name: str, leaf: Tensor) -> None:
        """Note an output of the model like an output of an op without a name."""
        if holds_data(leaf) and not is_special(leaf):
            self.add(leaf, (name, "", 0, frozenset()), [leaf], None)

    def op(
        self, func: Any, types: Iterable[Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Run an op for ``DispatchMode``, and note its outputs."""
        plan = make_plan(func)
        if comes_apart(plan, args, kwargs):
            return TAKE_APART
        plan = plan.whole or plan
        special = [kind for kind in types if kind not in PLAIN]
        if plan.kind is not OpKind.DIGEST or any(
            issubclass(kind, FakeTensor | FunctionalTensor) for kind in special
        ):
            return func(*args, **kwargs)
        if any(kind.__torch_dispatch__ is not Tensor.__torch_dispatch__ for kind in special):
            return NotImplemented  # the ops on the inner tensors come here one by one
        before = RewindPoint(with_python=False) if plan.draws_random else None
        read = tensors_in(value for _, value in plan.inputs(args, kwargs))
        inputs = [value for value in read if not is_special(value)]
        out = plan.call(*args, **kwargs)
        kinds = frozenset((tensor.dtype, tensor.dim()) for tensor in inputs)
        has_drawn = before is not None and before.has_moved()
        with unobserved():
            for index, output in enumerate(written_by_call(plan, out, args, kwargs)):
                is_read = isinstance(output, Tensor) and index not in plan.opaque_outputs
                if is_read and holds_data(output) and not is_special(output) and output.numel():
                    key = self._places.modules.current.module, plan.name, index, kinds
                    self.add(output, key, inputs, plan, has_drawn=has_drawn)
        return out

    def add(
        self,
        output: Tensor,
        key: Key,
        inputs: Sequence[Tensor],
        plan: OpPlan | None,
        *,
        has_drawn: bool = False,
    ) -> None:
        """Note an output, and the tensors that its op got; ``plan`` is None
        for an output of the model.
        """
        raise NotImplementedError


class ShapePass(OpPass):
    """Notes the shapes of a pass over a part, with which those of the whole batch are compared."""

    def __init__(self) -> None:
        self.rows: list[Row] = []

    @override
    def add(
        self, output: Tensor, key: Key, inputs: Sequence[Tensor], plan: OpPlan | None, **_: Any
    ) -> None:
        self.rows.append(Row(key=key, shape=tuple(output.shape), input_shapes=_shapes(inputs)))


class AlignedPass(OpPass):
    """Finds the row of an earlier pass for each output."""

    def __init__(self, rows: Sequence[Row], alignment: Alignment) -> None:
        self._earlier = rows
        self._alignment = iter(alignment)
        self.missing = set(range(len(rows)))
        self.has_left_alignment = False  # from the pass that the alignment is of

    def counterpart(self, key: Key) -> int | None:
        """Return the row of the next output, or None if the earlier pass has none."""
        expected, index = next(self._alignment, (None, None))
        if self.has_left_alignment or expected != key:
            self.has_left_alignment = True
            return None
        if index is not None:
            self.missing.discard(index)
        return index


class WholePass(AlignedPass):
    """The pass over the whole batch: finds the samples in each output, and digests them."""

    def __init__(self, rows: Sequence[Row], alignment: Alignment, sizes: tuple[int, int]) -> None:
        super().__init__(rows, alignment)
        self._sizes = sizes
        self.rows: list[Row] = []
        self._writers = StorageWriters()  # whose positions are rows
        # storage -> elements from sample to sample, offset of the first
        self._sample_strides: dict[int, tuple[int, int]] = {}
        self._calls: Counter[Any] = Counter()

    @override
    def add_input(self, tensor: Tensor) -> None:
        if not is_special(tensor) and tensor.dim() and len(tensor) == self.size:
            self._writers.pin(tensor)
            self._note_samples(tensor, Axis(0))

    @override
    def add_output(self, name: str, leaf: Tensor) -> None:
        num_rows = len(self.rows)
        super().add_output(name, leaf)
        if len(self.rows) == num_rows:
            self.rows.append(
                Row(
                    key=(name, "", 0, frozenset()),
                    shape=(),
                    input_shapes=(),
                    why="not_followed",
                    detail="it is no ordinary tensor",
                )
            )

    @override
    def end(self) -> None:
        super().end()
        self._writers.close()

    @override
    def add(
        self,
        output: Tensor,
        key: Key,
        inputs: Sequence[Tensor],
        plan: OpPlan | None,
        *,
        has_drawn: bool = False,
    ) -> None:
        source = () if plan is None else source_of(self._places.modules.current)
        reads = {index for tensor in inputs for index in self._writers.writers_of(tensor)}
        row = Row(
            key=key,
            shape=tuple(output.shape),
            input_shapes=_shapes(inputs),
            source=source,
            draws=has_drawn,
        )
        row.reads, row.occurrence = tuple(sorted(reads)), self._calls[key[:3]]
        self._calls[key[:3]] += 1
        index = self.counterpart(key)
        if index is None:
            row.why, row.detail = "not_followed", "smaller batches run other ops"
        else:
            self._find_samples(row, self._earlier[index], output, inputs, is_output=plan is None)
        if row.axis is not None:
            row.digests = _sample_digests(output, row.axis, self.size)
        if plan is not None:
            self._writers.write(output, len(self.rows))
            self._note_samples(output, row.axis)
        self.rows.append(row)

    def _find_samples(
        self, row: Row, other: Row, output: Tensor, inputs: Sequence[Tensor], *, is_output: bool
    ) -> None:
        dims = self._batch_dims(row.shape, other.shape)
        if dims is None:
            row.detail = "its shape does not follow the batch size in proportion"
        elif len(dims) > 1:
            row.detail = "several of its dimensions follow the batch size"
        elif dims:
            row.axis = self._axis(dims[0], output, inputs, other, is_output=is_output)
            if row.axis is None:
                row.detail = "the order of the samples in a dimension is unknown"
        elif len(other.input_shapes) != len(inputs):
            row.detail = "smaller batches run it on other tensors"
        elif any(
            self._batch_dims(tuple(tensor.shape), shape) != []
            for tensor, shape in zip(inputs, other.input_shapes, strict=True)
        ):
            row.why, row.detail = "reduction", _REDUCES
            return
        if row.detail:
            row.why = "not_followed"

    def _batch_dims(self, shape: Shape, other: Shape) -> list[int] | None:
        """Return the dimensions that follow the batch size,
        or None if one has another relation to it.
        """
        if len(shape) != len(other):
            return None
        size, other_size = self._sizes
        changed = [dim for dim, length in enumerate(shape) if length != other[dim]]
        if any(
            shape[dim] * other_size != other[dim] * size or shape[dim] % size for dim in changed
        ):
            return None
        return changed

    def _axis(
        self,
        dim: int,
        output: Tensor,
        inputs: Sequence[Tensor],
        other: Row,
        *,
        is_output: bool,
    ) -> Axis | None:
        """Return where a dimension of an output that follows the batch size has its samples."""
        length = output.shape[dim]
        if length == self.size:
            return Axis(dim)
        if is_output:
            return self._axis_of_view(output, dim)
        if len(inputs) != len(other.input_shapes):
            return None
        # as the inputs have them, if these agree
        divisions = set()
        for tensor, shape in zip(inputs, other.input_shapes, strict=True):
            for input_dim in self._batch_dims(tuple(tensor.shape), shape) or ():
                if tensor.shape[input_dim] == length:
                    axis = self._axis_of_view(tensor, input_dim)
                    divisions.add(None if axis is None else axis[1:])
        (division,) = divisions if len(divisions) == 1 else (None,)
        return None if division is None else Axis(dim, *division)

    def _axis_of_view(self, view: Tensor, dim: int) -> Axis | None:
        """Return the samples in a dimension of several values a sample,
        if its memory proves them.
        """
        step_and_first = self._sample_strides.get(_memory_of(view))
        if step_and_first is None:
            return None
        step, first = step_and_first
        stride, length = view.stride(dim), view.shape[dim]
        if not stride or step % stride or length % (self.size * (step // stride)):
            return None
        inner = step // stride
        below = (view.storage_offset() - first) % (step * self.size) + (inner - 1) * stride
        for other, (one_length, one_stride) in enumerate(
            zip(view.shape, view.stride(), strict=True)
        ):
            if other != dim and one_length > 1 and one_stride % (step * self.size):
                below += (one_length - 1) * one_stride
        # no other index may carry into the next sample
        return Axis(dim, length // (self.size * inner), inner) if below < step else None

    def _note_samples(self, tensor: Tensor, axis: Axis | None) -> None:
        """Note where a storage has its samples; nothing is known where
        writes to its parts disagree.
        """
        memory = _memory_of(tensor)
        is_all = tensor.numel() * tensor.itemsize == tensor.untyped_storage().nbytes()
        before = None if is_all else self._sample_strides.get(memory)
        self._sample_strides.pop(memory, None)
        if axis is None:
            return
        step, first = int(tensor.stride(axis.dim)) * axis.inner, int(tensor.storage_offset())
        if before is not None:
            if before[0] == step and not (first - before[1]) % step:
                self._sample_strides[memory] = before
        elif is_dense(tuple(tensor.shape), tensor.stride()):
            self._sample_strides[memory] = step, first


class PartPass(AlignedPass):
    """A pass over a part, whose samples are compared with the whole batch."""

    def __init__(
        self, rows: Sequence[Row], alignment: Alignment, part: Part, kept: Collection[int] = ()
    ) -> None:
        super().__init__(rows, alignment)
        self._part, self._is_kept = part, frozenset(kept)
        self.differing: set[int] = set()
        self.reordered: set[int] = set()  # of these, those with the bits of other samples
        self.kept: dict[int, Tensor] = {}  # the compared samples of some outputs

    @override
    def add(
        self, output: Tensor, key: Key, inputs: Sequence[Tensor], plan: OpPlan | None, **_: Any
    ) -> None:
        index = self.counterpart(key)
        row = None if index is None else self._earlier[index]
        if index is None or row is None or row.digests is None or row.axis is None:
            return
        if tuple(output.shape) != _resized(row.shape, row.axis, self.size):
            self.missing.add(index)
            return
        compared = list(self._part.compared)
        if index in self._is_kept:
            samples = _by_sample(output, row.axis, self.size)
            self.kept[index] = samples.index_select(
                0, torch.tensor(compared, device=output.device)
            ).clone()
        reference = row.digests[self._part.compared_samples]
        current = _sample_digests(output, row.axis, self.size)[compared]
        if not np.array_equal(reference, current):
            self.differing.add(index)
            if (
                len({*row.digests.tolist()}) == len(row.digests)
                and np.isin(current, row.digests).all()
            ):
                self.reordered.add(index)


def _memory_of(tensor: Tensor) -> int:
    return storage_address(tensor.untyped_storage())


def _shapes(tensors: Iterable[Tensor]) -> tuple[Shape, ...]:
    return tuple(tuple(tensor.shape) for tensor in tensors)


def _resized(shape: Shape, axis: Axis, size: int) -> Shape:
    dim, outer, inner = axis
    return (*shape[:dim], outer * size * inner, *shape[dim + 1 :])


def _by_sample(tensor: Tensor, axis: Axis, size: int) -> Tensor:
    """Return a view or copy of a tensor with one row for each sample."""
    dim, outer, inner = axis
    shape = (*tensor.shape[:dim], outer, size, inner, *tensor.shape[dim + 1 :])
    return tensor.detach().reshape(shape).movedim(dim + 1, 0)


def _sample_digests(tensor: Tensor, axis: Axis, size: int) -> np.ndarray:
    with unobserved():
        rows = _by_sample(tensor, axis, size).resolve_conj().resolve_neg().contiguous().cpu()
        address = memory_address(rows) + rows.storage_offset() * rows.itemsize
        return np.array(digest_rows(address, size, rows.nbytes // size), dtype=np.uint64)
