"""Verifies fits against a recorded run (``mode="verify"``)."""

import warnings
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor
from typing_extensions import override

from det_callbacks.compare.record import REPORT_FILE
from det_callbacks.digest.components import digest_tensors
from det_callbacks.digest.unobserved import hidden
from det_callbacks.errors import (
    DivergenceError,
    DivergenceWarning,
    NotComparableError,
    NothingComparedError,
    SelectionError,
    divergence_error,
)
from det_callbacks.report import closing_lines
from det_callbacks.report.console import print_closing_line
from det_callbacks.report.page import write_report
from det_callbacks.report.verdict import verdict_of_rank
from det_callbacks.runs.files import ANOTHER_FOLDER, make_folder, stream_path
from det_callbacks.runs.manifest import STAGES
from det_callbacks.runs.metrics import Reading
from det_callbacks.runs.peers import END_OF_FIT
from det_callbacks.runs.replacement import settle
from det_callbacks.runs.selection import Selection
from det_callbacks.runs.steps import StepTrace
from det_callbacks.runs.store import Run, remove_verification
from det_callbacks.text import count
from det_callbacks.trace.components import holds_data
from det_callbacks.trace.leaves import flatten
from det_callbacks.training.recording import stop_waiting, wait
from det_callbacks.training.session import FIT, TracedSession
from det_callbacks.verdict import Verdict
from det_callbacks.verify.verification import (
    Verification,
    free_folder,
    open_reference,
    write_verdict,
)


class Verifying(TracedSession):
    """Compares the fits of one run; differences go to ``current``,
    or to a new folder below the training's.
    """

    run: Verification
    _reference: Run

    @override
    def clear_results(self) -> None:
        current = self.arguments.current
        if self.run is None and current is not None:
            self.peers.broadcast(
                partial(remove_verification, current), task=f"making room in {current}"
            )

    @override
    def prepare(self) -> Selection:
        super().prepare()
        arguments = self.arguments
        if self.run is not None:
            return arguments.selection
        # together: rank 0 may have to put a recording of this program in its place first
        self.peers.broadcast(partial(settle, self.path), task=f"opening the reference {self.path}")
        opens = partial(
            open_reference, self.path, arguments.asked, steps=arguments.steps, peers=self.peers
        )
        try:
            self._reference = self.peers.run_on_all(
                opens, task=f"opening the reference {self.path}"
            )
        except NotComparableError as error:
            if self.peers.rank == 0 and error.verdict is not None:
                folder = arguments.current or free_folder(self.root)
                make_folder(folder, instead=ANOTHER_FOLDER["verify"])
                write_verdict(folder, replace(error.verdict, current=str(folder)))
            raise
        return self._reference.manifest.selection

    @override
    def begin(self, *, is_resumed: bool = False, call: str | None = None, stage: str = FIT) -> None:
        super().begin(is_resumed=is_resumed, call=call, stage=stage)
        stop_waiting(self)
        self.verdict, was_open = None, self.run is not None
        if not was_open:
            arguments, peers = self.arguments, self.peers
            # rank 0 decides, since the others would see the folder that it made
            folder = peers.broadcast(
                lambda: str(arguments.current or free_folder(self.root)), task="choosing a folder"
            )
            options: dict[str, Any] = {
                "manifest": self.manifest,
                "peers": peers,
                "steps": arguments.steps,
            }
            self.run = self.detector = Verification(self._reference, Path(folder), **options)
            self.may_stop = arguments.on_divergence == "raise"
        if call is not None:
            self.run.withdraw_verdict()
            return
        segment = self.num_segments - 1
        self._require_stage(segment, stage)
        if was_open and not segment:
            self.run.reopen(self.manifest)
        stream = stream_path(self.run.current, self.peers.rank, 0, segment)
        self._begin_saving(stream, segment, self._reference.manifest, is_recording=False)
        if self.keeper is not None:
            self.run.keep_tensors = self.keeper.write
        self.run.begin_fit(
            segment, is_resumed=is_resumed, is_every_step=self.arguments.selection.is_every_step
        )

    @override
    @hidden
    def find_resumed(self, batch: Any) -> int | None:
        if not (self._is_first and self.arguments.selection.is_every_step):
            return None
        leaves = flatten(batch, "batch", is_whole=True)
        given = [
            (name, value)
            for name, value in leaves
            if isinstance(value, Tensor) and holds_data(value)
        ]
        digests = digest_tensors([value for _, value in given])
        named = dict(zip((name for name, _ in given), digests, strict=True))
        find = partial(self.run.find_resumed, self._hash_mode.digest_state(), named)
        steps = self.peers.gather(find, task="finding the step that it resumes from")
        step = steps[self.peers.rank]
        if step is None or {*steps} != {step}:
            return None
        self.is_resumed, self._is_first = True, False
        self._evidence.begin("batch start", self.run.idle_generators(step))
        return int(step)

    @override
    def _add(self, trace: StepTrace, *, step: int, epoch: int) -> bool:
        differs = self.run.add(trace, step=step, epoch=epoch)
        self.replay.end_step(differs=differs)
        self.chain = self.run.chain(step)
        return differs and self.may_stop

    @override
    def put_metrics(self, reading: Reading) -> bool:
        return self.run.add_metrics(reading) and self.may_stop

    @override
    def resume_metrics(self, reading: Reading, *, is_first: bool) -> None:
        self.run.resume_metrics(reading, is_first=is_first)

    @override
    def end(self, *, is_early: bool = False) -> None:
        run, selection = self.run, self.arguments.selection
        run.tally.replayed = self.replay.to_dict()
        self.add_packages()
        if self.call is None and not is_early:
            if self.is_resumed and not (run.fit.compared or run.fit.extra):
                run.close(complete=False)
                raise NothingComparedError(
                    "The checkpoint is from a finished run, so there was no step to compare with "
                    f"{self.path}. Verify from an earlier checkpoint, or from the start."
                )
            run.end_fit()
        missing = self._stages_of_reference[self.num_segments :]
        missing += self.peers.gather(lambda: [*run.metrics.pending_calls], task=END_OF_FIT)[0]
        is_pending = bool(missing) and not is_early and self.arguments.steps == "all"
        verdict = run.finish(is_pending=is_pending, is_early=is_early)
        level = closing_lines.level_words(
            selection.level, selection.compiled, verdict.coverage.opaque_regions
        )
        if is_pending and not run.differs_anywhere:
            self._wait(verdict, missing, level)
            return
        self.verdict = verdict

        def tell() -> None:
            report = self._report(verdict) if run.differs_anywhere else None
            self._print_once(closing_lines.verified_line(verdict, level=level, report=report))

        # torchrun ends all processes when the first one exits, so none may
        # exit before rank 0 has told
        self.peers.gather(tell, task="the report of the verdict")
        if verdict.verdict == "match":
            return
        text = verdict_of_rank(verdict, rank=self.peers.rank, world_size=self.peers.world_size)
        if self.arguments.on_divergence != "warn":
            raise divergence_error(text, verdict)
        self._warn_once(text, DivergenceWarning)

    @property
    def _stages_of_reference(self) -> list[str]:
        """What each part of the reference is: "fit" or another stage."""
        noted = self._reference.manifest.environment.get(STAGES)
        known = noted.value if noted is not None else []
        return [*known, *[FIT] * (self.run.num_segments - len(known))]

    def _require_stage(self, segment: int, stage: str) -> None:
        known = self._stages_of_reference
        if segment < len(known) and known[segment] != stage:
            raise SelectionError(
                f"Part {segment + 1} of {self.path} is a {known[segment]}, and here it is a "
                f"{stage}, so they cannot be compared. The reference has {', '.join(known)}: make "
                "the same calls in this order, with the same stages."
            )

    def _wait(self, verdict: Verdict, missing: Sequence[str], level: str) -> None:
        """Keep the verdict until the last fit or test of the reference."""
        stages, num_ended = [*self.stages, *missing], len(self.stages)
        self._print_once(
            closing_lines.waiting_line(verdict, stages=stages, num_ended=num_ended, level=level)
        )

        def unfinished() -> DivergenceError | None:  # called in each process at its end
            self.run.write(verdict)
            self._report(verdict)
            error = DivergenceError(
                closing_lines.unfinished_text(verdict, stages=stages, num_ended=num_ended), verdict
            )
            if self.arguments.on_divergence != "warn":
                return error
            warnings.warn(str(error), DivergenceWarning, stacklevel=2)
            return None

        wait(self, unfinished)

    @override
    def withdraw(self) -> None:
        self.run.discard()
        self.is_over = True

    @override
    def stop(self, reason: str) -> None:
        self.add_packages()
        verdict = self.verdict = self.run.stop(reason)
        found, num_steps = "no verdict", count(self.run.tally.num_steps, "step")
        if verdict is not None:
            found = f"{verdict.verdict}; report: {self._report(verdict)}"
        elif self.peers.world_size > 1:
            found += (
                ". Correct the error, and verify again. To see whether a rank differed before it: "
            )
            found += f"{self.run.diff_command} (exit status 2 if none did, or if a rank was killed)"
        self.print_line(
            f"det_callbacks: verification{self._of_rank} stopped by {reason} after {num_steps}: "
            f"{found}"
        )

    def _report(self, verdict: Verdict) -> Path | None:
        if self.peers.rank:
            return None
        try:
            return write_report(
                self.run.current / REPORT_FILE,
                verdict,
                reference=self.path,
                current=self.run.current,
            )
        except Exception as error:  # noqa: BLE001
            # a fault in the report must not hide the divergence
            print_closing_line(
                f"det_callbacks: no report was written ({type(error).__name__}: {error})"
            )
            return None
