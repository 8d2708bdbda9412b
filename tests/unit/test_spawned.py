"""Settings of the process that starts the ranks, in the ranks."""

import copy
import os
import pickle

import pytest
import torch
from torch import nn

from det_callbacks.callback import spawned
from det_callbacks.callback.spawned import InheritedSettings
from det_callbacks.errors import SettingsError
from det_callbacks.settings import DeterminismSettings, enforce_determinism

SETTINGS = DeterminismSettings(seed=None)


def arrive(
    inherited: InheritedSettings, monkeypatch: pytest.MonkeyPatch, *, is_child: bool = True
) -> InheritedSettings:
    """Return what arrives in a process that this one starts."""
    arrived: InheritedSettings = pickle.loads(pickle.dumps(inherited))
    process = os.getpid()
    monkeypatch.setattr(spawned.os, "getpid", lambda: process + 1)
    monkeypatch.setattr(spawned.multiprocessing, "parent_process", lambda: object() if is_child else None)
    return arrived


def test_what_was_in_force_there_is_in_force_here(monkeypatch: pytest.MonkeyPatch) -> None:
    with enforce_determinism(SETTINGS):
        arrived = arrive(InheritedSettings(), monkeypatch)
    assert not torch.backends.cudnn.deterministic
    with enforce_determinism(dict.fromkeys(spawned.SETTINGS)):  # puts everything back
        arrived.require(SETTINGS, nn.Linear(1, 1))
        assert torch.backends.cudnn.deterministic


def test_what_was_not_in_force_there_is_missed_here(monkeypatch: pytest.MonkeyPatch) -> None:
    arrived = arrive(InheritedSettings(), monkeypatch)
    with pytest.raises(SettingsError, match="cudnn_deterministic should be True and is False"):
        arrived.require(SETTINGS, nn.Linear(1, 1))


@pytest.mark.parametrize("is_child", [True, False])
def test_a_copy_in_no_started_process_changes_nothing(is_child: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    with enforce_determinism(SETTINGS):
        arrived = copy.deepcopy(InheritedSettings())
        if not is_child:
            arrived = arrive(arrived, monkeypatch, is_child=False)
    with pytest.raises(SettingsError, match="cudnn_deterministic should be True and is False"):
        arrived.require(SETTINGS, nn.Linear(1, 1))
