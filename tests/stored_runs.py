"""Run folders for tests, all that can be read from one, and strategies for what it holds."""

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
from hypothesis import strategies as st
from msgspec import structs

from det_callbacks.runs.evidence import EvidenceRow
from det_callbacks.runs.manifest import read_manifest
from det_callbacks.runs.peers import Peers
from det_callbacks.runs.program import Layout, Program, Site, TensorLayout
from det_callbacks.runs.selection import Selection
from det_callbacks.runs.store import Run
from det_callbacks.runs.writer import RunWriter

SELECTION = Selection().to_dict()
ENVIRONMENT = {"torch.version": {"value": "2.13", "is_machine": True, "changes_bits": True}}

INT32, COUNTS = st.integers(0, 2**31 - 1), st.integers(0, 2**40)
SIZES = st.lists(st.integers(0, 2**63 - 1), max_size=3).map(tuple)
SITES = st.builds(
    Site,
    output=INT32,
    arguments=st.dictionaries(st.text(), INT32).map(json.dumps),
    **dict.fromkeys(("subject", "of", "part", "varying", "recomputed", "source"), ...),
)
ENTRIES = st.none() | st.builds(TensorLayout, shape=SIZES, stride=SIZES, detail=...)


@st.composite
def whole_steps(draw: st.DrawFn) -> tuple[Program, Layout, list[int]]:
    """Draw a program, and a layout and digests of as many sites."""
    num = draw(st.integers(1, 3))
    sites, entries, digests = (
        draw(st.lists(one, min_size=num, max_size=num))
        for one in (SITES, ENTRIES, st.integers(0, 2**64 - 1))
    )
    inputs = [draw(st.lists(st.integers(0, at), max_size=3).map(tuple)) for at in range(num)]
    sites = [structs.replace(site, inputs=read) for site, read in zip(sites, inputs, strict=True)]
    counts = [
        draw(one)
        for one in (
            COUNTS,
            COUNTS,
            st.dictionaries(st.text(), COUNTS),
            st.lists(st.text()).map(tuple),
        )
    ]
    names = ("ops_seen", "ops_digested", "ops_skipped", "opaque_regions")
    return (
        Program.of(sites, **dict(zip(names, counts, strict=True))),
        Layout(tuple(entries)),
        digests,
    )


def small_program(num_sites: int = 3, op: str = "aten.mul.Tensor") -> Program:
    """Return a program in which every column has a value somewhere and is empty elsewhere."""
    place = {
        "phase": "forward",
        "module": "net.größe",
        "role": "named",
        "subject": "tensor",
        "of": "batch[0]",
        "recomputed": True,
    }
    call = {"arguments": '{"other":2.0}', "varying": ("lr",), "inputs": (0,)}
    lines = ("train.py:41 in forward", "train.py:7 in main")
    first = Site(op=op, occurrence=0, output=0, **place, **call, source=lines)
    other = Site(phase="backward", module="net", op=op, occurrence=0, output=0, role="output")
    rest = [structs.replace(other, occurrence=index) for index in range(num_sites - 1)]
    counts = {"ops_seen": 9, "ops_digested": num_sites, "ops_skipped": {"view": 6}}
    return Program.of((first, *rest), **counts, opaque_regions=("net.fused",))


def small_layout(num_sites: int = 3) -> Layout:
    """Return a layout whose second entry is no tensor."""
    entry = TensorLayout(dtype="float32", shape=(2, 3), stride=(3, 1))
    return Layout(entries=tuple(None if index == 1 else entry for index in range(num_sites)))


def digests_of(step: int, num_sites: int = 3, seed: int = 0) -> np.ndarray:
    return np.random.default_rng((seed, step)).integers(0, 2**64, num_sites, dtype=np.uint64)


def append(
    writer: RunWriter,
    steps: Iterable[int],
    *,
    num_sites: int = 3,
    seed: int = 0,
    complete: bool | None = None,
) -> RunWriter:
    """Write steps of the small program, and close the run unless ``complete`` is None."""
    program, layout = small_program(num_sites), small_layout(num_sites)
    writer.put_program(program)
    writer.put_layout(layout)
    for step in steps:
        if writer.manifest.purpose == "record":
            writer.put_evidence([EvidenceRow(step, "batch start", "generator", "python")])
        writer.append(step, step // 4, program.id, layout.id, digests_of(step, num_sites, seed))
    if complete is not None:
        writer.close(complete=complete)
    return writer


def create(path: Path, **options: Any) -> RunWriter:
    """Start a run with a manifest that can be resumed."""
    return RunWriter.create(
        path, manifest={"selection": SELECTION, "environment": ENVIRONMENT}, **options
    )


class OneOf(Peers):
    """One of several processes that a test plays one after the other:
    whoever it asks says what it says itself.
    """

    def __init__(self, rank: int, world_size: int) -> None:
        self.rank, self.world_size = rank, world_size

    def gather(self, action: Callable[[], Any], *, task: str) -> list[Any]:
        return [action()] * self.world_size


def join(path: Path, rank: int, *, attempt: int = 0) -> RunWriter:
    """Start writing, as another process, a run that rank 0 has created."""
    manifest = read_manifest(path)
    return RunWriter(path, OneOf(rank, manifest.world_size), manifest, attempt=attempt, segment=0)


def resume(path: Path) -> RunWriter:
    return RunWriter.resume(path, manifest={"selection": SELECTION})


def record(path: Path, *fits: Iterable[int], complete: bool = True) -> Path:
    writer = create(path)
    for number, steps in enumerate(fits):
        if number:
            writer.start_segment()
        append(writer, steps)
    writer.close(complete=complete)
    return path


def everything_in(path: Path) -> dict[str, Any]:
    run = Run.open(path)
    steps = {}
    for rank in run.ranks:
        for record in run.rank(rank).iterate():
            program = run.view(rank, record.segment, record.step).program
            lines = [site.source for site in program.sites]
            content = (record.epoch, record.chain, record.digests.tobytes(), program, lines)
            steps[rank, record.segment, record.step] = (*content, run.layout(record.layout_id))
    return {"manifest": run.manifest, "steps": steps, "incomplete": run.incomplete_reason}
