"""The callback that ``det-callbacks record``, ``verify`` and ``check`` put into the Trainers of a script."""

import json
import os
import sys
from functools import cache
from pathlib import Path
from types import TracebackType

import lightning.pytorch as pl
from typing_extensions import override

from det_callbacks.callback.determinism import DeterminismCallback
from det_callbacks.errors import DetCallbacksError, DivergenceError, SelectionError
from det_callbacks.report.console import print_error
from det_callbacks.settings import DeterminismSettings
from det_callbacks.variables import LAUNCH


class LaunchedCallback(DeterminismCallback):
    """A DeterminismCallback of a script, all of whose fits are one run."""

    _has_claimed = False

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        if self._is_fitting:
            raise SelectionError(
                "This script trains a model while another one trains, and det-callbacks records one fit after another. "
                "Give the Trainer that matters a DeterminismCallback, and start the script without det-callbacks."
            )
        if trainer.is_global_zero and not self._has_claimed:
            self._claim(Path(json.loads(os.environ[LAUNCH])["claim"]))
        super().setup(trainer, pl_module, stage)

    def _claim(self, file: Path) -> None:
        """Refuse what another process of the command has begun: its verdict would be replaced by this one's.

        The file is made by the first process, and no more empty when there was another; the command looks at it.
        """
        try:
            file.touch(exist_ok=False)
        except FileExistsError as error:
            text = "The command trains in several processes that are no ranks of one training, and they are no one run"
            file.write_text(text, encoding="utf-8")
            raise SelectionError(f"{text}. Start det-callbacks for each of them.") from error
        self._has_claimed = True


@cache  # a script of several Trainers is one run
def launched_callback(asked: str) -> LaunchedCallback:
    """Return the callback of this process; from the first call on, its errors are printed without a traceback.

    ``asked`` is JSON: the arguments of ``DeterminismCallback``, and settings, which were put in force when torch was
    imported.
    """
    arguments, settings = (json.loads(asked)[name] for name in ("arguments", "settings"))
    before = sys.excepthook

    def print_plainly(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if not isinstance(error, DetCallbacksError):
            before(kind, error, trace)
        elif not (arguments["mode"] == "verify" and isinstance(error, DivergenceError)):  # which the command prints
            print_error(error)

    chosen = DeterminismSettings.choose(**settings) if settings else None
    callback = LaunchedCallback(**arguments, settings=chosen)
    sys.excepthook = print_plainly
    return callback
