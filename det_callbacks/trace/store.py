"""The run folder: what a run leaves on disk, and how it is opened again.

    run.json                                    versions, selection, settings, environment, attempts
    programs/<id>.parquet                       one row a site; shared by all ranks and attempts
    layouts/<id>.parquet                        one row a site: dtype, shape and stride
    rank-00000/attempt-000.arrows               Arrow IPC stream, one record batch a step
    rank-00000/attempt-000.segment-001.arrows   the steps of a second ``fit`` of the same process

A step is one ``write`` of 480 bytes and 8 bytes a site, without fsync, so that a kill leaves whole steps and at most a
torn tail. The end-of-stream marker is written when a fit ends as it should; without it the run is incomplete.
"""

import os
import uuid
from collections.abc import Iterator, Mapping
from functools import lru_cache
from importlib.metadata import version
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from det_callbacks.errors import ReferenceFormatError, ReferenceNotFoundError
from det_callbacks.trace.program import Layout, Program, StepRecord, StepView, chain_digest
from det_callbacks.trace.run_files import (
    LAYOUTS,
    MANIFEST,
    PROGRAMS,
    damaged,
    layout_path,
    make_room,
    program_path,
    read_layout,
    read_manifest,
    read_program,
    replace_atomically,
    stream_path,
    write_layout,
    write_manifest,
    write_program,
)
from det_callbacks.trace.stream import END_OF_STREAM, StreamFile, encode_header, encode_step

_CACHED = 64


class RunWriter:
    """Writes the steps of one process; made by ``create`` or ``resume``."""

    def __init__(self, path: Path, rank: int, manifest: dict[str, Any], attempt: int, segment: int) -> None:
        self.path = path
        self.bytes_written = 0
        self._rank = rank
        self._manifest = manifest
        self._attempt = attempt
        self._segment = segment
        self._programs: dict[int, int] = {}
        self._layouts: dict[int, int] = {}
        self._last_step = -1
        self._chain: int | None = 0 if not attempt else None
        for folder in (path / PROGRAMS, path / LAYOUTS, stream_path(path, rank, 0, 0).parent):
            folder.mkdir(parents=True, exist_ok=True)
        self._file: BinaryIO | None = self._open_stream()

    @classmethod
    def create(
        cls,
        path: str | Path,
        *,
        rank: int = 0,
        world_size: int = 1,
        manifest: Mapping[str, Any],
        purpose: str = "record",
        keeps: str = "all",
        overwrite: bool = False,
    ) -> "RunWriter":
        """Start a new run.

        Args:
            path: the folder; it and its parents are made.
            rank: of this process.
            world_size: number of processes.
            manifest: further entries of run.json: selection, settings, environment.
            purpose: "record" or "verify".
            keeps: "all" steps, or those "diverging".
            overwrite: delete a run that is there; only files of ours are deleted.

        Raises:
            RunExistsError: there is a run, or something else under our names, or a file.
        """
        path = Path(path)
        make_room(path, overwrite=overwrite)
        content = {
            "det_callbacks_version": version("det_callbacks"),
            "run_id": uuid.uuid4().hex,
            "purpose": purpose,
            "keeps": keeps,
            "world_size": world_size,
            "attempts": [{"segments": 1}],
            **manifest,
        }
        # Wherever a kill comes, run.json tells only of files that are there: it is written after them.
        writer = cls(path, rank, content, attempt=0, segment=0)
        write_manifest(path, content)
        return writer

    @classmethod
    def resume(cls, path: str | Path, *, rank: int = 0, manifest: Mapping[str, Any]) -> "RunWriter":
        """Start the next attempt of a run that is there; steps recorded again count from the later attempt.

        Raises:
            ReferenceFormatError: the run is damaged, or was recorded with another selection.
        """
        run = Run.open(path)
        if run.manifest.get("selection") != manifest.get("selection"):
            raise ReferenceFormatError(
                f"{path} was recorded with the selection {run.manifest.get('selection')}, and this attempt has "
                f"{manifest.get('selection')}. Resume with the same arguments.",
                str(path),
            )
        segments = run.rank(rank).segments
        content = {key: value for key, value in run.manifest.items() if key != "digest"}
        content["attempts"] = [*content["attempts"], {"segments": 1}]
        writer = cls(run.path, rank, content, attempt=len(content["attempts"]) - 1, segment=segments[-1])
        write_manifest(run.path, content)
        return writer

    def put_program(self, program: Program) -> None:
        """Keep a program; nothing is done when it is there."""
        if program.id not in self._programs:
            write_program(self.path, program)
            self._programs[program.id] = len(program)

    def put_layout(self, layout: Layout) -> None:
        """Keep a layout; nothing is done when it is there."""
        if layout.id not in self._layouts:
            write_layout(self.path, layout)
            self._layouts[layout.id] = len(layout)

    def has_layout(self, identity: int) -> bool:
        """Return whether a layout was put already."""
        return identity in self._layouts

    def append(self, step: int, epoch: int, program_id: int, layout_id: int, digests: np.ndarray) -> int:
        """Write a step and return its chain.

        Args:
            step: larger than the one before it in this fit.
            epoch: counted from 0.
            program_id: of a program that was put.
            layout_id: of a layout that was put.
            digests: uint64, one a site of the program.

        Raises:
            ValueError: an argument is not as described.
        """
        if not self._programs.get(program_id) == self._layouts.get(layout_id) == len(digests):
            raise ValueError(f"step {step}: put its program and layout first; {len(digests)} digests were given")
        if digests.dtype != np.uint64:
            raise ValueError(f"step {step}: digests are uint64; got {digests.dtype}")
        if step <= self._last_step:
            raise ValueError(f"step {step} comes after step {self._last_step}")
        if self._chain is None:
            self._chain = Run.open(self.path).rank(self._rank).chain_before(self._segment, step)
        chain = chain_digest(
            self._chain, step=step, epoch=epoch, program_id=program_id, layout_id=layout_id, digests=digests
        )
        self._write(encode_step(step, epoch, program_id, layout_id, chain, digests))
        self._chain, self._last_step = chain, step
        return chain

    def start_segment(self) -> None:
        """Go on with the steps of another fit of this process."""
        finished = self._file
        self._segment += 1
        self._last_step = -1
        self._chain = 0
        self._manifest["attempts"][self._attempt]["segments"] += 1
        self._file = self._open_stream()
        write_manifest(self.path, {key: value for key, value in self._manifest.items() if key != "digest"})
        # Last, so that after a kill in between the run is incomplete, and not a whole one with a fit less.
        self._end(finished, complete=True)

    def close(self, *, complete: bool) -> None:
        """Close the stream; without ``complete`` it stays marked as incomplete. May be called more than once."""
        finished, self._file = self._file, None
        self._end(finished, complete=complete)

    def _open_stream(self) -> BinaryIO:
        number = self._manifest["attempts"][self._attempt]["segments"] - 1
        path = stream_path(self.path, self._rank, self._attempt, number)
        header = encode_header(
            run_id=self._manifest["run_id"], rank=self._rank, attempt=self._attempt, segment=self._segment
        )
        # The file appears with its header; one that is there is of an attempt killed before run.json told of it.
        replace_atomically(path, header)
        self.bytes_written += len(header)
        return path.open("ab", buffering=0)

    def _write(self, content: Any) -> None:
        if self._file is None:
            raise ValueError(f"{self.path}: the run is closed")
        view = memoryview(content)
        written = os.write(self._file.fileno(), view)
        if written != len(view):
            # Nothing may follow half a step: it would be damage, where now it is a torn tail.
            self.close(complete=False)
            raise OSError(f"{self.path}: only {written} of {len(view)} bytes could be written; is the disk full?")
        self.bytes_written += written

    def _end(self, file: BinaryIO | None, *, complete: bool) -> None:
        if file is None:
            return
        with file:
            if complete:
                self.bytes_written += file.write(END_OF_STREAM)


class RankRun:
    """The steps of one process, later attempts over earlier ones; steps are read from disk when asked for."""

    def __init__(self, rank: int, files: list[StreamFile]) -> None:
        self.rank = rank
        self._index: dict[int, dict[int, tuple[StreamFile, int]]] = {}
        for file in files:
            steps = self._index.setdefault(file.segment, {})
            if len(file.steps):
                file.continue_from(self.chain_before(file.segment, int(file.steps[0])) if file.attempt else 0)
            steps.update((int(step), (file, position)) for position, step in enumerate(file.steps))

    @property
    def segments(self) -> list[int]:
        """The fits that were recorded, from 0."""
        return sorted(self._index)

    @property
    def num_steps(self) -> int:
        """Steps of all fits together."""
        return sum(len(steps) for steps in self._index.values())

    def steps(self, segment: int) -> np.ndarray:
        """Return the steps of a fit, int64, ascending."""
        return np.array(sorted(self._index.get(segment, ())), dtype=np.int64)

    def chain(self, segment: int, step: int) -> int:
        """Return the chain at a step."""
        file, position = self._index[segment][step]
        return int(file.chains[position])

    def chain_before(self, segment: int, step: int) -> int:
        """Return the chain that a step continues: that of the last step before it, 0 if there is none."""
        earlier = [known for known in self._index.get(segment, ()) if known < step]
        return self.chain(segment, max(earlier)) if earlier else 0

    def read(self, segment: int, step: int) -> StepRecord:
        """Return a step.

        Raises:
            KeyError: there is no such step.
            ReferenceFormatError: its bytes are not those that were written.
        """
        file, position = self._index[segment][step]
        return file.read(position)

    def iterate(self) -> Iterator[StepRecord]:
        """Yield all steps in order."""
        for segment in self.segments:
            for step in self.steps(segment):
                yield self.read(segment, int(step))


class Run:
    """A recorded run, opened for reading.

    Attributes:
        path: its folder.
        manifest: content of run.json.
        is_complete: whether its last fit ended as it should.
        incomplete_reason: what is missing otherwise, with the file and the last whole step.
    """

    def __init__(self, path: Path, manifest: dict[str, Any]) -> None:
        self.path = path
        self.manifest = manifest
        self.incomplete_reason: str | None = None
        self._ranks = {rank: self._open_rank(rank) for rank in range(self.world_size)}
        self._program = lru_cache(_CACHED)(read_program)
        self._layout = lru_cache(_CACHED)(read_layout)

    @classmethod
    def open(cls, path: str | Path) -> "Run":
        """Open a run; every step is read once and checked against its chain: some 100 microseconds a step.

        Raises:
            ReferenceNotFoundError: there is none.
            ReferenceFormatError: a file is damaged, missing, or of another format version.
        """
        path = Path(path)
        manifest = read_manifest(path)
        try:
            is_known = (
                isinstance(manifest["run_id"], str)
                and _is_count(manifest["world_size"])
                and isinstance(manifest["attempts"], list)
                and bool(manifest["attempts"])
                and all(_is_count(attempt["segments"]) for attempt in manifest["attempts"])
            )
        except (KeyError, TypeError) as error:
            raise damaged(path / MANIFEST, f"an entry is missing ({error})") from error
        if not is_known:
            raise damaged(path / MANIFEST, "an entry has no sensible value")
        return cls(path, manifest)

    @property
    def run_id(self) -> str:
        """Random identity of the run."""
        return str(self.manifest["run_id"])

    @property
    def world_size(self) -> int:
        """Number of processes."""
        return int(self.manifest["world_size"])

    @property
    def keeps(self) -> str:
        """Which steps are kept: "all", or in the folder of a verify run those "diverging"."""
        return str(self.manifest.get("keeps", "all"))

    @property
    def ranks(self) -> list[int]:
        """The processes, from 0."""
        return list(self._ranks)

    @property
    def is_complete(self) -> bool:
        """Whether the last fit of every process ended as it should."""
        return self.incomplete_reason is None

    def rank(self, rank: int) -> RankRun:
        """Return the steps of a process; raise ReferenceNotFoundError when there is no such one."""
        if rank not in self._ranks:
            raise ReferenceNotFoundError(
                f"{self.path} has no rank {rank}; it has {self.world_size}, from 0.", str(self.path)
            )
        return self._ranks[rank]

    def program(self, identity: int) -> Program:
        """Return a program; the last 64 are kept."""
        return self._program(self.path, identity)

    def layout(self, identity: int) -> Layout:
        """Return a layout; the last 64 are kept."""
        return self._layout(self.path, identity)

    def view(self, rank: int, segment: int, step: int) -> StepView:
        """Return a step opened for comparison.

        Raises:
            ReferenceFormatError: one of its files is damaged or missing.
        """
        record = self.rank(rank).read(segment, step)
        program = self.program(record.program_id)
        layout = self.layout(record.layout_id)
        if not len(program) == len(layout) == len(record.digests):
            raise damaged(
                program_path(self.path, record.program_id),
                f"it has {len(program)} sites, its layout {layout_path(self.path, record.layout_id).name} has "
                f"{len(layout)}, and step {step} has {len(record.digests)} digests",
            )
        return StepView(rank=rank, record=record, program=program, layout=layout)

    def _open_rank(self, rank: int) -> RankRun:
        files: list[StreamFile] = []
        first_segment = 0
        for attempt, entry in enumerate(self.manifest["attempts"]):
            for number in range(entry["segments"]):
                file = StreamFile(
                    stream_path(self.path, rank, attempt, number),
                    run_id=self.run_id,
                    rank=rank,
                    attempt=attempt,
                    segment=first_segment + number,
                )
                files.append(file)
                # only of an attempt that another one went on with the last fit may have no end
                is_resumed = attempt < len(self.manifest["attempts"]) - 1 and number == entry["segments"] - 1
                if not is_resumed and self.incomplete_reason is None:
                    self.incomplete_reason = file.unfinished
            first_segment = files[-1].segment
        return RankRun(rank, files)


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1
