"""The outcome of a comparison: plain frozen data, no wording and no input or output.

The field names are those of ``det-callbacks diff --json`` (schema 1); ``Verdict.to_dict()`` and that JSON are the same.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, get_args

VERDICT_SCHEMA = 1

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
    "unknown",
]

EXIT_CODES: Mapping[str, int] = {"match": 0, "diverged": 1, "not_comparable": 3}


@dataclass(frozen=True, slots=True, kw_only=True)
class Divergence:
    """One aligned place where two runs differ.

    Attributes:
        rank: process that saw it.
        step: training batch, counted from 0 over the whole run.
        phase: forward, backward, gradient, optimizer, input, state, data, rng or other.
        module: qualified name in the LightningModule; "" outside any module, "?" when unknown.
        op: ``namespace.op.overload``; "" for sites that are no op (a batch, a parameter, a generator).
        occurrence: how many sites of the same phase, module, op and output came before it in the step.
        output: which output of the op, from 0.
        name: parameter, buffer, gradient, optimizer state ("exp_avg of net.head.weight"), path in the batch
            ("batch[0]"), generator or observation; None for an ordinary activation.
        kind: content (other bits), argument (another scalar or option), structure (another shape, dtype or layout),
            missing (only in the reference), extra (only in the current run).
        source: lines of the user's code, innermost first, as "train.py:41 in forward".
        shape: sizes in elements, None where the site is no tensor.
        dtype: "float32" and so on, None where the site is no tensor.
        reference_digest: 16 hexadecimal digits, None when there is none on that side.
        current_digest: likewise.
        is_origin: True when nothing it read differs, False when it passed a difference on or is itself a source
            (an input, a batch, a weight), None where neither can be proven.
    """

    rank: int
    step: int
    phase: str
    module: str
    op: str
    occurrence: int
    output: int
    name: str | None
    kind: Kind
    source: tuple[str, ...]
    shape: tuple[int, ...] | None
    dtype: str | None
    reference_digest: str | None
    current_digest: str | None
    is_origin: bool | None

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON form: tuples become lists."""
        row = asdict(self)
        row["source"] = list(self.source)
        row["shape"] = None if self.shape is None else list(self.shape)
        return row


@dataclass(frozen=True, slots=True, kw_only=True)
class Counts:
    """How much was compared; a site is one digested place of one step."""

    steps_compared: int
    sites_compared: int
    sites_differing: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Coverage:
    """What the verdict speaks of.

    Attributes:
        ranks: number of processes compared.
        steps: first and last step compared, None when none was.
        ops_seen: ops that ran under the trace, over all compared steps.
        ops_digested: those of them whose outputs were digested.
        ops_skipped: reason -> number of ops (view, uninitialised, unselected, ...).
        opaque_regions: names of regions of which only the boundary was seen.
        replayed: op (or name of an observation) whose saved bits were put back -> tensors ("count"), those of them
            whose live bits differed ("differing"), and "mib_per_step".
    """

    ranks: int
    steps: tuple[int, int] | None
    ops_seen: int = 0
    ops_digested: int = 0
    ops_skipped: Mapping[str, int] = field(default_factory=dict)
    opaque_regions: tuple[str, ...] = ()
    replayed: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvironmentDifference:
    """One entry in which two environments differ.

    Attributes:
        name: dotted name, "torch.num_threads".
        reference: value in the reference, JSON-able.
        current: value in the current run, JSON-able.
        changes_bits: whether such a difference can change the bits of a computation.
        is_machine: True for a machine fact (versions, hardware, threads, flags that choose kernels), False for a
            choice (seed, precision, hyperparameter), which never excuses a divergence.
    """

    name: str
    reference: Any
    current: Any
    changes_bits: bool
    is_machine: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """Match, diverged or not comparable, with the evidence.

    ``first_divergence`` is the least in the order (step, position in the step, rank). ``evidence`` is what led to the
    cause, one line a finding, in the order of time.
    """

    verdict: VerdictName
    reference: str
    current: str
    first_divergence: Divergence | None
    origins: tuple[Divergence, ...]
    cause: Cause | None
    explanation: str
    counts: Counts
    coverage: Coverage
    environment: tuple[EnvironmentDifference, ...] = ()
    evidence: tuple[str, ...] = ()

    @property
    def exit_code(self) -> int:
        """0 match, 1 diverged, 3 not comparable."""
        return EXIT_CODES[self.verdict]

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON form of schema 1, as ``det-callbacks diff --json`` prints it."""
        first = self.first_divergence
        return {
            "schema": VERDICT_SCHEMA,
            "verdict": self.verdict,
            "reference": self.reference,
            "current": self.current,
            "first_divergence": None if first is None else first.to_dict(),
            "origins": [origin.to_dict() for origin in self.origins],
            "cause": self.cause,
            "explanation": self.explanation,
            "evidence": list(self.evidence),
            "counts": asdict(self.counts),
            "coverage": {
                **asdict(self.coverage),
                "steps": None if self.coverage.steps is None else list(self.coverage.steps),
                "ops_skipped": dict(self.coverage.ops_skipped),
                "opaque_regions": list(self.coverage.opaque_regions),
                "replayed": dict(self.coverage.replayed),
            },
            "environment": {
                "differences": [
                    {
                        "name": difference.name,
                        "reference": difference.reference,
                        "current": difference.current,
                        "changes_bits": difference.changes_bits,
                        "is_machine": difference.is_machine,
                    }
                    for difference in self.environment
                ]
            },
        }

    @classmethod
    def from_dict(cls, data: Any) -> "Verdict":
        """Return the verdict that :meth:`to_dict` gave, of schema 1.

        Raises:
            ValueError: the structure is another one; the message says what is missing or wrong. Whoever read the file
                names it.
        """
        if not isinstance(data, Mapping) or data.get("schema") != VERDICT_SCHEMA:
            raise ValueError(f"it is no verdict of schema {VERDICT_SCHEMA}")
        cause = data.get("cause")
        if data.get("verdict") not in EXIT_CODES or (cause is not None and cause not in get_args(Cause)):
            raise ValueError(f"it says {data.get('verdict')!r} with the cause {cause!r}, which is none of its words")
        try:
            first, coverage = data["first_divergence"], data["coverage"]
            return cls(
                verdict=data["verdict"],
                reference=str(data["reference"]),
                current=str(data["current"]),
                first_divergence=None if first is None else _divergence(first),
                origins=tuple(_divergence(origin) for origin in data["origins"]),
                cause=cause,
                explanation=str(data["explanation"]),
                counts=Counts(**data["counts"]),
                coverage=Coverage(
                    **{
                        **coverage,
                        "steps": None if coverage["steps"] is None else tuple(coverage["steps"]),
                        "opaque_regions": tuple(coverage["opaque_regions"]),
                    }
                ),
                environment=tuple(EnvironmentDifference(**entry) for entry in data["environment"]["differences"]),
                evidence=tuple(str(line) for line in data["evidence"]),
            )
        except (AttributeError, KeyError, TypeError) as error:
            raise ValueError(f"its structure is not that of a verdict: {type(error).__name__}: {error}") from error


def _divergence(row: Mapping[str, Any]) -> Divergence:
    shape = row["shape"]
    return Divergence(**{**row, "source": tuple(row["source"]), "shape": None if shape is None else tuple(shape)})
