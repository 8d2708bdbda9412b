"""Writes a run; docs/reference/run-folder.md describes the folder."""

import shutil
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from det_callbacks.errors import ReferenceNotFoundError, RunExistsError, SelectionError, WriteError
from det_callbacks.runs import tables
from det_callbacks.runs.evidence import (
    EvidenceRow,
    EvidenceWriter,
    NondeterministicOp,
    evidence_path,
)
from det_callbacks.runs.files import (
    ANOTHER_FOLDER,
    LAYOUTS,
    MANIFEST,
    NONDETERMINISTIC_FILE,
    PROGRAMS,
    REPLACEMENT,
    SITES,
    SOURCES,
    AppendedFile,
    make_folder,
    rank_folder,
    read_file,
    replace_atomically,
    stream_path,
    writing,
)
from det_callbacks.runs.lock import FolderLock
from det_callbacks.runs.manifest import (
    Attempt,
    Environment,
    EnvironmentEntry,
    Manifest,
    Purpose,
    ResumedFit,
    read_manifest,
    write_manifest,
)
from det_callbacks.runs.metrics import Reading, line_of, metrics_path
from det_callbacks.runs.peers import ALONE, Peers
from det_callbacks.runs.program import Layout, Program, chain_digest
from det_callbacks.runs.replacement import (
    finish_replacing,
    forget_replacement,
    loses_steps,
    put_in_place,
    settle,
    wait_to_replace,
)
from det_callbacks.runs.selection import Selection
from det_callbacks.runs.source_text import write_source_text
from det_callbacks.runs.steps import END_OF_STREAM, encode_header, encode_step
from det_callbacks.runs.store import Run, make_room, remove_run


class RunWriter:
    """Writes the steps of one process; all processes call ``create`` or ``resume`` together.

    Rank 0 writes run.json after the files of every process, so that all files that it lists exist
    even after a kill. Rank 0 also holds the lock of the folder for all processes until ``close``,
    in a verify run until ``release``.
    """

    def __init__(
        self,
        path: Path,
        peers: Peers,
        manifest: Manifest,
        attempt: int,
        segment: int,
        lock: FolderLock | None = None,
    ) -> None:
        self.path = path
        self.manifest = manifest
        self.segment = segment  # the current fit
        self.earlier: Run | None = None  # the run before this attempt
        # whether it is complete, and may take the place of the run that it replaces
        self.is_waiting = False
        self._replaced_manifest = b""  # bytes of run.json in the run that it waits to replace
        self._peers = peers
        self._lock = lock  # None on other ranks
        self._attempt = attempt
        # what the folder holds already: programs and layouts with their number of sites
        self._programs: dict[int, int] = {}
        self._layouts: dict[int, int] = {}
        self._sites: set[int] = set()
        self._places: set[str] = set()
        # the current fit
        self._last_step = -1
        self._chain: int | None = 0 if not attempt else None
        self._file: AppendedFile | None = None
        self._evidence: EvidenceWriter | None = None
        self._values: dict[int, str] = {}
        self._metrics: AppendedFile | None = None
        self._num_uncounted = 0  # readings of metrics that run.json does not count yet
        self._shared_before = self._shared
        try:
            self._open_stream(is_new=True)
            self._write_manifest_together()
        except BaseException:  # including Ctrl-C
            self._close_files(complete=False)
            raise

    @classmethod
    def create(
        cls,
        path: str | Path,
        *,
        manifest: Mapping[str, Any],
        peers: Peers = ALONE,
        purpose: Purpose = "record",
        overwrite: bool = False,
    ) -> "RunWriter":
        """Start a new run; with ``overwrite``, it may replace an existing run: see ``close``."""
        path = Path(path)
        lock = FolderLock(path) if peers.rank == 0 else None

        def lead() -> list[str]:
            assert lock is not None, "this is rank 0"
            settle(path)
            lock.acquire(instead=ANOTHER_FOLDER[purpose])
            room = make_room(path, purpose=purpose, overwrite=overwrite)
            return [uuid.uuid4().hex, str(room.relative_to(path))]

        with _releasing_on_errors(lock):
            run_id, place = peers.broadcast(lead, task=f"making room in {path}")
            peers.require_shared(path / place)
            content = {
                "run_id": run_id,
                "purpose": purpose,
                "world_size": peers.world_size,
                **manifest,
            }
            return cls(
                path / place,
                peers,
                msgspec.convert(content, Manifest),
                attempt=0,
                segment=0,
                lock=lock,
            )

    @classmethod
    def resume(
        cls, path: str | Path, *, manifest: Mapping[str, Any], peers: Peers = ALONE
    ) -> "RunWriter":
        """Start the next attempt of an existing run; steps recorded again replace
        those of earlier attempts.
        """
        path = Path(path)
        lock = FolderLock(path) if peers.rank == 0 else None

        def lead() -> None:
            settle(path)
            read_manifest(path)  # raises before a folder is made if there is no run
            assert lock is not None, "this is rank 0"
            lock.acquire(instead=ANOTHER_FOLDER["record"])
            finish_replacing(path)

        with _releasing_on_errors(lock):
            peers.broadcast(lead, task=f"continuing the run {path}")
            run = peers.run_on_all(
                lambda: _open_resumed(path, manifest, peers), task=f"opening the run {path}"
            )
            peers.require_shared(path)
            attempts = run.manifest.attempts
            writer = cls(
                run.path,
                peers,
                replace(run.manifest, attempts=(*attempts, Attempt())),
                attempt=len(attempts),
                segment=run.segments[-1],
                lock=lock,
            )
        writer.earlier = run
        return writer

    @property
    def stream(self) -> Path:
        return self._streams[-1]

    @property
    def bytes_written(self) -> int:
        """Size of the steps of this attempt on this rank."""
        with writing(self.path):
            return sum(path.stat().st_size for path in self._streams)

    @property
    def _streams(self) -> list[Path]:
        segments = range(self.manifest.attempts[-1].segments)
        return [
            stream_path(self.path, self._peers.rank, self._attempt, segment) for segment in segments
        ]

    @property
    def _shared(self) -> set[Path]:
        """The existing files that all ranks and attempts share."""
        kinds = (PROGRAMS, SITES, LAYOUTS, SOURCES)
        folders = [self.path / kind for kind in kinds]
        return {file for folder in folders for file in folder.glob("*")}

    def put_program(self, program: Program) -> None:
        """Write a program, its sites and the text of their source lines, unless they exist."""
        if program.id not in self._programs:
            new = {row.id: row for row in program.rows if row.id not in self._sites}
            if new:
                text = {
                    place: lines
                    for place, lines in program.text.items()
                    if place not in self._places
                }
                if text:
                    write_source_text(self.path, text)
                    self._places |= text.keys()
                tables.write_sites(self.path, [*new.values()])
                self._sites |= new.keys()
            tables.write_program(self.path, program)
            self._programs[program.id] = len(program)

    def put_layout(self, layout: Layout) -> None:
        """Write a layout unless it exists."""
        if layout.id not in self._layouts:
            tables.write_layout(self.path, layout)
            self._layouts[layout.id] = len(layout)

    def has_layout(self, identity: int) -> bool:
        return identity in self._layouts

    def append(
        self, step: int, epoch: int, program_id: int, layout_id: int, digests: np.ndarray
    ) -> int:
        """Write a step after its program and layout, and return its chain;
        steps ascend in a fit.
        """
        assert self._programs[program_id] == self._layouts[layout_id] == len(digests), (
            "all are of the same sites"
        )
        assert step > self._last_step, f"step {step} comes after step {self._last_step}"
        if self._chain is None:
            rank = self._peers.rank
            self._chain = (
                Run.open(self.path, ranks=(rank,)).rank(rank).chain_before(self.segment, step)
            )
        chain = chain_digest(self._chain, step, epoch, program_id, layout_id, digests)
        if self._file is None:
            raise ValueError(f"{self.path}: the run is closed")
        self._file.write(encode_step(step, epoch, program_id, layout_id, chain, digests))
        self._chain, self._last_step = chain, step
        return chain

    def put_evidence(self, rows: Sequence[EvidenceRow]) -> None:
        if self._evidence is None:
            self._evidence = EvidenceWriter(evidence_path(self.stream), run_id=self.manifest.run_id)
        self._evidence.append(rows)

    def put_values(self, step: int, values: Mapping[int, str]) -> None:
        """Write the JSON text of arguments by digest, as evidence,
        unless this fit has it already.
        """
        if len(values) > len(self._values):
            new = {bits: text for bits, text in values.items() if bits not in self._values}
            self._values.update(new)
            self.put_evidence(
                [
                    EvidenceRow(step, "", "number", value=bits, text=text)
                    for bits, text in new.items()
                ]
            )

    def flush_evidence(self) -> None:
        """Flush the evidence to disk, so that a kill does not lose it."""
        if self._evidence is not None:
            self._evidence.flush()

    def put_reading(self, reading: Reading) -> None:
        """Add what the module logged, during or after the fit;
        run.json counts it when the fit ends. For rank 0.
        """
        was_held = self._is_held
        self._take_lock()
        if self._metrics is None:
            self._metrics = AppendedFile(metrics_path(self.stream), is_new=False)
        self._metrics.write(line_of(reading, run_id=self.manifest.run_id))
        self._num_uncounted += 1
        if self._file is None:
            self._count_readings()
            self._write_manifest()
        if not was_held:
            self.release()

    def put_nondeterministic_ops(self, ops: Sequence[NondeterministicOp]) -> None:
        """Write the ops without a deterministic implementation that this process
        has called so far.
        """
        path = self.path / rank_folder(self._peers.rank) / NONDETERMINISTIC_FILE
        try:
            replace_atomically(path, msgspec.json.encode(list(ops)))
        except WriteError as error:
            if not isinstance(error.__cause__, FileNotFoundError):
                raise
            # rank 0 has discarded a run without a step, see ``discard``

    def note_resumed(self, step: int) -> None:
        """Note in run.json that the current fit resumed from a checkpoint, with this first step."""
        fits = (
            *self.manifest.attempts[-1].resumed_from,
            ResumedFit(segment=self.segment, step=step),
        )
        self._change_attempt(resumed_from=fits)
        self._write_manifest()

    def note(self, name: str, value: Any) -> None:
        """Put a fact that is known only when a fit ends into the environment in run.json."""
        entry = EnvironmentEntry(value=value, is_machine=False, changes_bits=False)
        self.add_environment({name: entry})

    def add_environment(self, entries: Environment) -> None:
        """Put entries into the environment in run.json; where that fails, the run is closed."""
        self.manifest = replace(self.manifest, environment={**self.manifest.environment, **entries})
        try:
            self._write_manifest()
        except WriteError:
            self.close(complete=False)
            raise

    def reopen(self, manifest: Mapping[str, Any]) -> None:
        """Prepare for the first fit after a test, which had no optimizers and closed the stream."""
        environment = msgspec.convert(manifest["environment"], dict[str, EnvironmentEntry])
        self.manifest = replace(self.manifest, environment=environment)
        self._retake_lock()
        self._write_manifest_together()
        if self._file is None:
            self._open_stream()

    def start_segment(self) -> None:
        self._retake_lock()
        finished = self._file
        if self._num_uncounted:
            self._count_readings()
        self.segment += 1
        self._last_step = -1
        self._chain = 0
        self._change_attempt(segments=self.manifest.attempts[-1].segments + 1)
        self._open_stream(is_new=True)
        self._write_manifest_together()
        # Last, so a kill in between leaves an incomplete run, not a complete run that lacks a fit.
        self._end(finished, complete=True)

    def close(self, *, complete: bool) -> None:
        """Close the stream; all processes call this together if the run replaces another one.

        If it is complete, it waits to replace that run (``settle``) unless a fit follows.
        """
        try:
            self._close_files(complete=complete)
            if complete and self._peers.rank == 0:
                self.require_own()
            if complete and self.path.name == REPLACEMENT:
                self._peers.run_on_all(lambda: None, task=f"closing their streams in {self.path}")
                self.is_waiting = self._peers.broadcast(
                    self._wait, task=f"replacing the run {self.path.parent}"
                )
        finally:
            if self.manifest.purpose == "record":
                self.release()

    def release(self) -> None:
        """Release the folder's lock; a later fit, or a test,
        takes it again if the folder still holds this run.
        """
        if self._lock is not None:
            self._lock.release()

    def require_own(self) -> None:
        """Raise RunExistsError if another process has changed the run: since it was
        closed, or without locks.
        """
        try:
            now = read_manifest(self.path)
        except ReferenceNotFoundError:
            now = None
        if now is None or (now.run_id, now.attempts) != (
            self.manifest.run_id,
            self.manifest.attempts,
        ):
            raise RunExistsError(
                f"Another process has replaced or continued {self.path}, which this one was "
                "writing. If a script has several fits, start it again only after it has ended.",
                str(self.path),
            )

    def discard(self) -> None:
        """Discard this attempt and restore the folder, on all ranks unless it
        is the first attempt.
        """
        self._close_files(complete=False)
        try:
            self._remove_attempt()
        finally:
            self.release()

    @property
    def _is_held(self) -> bool:
        return self._lock is None or self._lock.is_held

    def _retake_lock(self) -> None:
        def take() -> str:
            if self.path.name == REPLACEMENT:
                forget_replacement(self.path.parent)
            self._take_lock()
            return str(self.path)  # rank 0 may have put the run in its place

        self.path = Path(self._peers.gather(take, task=f"continuing the run {self.path}")[0])
        self.is_waiting = False

    def _take_lock(self) -> None:
        """Take the lock again after ``close``; raise RunExistsError if another process
        has changed the run since.
        """
        if self._is_held or self._lock is None:
            return
        with _releasing_on_errors(self._lock):
            self._lock.acquire(instead=ANOTHER_FOLDER[self.manifest.purpose])
            self.require_own()

    def _count_readings(self) -> None:
        """Close the file of metrics, and count its new readings in the manifest."""
        file, self._metrics = self._metrics, None
        with file or nullcontext():
            last = self.manifest.attempts[-1]
            counts = [*last.readings, *[0] * (last.segments - len(last.readings))]
            counts[-1] += self._num_uncounted
            self._change_attempt(readings=tuple(counts))
            self._num_uncounted = 0

    def _close_files(self, *, complete: bool) -> None:
        finished, self._file = self._file, None
        if self._num_uncounted:  # before the stream is complete
            self._count_readings()
            self._write_manifest()
        self._end(finished, complete=complete)

    def _wait(self) -> bool:
        """If this run is whole, let it wait to replace the earlier run, and return True."""
        self.path = self.path.absolute()  # the program may change its directory
        is_whole = (
            not loses_steps(self.path.parent) and Run.open(self.path, check_steps=False).is_complete
        )
        if is_whole:
            self._replaced_manifest = _manifest_bytes(self.path.parent)
            wait_to_replace(self.path.parent, self._replace)
        return is_whole

    def _replace(self) -> None:
        if not self.path.parent.exists():
            return  # the program has removed it all
        try:
            self._take_lock()
            if _manifest_bytes(self.path.parent) != self._replaced_manifest:
                raise RunExistsError(
                    f"Another process has changed the run in {self.path.parent} since this program "
                    "recorded its replacement, so it was left as it is. The new run is in "
                    f"{self.path}: move it to another folder.",
                    str(self.path.parent),
                )
            put_in_place(self.path.parent)
        finally:
            self.release()
        self.path, self.is_waiting = self.path.parent, False

    def _remove_attempt(self) -> None:
        if not self._attempt:
            if self._peers.rank == 0:
                remove_run(self.path)
            elif not (self.path / MANIFEST).exists():
                # this rank may have written while rank 0 removed the run
                shutil.rmtree(self.stream.parent, ignore_errors=True)
            return
        streams = self._streams
        self.manifest = replace(self.manifest, attempts=self.manifest.attempts[:-1])
        # run.json first: the next attempt overwrites files that a kill leaves behind after that
        self._write_manifest_together()
        of_streams = (
            place(stream) for stream in streams for place in (Path, evidence_path, metrics_path)
        )
        with writing(self.path):
            for path in (*of_streams, *self._shared - self._shared_before):
                path.unlink(missing_ok=True)

    def _change_attempt(self, **changes: Any) -> None:
        *earlier, last = self.manifest.attempts
        self.manifest = replace(self.manifest, attempts=(*earlier, replace(last, **changes)))

    def _write_manifest(self) -> None:
        if self._peers.rank == 0:
            write_manifest(self.path, self.manifest)

    def _write_manifest_together(self) -> None:
        self._peers.run_on_all(self._write_manifest, task=f"writing run.json in {self.path}")

    def _open_stream(self, *, is_new: bool = False) -> None:
        path, rank = self.stream, self._peers.rank
        header = encode_header(
            run_id=self.manifest.run_id, rank=rank, attempt=self._attempt, segment=self.segment
        )

        def create_stream() -> None:
            for folder in (PROGRAMS, SITES, LAYOUTS, path.parent.name):
                make_folder(self.path / folder)
            # existing files are from an attempt that was killed before run.json listed it
            if is_new:
                with writing(path):
                    metrics_path(path).unlink(missing_ok=True)
            replace_atomically(path, header)
            self._file = AppendedFile(path, is_new=False)

        self._peers.run_on_all(create_stream, task=f"opening its stream in {self.path}")

    def _end(self, file: AppendedFile | None, *, complete: bool) -> None:
        evidence, self._evidence = self._evidence, None
        self._values.clear()
        with ExitStack() as streams:
            if file is not None:
                streams.enter_context(file)
            if evidence is not None:
                evidence.close()
            if file is not None and complete:
                file.write(END_OF_STREAM)


@contextmanager
def _releasing_on_errors(lock: FolderLock | None) -> Iterator[None]:
    try:
        yield
    except BaseException:  # including Ctrl-C
        if lock is not None:
            lock.release()
        raise


def _open_resumed(path: Path, manifest: Mapping[str, Any], peers: Peers) -> Run:
    """Return this process's part of the run; all processes read it before
    rank 0 changes run.json.
    """
    run = Run.open(path, ranks=(peers.rank,))
    selection = msgspec.convert(manifest["selection"], Selection)
    asked = {**selection.to_dict(), "world_size": peers.world_size}
    recorded = {**run.manifest.selection.to_dict(), "world_size": run.manifest.world_size}
    for name in ("replay", "keep_tensors"):
        asked[name] = sorted(manifest.get(name, ()))
        recorded[name] = sorted(getattr(run.manifest, name))
    if others := [name for name, value in asked.items() if value != recorded[name]]:
        before = ", ".join(f"{name}={recorded[name]!r}" for name in others)
        now = ", ".join(f"{name}={asked[name]!r}" for name in others)
        raise SelectionError(
            f"{path} was recorded with {before}, and this attempt asks for {now}. Nothing was "
            "changed. Resume with the same arguments and as many processes, or record to another "
            "folder."
        )
    return run


def _manifest_bytes(folder: Path) -> bytes:
    path = folder / MANIFEST
    with writing(path):
        return read_file(path) if path.exists() else b""
