"""A session handles the fits of a run in one mode; the base class ``Session`` does nothing."""

import os
import warnings
from collections.abc import Callable, Collection, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from typing_extensions import override

from det_callbacks.audit.result import AuditReport
from det_callbacks.digest.unobserved import hidden
from det_callbacks.environment.capture import packages_since
from det_callbacks.environment.variables import CAPTURE, FILL_MEMORY, PERTURB
from det_callbacks.errors import TraceError
from det_callbacks.findings.table import ignored_findings
from det_callbacks.observers.observations import REGISTRY, Observations
from det_callbacks.runs.evidence import AFTER_BACKWARD, AFTER_FORWARD, BATCH_END
from det_callbacks.runs.manifest import Manifest
from det_callbacks.runs.metrics import CALLS, Reading
from det_callbacks.runs.peers import ALONE, Peers
from det_callbacks.runs.selection import Selection
from det_callbacks.runs.steps import Expectation, StepTrace
from det_callbacks.tensors.calls import CallCapture
from det_callbacks.tensors.copies import Perturbation, TensorBudget
from det_callbacks.tensors.files import KEPT, REPLAY, SavedStep, StepWriter
from det_callbacks.tensors.replay import Keeper, OpReplay, Replay
from det_callbacks.trace.compiled.replaced import forget_compiled
from det_callbacks.trace.generators import GeneratorReader
from det_callbacks.trace.hash_mode import HashMode
from det_callbacks.trace.nondeterministic_ops import NondeterministicOps
from det_callbacks.trace.places import set_phase
from det_callbacks.training.arguments import RunArguments
from det_callbacks.training.evidence import EvidenceLog, ParameterNotes
from det_callbacks.training.training import Training
from det_callbacks.verdict import Verdict
from det_callbacks.verify.verification import Verification

FIT = "fit"


class Progress(NamedTuple):
    """The progress of a run on this process, for loggers and progress bars."""

    num_steps: int = 0  # recorded or compared
    num_sites: int = 0
    num_differing: int = 0  # sites, and steps in one run only
    num_bytes: int = 0  # saved or restored for replay
    chain: int | None = None  # None before the first step, and after a difference


class Steps:
    """What a way in reports of the steps of a fit, in its order; this class does nothing,
    for when no fit is open.

    ``attach`` follows the setup of the data, and ``close``, which may be called twice, the last
    step. Between ``pause`` and ``unpause`` ops belong to no step.
    """

    def attach(self, training: Training) -> None:
        """Begin to follow the models and optimizers."""

    def find_resumed(self, batch: Any) -> int | None:
        """Return the step from which a run continues its reference, if its state tells; only a
        verification of every step looks.
        """

    def begin_step(self, step: int, batch: Any) -> None:
        """Begin a step with its batch."""

    def add_batch(self, batch: Any) -> None:
        """Record another batch of the step."""

    def enter_call(self, module: Any) -> None:
        """Note a call of a module that began before the step."""

    def note_loss(self, loss: Any) -> None:
        """Note the tensor whose backward pass begins."""

    def begin_gradients(self) -> None:
        """Note that the backward pass has ended, and an update may follow."""

    def pause(self) -> None:
        """Leave ops out of the step."""

    def unpause(self) -> None:
        """Record ops again."""

    def mark(self, point: str) -> None:
        """Read the generators at a boundary, such as "epoch start"."""

    def end_step(self, step: int, epoch: int, outputs: Any) -> bool:
        """End a step with what it returned; return whether to stop."""
        return False

    def drop_step(self) -> None:
        """Forget a step that did not end."""

    def flush(self, step: int) -> None:
        """Write the evidence from before a step."""

    def close(self) -> None:
        """Stop following the run."""


class Session(Steps):
    """Handles the fits of a run, and the calls that log metrics without a fit;
    each mode is a subclass.

    ``clear_results`` and ``prepare`` come before a fit builds anything, ``begin`` and ``follow``
    before its first step; after the last one comes ``end``, or ``stop`` after an exception. The
    base class handles none: ``is_over``.
    """

    root: Path  # default parent of folders
    manifest: Mapping[str, Any]  # as in run.json
    print_line: Callable[[str], None]
    may_stop = False  # whether a difference ends the fit
    is_resumed = False
    idle_before: Collection[str] | None = None  # generators unused when the checkpoint was saved
    call: str | None = None  # the last call if it is not a fit, such as "trainer.test"
    run: Any = None  # RunWriter or Verification
    verdict: Verdict | None = None
    audit_report: AuditReport | None = None

    def __init__(self, arguments: Any = None, peers: Peers = ALONE) -> None:
        self.arguments: RunArguments = arguments
        self.peers = peers
        self.reader = GeneratorReader()
        # whether the next stage needs a new session: it has no arguments, or its files were removed
        self.is_over = arguments is None
        self.stages: list[str] = []  # recorded stages such as "fit", and calls outside of them

    def prepare(self) -> Selection:
        """Check the arguments before a fit, and return the selection."""
        ignored_findings()  # raises for an unknown word
        return self.arguments.selection

    def begin(self, *, is_resumed: bool = False, call: str | None = None, stage: str = FIT) -> None:
        """Begin a call that logs metrics, or without ``call`` a stage whose steps are recorded."""
        self.is_resumed, self.call = is_resumed, call
        self.reader = GeneratorReader()
        if call is None:
            self.stages.append(stage)
        else:
            self.reader.begin()

    def num_calls(self, call: str) -> int:
        last = max((at for at, stage in enumerate(self.stages) if stage not in CALLS), default=-1)
        return self.stages[last + 1 :].count(call)

    @property
    def num_segments(self) -> int:
        """Fits, and other stages whose steps are recorded, that have begun."""
        return sum(stage not in CALLS for stage in self.stages)

    def clear_results(self) -> None:
        """Remove the results of an earlier verification or audit, before anything can fail."""

    def follow(self, training: Training, ops: NondeterministicOps | None) -> None:
        """Begin to follow a run, before its loaders are set up, or right after."""

    def add_packages(self) -> None:
        """Put what the program imported since the run began into the run's environment."""
        if packages := packages_since(self.run.manifest.environment):
            self.run.add_environment(packages)

    def put_metrics(self, reading: Reading) -> bool:
        """Record or compare what was logged; return whether to stop."""
        return False

    def resume_metrics(self, reading: Reading, *, is_first: bool) -> None:
        """Note from where on a resumed fit logs."""

    def progress(self) -> Progress:
        """Return how far the run is."""
        return Progress()

    def end(self, *, is_early: bool = False) -> None:
        """Close the files, print the closing line, and raise if the run differs."""

    def stop(self, reason: str) -> None:
        """Close the files after an exception."""

    def withdraw(self) -> None:
        """Remove a run without steps."""

    def _print_once(self, text: str) -> None:
        if self.peers.rank == 0:
            self.print_line(text)

    def _warn_once(self, text: str, category: type[Warning]) -> None:
        if self.peers.rank == 0:
            warnings.warn(text, category, stacklevel=2)


class TracedSession(Session):
    """Traces the steps of fits; its subclasses record or verify them."""

    def __init__(self, arguments: RunArguments, peers: Peers) -> None:
        super().__init__(arguments, peers)
        assert arguments.reference is not None, "checked when the callback was made"
        self.path = arguments.reference
        self.detector: Verification | None = None  # for steps already recorded
        self.num_steps = self.num_sites = 0  # recorded; the detector counts compared ones
        self.chain: int | None = None
        self.replay = Replay()
        self.op_replay: OpReplay | None = None
        self.keeper: Keeper | None = None
        self._perturbation = Perturbation() if PERTURB in os.environ else None
        wanted = os.environ.get(CAPTURE)
        self._capture = None if wanted is None else CallCapture(wanted, arguments.tensor_budget_mib)
        self._step_writers: list[StepWriter] = []
        self._of_rank = "" if peers.world_size == 1 else f" of rank {peers.rank}"

    def _begin_saving(
        self, stream: Path, segment: int, patterns: Manifest, *, is_recording: bool
    ) -> None:
        if self._step_writers:
            for writer in self._step_writers:
                writer.start_segment(stream, segment)
            return
        place: dict[str, Any] = {
            "run_id": self.run.manifest.run_id,
            "rank": self.peers.rank,
            "segment": segment,
        }
        replayed, kept = self._step_writers = [
            StepWriter(stream, kind, **place) for kind in (REPLAY, KEPT)
        ]
        budget = TensorBudget(self.arguments.tensor_budget_mib)
        if is_recording:
            self.replay = Replay(replayed, budget)
        if patterns.replay:
            self.op_replay = OpReplay(patterns.replay, self.replay)
        if patterns.keep_tensors:
            self.keeper = Keeper(patterns.keep_tensors, kept, self.arguments.tensor_budget_mib)

    def _add(self, trace: StepTrace, *, step: int, epoch: int) -> bool:
        raise NotImplementedError

    @override
    def flush(self, step: int) -> None:
        rows = self._evidence.take(step)
        if self.detector is not None and self.detector is not self.run:
            self.detector.put_evidence(rows)
        self.run.put_evidence(rows)

    @override
    @hidden
    def follow(self, training: Training, ops: NondeterministicOps | None) -> None:
        selection = self.arguments.selection
        if selection.level != "state" and selection.compiled == "run":
            forget_compiled()
        self._ops, self._training = ops, training
        # the first step after a resume is recorded like any later step
        self._is_first = not self.is_resumed
        self._evidence = EvidenceLog(training, self.reader, is_resumed=self.is_resumed)
        self._hash_mode = HashMode.for_training(
            training.module, selection, base_phase=training.base_phase
        )
        recorder = self._hash_mode.recorder
        recorder.generators.reader = self.reader
        if FILL_MEMORY in os.environ:
            recorder.undigested.fill = int(os.environ[FILL_MEMORY])
        recorder.plans.nondeterministic_ops = ops
        # keeper and capture see what the others wrote
        hooks = self.op_replay, self._perturbation, self.keeper, self._capture
        if self._capture is not None:
            recorder.plans.around = self._capture.around
        recorder.output_hooks.every = tuple(hook for hook in hooks if hook is not None)
        owner = f"the {self.arguments.called} of {self.path}"
        self._observations = Observations(recorder, owner=owner, level=selection.level)
        REGISTRY.activate(self._observations)
        training.follow_loaders(self._evidence)
        if ops is not None:
            ops.on_new = self.run.put_nondeterministic_ops

    @override
    @hidden
    def attach(self, training: Training) -> None:
        self._hash_mode.optimizers = list(training.optimizers)
        self._optimized = ParameterNotes(training.module, training.optimizers, self._evidence)
        self._hash_mode.list_further = training.further_state
        training.mark_forward(self._hash_mode.marks_forward)
        training.leave_out(self._hash_mode.leaves_out)
        if training.is_own_loop:
            self._hash_mode.on_updated = partial(self._set_phase, "other")

    @override
    def mark(self, point: str) -> None:
        self._evidence.mark(point, with_seeds=point in (AFTER_FORWARD, AFTER_BACKWARD, BATCH_END))

    @override
    @hidden
    def begin_step(self, step: int, batch: Any) -> None:
        selection = self.arguments.selection
        if not self.reader.has_begun:  # here, because loading a checkpoint restores generators
            known = None if self.detector is None else self.detector.idle_generators(step)
            self._evidence.begin(
                "batch start", known if self.idle_before is None else self.idle_before
            )
        self._optimized.note_measured()  # outside the step, which must not wait for a device
        if selection.selects_step(step):
            if self._perturbation is not None:
                self._perturbation.begin(batch)
            if self._capture is not None:
                place = {"rank": self.peers.rank, "segment": self.run.segment, "step": step}
                self._capture.begin(is_wanted=self._capture.is_of(**place))
            # a resume repeats step 0 if an exception ended it; with only_steps, no step is special
            is_first = step == 0 or (self._is_first and selection.only_steps is None)
            self._hash_mode.begin(
                batch=batch, is_first=is_first, expected=self._begin_tensors(step)
            )
            self._observations.begin(self.replay)
        self._evidence.begin_step(batch)
        self._optimized.begin_step(self._training.epoch)

    def _begin_tensors(self, step: int) -> Expectation | None:
        detector, expectation = self.detector, None
        saved: dict[str, SavedStep] = {}
        if detector is not None and detector.holds(step):
            if detector.is_resuming:
                detector.compare_state(step, self._hash_mode.digest_state)
            expectation = detector.expectation(step)
            place: dict[str, Any] = {
                "rank": self.peers.rank,
                "segment": detector.segment,
                "step": step,
            }
            saved = {
                kind: SavedStep.of(detector.reference, kind=kind, **place)
                for kind in (REPLAY, KEPT)
            }
        self.replay.begin(saved.get(REPLAY))
        if self.keeper is not None:
            is_kept = KEPT in saved and saved[KEPT].exists
            self.keeper.begin(is_wanted=is_kept or self.run is not detector)
        return expectation

    @override
    def enter_call(self, module: Any) -> None:
        self._hash_mode.recorder.places.modules.enter_call(module)

    @override
    @hidden
    def note_loss(self, loss: Any) -> None:
        self.mark(AFTER_FORWARD)
        self._evidence.note_modes()  # the script may set them within the step
        self._hash_mode.record_values("forward", loss, "loss")

    @override
    @hidden
    def begin_gradients(self) -> None:
        self._evidence.note_options(self._hash_mode.optimizers)
        self._set_phase("gradient")
        self._optimized.measure_gradients()

    @override
    @hidden
    def add_batch(self, batch: Any) -> None:
        if self._hash_mode.recorder.phase == "gradient":
            self._set_phase("other")
        self._hash_mode.add_batch(batch)
        self._evidence.add_batch()

    def _set_phase(self, phase: str) -> None:
        recorder, is_own_loop = self._hash_mode.recorder, self._training.is_own_loop
        set_phase(recorder, phase, recorder.places.modules, is_own_loop=is_own_loop)

    @override
    def pause(self) -> None:
        self._hash_mode.pause()

    @override
    def unpause(self) -> None:
        self._hash_mode.unpause()

    @override
    @hidden
    def end_step(self, step: int, epoch: int, outputs: Any) -> bool:
        self.mark(BATCH_END)
        self._evidence.end_step()
        self._optimized.end_step()
        if not self._hash_mode.is_open:
            self.flush(step)
            return False
        self._hash_mode.record_values("state", outputs, "outputs")
        self._observations.end()
        trace = self._hash_mode.finish()
        if self._perturbation is not None:
            self._perturbation.end_step()
        for number, digest in enumerate(self._hash_mode.sketch):
            self._evidence.note("", "sample", part=str(number), value=digest)
        self.flush(step)
        if trace is None:
            raise TraceError(
                f"Step {step} could not be traced, because the training step left a dispatch mode "
                f"open, so nothing after step {step - 1} can be recorded or verified. Close that "
                "mode inside the training step."
            )
        self._optimized.compare_state(trace)
        if self._capture is not None:
            self._capture.end_step(trace)
        self._is_first = False
        return self._add(trace, step=step, epoch=epoch)

    @override
    def drop_step(self) -> None:
        self._observations.drop()
        self._hash_mode.abandon()

    @override
    def close(self) -> None:
        self._evidence.detach()
        self._observations.abandon()
        REGISTRY.deactivate(self._observations)
        self._hash_mode.abandon()
        if self._ops is not None and self._ops.found:
            self.run.put_nondeterministic_ops(self._ops.found)  # with final call counts
        self._training.leave()

    @override
    def progress(self) -> Progress:
        steps, sites, differing = self.num_steps, self.num_sites, 0
        if self.detector is not None:
            tally, differing = self.detector.tally, self.detector.num_differing
            steps, sites = steps + tally.num_steps, sites + tally.num_sites
        return Progress(steps, sites, differing, self.replay.num_bytes, self.chain)
