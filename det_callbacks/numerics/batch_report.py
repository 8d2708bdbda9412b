"""The result of check_batch_invariance, as data and as text."""

from collections import Counter
from dataclasses import dataclass
from typing import Any, Literal

from det_callbacks.digest.numbers import Measure
from det_callbacks.errors import DetCallbacksError
from det_callbacks.numerics.result import fields_with_measure
from det_callbacks.report.console import Section, Table, to_text
from det_callbacks.report.numerics import ulps_text
from det_callbacks.text import at_most, count, listed
from det_callbacks.verdict import as_json

Kind = Literal[
    "rounding",
    "mixing",
    "nondeterministic",
    "reduction",
    "batch_statistics",
    "random",
    "not_followed",
]

_WORDS = {
    "rounding": "other bits in a batch of a different size; other samples do not matter",
    "mixing": "other values if other samples are in the batch",
    "nondeterministic": "other bits in a second pass over the same batch",
    "reduction": "computes over all samples",
    "batch_statistics": (
        "normalises with the statistics of the batch, as batch normalisation does in train mode"
    ),
    "random": "draws random numbers",
    "not_followed": "samples not followed",
}
_BY_DESIGN = ("batch_statistics", "random")
PRINTED = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchOp:
    """An output of an op in which samples depend on the batch, or cannot be told apart.

    Attributes:
        module: qualified name of the module, "" outside of submodules.
        op: such as "aten.addmm.default"; "" for an output of the model.
        name: for an output of the model, its path: "output['logits']".
        source: lines of the program, the innermost first: "model.py:41 in forward".
        occurrence: number of the call among those of this op in this module, from 0.
        output: index of the op's output.
        kind: "rounding" if the bits depend on the size of the batch and not on the other samples,
            "mixing" if they depend on the other samples, "nondeterministic" if they differ between
            two passes over one batch. In ``BatchInvarianceReport.unseparated``, "reduction",
            "batch_statistics", "random" or "not_followed".
        sizes: sizes of the parts in which a sample has other bits than in the whole batch; () if it
            has them only in batches of the same size.
        begins: whether the difference starts here, since all samples that the op reads are equal.
            False: it reads samples that differ. None: it reads something in which
            samples could not be followed.
        measure: the distance from the whole batch, in one part, for the first ops
            that begin; None for others.
        detail: why samples could not be followed.

    Examples:
        >>> report = check_batch_invariance(torch.nn.BatchNorm1d(3), torch.randn(4, 3))
        >>> report.unseparated[0].op, report.unseparated[0].kind
        ('aten.native_batch_norm.default', 'batch_statistics')
    """

    module: str
    op: str
    kind: Kind
    name: str = ""
    source: tuple[str, ...] = ()
    occurrence: int = 0
    output: int = 0
    sizes: tuple[int, ...] = ()
    begins: bool | None = None
    measure: Measure | None = None
    detail: str = ""

    @property
    def place(self) -> str:
        """The op with its module and line, or the output of the model."""
        if not self.op:
            return f"the model's {self.name}"
        line = f" at {self.source[0]}" if self.source else ""
        return f"{self.op} in {self.module or 'no submodule'}{line}"

    def to_dict(self) -> dict[str, Any]:
        """Return plain data."""
        plain: dict[str, Any] = as_json(fields_with_measure(self))
        return plain


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchInvarianceReport:
    """Whether the bits of a sample depend on the batch that it is in, and where; prints as a table.

    Attributes:
        model: class of the model.
        num_samples: size of the whole batch.
        sizes: sizes of the parts that were compared with it.
        num_compared: outputs of ops and of the model whose samples were compared.
        ops: those in which a sample's bits depend on its batch, in order.
            The last ones are the model's outputs.
        unseparated: ops in which no sample can be told apart, each call once: by design (``kind``
            "reduction", "batch_statistics" or "random"), or because samples could not be followed.
        not_compared: outputs of the model that could not be compared in all sizes.
        notes: further remarks.

    Examples:
        >>> report = check_batch_invariance(torch.nn.BatchNorm1d(3).eval(), torch.randn(4, 3))
        >>> report.invariant, report.num_samples, report.sizes
        (True, 4, (1, 2))
    """

    model: str
    num_samples: int
    sizes: tuple[int, ...]
    num_compared: int
    ops: tuple[BatchOp, ...] = ()
    unseparated: tuple[BatchOp, ...] = ()
    not_compared: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def invariant(self) -> bool | None:
        """Whether each sample has the same bits in every batch;
        None if an output could not be compared.
        """
        if self.ops or any(op.kind in _BY_DESIGN for op in self.unseparated):
            return False
        return None if self.not_compared else True

    @property
    def first(self) -> BatchOp | None:
        """The first op that makes a difference.

        None if there is none, or if all come from batch statistics and random numbers.
        """
        return next((op for op in self.ops if op.begins is not False), None)

    def assert_invariant(self) -> None:
        """Raise ``BatchInvarianceError``, an AssertionError with the report,
        unless ``invariant`` is True.
        """
        if not self.invariant:
            raise BatchInvarianceError(str(self), self)

    def to_dict(self) -> dict[str, Any]:
        """Return plain data."""
        names = (
            "model",
            "num_samples",
            "sizes",
            "num_compared",
            "invariant",
            "not_compared",
            "notes",
        )
        content: dict[str, Any] = as_json({name: getattr(self, name) for name in names})
        first = None if self.first is None else self.first.to_dict()
        ops = {
            name: [op.to_dict() for op in getattr(self, name)] for name in ("ops", "unseparated")
        }
        return {"schema": 1, **content, "first": first, **ops}

    def __str__(self) -> str:
        return _text(self)


class BatchInvarianceError(DetCallbacksError, AssertionError):
    """The bits of a sample depend on its batch, or this is unknown; ``report`` has the ops.

    Examples:
        >>> try:
        ...     check_batch_invariance(
        ...         torch.nn.BatchNorm1d(3), torch.randn(4, 3)
        ...     ).assert_invariant()
        ... except BatchInvarianceError as error:
        ...     error.exit_code, error.report.first
        (1, None)
    """

    exit_code = 1
    _data = ("report",)
    report: BatchInvarianceReport | None = None


def _text(report: BatchInvarianceReport) -> str:
    title = {True: "INVARIANT", False: "DEPENDS ON THE BATCH", None: "NOT COMPARED"}[
        report.invariant
    ]
    starts = [op for op in report.ops if op.begins is not False]
    sections = [Section(title=title, lines=_summary(report))]
    if starts:
        columns = ("op", "module", "line", "kind", "sizes", "distance")
        table = Table(columns=columns, rows=[*map(_cells, starts)], limit=PRINTED)
        sections.append(Section(table=table))
    num_passed_on = len(report.ops) - len(starts)
    passed_on = f"Because of what they read, {count(num_passed_on, 'more output')} differ."
    unseparated = Counter(
        f"{op.place}: {_WORDS[op.kind]}{f' ({op.detail})' if op.kind == 'not_followed' else ''}"
        for op in report.unseparated
        if op.kind not in _BY_DESIGN
    )
    lines = [passed_on] * bool(num_passed_on)
    lines += at_most(PRINTED, [_times(text, number) for text, number in unseparated.items()])
    sections.append(Section(lines=[*lines, *report.notes]))
    return to_text([section for section in sections if section.lines or section.table])


def _summary(report: BatchInvarianceReport) -> list[str]:
    lines = [
        f"{report.model}, {report.num_samples:,} samples, in batches of "
        f"{listed(map(str, report.sizes), limit=20)}: {count(report.num_compared, 'output')} of "
        f"ops and of the model compared sample by sample, {len(report.ops):,} with other bits."
    ]
    first = report.first
    if first is not None:
        why = (
            "all samples that it reads are equal, so it starts here"
            if first.begins
            else "what it reads is not all known"
        )
        where = f" in batches of {listed(map(str, first.sizes), limit=20)}" if first.sizes else ""
        far = "" if first.measure is None else f", {ulps_text(first.measure.ulp)}"
        lines.append(f"First: {first.place}{where}{far}: {_WORDS[first.kind]}; {why}.")
    by_design = [op for op in report.unseparated if op.kind in _BY_DESIGN]
    if by_design:
        lines.append(
            f"By design: {listed([f'{op.place} {_WORDS[op.kind]}' for op in by_design])}. Call "
            "model.eval() to check the model as it is evaluated."
        )
    if report.not_compared:
        lines.append(
            f"Not compared in all sizes: {listed(report.not_compared)}, because the samples could "
            "not be followed, or the shape does not follow the batch size."
        )
    return lines


def _cells(op: BatchOp) -> tuple[str, ...]:
    return (
        op.op or op.name,
        op.module,
        op.source[0] if op.source else "",
        op.kind,
        ", ".join(map(str, op.sizes)) or "-",
        "-" if op.measure is None else ulps_text(op.measure.ulp),
    )


def _times(text: str, number: int) -> str:
    return f"{text}, in {count(number, 'call')}." if number > 1 else f"{text}."
