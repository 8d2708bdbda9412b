"""The number of workers that the environment asks for, in loaders of every kind."""

from typing import Any

import pytest
import torch
from lightning.pytorch.demos.boring_classes import BoringModel
from torch.utils.data import DataLoader, TensorDataset
from trainers import LIGHTNING_ADVICE, quiet_trainer

from det_callbacks import DeterminismCallback, SettingsError
from det_callbacks.callback.draws import set_workers
from det_callbacks.variables import NUM_WORKERS

pytestmark = LIGHTNING_ADVICE


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"num_workers": 1, "persistent_workers": True, "prefetch_factor": 3},
        {"num_workers": 1, "timeout": 30, "multiprocessing_context": "fork"},
    ],
)
@pytest.mark.parametrize("number", [0, 2])
def test_a_loader_gets_them_with_what_goes_with_them(options: dict[str, Any], number: int) -> None:
    loader = DataLoader(TensorDataset(torch.arange(8.0)), batch_size=4, **options)
    assert set_workers([[1, 2], loader], number)
    kind = "_MultiProcessingDataLoaderIter" if number else "_SingleProcessDataLoaderIter"
    assert type(iter(loader)).__name__ == kind
    for _ in range(2):
        assert [batch.tolist() for (batch,) in loader] == [[0, 1, 2, 3], [4, 5, 6, 7]]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("2", "DET_CALLBACKS_NUM_WORKERS=2, but the training has no torch DataLoader"),
        ("", "from 0 on; got ''"),
        ("-1", "from 0 on; got '-1'"),
        ("1.0", "from 0 on; got '1.0'"),
    ],
)
def test_what_cannot_be_done_is_refused(text: str, message: str, monkeypatch: Any, tmp_path: Any) -> None:
    monkeypatch.setenv(NUM_WORKERS, text)
    trainer = quiet_trainer(DeterminismCallback(tmp_path / "run", mode="record"))
    with pytest.raises(SettingsError, match=message):
        trainer.fit(BoringModel(), [torch.ones(2, 32)])
    assert "_load_combined_loader_states" not in vars(trainer.fit_loop)
