"""The outcome of a comparison: plain frozen data whose fields are those of ``det-callbacks diff
--json`` (schema 1).
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any, Literal

import msgspec

VERDICT_SCHEMA = 1
MAX_ORIGINS = 100  # that a verdict lists, those of the first ranks

VerdictName = Literal["match", "diverged", "not_comparable"]
Kind = Literal["content", "argument", "structure", "missing", "extra"]
Cause = Literal[
    "settings",
    "initial_weights",
    "data_order",
    "data_content",
    "rng",
    "forward",
    "backward",
    "collective",
    "optimizer",
    "checkpoint",
    "structure",
    "external_write",
    "uninitialised_memory",
    "unknown",
]

TrailKind = Literal[
    "setting",
    "option",
    "checkpoint",
    "generator",
    "indices",
    "loaded",
    "batch",
    "boundary",
    "state",
    "op",
    "gradient",
    "collective",
    "region",
    "kernel",
    "unwritten",
    "outside",
    "metric",
]

Restored = Literal["restored", "differs", "missing", "exchanged", "reseeded"]

EXIT_CODES: Mapping[str, int] = {"match": 0, "diverged": 1, "not_comparable": 3}


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorNumbers:
    """The size of the difference of one tensor that both runs kept."""

    tensor: str  # "output 0"
    shape: tuple[int, ...] = ()
    dtype: str = ""
    num_differing: int = 0
    # elements by distance: 0 ULPs (equal, or zeros of the other sign), 1, 2 to 3, 4 to 7 and so on,
    # up to ``max_ulps``; () for dtypes without a distance
    ulps: tuple[int, ...] = ()
    num_nan: int = 0  # elements that differ and of which one or both are NaN; in no bin of ``ulps``
    num_inf: int = 0  # likewise, of which one or both are infinite and none is NaN
    # in units in the last place of the element, or of the root mean square of the
    # reference if that is larger
    max_ulps: int | None = None
    # largest distances of finite elements, or None if there are none or
    # float64 cannot represent them
    max_absolute: float | None = None
    max_relative: float | None = None  # likewise, divided by the size that determines the unit
    first: tuple[int, ...] | None = None  # index of the first element that differs, row-major
    # its values in the reference and the current run, as text
    first_values: tuple[str, str] | None = None
    # the element with NaN, else an infinity, else the largest distance
    worst: tuple[int, ...] | None = None
    worst_values: tuple[str, str] | None = None
    problem: str = ""  # why there are no numbers, or ""
    num_elements: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        object.__setattr__(self, "num_elements", prod(self.shape))


@dataclass(frozen=True, slots=True, kw_only=True)
class Numbers:
    """The size of a divergence: of the tensors that both runs kept, or why there are no numbers."""

    output: tuple[TensorNumbers, ...] = ()
    problem: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Divergence:
    """One aligned place where two runs differ.

    Attributes:
        rank: number of the process.
        step: training batch, counted from 0 over the whole run.
        phase: forward, backward, gradient, optimizer, input, state, data, rng, metric or other.
        module: qualified name in the LightningModule; "" for ops of the root and outside any
            module, "?" when unknown.
        op: ``namespace.op.overload``; "" for a batch, a parameter or a generator.
        occurrence: number of earlier sites of the step with the same phase, module, op and output.
        output: index of the op's output.
        name: parameter, buffer, gradient, optimizer state ("exp_avg of net.head.weight"), path in
            the batch ("batch[0]"), generator, metric or observation, or None for an activation.
        kind: content (different bits), argument (a different scalar or option), structure (a
            different shape, dtype or layout), missing (only in the reference),
            extra (only in the current run).
        source: lines of the user's code, innermost first, as "train.py:41 in forward".
        shape: in elements; None if the site is not a tensor.
        dtype: such as "float32"; None if the site is not a tensor.
        reference_digest: 16 hexadecimal digits, or None.
        current_digest: the same for the current run.
        is_origin: True if nothing it read differs; False if it passed a difference on or is itself
            a source (an input, a batch, a weight), or None if neither can be proven.
        numbers: the size of the difference; None unless ``keep_tensors`` has its op.
        segment: fit of the run, counted from 0.

    Examples:
        >>> first = compare_runs("refs/run1", "refs/run2").first_divergence
        >>> first.step, first.phase, first.op, first.kind
        (0, 'optimizer', 'aten.add_.Tensor', 'argument')
        >>> first.name, first.shape, first.dtype, first.is_origin
        ('weight', (2, 4), 'float32', True)
    """

    rank: int
    step: int
    phase: str
    module: str = ""
    op: str = ""
    occurrence: int = 0
    output: int = 0
    name: str | None = None
    kind: Kind
    source: tuple[str, ...] = ()
    shape: tuple[int, ...] | None = None
    dtype: str | None = None
    reference_digest: str | None = None
    current_digest: str | None = None
    is_origin: bool | None = None
    numbers: Numbers | None = None
    segment: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Counts:
    """How much was compared; a site is one digested place of one step.

    Attributes:
        steps_compared: number of steps, over all ranks.
        sites_compared: number of sites, over all steps.
        sites_differing: those that differ or that only one run has.

    Examples:
        >>> compare_runs("refs/run1", "refs/run1").counts
        Counts(steps_compared=3, sites_compared=108, sites_differing=0)
    """

    steps_compared: int
    sites_compared: int
    sites_differing: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Coverage:
    """What the verdict covers.

    Attributes:
        ranks: number of processes that were compared.
        steps: first and last step compared, or None.
        ops_seen: ops that ran under the trace, over all compared steps.
        ops_digested: those whose outputs were digested.
        ops_skipped: reason -> number of ops without a digest, such as views.
        opaque_regions: what the recorder could not look into: compiled regions of which it saw only
            the boundary, ops, classes of tensors, and objects in a batch.
        replayed: op or observation whose saved bits were restored -> number of tensors ("count"),
            of those whose live bits differed ("differing"), and "mib_per_step".
        metrics: number of compared logged values.
        lost: parts of a followed training that no step holds, a sentence each.
        followed: models and optimizers that torch's hooks found,
            "" if the training named its steps.

    Examples:
        >>> coverage = compare_runs("refs/run1", "refs/run1").coverage
        >>> coverage.ranks, coverage.steps, coverage.ops_seen, coverage.ops_digested
        (1, (0, 2), 72, 36)
        >>> coverage.ops_skipped
        {'no_tensors': 12, 'view': 24}
    """

    ranks: int
    steps: tuple[int, int] | None
    ops_seen: int = 0
    ops_digested: int = 0
    ops_skipped: Mapping[str, int] = field(default_factory=dict)
    opaque_regions: tuple[str, ...] = ()
    replayed: Mapping[str, Any] = field(default_factory=dict)
    metrics: int = 0
    lost: tuple[str, ...] = ()
    followed: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvironmentDifference:
    """One entry, such as "torch.num_threads", in which two environments differ, with JSON values.

    Attributes:
        name: the entry, such as "torch.num_threads".
        reference: its value in the reference.
        current: its value in the current run.
        changes_bits: whether such a difference can change bits.
        is_machine: True for a machine fact (versions, hardware, threads, flags that choose
            kernels), False for a choice (seed, precision, hyperparameter), which never excuses a
            divergence.

    Examples:
        >>> for entry in compare_runs("refs/run1", "refs/run2").environment:
        ...     entry.name, entry.reference, entry.current, entry.is_machine
        ('optimizer.SGD.lr', 0.1, 0.2, False)
    """

    name: str
    reference: Any
    current: Any
    changes_bits: bool
    is_machine: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """A reproducible mistake in one run, such as an epoch that repeats the order of the last one.

    Attributes:
        finding: its word, which ``ignore_findings`` in ``[tool.det_callbacks]``
            of pyproject.toml ignores.
        explanation: what is wrong, and what to do about it.
        ranks: the processes that show it.
        steps: the first and the last step that show it; () for the run as a whole.
        names: parameters, loaders, generators, modules or parts of the batch.

    ``Verdict.findings`` and ``det-callbacks findings RUN --json`` have them.

    Examples:
        >>> Finding(
        ...     finding="repeated_order",
        ...     explanation="Epoch 1 repeats the order of epoch 0: set shuffle=True.",
        ...     ranks=(0,),
        ...     steps=(8, 15),
        ...     names=("train_dataloader",),
        ... ).finding
        'repeated_order'
    """

    finding: str
    explanation: str
    ranks: tuple[int, ...]
    steps: tuple[int, ...]
    names: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class TrailEntry:
    """One of the things that led to the first divergence.

    Attributes:
        kind: what it is: a setting, an option (of an optimizer's group or a loader, or the mode of
            a module), a checkpoint, a generator, the indices that a sampler drew, what a loader
            returned ("loaded"), a part of the batch, a boundary (what ran between two moments), a
            tensor of the state, an op, a gradient, a collective, a compiled region, a kernel,
            memory that nothing had written ("unwritten"), something that was not recorded
            ("outside"), or a metric.
        name: "optimizer.SGD.lr", "torch.cpu", "batch[0]", "aten.mm.default in net.head".
        rank: number of the process.
        segment: fit of the run, counted from 0.
        step: at which it differs, or which it precedes.
        moment: phase of the step, or point before it, such as "epoch start";
            "" if it holds for the run.
        proven: whether it is certain that the next entry read it; else it may have.
        reference: its value or digest in the reference, as text; None if it has none.
        current: the same of the current run.

    Examples:
        >>> entry = compare_runs("refs/run1", "refs/run2").trail[0]
        >>> entry.kind, entry.name, entry.reference, entry.current, entry.proven
        ('setting', 'optimizer.SGD.lr', '0.1', '0.2', False)
    """

    kind: TrailKind
    name: str
    rank: int
    segment: int
    step: int
    moment: str
    proven: bool
    reference: str | None
    current: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class SiteNumerics:
    """The size of the difference at a site whose tensors both runs kept;
    the first fields are a ``Divergence``'s.

    Attributes:
        kind: also "equal".
        ulp: largest distance in units in the last place; ``relative`` and ``absolute`` are the
            largest errors. All are None where one side alone has a NaN or an infinity, or one run
            alone has the op. Elements smaller than the root mean square of their tensor count at
            that size, since next to zero ULPs and relative errors say little.
        within: whether every element is within the tolerance; ``excess`` is the largest difference
            as a multiple of it, None if that is infinite.
        num_elements: number of compared elements, fewer than in the shape if a sample was kept.
        reads: largest relative error of the op's inputs, or None if unknown.
        growth: the error as a multiple of that, or of the dtype's epsilon if that is larger, or
            None without either.
        is_start: whether a change starts here: it is beyond its tolerance, its inputs do not
            explain that, and no other change has reached them. Ops that only one run has may
            explain it: ``Numerics.jumps`` has the op.
        through: unknown ops on the way from the compared inputs: ops that only one run has or kept,
            and inputs that differ.
    """

    rank: int
    step: int
    phase: str
    module: str
    op: str
    occurrence: int
    output: int
    name: str | None
    kind: Kind | Literal["equal"]
    source: tuple[str, ...]
    shape: tuple[int, ...] | None
    dtype: str | None
    reference_digest: str | None
    current_digest: str | None
    is_origin: bool | None
    segment: int
    ulp: int | None
    relative: float | None
    absolute: float | None
    within: bool
    excess: float | None
    num_elements: int
    reads: float | None
    growth: float | None
    is_start: bool
    through: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Numerics:
    """Whether two runs differ by rounding or by a real change,
    at the sites whose tensors both runs kept.

    Attributes:
        conclusion: "none" if all numbers are equal; "change" if an op beyond its tolerance has an
            error that its inputs do not explain; else "rounding",
            which may add up to more than the tolerance.
        tolerance: "torch.testing", or the file with the measured one.
        first_jump: where a change starts: an op beyond its tolerance whose error is at least 10
            times that of its inputs, and the dtype's epsilon. The largest, in the first step with
            any. If an op that only one run has comes right before, the change starts there: its
            kind is "missing" or "extra", and it has no measures.
        worst: the site that is farthest beyond its tolerance, or nearest to it.
        num_default: differing sites with the tolerance of ``torch.testing``,
            because none was measured for them.
        not_compared: why kept sites were not compared -> how many.
        jumps: all of them of that step, the largest first, except that an op that only one run has
            comes directly before the largest jump behind it.
        sites: all compared sites, in the order of the steps.
    """

    conclusion: Literal["rounding", "change", "none"]
    tolerance: str
    first_jump: SiteNumerics | None
    worst: SiteNumerics | None
    num_differing: int
    num_beyond: int
    num_default: int
    not_compared: Mapping[str, int]
    jumps: tuple[SiteNumerics, ...]
    sites: tuple[SiteNumerics, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Resume:
    """Where the current run continued the reference, and what it restored.

    Attributes:
        step: its first step, counted from 0.
        how: "given" by the program, or "found": the run began with parameters that
            the step before had left.
        restored: for each part of the state that was recorded, "restored" if it is the reference's,
            "differs", "missing", "exchanged" (the reference's bits of another parameter) or
            "reseeded" (with a different seed): parameters; buffers; optimizer, for each of its
            states; options of the optimizer that differ, such as lr; further state (schedulers, a
            gradient scaler, callbacks); generators that the reference has drawn from; gradients
            accumulated before the step, if they are missing; data (the batch of the step).
        of_step: for data and generators that differ, the step of the reference that had what this
            run began with; for data it is ``step`` if the same samples were drawn,
            and their content differs.
        framework: what trained: "torch" (no framework), "lightning",
            "transformers" or "accelerate".

    Examples:
        >>> compare_runs("refs/run1", "verified").resume
        Resume(step=400, how='found', restored={'parameters': 'restored', 'data': 'differs'},
        of_step={'data': 0}, ...)
    """

    step: int
    how: Literal["given", "found"]
    restored: Mapping[str, Restored | Mapping[str, Restored]]
    of_step: Mapping[str, int] = field(default_factory=dict)
    framework: str = "torch"


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """Match, diverged or not comparable, with the evidence.

    Attributes:
        verdict: "match", "diverged" or "not_comparable".
        reference: folder of the reference.
        current: folder of the run that was compared.
        first_divergence: the earliest difference by fit, step and position, of several ranks there
            one in which it started; or a metric, or a step in one run only, if that comes first.
            None for a match.
        origins: the sites at which a difference starts, at most 100.
        cause: a word from docs/reference/causes.md; None for a match.
        explanation: what differs and what to do, in one sentence.
        trail: what led to the first divergence, the cause first; it ends where the record ends.
        resume: where the current run continued the reference, if it was verified and resumed.
        evidence: what led to the cause, a line each, in the order of time.
        record_next: the arguments of ``DeterminismCallback`` that record what
            the verdict lacks, or None.
        find_command: the ``det-callbacks find`` command that does so in one go, or None.
        counts: how much was compared.
        coverage: what the verdict covers, and what it leaves out.
        environment: the entries in which the environments differ.
        findings: mistakes that the current run shows by itself.
            Neither they nor ``numerics`` change the verdict.
        numerics: how far the tensors are apart; None unless ``compare_runs`` was asked for it.

    Examples:
        >>> verdict = compare_runs("refs/run1", "refs/run2")
        >>> verdict.verdict, verdict.exit_code, verdict.cause
        ('diverged', 1, 'settings')
        >>> Verdict.from_dict(verdict.to_dict()) == verdict
        True
    """

    verdict: VerdictName
    reference: str
    current: str
    first_divergence: Divergence | None
    origins: tuple[Divergence, ...]
    cause: Cause | None
    explanation: str
    trail: tuple[TrailEntry, ...] = ()
    resume: Resume | None = None
    evidence: tuple[str, ...] = ()
    record_next: Mapping[str, Any] | None = None
    find_command: str | None = None
    counts: Counts
    coverage: Coverage
    environment: tuple[EnvironmentDifference, ...] = ()
    findings: tuple[Finding, ...] = ()
    numerics: Numerics | None = None

    @classmethod
    def refused(
        cls,
        reference: str,
        current: str,
        reason: str,
        environment: Sequence[EnvironmentDifference] = (),
    ) -> "Verdict":
        """Return the verdict on runs that cannot be compared at all."""
        return cls(
            verdict="not_comparable",
            reference=reference,
            current=current,
            first_divergence=None,
            origins=(),
            cause=None,
            explanation=reason,
            counts=Counts(steps_compared=0, sites_compared=0, sites_differing=0),
            coverage=Coverage(ranks=0, steps=None),
            environment=tuple(environment),
        )

    @property
    def exit_code(self) -> int:
        """0 match, 1 diverged, 3 not comparable."""
        return EXIT_CODES[self.verdict]

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON form of schema 1, as ``det-callbacks diff --json`` prints it."""
        content = as_json(self)
        if self.numerics is None:
            del content["numerics"]
        return {
            "schema": VERDICT_SCHEMA,
            **content,
            "environment": {"differences": content["environment"]},
        }

    @classmethod
    def from_dict(cls, content: Any) -> "Verdict":
        """Return the verdict that :meth:`to_dict` wrote; ValueError, which names the field,
        if it is not a verdict.
        """
        if not isinstance(content, Mapping) or content.get("schema") != VERDICT_SCHEMA:
            raise ValueError(f"it is not a verdict of schema {VERDICT_SCHEMA}")
        environment = content.get("environment")
        differences = environment.get("differences") if isinstance(environment, Mapping) else None
        try:
            return msgspec.convert({**content, "environment": differences}, cls)
        except msgspec.ValidationError as error:  # no ValueError in msgspec 0.19
            raise ValueError(str(error)) from error


def is_certain_change(verdict: Verdict) -> bool:
    """Return whether the training certainly changed, even if the machine did too.

    A different machine or version may change the bits of an op and which ops run, but no setting,
    no shape of a batch or a weight, and no number of steps.
    """
    first = verdict.first_divergence
    has_other_choice = any(
        entry.changes_bits and not entry.is_machine for entry in verdict.environment
    )
    if first is None or has_other_choice:
        return has_other_choice
    is_given_or_a_step = not first.op and first.phase in ("state", "data", "other")
    return is_given_or_a_step and first.kind in ("structure", "missing", "extra")


def as_json(data: object) -> dict[str, Any]:
    """Return a dataclass as JSON: lists for tuples, text for keys;
    ValueError for a number that JSON lacks.
    """
    content: dict[str, Any] = json.loads(
        json.dumps(msgspec.to_builtins(data, str_keys=True), allow_nan=False)
    )
    return content
