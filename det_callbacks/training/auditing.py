"""Audits fits: runs the ops of some steps twice (``mode="audit"``)."""

import json
import math
from functools import partial
from pathlib import Path

import yaml
from typing_extensions import override

from det_callbacks.audit.equivalence import BitwiseEquivalenceMode
from det_callbacks.audit.result import AuditError, AuditFinding, AuditReport, OpMismatch
from det_callbacks.errors import DivergenceWarning, NothingComparedError
from det_callbacks.report.closing_lines import audit_line, audit_lines
from det_callbacks.runs.disk import ANOTHER_FOLDER, make_folder, replace_atomically, writing
from det_callbacks.runs.peers import Peers
from det_callbacks.trace.attribution.places import set_until_module
from det_callbacks.trace.state.optimizers import in_phase
from det_callbacks.training.arguments import RunArguments
from det_callbacks.training.session import FIT, Session
from det_callbacks.training.training import Training
from det_callbacks.verify.verification import free_folder

AUDIT_FILE = "audit.json"
REPLAY_FILE = "replay.yaml"
NUM_STEPS = 3  # audited by default


class Auditing(Session):
    """Audits the fits of one run; files go to ``current``, or to a new folder below the training's."""

    _folder: Path
    _mode: BitwiseEquivalenceMode

    def __init__(self, arguments: RunArguments, peers: Peers) -> None:
        super().__init__(arguments, peers)
        self._step = -1
        self._steps: list[int] = []
        self._found: dict[tuple[str, str, str], list[tuple[int, OpMismatch]]] = {}

    @override
    def clear_results(self) -> None:
        if not self.stages and self.arguments.current is not None:
            self._remove_files(self.arguments.current)

    def _remove_files(self, folder: Path) -> None:
        for name in (AUDIT_FILE, REPLAY_FILE):  # of an earlier audit
            with writing(folder, instead=ANOTHER_FOLDER["audit"]):
                (folder / name).unlink(missing_ok=True)

    @override
    def follow(self, training: Training, ops: object) -> None:
        self.audit_report, self._training = None, training
        if self.stages == [FIT]:
            self._folder = self.arguments.current or free_folder(self.root, kind="audit")
            self._mode = BitwiseEquivalenceMode(model=training.module, base_phase=training.base_phase)
        self._remove_files(self._folder)

    @override
    def attach(self, training: Training) -> None:
        training.mark_forward(partial(in_phase, self._mode.places, "forward"))
        if training.is_own_loop:
            self._mode.on_updated = partial(self._set_phase, "other")

    @override
    def begin_step(self, step: int, batch: object) -> None:
        chosen = self.arguments.selection.only_steps
        if step in chosen if chosen is not None else len(self._steps) < NUM_STEPS:
            self._step = step
            self._mode.begin()

    @override
    def begin_gradients(self) -> None:
        self._set_phase("gradient")

    def _set_phase(self, phase: str) -> None:
        places = self._mode.places
        if self._training.is_own_loop:
            set_until_module(places, phase, places.modules)
        else:
            places.phase = phase

    @override
    def end_step(self, *_: object) -> bool:
        if self._mode.is_open:
            self._steps.append(self._step)
            for mismatch in self._mode.finish():
                place = (mismatch.phase, mismatch.module, mismatch.op)
                self._found.setdefault(place, []).append((self._step, mismatch))
        return False

    drop_step = end_step  # a step that the module cuts short was also audited

    @override
    def close(self) -> None:
        self._mode.abandon()
        self._training.leave()

    @override
    def end(self, *, is_early: bool = False) -> None:
        chosen, mode, folder = self.arguments.selection.only_steps, self._mode, self._folder
        if not mode.num_compared:
            why = "no op ran twice. Train at least one step"
            if chosen is not None:
                steps = ", ".join(map(str, chosen))
                why = f"the fit ran none of the steps in only_steps ({steps}). Select steps that the fit reaches"
            raise NothingComparedError(f"Nothing was audited, because {why}.")
        report = self.audit_report = AuditReport(
            steps=tuple(self._steps),
            num_compared=mode.num_compared,
            skipped=dict(mode.skipped),
            findings=tuple(map(AuditFinding.of, self._found.values())),
        )
        make_folder(folder, instead=ANOTHER_FOLDER["audit"])
        replace_atomically(folder / AUDIT_FILE, json.dumps(report.to_dict(), indent=1).encode())
        replay = folder / REPLAY_FILE
        steps = ", ".join(map(str, report.steps))
        text = (
            f"# The ops that an audit of the steps {steps} found. Pass this file to record and verify:\n"
            f"# determinism.replay={replay} (Hydra), or replay={str(replay)!r}\n"
        )
        replace_atomically(replay, (text + yaml.safe_dump(list(report.replay), width=math.inf)).encode())
        self.print_line(audit_line(report, folder=folder, missed=sorted(set(chosen or ()).difference(report.steps))))
        if report.findings:
            text = audit_lines(report, replay=replay)
            if self.arguments.on_divergence != "warn":
                raise AuditError(text, report)
            self._warn_once(text, DivergenceWarning)
