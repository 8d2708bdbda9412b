"""The callback that ``det-callbacks record``, ``verify`` and ``check`` put into the Trainers of a script."""

import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import lightning.pytorch as pl
from typing_extensions import override

from det_callbacks.callback.arguments import CallbackArguments
from det_callbacks.callback.determinism import DeterminismCallback
from det_callbacks.callback.progress import print_beside_bar
from det_callbacks.errors import DetCallbacksError, DivergenceError, SelectionError
from det_callbacks.report.console import print_error
from det_callbacks.settings import DeterminismSettings
from det_callbacks.variables import LAUNCH

_made: list["LaunchedCallback"] = []
"""The callback of this process: a script of several Trainers is one run."""


class LaunchedCallback(DeterminismCallback):
    """A DeterminismCallback that steps aside where the Trainer has one of the script's own."""

    gives_way = True
    _has_said = _has_claimed = False

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        if self._is_fitting:
            raise SelectionError(
                "This script trains a model while another one trains, and det-callbacks records one fit after another. "
                "Give the Trainer that matters a DeterminismCallback, and start the script without det-callbacks."
            )
        others = [it for it in vars(trainer)["callbacks"] if isinstance(it, CallbackArguments) and it is not self]
        if any(other.mode != "disabled" for other in others):
            if self._session is not None:
                raise SelectionError(
                    "One Trainer of this script has a DeterminismCallback of its own, and another one has none: they "
                    "are no run that det-callbacks can record. Give both one, or none."
                )
            self.mode = "disabled"
            if trainer.is_global_zero and not self._has_said:
                self._has_said = True
                print_beside_bar(
                    trainer, "det_callbacks: the script has a DeterminismCallback of its own, which is used"
                )
        elif trainer.is_global_zero and not self._has_claimed:
            self._claim(Path(json.loads(os.environ[LAUNCH])["claim"]))
        super().setup(trainer, pl_module, stage)

    def _claim(self, file: Path) -> None:
        """Refuse what another process of the command has begun: its verdict would be replaced by this one's.

        Args:
            file: is made by the first process, and not empty when there was another one, which the command looks at.
        """
        try:
            file.touch(exist_ok=False)
        except FileExistsError as error:
            text = "The command trains in several processes that are no ranks of one training, and they are no one run"
            file.write_text(text, encoding="utf-8")
            raise SelectionError(f"{text}. Start det-callbacks for each of them.") from error
        self._has_claimed = True


def launched_callback(*, arguments: Mapping[str, Any], settings: Mapping[str, Any], claim: str) -> LaunchedCallback:
    """Return the callback of this process; from the first call on, its errors are printed without a traceback.

    Args:
        arguments: of ``DeterminismCallback``.
        settings: of ``DeterminismSettings.choose``; they were put in force when torch was imported.
        claim: file that the process makes which trains.
    """
    if not _made:
        chosen = DeterminismSettings.choose(**settings) if settings else None
        _made.append(LaunchedCallback(**arguments, settings=chosen))
        _print_errors_plainly(is_verifying=arguments["mode"] == "verify")
    return _made[0]


def _print_errors_plainly(*, is_verifying: bool) -> None:
    """Let the process end by our errors with their message alone; a verdict is printed by the command that asked."""
    before = sys.excepthook

    def print_plainly(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if not isinstance(error, DetCallbacksError):
            before(kind, error, trace)
        elif not (is_verifying and isinstance(error, DivergenceError)):
            print_error(error)

    sys.excepthook = print_plainly
