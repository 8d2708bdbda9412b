"""The number of workers that the environment asks for, in loaders of every kind."""

from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from det_callbacks.callback.workers import NumWorkers
from det_callbacks.check import NUM_WORKERS_VARIABLE
from det_callbacks.errors import SettingsError

DATA = TensorDataset(torch.arange(8.0))


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"num_workers": 1},
        {"num_workers": 1, "persistent_workers": True, "prefetch_factor": 3},
        {"num_workers": 1, "timeout": 30, "multiprocessing_context": "fork"},
    ],
)
@pytest.mark.parametrize("number", ["0", "2"])
def test_a_loader_gets_them_with_what_goes_with_them(
    options: dict[str, Any], number: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(NUM_WORKERS_VARIABLE, number)
    loader = DataLoader(DATA, batch_size=4, **options)
    workers = NumWorkers()
    workers.apply([[1, 2], loader])
    workers.require()
    kind = type(iter(loader)).__name__
    assert kind == ("_SingleProcessDataLoaderIter" if number == "0" else "_MultiProcessingDataLoaderIter")
    for _ in range(2):
        assert [batch.tolist() for (batch,) in loader] == [[0, 1, 2, 3], [4, 5, 6, 7]]


def test_nothing_happens_unless_it_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(NUM_WORKERS_VARIABLE, raising=False)
    loader = DataLoader(DATA, num_workers=1, timeout=3)
    workers = NumWorkers()
    workers.apply([loader])
    workers.require()
    assert (loader.num_workers, loader.timeout, loader.prefetch_factor) == (1, 3, 2)


def test_what_has_no_loader_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(NUM_WORKERS_VARIABLE, "2")
    workers = NumWorkers()
    workers.apply([[1, 2]])
    with pytest.raises(SettingsError, match="DET_CALLBACKS_NUM_WORKERS=2, but the training has no torch DataLoader"):
        workers.require()


@pytest.mark.parametrize("text", ["", "-1", "two", "1.0"])
def test_what_is_no_number_is_refused(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(NUM_WORKERS_VARIABLE, text)
    with pytest.raises(SettingsError, match=f"from 0 on; got {text!r}"):
        NumWorkers()
