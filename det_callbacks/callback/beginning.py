"""What a fit of the callback begins with: checks, and the run that its mode asks for."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import lightning.pytorch as pl

from det_callbacks.callback.alerts import conflicts_of_trainer
from det_callbacks.callback.arguments import check_alone, check_processes
from det_callbacks.callback.auditing import Auditing
from det_callbacks.callback.recording import Recording
from det_callbacks.callback.verifying import Verifying
from det_callbacks.settings import require_in_force, require_seeded_before
from det_callbacks.trace.peers import Peers

if TYPE_CHECKING:
    from det_callbacks.callback.determinism import DeterminismCallback


def check_fit(
    callback: "DeterminismCallback", trainer: pl.Trainer, pl_module: pl.LightningModule, *, alike: Sequence[pl.Callback]
) -> None:
    """Raise ``SettingsError`` where a fit cannot be what the callback was asked for.

    Args:
        callback: that is set up.
        trainer: whose fit it is.
        pl_module: that is trained.
        alike: the Trainer's callbacks of its kind, itself among them.
    """
    check_alone(alike)
    check_processes(callback.mode, trainer.world_size)
    if callback.settings is not None:
        require_in_force(callback.settings, suspects=conflicts_of_trainer(callback.settings))
        if callback.settings.seed is not None:
            require_seeded_before(pl_module)


def new_run(callback: "DeterminismCallback", peers: Peers) -> Recording | Verifying | Auditing:
    """Return what the steps of the callback's fits are written to, or compared with."""
    if callback.mode == "audit":
        return Auditing(
            callback.current,
            kind=callback.audit,
            steps=callback.audit_steps,
            num_runs=callback.audit_runs,
            on_divergence=callback.on_divergence,
        )
    assert callback.reference is not None, "checked when the callback was made"
    if callback.mode == "record":
        return Recording(callback.reference, peers=peers, overwrite=callback.overwrite, replay=callback.replay)
    return Verifying(
        callback.reference,
        callback.current,
        peers=peers,
        steps=callback.steps,
        on_divergence=callback.on_divergence,
        replay=callback.replay.patterns,
    )
