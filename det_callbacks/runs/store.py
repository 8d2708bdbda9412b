"""Opens a run for reading, and makes room for a new one.

docs/reference/run-folder.md describes the folder of a run.
"""

import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache, partial
from pathlib import Path

import numpy as np

from det_callbacks.errors import ReferenceFormatError, ReferenceNotFoundError, RunExistsError
from det_callbacks.runs import files, tables
from det_callbacks.runs.evidence import NondeterministicOp, read_checked, read_values
from det_callbacks.runs.files import (
    ANOTHER_FOLDER,
    LAYOUTS,
    MANIFEST,
    PROGRAMS,
    REPLACEMENT,
    SITES,
    list_folder,
    make_folder,
    read_json,
)
from det_callbacks.runs.lock import FolderLock
from det_callbacks.runs.manifest import Manifest, Purpose, has_failed, read_manifest
from det_callbacks.runs.program import Layout, Program, StepRecord, StepView
from det_callbacks.runs.replacement import finish_replacing, our_files, remove, settle
from det_callbacks.runs.source_text import read_source_text
from det_callbacks.runs.steps import Fit, StreamFile, make_fit

_CACHED = 64
_EMPTY = make_fit()

HOW_TO_OVERWRITE = "det-callbacks record: --overwrite, Hydra: determinism.overwrite=true"
HOW_TO_CONTINUE = (
    "Lightning: ckpt_path, Hugging Face: resume_from_checkpoint, TrainingRun: resume_from"
)

_VERDICT_FILES = ("verdict.json", "report.html")


class RankRun:
    """The steps of one process, read on demand, each from its latest attempt;
    KeyError for an unknown step.
    """

    def __init__(self, rank: int, files: Sequence[StreamFile]) -> None:
        self.rank = rank
        self.files = files  # one for each fit of each attempt
        self._fits: dict[int, Fit] = {}
        self._steps: dict[int, np.ndarray] = {}
        for index, file in enumerate(files):
            fit = file.rows.copy()
            fit.files = index
            if len(fit):
                file.chain_start = (
                    self.chain_before(file.segment, int(fit.steps[0])) if file.attempt else 0
                )
                file.read(0)
            earlier = self.fit(file.segment)
            joined = np.concatenate((earlier[~np.isin(earlier.steps, fit.steps)], fit))
            fit = joined[np.argsort(joined["steps"])].view(np.recarray)
            self._fits[file.segment] = fit
            self._steps[file.segment] = fit.steps.copy()

    @property
    def segments(self) -> list[int]:
        """Numbers of the recorded fits, from 0."""
        return sorted(self._fits)

    @property
    def num_steps(self) -> int:
        return sum(len(fit) for fit in self._fits.values())

    @property
    def num_bytes(self) -> int:
        """Size of the files that steps are read from."""
        return sum(file.num_bytes for file in self.files)

    def fit(self, segment: int) -> Fit:
        """Return the table of the steps of a fit; empty for an unknown fit."""
        return self._fits.get(segment, _EMPTY)

    def steps(self, segment: int) -> np.ndarray:
        """Return the steps of a fit, int64, ascending."""
        return (
            self._steps[segment].copy() if segment in self._steps else np.zeros(0, dtype=np.int64)
        )

    def chain(self, segment: int, step: int) -> int:
        return int(self._fits[segment].chains[self._index(segment, step)])

    def chain_before(self, segment: int, step: int) -> int:
        """Return the chain at the last step before this one; 0 if there is none."""
        fit = self.fit(segment)
        index = int(np.searchsorted(fit.steps, step))
        return int(fit.chains[index - 1]) if index else 0

    def file_of(self, segment: int, step: int) -> StreamFile:
        """Return the file that a step is read from."""
        return self._place(segment, step)[0]

    def read(self, segment: int, step: int) -> StepRecord:
        """Return a step; raise ReferenceFormatError if its bytes are damaged."""
        file, position = self._place(segment, step)
        return file.read(position)

    def check_steps(self) -> None:
        """Check every step against the chains, including steps that a
        later attempt recorded again.
        """
        for file in self.files:
            file.check_steps()

    def iterate(self) -> Iterator[StepRecord]:
        """Yield all steps in order."""
        for segment in self.segments:
            for step in self.steps(segment):
                yield self.read(segment, int(step))

    def _place(self, segment: int, step: int) -> tuple[StreamFile, int]:
        # as a tuple: reading an attribute of a record takes microseconds
        _, _, _, file, position, *_ = self._fits[segment].item(self._index(segment, step))
        return self.files[file], position

    def _index(self, segment: int, step: int) -> int:
        steps = self._steps[segment]
        index = int(steps.searchsorted(step))
        if index == len(steps) or steps[index] != step:
            raise KeyError(step)
        return index


class Run:
    """A recorded run, opened for reading; ReferenceFormatError names a damaged,
    missing or foreign file.

    ``incomplete_reason`` is None if each fit of each process ended normally, except the last one
    of an attempt that a later attempt continued, and the script of a followed loop did not fail.
    """

    def __init__(self, path: Path, manifest: Manifest, ranks: Sequence[int] | None = None) -> None:
        self.path = path
        self.manifest = manifest
        files.refuse_links(path, ranks)
        self.incomplete_reason: str | None = None
        # one by one: a corrupt world size fails at the first missing file
        wanted = (rank for rank in range(manifest.world_size) if ranks is None or rank in ranks)
        self._ranks = {rank: self._open_rank(rank) for rank in wanted}
        if self.incomplete_reason is None and has_failed(manifest):
            self.incomplete_reason = (
                "its script ended with an error, so a part of the training may be missing."
            )
        self.program: Callable[[int], Program] = lru_cache(_CACHED)(
            partial(tables.read_program, path, tables.SiteTable(path))
        )
        self.layout: Callable[[int], Layout] = lru_cache(_CACHED)(partial(tables.read_layout, path))
        self._text = lru_cache(1)(read_source_text)
        self._values = lru_cache(_CACHED)(read_values)

    @classmethod
    def open(
        cls, path: str | Path, *, ranks: Sequence[int] | None = None, check_steps: bool = True
    ) -> "Run":
        """Open a run, or some of its ``ranks``; check every step against its
        chain now, or when it is read.
        """
        path = Path(path)
        settle(path)
        run = cls(path, read_manifest(path), ranks)
        for rank in run.ranks if check_steps else ():
            run.rank(rank).check_steps()
        return run

    @property
    def keeps(self) -> str:
        """The steps that the folder holds: "all", or in that of a verify
        run only those "diverging".
        """
        return "all" if self.manifest.purpose == "record" else "diverging"

    @property
    def resumed_steps(self) -> frozenset[tuple[int, int]]:
        """The first step of each fit that resumed from a checkpoint, as (fit, step)."""
        return frozenset(
            (fit.segment, fit.step)
            for attempt in self.manifest.attempts
            for fit in attempt.resumed_from
        )

    @property
    def segments(self) -> list[int]:
        """Numbers of the fits that began, from 0; never empty:
        a run without a fit has one without steps.
        """
        return sorted({segment for *_, segment in self._places()})

    @property
    def ranks(self) -> list[int]:
        """The opened ranks, from 0."""
        return list(self._ranks)

    @property
    def is_complete(self) -> bool:
        """Whether there is no ``incomplete_reason``."""
        return self.incomplete_reason is None

    def rank(self, rank: int) -> RankRun:
        """Return the steps of a process; raise ReferenceNotFoundError for an unknown rank."""
        if rank not in self._ranks:
            num = self.manifest.world_size
            raise ReferenceNotFoundError(
                f"{self.path} has no rank {rank}; it has {num}, from 0.", str(self.path)
            )
        return self._ranks[rank]

    def nondeterministic_ops(self, rank: int) -> list[NondeterministicOp]:
        path = self.path / files.rank_folder(rank) / files.NONDETERMINISTIC_FILE
        return read_json(path, list[NondeterministicOp]) if os.path.lexists(path) else []

    def source_text(self, line: str) -> tuple[tuple[int, str], ...]:
        """Return the lines around "train.py:41 in forward": ((40, "..."), (41, "..."), (42,
        "...")); () if unknown.
        """
        place = line.partition(" in ")[0]
        lines = self._text(self.path).get(place, ())
        return (
            tuple(enumerate(lines, start=max(1, int(place.rpartition(":")[2]) - 1)))
            if lines
            else ()
        )

    def view(self, rank: int, segment: int, step: int) -> StepView:
        record = self.rank(rank).read(segment, step)
        program, layout = self.program(record.program_id), self.layout(record.layout_id)
        if not len(program) == len(layout) == len(record.digests):
            sizes = (
                f"its layout has {len(layout)}, and step {step} has {len(record.digests)} digests"
            )
            path = files.table_path(self.path, files.PROGRAMS, program.id)
            raise files.damaged(path, f"it has {len(program)} sites, {sizes}")
        stream = self.rank(rank).file_of(segment, step).path
        run_id = self.manifest.run_id
        unseen, checked = frozenset[int](), None
        if self.manifest.purpose == "verify":
            unseen, checked = read_checked(stream, run_id, step, len(program))
        values = partial(self._values, stream, run_id)
        return StepView(rank, record, program, layout, unseen, values, checked)

    def streams(self, segment: int) -> Iterator[tuple[Path, int]]:
        """Yield rank 0's files of a fit, one per attempt, each with the number of
        metric readings in run.json.
        """
        for attempt, segment_in_attempt, fit in self._places():
            if fit == segment:
                num_readings = dict(enumerate(self.manifest.attempts[attempt].readings))
                path = files.stream_path(self.path, 0, attempt, segment_in_attempt)
                yield path, num_readings.get(segment_in_attempt, 0)

    def _open_rank(self, rank: int) -> RankRun:
        streams: list[StreamFile] = []
        *earlier, _ = self.manifest.attempts
        for attempt, segment_in_attempt, segment in self._places():
            path = files.stream_path(self.path, rank, attempt, segment_in_attempt)
            streams.append(
                StreamFile(
                    path, run_id=self.manifest.run_id, rank=rank, attempt=attempt, segment=segment
                )
            )
            # only the last fit of an attempt may have no end, if another attempt continued it
            if attempt == len(earlier) or segment_in_attempt + 1 < earlier[attempt].segments:
                self.incomplete_reason = self.incomplete_reason or self._unfinished(streams)
        return RankRun(rank, streams)

    def _unfinished(self, streams: Sequence[StreamFile]) -> str | None:
        """Return why the last of some fits, apart from attempts that left nothing, has no end."""
        return next(one for one in reversed(streams) if not self._left_nothing(one)).unfinished

    def _left_nothing(self, stream: StreamFile) -> bool:
        """Return whether an attempt that resumed the run ended before its first step,
        without changing the run.
        """
        entry = self.manifest.attempts[stream.attempt]
        is_every_step = self.manifest.selection.is_every_step
        is_new = stream.attempt > 0 and entry.segments == 1 and not entry.resumed_from
        return is_new and is_every_step and stream.unfinished is not None and not len(stream.rows)

    def _places(self) -> Iterator[tuple[int, int, int]]:
        """Yield attempt, fit in the attempt and fit of each stream;
        an attempt continues the last fit.
        """
        segment = 0
        for attempt, entry in enumerate(self.manifest.attempts):
            for segment_in_attempt in range(entry.segments):
                if segment_in_attempt:
                    segment += 1
                yield attempt, segment_in_attempt, segment


def make_room(path: Path, *, purpose: Purpose = "record", overwrite: bool = False) -> Path:
    """Make the folder of a new run, and return where to write it;
    RunExistsError if something is in the way.

    With ``overwrite``, that is next to the earlier run. A verification replaces an earlier one.
    """
    make_folder(path, instead=ANOTHER_FOLDER[purpose])
    finish_replacing(path)
    present = our_files(path)
    if not present:
        return path
    if _is_left_by_kill(path):
        remove(present)
        return path
    if purpose == "verify" and _is_of_verification(path):
        # the verdict first, so that it is not taken for the next one's; run.json last,
        # which says whose the files are
        remove(
            sorted(
                present,
                key=lambda child: (child.name not in _VERDICT_FILES, child.name == MANIFEST),
            )
        )
        return path
    if purpose == "record" and not overwrite and (reason := _incomplete_reason(path)) is not None:
        raise RunExistsError(
            f"{path} holds an incomplete run: {reason} Nothing was changed. Continue it from a "
            f"checkpoint ({HOW_TO_CONTINUE}), replace it with overwrite=True ({HOW_TO_OVERWRITE}), "
            "or record to another folder.",
            str(path),
        )
    names = ", ".join(child.name for child in present[:4])
    if not (path / MANIFEST).exists() and not _is_of_verification(path):
        raise RunExistsError(
            f"{path} holds {names}, which a run would replace, but no {MANIFEST}, so they may be "
            f"yours. Nothing was changed. Move them away, or {ANOTHER_FOLDER[purpose]}.",
            str(path),
        )
    if purpose == "verify":
        raise RunExistsError(
            f"{path} already holds a run ({names}), and a verification replaces only another "
            f"verification. Nothing was changed. To verify, {ANOTHER_FOLDER[purpose]}.",
            str(path),
        )
    if not overwrite:
        raise RunExistsError(
            f"{path} already holds a run ({names}). Nothing was changed. Record to another folder, "
            f"replace the run with overwrite=True ({HOW_TO_OVERWRITE}), or verify against it "
            '(DeterminismCallback and TrainingRun: mode="verify", ObserverContext: reference=...).',
            str(path),
        )
    beside = path / REPLACEMENT
    remove([beside])  # left by a recording that did not take its place
    make_folder(beside)
    return beside


def remove_verification(path: Path) -> None:
    """Remove an earlier verification, so that none of its files is taken
    for one that fails to begin.
    """
    if os.path.lexists(path):
        with FolderLock(path).hold(instead=ANOTHER_FOLDER["verify"]):
            make_room(path, purpose="verify")


def remove_run(path: Path) -> None:
    """Remove a run without a step; other ranks may still hold its files open."""
    remove(our_files(path), ignore_errors=True)
    if path.name == REPLACEMENT:
        shutil.rmtree(path, ignore_errors=True)


def _is_left_by_kill(path: Path) -> bool:
    """Return whether the files are those of a process that was killed before it wrote
    run.json, so before a step.
    """
    return all(_holds_nothing(child) for child in our_files(path))


def _holds_nothing(child: Path) -> bool:
    if child.name in (PROGRAMS, SITES, LAYOUTS):
        return child.is_dir() and not list_folder(child)
    if child.name.startswith("rank-"):
        return child.is_dir() and all(
            file.name.lstrip(".").startswith("attempt-") for file in list_folder(child)
        )
    return child.name.startswith(f".{MANIFEST}.")


def _incomplete_reason(path: Path) -> str | None:
    """Return why a run ended early; None for a complete run,
    and for files that are no run that can be read.
    """
    try:
        return Run.open(path, check_steps=False).incomplete_reason
    except (ReferenceFormatError, ReferenceNotFoundError):
        return None


def _is_of_verification(path: Path) -> bool:
    if (path / MANIFEST).is_file():
        return read_manifest(path).purpose == "verify"
    # refused at its start
    return (path / "verdict.json").is_file() and not (path / PROGRAMS).exists()
