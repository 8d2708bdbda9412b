"""The part of the callback that watches for ops without a deterministic implementation."""

from collections.abc import Mapping

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Callback
from typing_extensions import override

from det_callbacks.settings import DeterminismSettings, settings_in_force
from det_callbacks.trace.nondeterministic_ops import NondeterministicOps, NondeterministicOpWatch


class AlertCallback(Callback):
    """Attributes nondeterministic ops to module and line, in training, validation, test and prediction alike.

    Where a trace at level op is open, the trace does it. Elsewhere a dispatch mode of its own does, some 5 microseconds
    an op, and only while torch's deterministic algorithms are on.
    """

    def __init__(self) -> None:
        super().__init__()
        self._alerts: NondeterministicOps | None = None
        self._watch: NondeterministicOpWatch | None = None

    def _begin_alerts(self, settings: DeterminismSettings | None, pl_module: pl.LightningModule) -> None:
        self._end_alerts()
        self._alerts = None
        if settings_in_force()["deterministic_algorithms"] != "disabled":
            self._alerts = NondeterministicOps(() if settings is None else settings.allow)
            self._watch = NondeterministicOpWatch(self._alerts, pl_module)

    def _end_alerts(self) -> None:
        self._close_watch()
        self._watch = None
        if self._alerts is not None:
            self._alerts.close()

    def _open_watch(self) -> None:
        if self._watch is not None:
            self._watch.open()

    def _close_watch(self) -> None:
        if self._watch is not None:
            self._watch.close()

    # the sanity check is a validation

    @override
    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._open_watch()

    @override
    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._close_watch()

    @override
    def on_test_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._open_watch()

    @override
    def on_test_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._close_watch()

    @override
    def on_predict_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._open_watch()

    @override
    def on_predict_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._close_watch()


def conflicts_of_trainer(settings: DeterminismSettings) -> Mapping[str, str]:
    """Return, for settings that a Trainer overwrites when it is built, which argument of it leaves what is in force.

    ``Trainer(deterministic=..., benchmark=...)`` sets them without looking (Lightning 2.6.6, ``_set_torch_flags``).
    """
    in_force = settings_in_force()
    algorithms = {"error": "True", "warn": '"warn"', "disabled": "False"}[in_force["deterministic_algorithms"]]
    left = {
        "deterministic_algorithms": f"Trainer(deterministic={algorithms})",
        "cublas_workspace_config": "Trainer(deterministic=True)",
        "cudnn_benchmark": f"Trainer(benchmark={in_force['cudnn_benchmark']})",
    }
    is_theirs = in_force["cublas_workspace_config"] == ":4096:8"
    return {
        name: argument
        for name, argument in left.items()
        if getattr(settings, name) not in (None, in_force[name]) and (is_theirs or name != "cublas_workspace_config")
    }
