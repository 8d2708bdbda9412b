"""check_batch_invariance: which ops give a sample other bits if other samples are in its batch.

The model runs on the whole batch, on its parts, and on batches of the same size in which other
samples are replaced (``batch_passes.py``).
"""

import math
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from det_callbacks.compare.align import match_keys
from det_callbacks.digest.components import measure_tensors
from det_callbacks.digest.numbers import Measure
from det_callbacks.errors import NothingComparedError
from det_callbacks.internals import dynamo
from det_callbacks.numerics.batch_passes import (
    Alignment,
    Part,
    PartPass,
    PassType,
    Row,
    ShapePass,
    WholePass,
)
from det_callbacks.numerics.batch_report import BatchInvarianceReport, BatchOp, Kind
from det_callbacks.settings.generators import RewindPoint
from det_callbacks.text import count, listed
from det_callbacks.trace.dispatch import DispatchMode
from det_callbacks.trace.leaves import flatten

MAX_MEASURED = 8  # ops whose distance is measured


@dataclass(slots=True)
class _Differences:
    """The rows whose samples differ from the whole batch in some passes."""

    rows: set[int] = field(default_factory=set)
    missing: set[int] = field(default_factory=set)  # that did not run
    reordered: set[int] = field(default_factory=set)  # that have the bits of other samples

    def add(self, other: "_Differences") -> None:
        self.rows |= other.rows
        self.missing |= other.missing
        self.reordered |= other.reordered


def check_batch_invariance(
    model: nn.Module, batch: Any, *, sizes: Sequence[int] | None = None
) -> BatchInvarianceReport:
    """Find the ops in which the bits of a sample depend on the batch that it is in.

    The model runs without gradients, in the mode that it is in, on the whole batch and on its
    parts: for each size, on all samples in batches of that size. Then, to tell ops that mix samples
    from rounding, it runs on batches of the whole size in which other samples are replaced by
    copies. Every op's output is compared sample by sample, bit by bit. All passes begin with the
    same generators and buffers, which the check restores.

    A dimension holds the samples if its length follows the batch size. A dimension of several
    values a sample (batch * tokens, heads * batch) counts if memory proves how it was made;
    otherwise the report says that the samples could not be followed there. The op that first makes
    a difference is named; later ops that read it differ with it.

    Memory: one digest for each sample and output, and the tensors of one op; for the distance, the
    outputs of at most 8 ops. Time: two passes over the whole batch, one for each size, two for each
    doubling of the batch size, and one or two for the distance. Inside of compiled modules, ops are
    not compared, only the model's outputs.

    Args:
        model: a module, in train or eval mode.
        batch: one tensor, a tuple of positional arguments, or a mapping of keyword arguments.
            Tensors whose first dimension is as long as that of the first tensor are divided into
            samples; the rest is passed as it is.
        sizes: sizes of the parts, from 1 to the batch size minus 1. The default is 1, 2, 4 and so
            on, without sizes in which the model raises.

    Returns:
        The report; ``report.assert_invariant()`` raises if bits of a sample depend on its batch.

    Raises:
        NothingComparedError: in no output of an op or of the model could samples be told apart.
        TypeError, ValueError: an argument is wrong, or the batch has less than two samples.

    Examples:
        >>> report = check_batch_invariance(torch.nn.ReLU(), torch.randn(4, 3))
        >>> report.invariant, report.first
        (True, None)
        >>> class Centred(torch.nn.Module):
        ...     def forward(self, x):
        ...         return x - x.mean(0)
        >>> report = check_batch_invariance(Centred(), torch.randn(4, 3))
        >>> report.invariant, report.first.op, report.first.kind
        (False, 'aten.sub.Tensor', 'mixing')
    """
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"model must be a torch.nn.Module; got {model!r}. Wrap a function in a module that "
            "calls it."
        )
    args, kwargs = _call_of(batch)
    num_samples = _num_samples((args, kwargs))
    chosen = _checked_sizes(sizes, num_samples)
    with torch.no_grad():
        return _Check(model, args, kwargs, num_samples).run(chosen, may_leave_out=sizes is None)


def _call_of(batch: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if isinstance(batch, Mapping):
        return (), dict(batch)
    return (batch if type(batch) is tuple else (batch,)), {}


def _num_samples(call: Any) -> int:
    lengths = [len(tensor) for _, tensor in _tensors(call) if tensor.dim()]
    if not lengths:
        raise TypeError(
            "the batch has no tensor with a dimension; pass the tensors that the model gets"
        )
    if lengths[0] < 2:
        raise ValueError(
            f"the batch has {lengths[0]} samples (the length of its first tensor); pass at least 2"
        )
    return lengths[0]


def _tensors(tree: Any, name: str = "") -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of a batch in their own order, with their paths."""
    if isinstance(tree, Tensor):
        yield name, tree
    elif isinstance(tree, Mapping):
        for key, value in tree.items():
            yield from _tensors(value, f"{name}[{key!r}]")
    elif type(tree) in (list, tuple):
        for index, value in enumerate(tree):
            yield from _tensors(value, f"{name}[{index}]")


def _checked_sizes(sizes: Sequence[int] | None, num_samples: int) -> list[int]:
    if sizes is None:
        return [1 << power for power in range((num_samples - 1).bit_length())]
    if not sizes or not all(type(size) is int and 0 < size < num_samples for size in sizes):
        raise ValueError(
            f"sizes must be integers from 1 to {num_samples - 1}, the batch size minus 1; got "
            f"{sizes!r}"
        )
    return sorted(set(sizes))


def _ulps_of(measure: Measure) -> float:
    return math.inf if measure.ulp is None else measure.ulp  # none of a NaN or an infinity


class _Check:
    """Runs the passes over one batch, and draws the conclusion."""

    def __init__(self, model: nn.Module, args: Any, kwargs: Any, num_samples: int) -> None:
        self._model, self._args, self._kwargs = model, args, kwargs
        self._num_samples = num_samples
        self._generators = RewindPoint()
        self._buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
        self._is_compiled = any(
            isinstance(part, dynamo.optimized_module())
            or dynamo.is_compiled_in_place(part) is not None
            for part in model.modules()
        )
        self._rows: list[Row] = []
        self._alignments: dict[int, Alignment] = {}  # by size of the batch
        self._failed: dict[int, Exception] = {}  # by size of the batch
        self._found_in: dict[int, list[Part]] = {}  # row -> the parts in which it differs

    def run(self, sizes: Sequence[int], *, may_leave_out: bool) -> BatchInvarianceReport:
        everything = (*range(self._num_samples),)
        first = Part(everything[: sizes[-1]], ())
        shapes = self._pass(first, ShapePass()).rows
        alignment = self._align(Part(everything, ()), shapes)
        self._rows = self._pass(
            Part(everything, everything),
            WholePass(shapes, alignment, (self._num_samples, sizes[-1])),
        ).rows
        if not any(row.digests is not None for row in self._rows):
            raise NothingComparedError(
                "No output of an op or of the model has a dimension that follows the batch size, "
                "so no sample could be compared. Pass a batch whose samples are along the first "
                "dimension, and return them from forward."
            )
        unstable = self._differences([Part(everything, everything)])
        by_size: dict[int, _Differences] = {}
        for size in sizes:
            for start in range(0, self._num_samples, size):
                part = everything[start : start + size]  # the last may be smaller
                if len(part) in self._failed:
                    continue
                try:
                    differences = self._differences([Part(part, (*range(len(part)),))])
                except Exception as error:
                    if not may_leave_out or len(part) == sizes[-1]:
                        raise
                    self._failed[len(part)] = error
                    by_size.pop(len(part), None)
                else:
                    by_size.setdefault(len(part), _Differences()).add(differences)
        mixed = self._differences(self._with_others_replaced())
        return self._report(by_size, mixed, unstable.rows)

    def _with_others_replaced(self) -> Iterable[Part]:
        """Yield batches of the whole size in which, for any two samples,
        one is kept while the other is replaced.
        """
        everything = range(self._num_samples)
        for bit in range((self._num_samples - 1).bit_length()):
            for side in (0, 1):
                kept = [sample for sample in everything if sample >> bit & 1 == side]
                samples = [
                    sample if sample in kept else kept[sample % len(kept)] for sample in everything
                ]
                yield Part(tuple(samples), tuple(kept))

    def _align(self, part: Part, rows: Sequence[Row]) -> Alignment:
        """Run a part to see its ops, and match them with the rows of another pass."""
        keys = [row.key for row in self._pass(part, ShapePass()).rows]
        matches = match_keys([row.key for row in rows], keys)
        counterparts = {index: row for row, index in matches}
        return [(key, counterparts.get(index)) for index, key in enumerate(keys)]

    def _compared(self, part: Part, indices: Collection[int] = ()) -> PartPass:
        """Compare a part with the whole batch; batches of one size mostly run the same ops."""
        size = len(part.samples)
        if size not in self._alignments:
            self._alignments[size] = self._align(part, self._rows)
        compared = self._pass(part, PartPass(self._rows, self._alignments[size], part, indices))
        if compared.has_left_alignment:
            compared = self._pass(
                part, PartPass(self._rows, self._align(part, self._rows), part, indices)
            )
        return compared

    def _differences(self, parts: Iterable[Part]) -> _Differences:
        differences = _Differences()
        for part in parts:
            compared = self._compared(part)
            differences.add(_Differences(compared.differing, compared.missing, compared.reordered))
            for row in compared.differing:
                self._found_in.setdefault(row, []).append(part)
        return differences

    def _pass(self, part: Part, ops: PassType) -> PassType:
        """Run the model on a part of the batch; generators and buffers are as before."""
        index = torch.tensor(part.samples)
        args, kwargs = self._taken(self._args, index), self._taken(self._kwargs, index)
        self._generators.put_back()
        ops.begin(self._model, len(part.samples))
        try:
            for _, tensor in _tensors((args, kwargs)):
                ops.add_input(tensor)
            with nullcontext() if self._is_compiled else DispatchMode(ops.op):
                output = self._model(*args, **kwargs)
            for name, leaf in flatten(output, "output"):
                if isinstance(leaf, Tensor):
                    ops.add_output(name, leaf)
        except Exception as error:
            error.add_note(
                f"check_batch_invariance ran the model on {len(index)} of {self._num_samples} "
                "samples"
            )
            raise
        finally:
            ops.end()
            self._generators.put_back()
            for buffer, before in self._buffers:
                buffer.copy_(before)
        return ops

    def _taken(self, tree: Any, index: Tensor) -> Any:
        """Return the arguments with some samples, copied in the memory format of the batch."""
        if isinstance(tree, Tensor):
            if not tree.dim() or len(tree) != self._num_samples:
                return tree
            taken = tree.detach()[: len(index)].clone()
            return taken.copy_(tree.detach().index_select(0, index.to(tree.device)))
        if isinstance(tree, Mapping):
            return {name: self._taken(value, index) for name, value in tree.items()}
        if type(tree) in (list, tuple):
            return type(tree)(self._taken(value, index) for value in tree)
        return tree

    def _report(
        self, by_size: Mapping[int, _Differences], mixed: _Differences, unstable: Collection[int]
    ) -> BatchInvarianceReport:
        rows, passes = self._rows, (mixed, *by_size.values())
        self._explain_reordered(passes)
        declared = self._declared(passes, mixed, unstable)
        for index in declared:
            rows[index].why = "random" if rows[index].draws else "batch_statistics"
        begun, sizes = self._begun_in_any(by_size, mixed, declared)
        for index in unstable:
            begun.setdefault(index, None)
        differing = sorted(begun)
        measures = self._measures(
            [index for index in differing if begun[index] is not False][:MAX_MEASURED]
        )
        kinds: dict[int, Kind] = dict.fromkeys(differing, "rounding")
        kinds |= dict.fromkeys(mixed.rows & begun.keys(), "mixing")
        kinds |= dict.fromkeys(unstable, "nondeterministic")
        ops = [
            self._op(
                index,
                kinds[index],
                sizes=tuple(sizes[index]),
                begins=begun[index],
                measure=measures.get(index),
            )
            for index in differing
        ]
        unseparated: dict[tuple[str, str, int], BatchOp] = {}
        for index, row in enumerate(rows):
            if row.why is not None and row.key[1]:
                op = self._op(index, row.why, detail=row.detail)
                unseparated.setdefault((op.module, op.op, op.occurrence), op)
        return BatchInvarianceReport(
            model=type(self._model).__name__,
            num_samples=self._num_samples,
            sizes=tuple(sorted(by_size)),
            num_compared=sum(row.digests is not None and row.why is None for row in rows),
            ops=tuple(ops),
            unseparated=tuple(unseparated.values()),
            not_compared=tuple(dict.fromkeys(self._outputs_not_compared(by_size))),
            notes=tuple(self._notes(by_size)),
        )

    def _explain_reordered(self, passes: Iterable[_Differences]) -> None:
        """Note the rows that make a difference because their samples have another order."""
        for differences in passes:
            for index, begins in self._begun(differences, ()).items():
                row = self._rows[index]
                if begins is not False and index in differences.reordered and not row.draws:
                    row.why, row.detail = "not_followed", "its samples are in a different order"

    def _declared(
        self, passes: Iterable[_Differences], mixed: _Differences, unstable: Collection[int]
    ) -> set[int]:
        """Return the rows whose samples depend on the batch by design: they draw random numbers, or
        are normalised with its statistics.
        """
        differing = {index for differences in passes for index in differences.rows}
        return {
            index
            for index in differing - {*unstable}
            if (row := self._rows[index]).why is None
            and (row.draws or (index in mixed.rows and "batch_norm" in row.key[1]))
        }

    def _begun_in_any(
        self, by_size: Mapping[int, _Differences], mixed: _Differences, declared: Collection[int]
    ) -> tuple[dict[int, bool | None], dict[int, list[int]]]:
        """Return whether each row that differs makes the difference in any pass, as ``_begun`` does
        for one, and the sizes of the parts in which it differs.
        """
        begun: dict[int, bool | None] = {}
        sizes: dict[int, list[int]] = defaultdict(list)
        for size, differences in by_size.items():
            for index, begins in self._begun(differences, declared).items():
                sizes[index].append(size)
                in_passes = {begins, begun.get(index, False)}
                begun[index] = next(state for state in (True, None, False) if state in in_passes)
        # what reads a mixed sample is no place where samples are mixed
        return begun | self._begun(mixed, declared), sizes

    def _begun(
        self, differences: _Differences, declared: Collection[int]
    ) -> dict[int, bool | None]:
        """Return the rows that differ, and whether each makes the difference:
        None if what it reads is unknown.
        """
        differs: set[int] = set()  # rows with other bits that are not those of other samples
        unknown: set[int] = set()
        begun: dict[int, bool | None] = {}
        for index, row in enumerate(self._rows):
            reads_difference = not differs.isdisjoint(row.reads)
            is_followed = row.digests is not None and row.why != "not_followed"
            if is_followed and index in differences.rows:
                differs.add(index)
                if index not in declared:
                    reads_unknown = not unknown.isdisjoint(row.reads)
                    # which op made an output is unknown
                    is_known = row.key[1] != "" and not reads_unknown
                    begun[index] = False if reads_difference else True if is_known else None
            elif not is_followed or index in differences.missing:
                if reads_difference:
                    differs.add(index)
                if (
                    row.why == "not_followed"
                    or index in differences.missing
                    or not unknown.isdisjoint(row.reads)
                ):
                    unknown.add(index)
        return begun

    def _measures(self, wanted: Sequence[int]) -> dict[int, Measure]:
        """Return the largest distance of a sample from the whole batch, for some rows."""
        by_part: dict[Part, list[int]] = defaultdict(list)
        for index in wanted:
            for part in self._found_in[index]:
                by_part[part].append(index)
        everything = (*range(self._num_samples),)
        whole = self._compared(Part(everything, everything), wanted).kept
        measures: dict[int, list[Measure]] = defaultdict(list)
        for part, indices in by_part.items():
            for index, samples in self._compared(part, indices).kept.items():
                if index in whole:
                    of_whole = whole[index][part.compared_samples]
                    measures[index].append(measure_tensors(of_whole, samples))
        return {index: max(of_row, key=_ulps_of) for index, of_row in measures.items()}

    def _op(self, index: int, kind: Kind, **options: Any) -> BatchOp:
        row = self._rows[index]
        module, op, output, _ = row.key
        return BatchOp(
            kind=kind,
            module=module if op else "",
            op=op,
            name="" if op else module,
            occurrence=row.occurrence,
            output=output,
            source=row.source,
            **options,
        )

    def _outputs_not_compared(self, by_size: Mapping[int, _Differences]) -> Iterator[str]:
        """Yield the outputs of the model whose samples could not be compared in every size."""
        outputs = [(index, row) for index, row in enumerate(self._rows) if not row.key[1]]
        if not outputs:
            yield "output"  # it holds no tensor
        # a loss may be computed over all samples, but not everything that the model returns
        is_one_compared = any(row.digests is not None for _, row in outputs)
        for index, row in outputs:
            is_left_out = row.digests is None and not is_one_compared
            if (
                is_left_out
                or row.why == "not_followed"
                or any(index in found.missing for found in by_size.values())
            ):
                yield row.key[0]

    def _notes(self, by_size: Mapping[int, _Differences]) -> Iterable[str]:
        if self._is_compiled:
            yield "The model is compiled, so only its outputs were compared, not its ops."
        for size, error in self._failed.items():
            lines = str(error).splitlines() or [""]
            yield (
                f"Batches of {size} were not compared: the model raised {type(error).__name__} "
                f"({lines[0]})."
            )
        for size, differences in by_size.items():
            missing = [self._rows[index] for index in sorted(differences.missing)]
            missing = [row for row in missing if row.digests is not None and row.key[1]]
            if missing:
                module, op, *_ = missing[0].key
                yield (
                    f"In batches of {size}, the model runs other ops: "
                    f"{count(len(missing), 'output')} of ops in the whole batch, the first of {op} "
                    f"in {module or 'no submodule'}, could not be compared."
                )
        whole = [
            name
            for name, tensor in (*_tensors(self._args), *_tensors(self._kwargs))
            if tensor.dim() and len(tensor) != self._num_samples
        ]
        if whole:
            yield (
                "Passed whole to each part, since the first dimension is not the batch size: "
                f"{listed(whole)}."
            )
