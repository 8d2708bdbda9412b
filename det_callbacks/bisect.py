"""From two cheap recordings to the step in which they part, and how to record just that one in full."""

import json
import os
import shlex
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from det_callbacks.checkpoint.nearest import FoundCheckpoint, nearest_checkpoint
from det_callbacks.command_line import HYDRA, PLACE, WITHHELD
from det_callbacks.compare.first_step import FirstStep, find_first_step
from det_callbacks.compare.numbers import to_keep
from det_callbacks.errors import SelectionError
from det_callbacks.trace.selection import PHASES, Selection
from det_callbacks.trace.store import Run

BISECTION_SCHEMA = 1

MAX_OP_STEPS = 10
"""Steps that are recorded again at level op at once; of more, first all are recorded at level state."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rerun:
    """How to record some steps of a run again.

    Attributes:
        run: path of the run.
        folder: to record to.
        words: of the command after ``python``; None where the run does not say how it was started, or not in full.
        arguments: of the callback, by name.
        checkpoint: to resume from; None where none was found that is before these steps.
    """

    run: str
    folder: str
    words: tuple[str, ...] | None
    arguments: dict[str, Any]
    checkpoint: FoundCheckpoint | None

    @property
    def command(self) -> str | None:
        """The command line, for a shell."""
        return None if self.words is None else shlex.join(("python", *self.words))

    @property
    def callback(self) -> str:
        """The callback, as Python."""
        arguments = "".join(f", {name}={json.dumps(value)}" for name, value in self.arguments.items())
        return f'DeterminismCallback({json.dumps(self.folder)}, mode="record"{arguments})'

    @property
    def has_gaps(self) -> bool:
        """Whether words of the command were not recorded, and have to be put in again."""
        return self.words is not None and any(PLACE in word or WITHHELD in word for word in self.words)

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON form."""
        return {
            "run": self.run,
            "folder": self.folder,
            "command": self.command,
            "has_gaps": self.has_gaps,
            "callback": self.callback,
            "checkpoint": None if self.checkpoint is None else asdict(self.checkpoint),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Bisection:
    """Where two runs part.

    Attributes:
        reference: path of the one.
        current: path of the other.
        found: the first step that differs.
        steps: those in which the difference can begin: after the last step that is known to agree, up to the first that
            differs; () where none does.
        reruns: how to record them again, of the reference and of the current run; () where nothing is to be recorded:
            none differs, or the runs hold all there is of the step.
        level: that they are recorded at.
        then: the command that compares what was recorded; None where none differs.
    """

    reference: str
    current: str
    found: FirstStep
    steps: range
    reruns: tuple[Rerun, ...]
    level: Literal["op", "state"]
    then: str | None

    @property
    def exit_code(self) -> int:
        """0 no step differs, 1 one does, 3 not comparable."""
        return self.found.exit_code

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON form, as ``det-callbacks bisect --json`` prints it."""
        found = self.found
        first = found.ranks[0] if found.ranks else None
        return {
            "schema": BISECTION_SCHEMA,
            "reference": self.reference,
            "current": self.current,
            "verdict": "match" if found.verdict is None else found.verdict.verdict,
            "first": None if first is None else asdict(first),
            "ranks": [asdict(step) for step in found.ranks],
            "num_equal": found.num_equal,
            "last_equal": found.last_equal,
            "longer": found.longer,
            "step": None if found.verdict is None else found.verdict.to_dict(),
            "steps": list(self.steps),
            "level": self.level,
            "rerun": [rerun.to_dict() for rerun in self.reruns],
            "then": self.then,
        }


def bisect_runs(reference: str | Path, current: str | Path, *, checkpoints: Iterable[str | Path] = ()) -> Bisection:
    """Find the step in which two runs part, and say how to record just that one at level op.

    Args:
        reference: folder of the reference, at any level.
        current: folder of a run that recorded the same steps, or of a verification against the reference.
        checkpoints: folders in which checkpoints of the two runs are looked for; besides, those that the runs lie in.

    Returns:
        Where they part; ``exit_code`` is that of the command line.

    Raises:
        ReferenceNotFoundError: there is no run at one of the paths.
        ReferenceFormatError, SelectionError, NothingComparedError: see ``find_first_step``.
        SelectionError: also where one of ``checkpoints`` is no folder.

    Example:
        >>> bisect_runs("refs/run1", "refs/run2").steps  # doctest: +SKIP
        range(812, 813)
    """
    checkpoints = tuple(checkpoints)
    if missing := [str(folder) for folder in checkpoints if not Path(folder).is_dir()]:
        raise SelectionError(
            f"There is no folder {missing[0]} to look for checkpoints in. Nothing was compared. Name the folder that "
            "holds the checkpoints of these runs (--checkpoints DIR), or leave it out."
        )
    runs = Run.open(reference, check_steps=False), Run.open(current, check_steps=False)
    names = os.path.normpath(reference), os.path.normpath(current)
    found = find_first_step(*runs, *names)
    steps = _suspects(found, runs)
    verdict = found.verdict
    is_origin = bool(verdict and verdict.first_divergence and verdict.first_divergence.is_origin)
    if is_origin and found.ranks:
        steps = range(found.ranks[0].step, found.ranks[0].step + 1)  # what it read agrees, so no step before it
    wanted = None if verdict is None else to_keep(verdict)
    keep = wanted[1] if wanted is not None and len(steps) == 1 and found.ranks else None
    level: Literal["op", "state"] = "op" if len(steps) <= MAX_OP_STEPS else "state"
    if not steps or (len(steps) == 1 and _holds_all(runs) and keep is None):
        next_command = shlex.join(("det-callbacks", "diff", *names)) if steps else None
        return Bisection(
            reference=names[0], current=names[1], found=found, steps=steps, reruns=(), level=level, then=next_command
        )
    reruns = tuple(_rerun(run, name, steps, level, keep, checkpoints) for run, name in zip(runs, names, strict=True))
    command = ("diff",) if level == "op" else ("bisect",)
    return Bisection(
        reference=names[0],
        current=names[1],
        found=found,
        steps=steps,
        reruns=reruns,
        level=level,
        then=shlex.join(("det-callbacks", *command, *(rerun.folder for rerun in reruns))),
    )


def _suspects(found: FirstStep, runs: Sequence[Run]) -> range:
    """Return the steps in which the difference can begin."""
    if not found.ranks:
        return range(0)
    first = found.ranks[0]
    if first.last_equal is not None:
        return range(first.last_equal + 1, first.step + 1)
    is_resumed = any((first.segment, first.step) in run.resumed_steps for run in runs)
    return range(first.step if is_resumed else 0, first.step + 1)


def _holds_all(runs: Sequence[Run]) -> bool:
    """Return whether the runs recorded every op of their steps."""
    selections = [Selection.from_dict(run.manifest["selection"]) for run in runs]
    return all(one.level == "op" and one.modules == ("*",) and one.phases == PHASES for one in selections)


def _rerun(
    run: Run,
    name: str,
    steps: range,
    level: Literal["op", "state"],
    keep: str | None,
    checkpoints: Iterable[str | Path],
) -> Rerun:
    span = f"-step-{steps[0]}" if len(steps) == 1 else f"-step-{steps[0]}-{steps[-1]}"
    folder = f"{name.removesuffix(span)}{span}" + ("" if keep is None else "-kept")
    arguments: dict[str, Any] = {"level": level, "only_steps": list(steps)} if level == "op" else {"level": level}
    if keep is not None:
        arguments["keep_tensors"] = [keep]
    return Rerun(
        run=name,
        folder=folder,
        words=_words(run, folder, arguments),
        arguments=arguments,
        checkpoint=nearest_checkpoint(run.run_id, before=steps[0], folders=(*checkpoints, Path(name).parent)),
    )


def _words(run: Run, folder: str, arguments: dict[str, Any]) -> tuple[str, ...] | None:
    """Return what a Hydra application is started with; of others the arguments are not known."""
    environment = run.manifest.get("environment", {})
    argv, launcher = (environment.get(f"process.{name}", {}).get("value") for name in ("argv", "launcher"))
    if launcher != HYDRA or not isinstance(argv, list) or not argv or not all(isinstance(word, str) for word in argv):
        return None
    own = {"reference": folder, **arguments}
    values = (f"determinism.{name}={_override(value)}" for name, value in own.items())
    return (*argv, "+determinism=record", *values)


def _override(value: Any) -> str:
    return json.dumps(value, separators=(",", ":")) if isinstance(value, list) else str(value)
