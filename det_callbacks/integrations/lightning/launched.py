"""The callback that ``det-callbacks record``, ``verify`` and ``check`` put into the Trainers of a script."""

import json
import os
import sys
from functools import cache
from pathlib import Path
from types import TracebackType

import lightning.pytorch as pl
from typing_extensions import override

from det_callbacks.environment.variables import LAUNCH, REFUSAL
from det_callbacks.errors import DetCallbacksError, DivergenceError, SelectionError, SettingsError, WriteError
from det_callbacks.integrations.lightning.determinism import DeterminismCallback
from det_callbacks.integrations.lightning.progress import print_beside_bar
from det_callbacks.report.console import print_error
from det_callbacks.runs.disk import writing
from det_callbacks.settings import DeterminismSettings

_ANOTHER_TMPDIR = "set TMPDIR to a folder that can be written"


class LaunchedCallback(DeterminismCallback):
    """A DeterminismCallback of a script, all of whose fits are one run; one of the script's own is used instead."""

    gives_way = True
    _has_claimed = False

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        if self._is_fitting:
            raise SelectionError(
                "This script trains a model while another one trains, and det-callbacks records one fit after another. "
                "Give the Trainer that matters a DeterminismCallback, and start the script without det-callbacks."
            )
        others = [it for it in vars(trainer)["callbacks"] if isinstance(it, DeterminismCallback) and not it.gives_way]
        if any(other.mode != "disabled" for other in others):
            if self._has_claimed:
                raise SelectionError(
                    "One Trainer of this script has a DeterminismCallback of its own, and another one has none: they "
                    "are no run that det-callbacks can record. Give both one, or none."
                )
            if trainer.is_global_zero and self.mode != "disabled":
                print_beside_bar(
                    trainer, "det_callbacks: the script has a DeterminismCallback of its own, which is used"
                )
            self.mode = "disabled"
        elif trainer.is_global_zero and not self._has_claimed and self.mode != "disabled":
            # The first process makes this file. A second one, whose verdict would replace the first one's, writes its
            # error into it, and the command reads that.
            claim = Path(json.loads(os.environ[LAUNCH])["claim"])
            with writing(claim, instead=_ANOTHER_TMPDIR):
                try:
                    claim.touch(exist_ok=False)
                except FileExistsError as error:
                    text = (
                        "The command trains in several processes that are no ranks of one training, and are no one run"
                    )
                    claim.write_text(text, encoding="utf-8")
                    raise SelectionError(f"{text}. Start det-callbacks for each of them.") from error
            self._has_claimed = True
        super().setup(trainer, pl_module, stage)

    @override
    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        super().on_exception(trainer, pl_module, exception)
        _tell_command(exception)  # also where Hydra or the script catches it


def _tell_command(error: BaseException) -> bool:
    """Write why det_callbacks ends the script to where the command looks; return whether the command prints it."""
    asked = json.loads(os.environ[LAUNCH])
    if not isinstance(error, DetCallbacksError):
        return False
    if asked["arguments"]["mode"] == "verify" and isinstance(error, DivergenceError):
        return True  # the command prints the verdict
    refusal, text = Path(asked["claim"]).with_name(REFUSAL), str(error)
    try:
        with writing(refusal), refusal.open("x", encoding="utf-8", errors="backslashreplace") as file:
            file.write(text)
    except WriteError as failure:  # it is there, of this error or of the rank that failed first, or has no room
        return isinstance(failure.__cause__, FileExistsError) and refusal.read_text(encoding="utf-8") == text
    return True


@cache  # a script of several Trainers is one run
def launched_callback(asked: str) -> LaunchedCallback:
    """Return the callback of this process; from the first call on, its errors are printed without a traceback."""
    arguments, settings = (json.loads(asked)[name] for name in ("arguments", "settings"))
    before = sys.excepthook

    def print_plainly(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if not isinstance(error, DetCallbacksError):
            before(kind, error, trace)
        elif not _tell_command(error):
            print_error(error)

    sys.excepthook = print_plainly
    if settings and sys.flags.ignore_environment:
        raise SettingsError(
            "--seed and --deterministic reach the script through PYTHONPATH, which this Python ignores (-E or -I). "
            "Start it without these flags, or set seed and settings in the script."
        )
    return LaunchedCallback(**arguments, settings=DeterminismSettings.choose(**settings) if settings else None)
