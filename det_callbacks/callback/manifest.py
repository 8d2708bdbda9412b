"""What run.json says of a fit."""

from collections.abc import Mapping, Sequence
from typing import Any

import lightning.pytorch as pl

from det_callbacks.callback.choices import trainer_choices
from det_callbacks.command_line import command_choice
from det_callbacks.environment import capture_environment
from det_callbacks.runs.selection import Selection
from det_callbacks.settings import settings_in_force


def manifest_of(
    trainer: pl.Trainer,
    pl_module: pl.LightningModule,
    *,
    selection: Selection,
    allow: Sequence[str],
    choices: Mapping[str, Any],
    replay: Sequence[str],
    keep: Sequence[str],
) -> dict[str, Any]:
    """Return selection, settings, environment and replay patterns of a fit.

    Args:
        trainer: whose precision, strategy and so on are choices.
        pl_module: whose hyperparameters are.
        selection: what is traced.
        allow: ops that may be nondeterministic.
        choices: further ones.
        replay: patterns of ops whose outputs are saved or put back.
        keep: patterns of ops whose tensors are kept.
    """
    all_choices = {
        **trainer_choices(trainer, pl_module),
        **command_choice(),
        **choices,
        "settings": {"allow": list(allow)},
    }
    return {
        "selection": selection.to_dict(),
        "settings": {**settings_in_force(), "allow": list(allow)},
        "environment": capture_environment(choices=all_choices).to_dict(),
        "replay": list(replay),
        "keep_tensors": list(keep),
    }
