"""The parts of a recorded step: its ordered sites (the program), their layouts, and their digests.

Layouts are separate, so a model whose shapes change every step has one program. ``SiteRow``
separates a site from its position, since the programs of different steps share most sites.
"""

import json
import re
import struct
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain
from typing import Any, Literal, TypedDict

import msgspec
import numpy as np
from msgspec.structs import replace

from det_callbacks.digest.host import digest_bytes

# What the 64 bits of a site are; a digest of a tensor unless the comment says otherwise.
Role = Literal[
    "output",  # written by an op (returned, or mutated in place)
    # no tensor: a Python scalar that an op returned
    # (``_local_scalar_dense``), float64, int64 or bool
    "value",
    # no tensor: the numbers among the arguments of the following op (see ``Site.varying``)
    "argument",
    "input",  # read by an op, and not written by a recorded site of this step
    "generator",  # no tensor: the state of a random generator
    "named",  # batch, loss, gradient, parameter, buffer, optimizer state, module output
    "samples",  # a batch tensor, whatever the order of its samples (dimension 0)
    "sent",  # the rank's input of a collective, before the call; 0 without a layout if it has none
    # written by a collective, at its first read; 0 and IN_FLIGHT if read
    # before the collective was done
    "delivered",
    # no tensor: a compiled region about to run; also in the layout,
    # so that another region is structure
    "graph",
    "region_input",  # input of a compiled region, or the bits of a number that is
    "graph_output",  # memory that a replayed CUDA graph may have written, at its first read
]

IDLE = 0
"""Bits of a generator that nothing has drawn from since the fit began, whatever its state."""

SubjectKind = Literal[
    "",  # it has no name
    # a parameter, a buffer, a part of the batch, the loss, an output, an observation: of its name
    "tensor",
    "gradient",  # of a tensor
    "state",  # of an optimizer for a parameter: of "net.weight", part "exp_avg"
    "further",  # state of a scheduler, a scaler, an averaged model: of "StepLR", part "last_epoch"
    # of "torch.cpu"; at the step's end the part is AT_END, for one that an op was given PASSED
    "generator",
]
"""What a site is of."""

HOST_GENERATORS = ("python", "numpy")
AT_END, PASSED = "at the end", "passed"  # parts of generators
_FURTHER = re.compile(r"state of (.*?): (.*)", re.DOTALL)
_BATCH = re.compile(r"batch(?: (\d+))?(?![\w ])")  # "batch[0]", "batch 2.x"
_AFTER_STEP, _ON = " after the step", "generator on "


def after_step(name: str) -> str:
    """Return the name of a generator at the end of a step, while it is recorded."""
    return f"{name}{_AFTER_STEP}"


def passed_on(device: str) -> str:
    """Return the name of a generator that an op was given, while it is recorded."""
    return f"{_ON}{device}"


def is_passed(name: str) -> bool:
    return name.startswith(_ON)


def further_name(of: str, part: str) -> str:
    """Return the name of state of neither model nor optimizers, while it is recorded."""
    return f"state of {of}: {part}"


class Subject(TypedDict):
    """The fields of a site that say what it is of."""

    subject: SubjectKind
    of: str
    part: str


def subject_of(name: str | None, *, phase: str, role: str) -> Subject:
    """Return the fields of a site that say what it is of, from the name that it
    has while it is recorded.
    """
    if not name:
        return Subject(subject="", of="", part="")
    if role == "generator" or phase == "rng":
        if name.startswith(_ON):
            return Subject(subject="generator", of=name.removeprefix(_ON), part=PASSED)
        of = name.removesuffix(_AFTER_STEP)
        return Subject(subject="generator", of=of, part="" if of == name else AT_END)
    if phase == "data":
        return Subject(subject="tensor", of=name, part="")
    if phase == "state" and (further := _FURTHER.fullmatch(name)) is not None:
        return Subject(subject="further", of=further[1], part=further[2])
    part, _, of = name.partition(" of ")
    if not of:
        return Subject(subject="tensor", of=name, part="")
    if part == "grad":
        return Subject(subject="gradient", of=of, part="")
    return Subject(subject="state", of=of, part=part)


# Layout details of sites.
# without bits: allocated memory that no recorded op has written
UNWRITTEN = "written by nothing seen"
READS = "reads "  # prefix for an input or a forward op that reads part of a tensor
IN_FLIGHT = "in flight"  # without bits: the tensor was read before the collective was done
UNREAD = "not looked into"  # an object in a batch that cannot be digested; the dtype names its type

COLLECTIVES = ("c10d.", "_c10d_functional")  # namespaces of ops
REGION = "compiled."  # namespace of the sites of compiled regions: ``compiled.Net_forward.inputs``
KERNEL = "inductor."  # namespace of the kernels of a compiled region: ``inductor.cpp_fused_gelu_0``
# argument of a region whose parameters have no rows
MISSES_PARAMETERS = "reads_parameters_without_digest"
GRAPH = "cuda_graph"  # name of replayed graphs in the coverage

# Compact JSON in UTF-8, ten times as fast as json.dumps, which took most of
# the time to read a program.
to_json = msgspec.json.Encoder().encode

to_compact_json = json.JSONEncoder(separators=(",", ":")).encode
"""Python's JSON, for arguments of ops: an integer may have more than 64 bits."""


class Site(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One place in a step where 64 bits are recorded.

    A struct, since a run has many: it takes a fifth of a dataclass's time to
    make and a twentieth to copy.
    """

    phase: str
    module: str  # qualified name in the LightningModule; "" outside any module, "?" when unknown
    op: str = ""
    # number of such sites before it in the step; a label, never a key for alignment
    occurrence: int = 0
    output: int = 0
    role: Role
    subject: SubjectKind = ""
    of: str = ""  # "net.weight", "batch[0]", "torch.cpu"
    part: str = ""  # "exp_avg"
    # JSON object of the op's arguments by name, without tensors and ``varying``
    arguments: str = "{}"
    # names of the number arguments, which the program leaves out; the preceding site, of role
    # argument, holds their values, see ``argument_bits``
    varying: tuple[str, ...] = ()
    inputs: tuple[int, ...] = ()  # positions of the sites that this site read, ascending
    recomputed: bool = False  # repeated by activation checkpointing
    source: tuple[str, ...] = ()  # the user's lines, innermost first
    # of compiled code, if known: eager code gets this tensor from the call number ``eager_call`` of
    # the ``eager_calls`` of an op in a line that the region computes; "" for the region's own line
    eager_op: str = ""
    eager_line: str = ""
    eager_call: int = 0
    eager_calls: int = 0
    choice: str = "{}"  # JSON object: the configuration that autotuning chose for a kernel

    @property
    def name(self) -> str | None:
        """What it is of, as text: "net.weight", "grad of net.weight", "exp_avg of
        net.weight"; None for no name.
        """
        if self.subject == "gradient":
            return f"grad of {self.of}"
        if self.subject == "state":
            return f"{self.part} of {self.of}"
        if self.subject == "further":
            return further_name(self.of, self.part)
        if self.subject == "generator" and self.part:
            return after_step(self.of) if self.part == AT_END else passed_on(self.of)
        return self.of if self.subject else None

    @property
    def batch(self) -> int:
        """Number of the batch in its step, from 1, of which it is a tensor; 0 if it is of none."""
        if self.phase != "data" or self.subject != "tensor":
            return 0
        match = _BATCH.match(self.of)
        return 0 if match is None else int(match[1] or 1)

    @property
    def is_loss(self) -> bool:
        """Whether it is of a loss, or of one of several: "loss", "loss[0]"."""
        return self.subject == "tensor" and self.of.partition("[")[0] == "loss"

    @property
    def owner(self) -> str:
        """The module that a named tensor belongs to: "net.head" for the gradient of
        net.head.weight; "" for none.
        """
        return self.of.rpartition(".")[0] if self.subject in ("tensor", "gradient", "state") else ""

    @property
    def is_collective(self) -> bool:
        return is_collective(self.op)

    @property
    def is_region(self) -> bool:
        """Whether it is of a compiled region."""
        return is_region(self.op)

    @property
    def is_kernel(self) -> bool:
        """Whether it is of a kernel that inductor generated."""
        return self.op.startswith(KERNEL)


@dataclass(frozen=True, slots=True, eq=False)
class SiteRow:
    """A site without its position, inputs and occurrence, which the program adds.

    ``kind`` is a 64-bit digest of the row without its source lines, and what is known of a kernel
    (JSON, UTF-8); ``id`` includes them.
    """

    site: Site
    kind: int
    id: int

    @classmethod
    def of(cls, site: Site) -> "SiteRow":
        source = tuple(map(without_surrogates, site.source))
        if site.occurrence or site.inputs or site.source != source:
            site = replace(site, occurrence=0, inputs=(), source=source)
        place = [
            site.phase,
            site.module,
            site.op,
            site.output,
            site.role,
            site.subject,
            site.of,
            site.part,
        ]
        kind = to_json([*place, site.arguments, site.varying, site.recomputed])
        eager = [site.eager_op, site.eager_line, site.eager_call, site.eager_calls]
        explaining = to_json([source, *eager, site.choice])
        return cls(
            site,
            digest_bytes(kind),
            digest_bytes(kind.removesuffix(b"]") + b"," + explaining.removeprefix(b"[")),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorLayout:
    """The layout of a tensor in memory; a Python scalar has the dtype "float", "int" or "bool".

    ``detail`` is the placements of a DTensor, a layout such as "sparse_coo", or the parts of
    tensors that the op reads ("reads argument 1 from element 8 by [16, 1]").
    """

    dtype: str
    shape: tuple[int, ...]
    stride: tuple[int, ...] = ()
    detail: str = ""

    @property
    def part_read(self) -> str | None:
        """Which parts of its tensors an op reads, as text, or None if it reads them whole
        or the detail is another.
        """
        return self.detail.removeprefix(READS) if self.detail.startswith(READS) else None


def describe_tensor(entry: TensorLayout | None) -> str:
    """Return "float32 [8, 64]"; "-" for no tensor."""
    if entry is None:
        return "-"
    shape = f" {list(entry.shape)}" if entry.shape or entry.stride else ""
    return f"{entry.dtype}{shape}" + (
        f" {entry.detail}" if entry.detail and entry.part_read is None else ""
    )


def is_collective(op: str) -> bool:
    return op.startswith(COLLECTIVES)


def in_module(module: str, op: str) -> str:
    """Return " in net.head" for an op; "" for a kernel of a region that is in no submodule, because
    it may compute ops of several.
    """
    if not module and op.startswith(KERNEL):
        return ""
    return {"": " in no submodule", "?": " in an unknown module"}.get(module, f" in {module}")


def is_region(op: str) -> bool:
    """Return whether an op is of a compiled region."""
    return op.startswith(REGION)


def reads_expanded(layout: TensorLayout) -> bool:
    """Return whether an op read an element of a tensor several times, as
    broadcasting does: a stride is 0.
    """
    return re.search(r"by \[(.*, )?0[],]", layout.detail) is not None


@dataclass(frozen=True, eq=False)
class Program:
    """The ordered sites of one step; the counts of ops are for the coverage,
    and do not affect ``id``.

    Attributes:
        rows: the sites by position; programs share rows.
        num_read: number of sites that each site reads, int32.
        read: the positions of the sites read, site by site, ascending for each, int32.
        text: source lines as traced, of this program and others:
            "train.py:41" -> the lines 40 to 42.
    """

    rows: tuple[SiteRow, ...]
    num_read: np.ndarray
    read: np.ndarray
    ops_seen: int = 0
    ops_digested: int = 0
    ops_skipped: Mapping[str, int] = field(default_factory=dict)
    opaque_regions: tuple[str, ...] = ()
    text: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    @classmethod
    def of(cls, sites: Iterable[Site], **counts: Any) -> "Program":
        """Return the program with these sites; ignores their occurrences."""
        sites = list(sites)
        num_read, read = edges_of(sites)
        return cls(rows=tuple(map(SiteRow.of, sites)), num_read=num_read, read=read, **counts)

    def __len__(self) -> int:
        return len(self.rows)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Program) and (self.sites, self.counts) == (
            other.sites,
            other.counts,
        )

    __hash__ = None  # type: ignore[assignment]  # use ``id`` instead

    @property
    def leaves_out_ops(self) -> bool:
        """Whether ops ran whose outputs nothing recorded: outside the selection,
        or in another thread.
        """
        return not self.ops_skipped.keys().isdisjoint(("unselected", "other_thread"))

    @property
    def counts(self) -> dict[str, Any]:
        return {
            name: getattr(self, name)
            for name in ("ops_seen", "ops_digested", "ops_skipped", "opaque_regions")
        }

    @cached_property
    def id(self) -> int:
        """64-bit digest of the rows' kinds in order, how many sites each reads,
        and which (little-endian).
        """
        kinds = np.array([row.kind for row in self.rows], dtype="<u8")
        return digest_bytes(
            kinds.tobytes()
            + self.num_read.astype("<i4").tobytes()
            + self.read.astype("<i4").tobytes()
        )

    @cached_property
    def sites(self) -> tuple[Site, ...]:
        """The sites in order, with position, inputs and occurrence; the first call takes 5
        microseconds a site.
        """
        read, ends = self.read.tolist(), np.cumsum(self.num_read).tolist()
        counts: Counter[tuple[str, str, str, int, str, str | None]] = Counter()
        sites = []
        begin = 0
        for row, end in zip(self.rows, ends, strict=True):
            site = row.site
            key = (
                site.phase,
                site.module,
                site.op,
                site.output,
                site.role,
                site.name if site.op == "" else None,
            )
            if begin < end or counts[key]:
                site = replace(site, occurrence=counts[key], inputs=tuple(read[begin:end]))
            counts[key] += 1
            sites.append(site)
            begin = end
        return tuple(sites)

    def read_by(self, position: int) -> list[int]:
        """Return the positions of the sites that a site reads, ascending."""
        begin = int(self.num_read[:position].sum())
        positions: list[int] = self.read[begin : begin + int(self.num_read[position])].tolist()
        return positions

    @cached_property
    def roles(self) -> np.ndarray:
        """Role by position, as text."""
        return np.array([row.site.role for row in self.rows], dtype="U12")

    @cached_property
    def arguments(self) -> np.ndarray:
        """Positions of the sites of role argument, int64."""
        return np.flatnonzero([row.site.role == "argument" for row in self.rows])

    @cached_property
    def phases(self) -> np.ndarray:
        """Phase by position, as text."""
        return np.array([row.site.phase for row in self.rows], dtype="U9")

    @cached_property
    def edges(self) -> tuple[np.ndarray, np.ndarray]:
        """Two int64 arrays with an entry for each edge: the position of the reader,
        and that of the site read.
        """
        return np.repeat(np.arange(len(self)), self.num_read), self.read.astype(np.int64)


def lines_of_reader(program: Program, position: int) -> tuple[str, ...]:
    """Return the lines of the op that calls a kernel, or that alone reads a generator or
    made a gradient's output.
    """
    sites, site = program.sites, program.sites[position]
    if site.is_kernel:  # inductor took it from its cache: the lines of the region's call
        earlier = reversed(sites[:position])
        return next((graph.source for graph in earlier if graph.role == "graph"), ())
    read: Sequence[int] = ()
    if site.subject == "generator" and site.part == PASSED:
        read = [position]
    elif site.subject == "gradient" and site.phase == "backward" and not site.op:
        key = (site.module, "tensor", site.of)
        outputs = [output for output in sites if (output.module, output.subject, output.of) == key]
        read = outputs[0].inputs if len(outputs) == 1 else ()
    readers = program.edges[0][np.isin(program.edges[1], read)].tolist() if read else []
    sources = {
        sites[reader].source
        for reader in readers
        if sites[reader].op and sites[reader].phase != "backward"
    }
    return sources.pop() if len(sources) == 1 else ()


def edges_of(sites: Sequence[Site]) -> tuple[np.ndarray, np.ndarray]:
    """Return ``num_read`` and ``read`` of a ``Program`` with these sites."""
    num_read = np.array([len(site.inputs) for site in sites], dtype=np.int32)
    read = np.fromiter(
        chain.from_iterable(site.inputs for site in sites), dtype=np.int32, count=num_read.sum()
    )
    return num_read, read


def without_surrogates(text: str) -> str:
    """Return a text that JSON and text columns accept: surrogate escapes become UTF-8 text,
    or backslash escapes.

    Python makes surrogates from a path or an argument that is not UTF-8, or if the locale is C.
    """
    if text.isascii():
        return text
    try:
        content = text.encode(errors="surrogateescape")
    except UnicodeEncodeError:  # surrogates that do not encode bytes
        content = text.encode(errors="backslashreplace")
    return content.decode(errors="backslashreplace")


@dataclass(frozen=True)
class Layout:
    """The layouts of one step, one entry per site, or None for a site without a
    tensor (argument, generator).
    """

    entries: tuple[TensorLayout | None, ...]

    def __len__(self) -> int:
        return len(self.entries)

    @cached_property
    def dtypes(self) -> np.ndarray:
        """Dtype by position, as text; "" for a site without a tensor."""
        return np.array(
            ["" if entry is None else entry.dtype for entry in self.entries], dtype=np.str_
        )

    @cached_property
    def unread(self) -> str:
        """Type of the first object in the batch that could not be digested; "" if there is none."""
        return next(
            (entry.dtype for entry in self.entries if entry is not None and entry.detail == UNREAD),
            "",
        )

    @cached_property
    def id(self) -> int:
        """64-bit digest of the entries in order."""
        return layout_id([entry_digest(entry) for entry in self.entries])


def entry_digest(entry: TensorLayout | None) -> int:
    """Return the 64-bit digest of one layout entry."""
    if entry is None:
        return digest_bytes(b"null")
    return digest_bytes(to_json([entry.dtype, list(entry.shape), list(entry.stride), entry.detail]))


def layout_id(entry_digests: Sequence[int] | np.ndarray) -> int:
    return digest_bytes(np.asarray(entry_digests, dtype="<u8").tobytes())


@dataclass(frozen=True, slots=True, eq=False)
class StepRecord:
    """One recorded step of a stream; ``digests`` is a uint64 array with an entry per site."""

    step: int
    epoch: int
    program_id: int
    layout_id: int
    digests: np.ndarray
    chain: int
    segment: int = 0


def chain_digest(
    previous: int, step: int, epoch: int, program_id: int, layout_id: int, digests: np.ndarray
) -> int:
    """Return the chain at a step: the digest of all these numbers in order,
    8 bytes each, little-endian.
    """
    head = struct.pack("<5Q", previous, step, epoch, program_id, layout_id)
    return digest_bytes(head + np.ascontiguousarray(digests, dtype="<u8").tobytes())


@dataclass(frozen=True, slots=True, eq=False)
class StepView:
    """One step opened for comparison."""

    rank: int
    record: StepRecord
    program: Program
    layout: Layout
    # sites that are not origins: an unseen write changed their inputs
    unseen_writes: frozenset[int] = frozenset()
    read_values: Callable[[], Mapping[int, str]] = dict  # digest of arguments -> their JSON text
    # if some ops were not checked for unseen writes: the sites of those that were
    checked: frozenset[int] | None = None


# Types of torch that op arguments have, by name, so that this module does not import torch.
_TORCH_WORDS = frozenset({"dtype", "layout", "memory_format"})

ArgumentTag = Literal["float", "int", "bool", "digest"]


def plain_value(value: Any) -> Any:
    """Return an op's argument in a form for JSON that does not depend on the
    process or a device index.
    """
    if value is None or isinstance(value, bool | str | int):
        return value
    if isinstance(value, float):
        return value if abs(value) < float("inf") else repr(value)
    kind = type(value)
    if kind.__module__ == "torch" and kind.__name__ == "device":
        return value.type
    if isinstance(value, complex) or (kind.__module__ == "torch" and kind.__name__ in _TORCH_WORDS):
        return str(value)
    return (
        [plain_value(item) for item in value] if isinstance(value, list | tuple) else kind.__name__
    )


def argument_bits(values: Sequence[Any]) -> tuple[int, ArgumentTag, str | None]:
    """Return 64 bits for the numbers of a call, how to read these,
    and the JSON text that they are a digest of.

    The bits of a single number are its value, without a text.
    """
    if len(values) == 1 and not isinstance(values[0], list | tuple):
        bits, tag = scalar_bits(values[0])
        if tag != "digest":
            return bits, tag, None
    text = _text_of(values)
    return digest_bytes(text.encode()), "digest", text


def scalar_bits(value: Any) -> tuple[int, ArgumentTag]:
    """Return the 64 bits of a Python value, and how to read them."""
    if isinstance(value, float):
        return struct.unpack("<Q", struct.pack("<d", value))[0], "float"
    if isinstance(value, bool):
        return int(value), "bool"
    if isinstance(value, int) and -(2**63) <= value < 2**63:
        return value & 0xFFFF_FFFF_FFFF_FFFF, "int"
    return digest_bytes(_text_of([value]).encode()), "digest"


def _text_of(values: Sequence[Any]) -> str:
    return to_compact_json([plain_value(value) for value in values])
