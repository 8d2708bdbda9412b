"""Records fits (``mode="record"``)."""

import json
import operator
import os
import shutil
import sys
from collections.abc import Callable
from copy import copy
from dataclasses import dataclass, replace
from functools import reduce
from multiprocessing.util import Finalize
from pathlib import Path
from typing import Any, NoReturn

from typing_extensions import override

from det_callbacks.environment.variables import launch_request
from det_callbacks.errors import (
    CoverageWarning,
    DetCallbacksError,
    NothingComparedError,
    WriteError,
    divergence_error,
)
from det_callbacks.report import closing_lines
from det_callbacks.report.console import end_process, print_closing_line, print_error
from det_callbacks.report.run import findings_line
from det_callbacks.report.verdict import disagreement_text
from det_callbacks.runs.files import DISAGREEMENT, MANIFEST, REPLACEMENT
from det_callbacks.runs.manifest import RECORDER, STAGES
from det_callbacks.runs.metrics import CALLS, Reading
from det_callbacks.runs.peers import END_OF_FIT, Peers
from det_callbacks.runs.replacement import forget_replacement, settle, waiting_folders
from det_callbacks.runs.steps import StepTrace
from det_callbacks.runs.writer import RunWriter
from det_callbacks.tensors.files import KeptCounts
from det_callbacks.text import count
from det_callbacks.training.arguments import RunArguments
from det_callbacks.training.session import FIT, TracedSession
from det_callbacks.verify.verification import Verification

# owner -> function that returns the error if no more fits follow
_waiting: dict[object, Callable[[], DetCallbacksError | None]] = {}

num_fits = 0
"""Number of fits that have begun in this process."""
last_error: DetCallbacksError | None = None
"""The error that ended the last fit, even if the program caught it;
later errors do not replace ours.
"""


def note_fit(*, ended_by: BaseException | None = None) -> None:
    """Count a fit that begins, or keep the error that ended it without its
    frames, which hold tensors.
    """
    global num_fits, last_error
    num_fits += ended_by is None
    if last_error is not None and not isinstance(last_error, NothingComparedError):
        return
    last_error = copy(ended_by) if isinstance(ended_by, DetCallbacksError) else None
    if ended_by is not None and last_error is None:
        name = type(ended_by).__name__
        last_error = NothingComparedError(
            f"{name} ended the last fit, but the program caught it: let it propagate."
        )


def wait(owner: object, unfinished: Callable[[], DetCallbacksError | None]) -> None:
    """At the end of the process, raise the error of ``unfinished``, unless the owner continues."""
    # Not atexit, which forked processes skip (ddp_fork). Registered each time,
    # since a fork forgets it.
    Finalize(None, _end_waiting, exitpriority=0)
    _waiting[owner] = unfinished


def stop_waiting(owner: object) -> None:
    """Stop waiting, because the owner's next fit begins."""
    _waiting.pop(owner, None)


def take_unfinished() -> DetCallbacksError | None:
    """Return the first error of the runs that still wait."""
    waiting = list(_waiting.values())
    _waiting.clear()
    errors = [unfinished() for unfinished in waiting]
    return next(filter(None, errors), None)


def replace_at_end() -> None:
    """At the end of the process, let the complete recordings take the places of
    the runs that they replace.
    """
    Finalize(None, _end_waiting, exitpriority=0)


def finish(*, has_failed: bool) -> DetCallbacksError | None:
    """Return the error that the process, or a job, ends with; without one,
    complete recordings take their places.
    """
    error = take_unfinished()
    for folder in waiting_folders():
        if error is not None or has_failed:
            forget_replacement(folder)
            text = (
                f"the program failed, so {folder} is unchanged; the new run is in "
                f"{folder / REPLACEMENT}"
            )
            print_closing_line(f"det_callbacks: {text}")
        elif folder != _folder_of_command():
            try:
                settle(folder)
            except DetCallbacksError as caught:
                error = caught
    return error


def _folder_of_command() -> Path | None:
    """Return the folder that ``det-callbacks record`` settles itself,
    since it knows the status of the script.
    """
    asked = launch_request()
    return (
        None
        if asked is None
        else Path(os.path.realpath(json.loads(asked)["arguments"]["reference"]))
    )


def _end_waiting() -> None:
    if (error := finish(has_failed=_has_failed())) is not None:
        print_error(error)
        end_process(error.exit_code)


def _has_failed() -> bool:
    """Return whether an exception ends this process; Python tells nobody of
    ``sys.exit`` in the main one.
    """
    # in a process of multiprocessing, which ends while it handles the exception
    ending = sys.exc_info()[1]
    if isinstance(ending, SystemExit):
        return ending.code not in (None, 0)
    is_interactive = hasattr(sys, "ps1")  # a notebook goes on after an exception
    return ending is not None or (
        not is_interactive and getattr(sys, "last_value", None) is not None
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _RankAtEnd:
    num_steps: int  # new ones
    num_sites: int
    num_bytes: int
    num_agreed: int  # repeated steps that match those already recorded
    has_diverged: bool
    kept: KeptCounts | None


class Recording(TracedSession):
    """Writes the fits of one run as a reference.

    A resumed fit continues the existing run, and ``detector`` compares the steps that it repeats.
    """

    run: RunWriter

    def __init__(self, arguments: RunArguments, peers: Peers) -> None:
        super().__init__(arguments, peers)
        self._num_metrics = self._num_before_call = 0
        self._regions: set[str] = set()
        self._is_resuming = self._has_diverged = False
        self._num_by_native = self._num_by_python = 0  # ops
        self._recorder = ""  # words about the native recorder, if it recorded

    @override
    def begin(self, *, is_resumed: bool = False, call: str | None = None, stage: str = FIT) -> None:
        has_segment = self.num_segments > 0  # an earlier one: the next line adds this stage
        super().begin(is_resumed=is_resumed, call=call, stage=stage)
        self._num_before_call = self._num_metrics
        # if steps are selected, the first recorded one may come later
        self._is_resuming = is_resumed and self.arguments.selection.is_every_step
        if self.run is None:
            self._open_run(continues=is_resumed and not self.arguments.overwrite)
        elif call is None:
            self.detector = None
            if has_segment:
                self.run.start_segment()
            else:
                self.run.reopen(self.manifest)
        if call is None and {*self.stages} - {FIT, *CALLS}:
            self.run.note(STAGES, [known for known in self.stages if known not in CALLS])
        if call is None:
            self.may_stop = self.detector is not None
            self._begin_saving(
                self.run.stream, self.run.segment, self.run.manifest, is_recording=True
            )

    def _open_run(self, *, continues: bool) -> None:
        options: dict[str, Any] = {"manifest": self.manifest, "peers": self.peers}
        if continues and self.peers.broadcast(self._has_run, task=f"looking for {self.path}"):
            self.run = RunWriter.resume(self.path, **options)
            assert self.run.earlier is not None, "it is resumed"
            # the run's folder holds diverging steps until the attempt is discarded
            self.detector = Verification(
                self.run.earlier, self.path / DISAGREEMENT, steps="common", **options
            )
            for segment in range(self.run.segment + 1):
                self.detector.begin_fit(segment, is_resumed=True, is_every_step=self._is_resuming)
        else:
            self.run = RunWriter.create(self.path, overwrite=self.arguments.overwrite, **options)

    def _has_run(self) -> bool:
        settle(self.path)
        return (self.path / "run.json").exists()

    @override
    def _add(self, trace: StepTrace, *, step: int, epoch: int) -> bool:
        run, detector = self.run, self.detector
        if self._is_resuming:
            self._is_resuming = False
            run.note_resumed(step)
        if detector is not None and detector.holds(step):
            # ranks continue until they stop together
            differs = detector.add(trace, step=step, epoch=epoch)
            self.replay.end_step(differs=differs)
            self._has_diverged |= differs
            has_saved = self.replay.saved is not None and self.replay.saved.exists
            # after a new step the chain continues over all steps
            keeps_recorded_step = self._has_diverged or not self.num_steps or has_saved
            if keeps_recorded_step:
                self.chain = detector.chain(step)
                return self._has_diverged
        else:
            self.replay.write(step)  # before the step itself
            self.num_steps += 1
            self.num_sites += len(trace.digests)
            self._regions.update(trace.program.opaque_regions)
        run.put_program(trace.program)
        if not run.has_layout(trace.layout_id):
            run.put_layout(trace.layout)
        run.put_values(step, trace.values)
        if self.keeper is not None:
            self.keeper.write(trace, step)  # before the step itself
        self.chain = run.append(step, epoch, trace.program.id, trace.layout_id, trace.digests)
        return False

    @override
    def put_metrics(self, reading: Reading) -> bool:
        detector = self.detector if self.call is None else None
        # an earlier attempt that was interrupted at this step may lack the reading
        is_new = detector is None or not detector.has_later_step(reading.step)
        if is_new:
            self._num_metrics += len(reading.metrics)
            self.run.put_reading(reading)
        differs = detector is not None and detector.add_metrics(reading)
        self._has_diverged |= differs
        return differs

    @override
    def resume_metrics(self, reading: Reading, *, is_first: bool) -> None:
        self.run.put_reading(reading)

    @override
    def end(self, *, is_early: bool = False) -> None:
        if self.call is not None:
            self._end_call(self.call)
            return
        detector, selection = self.detector, self.arguments.selection
        ranks: list[_RankAtEnd] = self.peers.gather(self._at_end, task=END_OF_FIT)
        diverged = next((rank for rank in ranks if rank.has_diverged), None)
        if detector is not None and diverged is not None:
            self._raise_disagreement(detector, diverged)
        self._end_comparison()
        if not all(rank.num_steps or rank.num_agreed for rank in ranks):
            self._discard()
            selected = "" if selection.is_every_step else selection.shown_steps
            text = closing_lines.nothing_recorded_text(
                path=self.path, selected=selected, is_resumed=self.is_resumed
            )
            raise NothingComparedError(text)
        self.add_packages()
        self._note_recorder()
        self._complete()
        # what another rank has not closed has no findings yet
        self.peers.run_on_all(lambda: None, task=f"closing their streams in {self.path}")
        kept = [rank.kept for rank in ranks if rank.kept is not None]
        self._print_once(
            closing_lines.recorded_line(
                path=self._shown_path,
                num_steps=sum(rank.num_steps for rank in ranks),
                num_sites=sum(rank.num_sites for rank in ranks),
                num_bytes=sum(rank.num_bytes for rank in ranks),
                level=closing_lines.level_words(selection.level, selection.compiled, self._regions),
                saved=self.replay.to_dict(),
                num_agreed=None if detector is None else sum(rank.num_agreed for rank in ranks),
                num_ranks=self.peers.world_size,
                kept=reduce(operator.add, kept) if kept else None,
                num_metrics=self._num_metrics,
                recorder=self._recorder,
            )
        )
        if self.peers.rank == 0 and (text := findings_line(self.run.path, shown=self.path)):
            self.print_line(text)
        self._warn_of_unused_patterns()

    def _warn_of_unused_patterns(self) -> None:
        for done, found in (
            ("saved for the replay", self.op_replay),
            ("kept for the keep_tensors", self.keeper),
        ):
            if found is not None and found.unused:
                unused = ", ".join(map(repr, found.unused))
                self._warn_once(
                    f"Nothing was {done} patterns {unused}, because no op that they match ran "
                    "(inputs and outputs of compiled regions are not ops). det-callbacks show RUN "
                    "--step N lists the ops that ran.",
                    CoverageWarning,
                )

    def _end_call(self, call: str) -> None:
        before, now = self.peers.broadcast(
            lambda: [self._num_before_call, self._num_metrics], task=END_OF_FIT
        )
        if not self.num_segments:
            if now:
                self._complete()
            else:
                self._discard()
            if now == before:
                raise NothingComparedError(closing_lines.no_metrics_text(call, reference=self.path))
        self._print_once(
            closing_lines.recorded_call_line(call, path=self._shown_path, num_metrics=now - before)
        )

    def _note_recorder(self) -> None:
        """Note how many ops native code recorded, in all fits of this process."""
        native = self._hash_mode.recorder.native
        if native is None:
            return
        by_native, by_python = native.take_counts()
        self._num_by_native += by_native
        self._num_by_python += by_python
        num_ops = self._num_by_native + self._num_by_python
        self._recorder = f"native, {self._num_by_python:,} of {count(num_ops, 'op')} by Python"
        self.run.note(RECORDER, self._recorder)

    def _complete(self) -> None:
        self.run.close(complete=True)
        if self.run.is_waiting:
            replace_at_end()

    @property
    def _shown_path(self) -> str:
        if self.run.path.name != REPLACEMENT:
            return str(self.path)
        if self.run.is_waiting:
            return f"{self.path}, where it replaces the earlier run when the program ends"
        return f"{self.path / REPLACEMENT}; {self.path} is unchanged"

    def _at_end(self) -> _RankAtEnd:
        try:
            self.run.flush_evidence()  # rank 0 reads it for findings
        except WriteError:
            self.run.close(complete=False)
            raise
        return _RankAtEnd(
            num_steps=self.num_steps,
            num_sites=self.num_sites,
            num_bytes=self.run.bytes_written,
            num_agreed=self._num_agreed(),
            has_diverged=self._has_diverged,
            kept=None if self.keeper is None else self.keeper.counts,
        )

    def _num_agreed(self) -> int:
        if self.detector is None:
            return 0
        tally = self.detector.tally
        # the step that differs is the last one that was compared
        return tally.num_steps - 1 if tally.num_differing else tally.num_steps

    def _raise_disagreement(self, detector: Verification, diverged: _RankAtEnd) -> NoReturn:
        self._discard()
        verdict = self.verdict = replace(detector.finish(is_early=True), current=str(self.path))
        self._end_comparison()
        counts = {"num_agreed": diverged.num_agreed, "num_dropped": diverged.num_steps}
        text = disagreement_text(verdict, path=self.path, **counts, rank=self.peers.rank)
        raise divergence_error(text, verdict)

    @override
    def withdraw(self) -> None:
        self._end_comparison()
        self._discard()

    def _end_comparison(self) -> None:
        if self.detector is not None:
            self.detector.close(complete=False)
            if self.peers.rank == 0:
                shutil.rmtree(self.detector.current, ignore_errors=True)

    def _discard(self) -> None:
        """Remove this attempt; another fit starts a new session."""
        for step_writer in self._step_writers:
            step_writer.delete()
        self.run.discard()
        self.is_over = True

    @override
    def stop(self, reason: str) -> None:
        self._end_comparison()
        if self.call is not None and self.num_segments:
            self.print_line(
                f"det_callbacks: {self.call} was stopped by {reason}, so {self.path} records "
                "nothing of it"
            )
            return
        has_nothing_new = not self.num_steps and not (self.call and self._num_metrics)
        # only all ranks together may discard a resumed attempt
        may_discard = self.detector is None or self.peers.world_size == 1
        if has_nothing_new and may_discard:
            self._discard()
            left = "is unchanged" if (self.path / MANIFEST).exists() else "holds no run"
            when = f"before its first new step: {self.path} {left}"
        else:
            self.add_packages()
            if self.num_steps:
                self._note_recorder()
            self.run.close(complete=False)
            when = f"after {count(self.num_steps, 'step')}: incomplete, in {self._shown_path}"
        self.print_line(f"det_callbacks: recording{self._of_rank} stopped by {reason} {when}")
