"""Seeds of every generator, and which parameters were drawn before they were set."""

import gc
import os
import random
import weakref
from collections.abc import Mapping

import numpy as np
import torch
from torch import nn
from torch.nn.parameter import is_lazy

from det_callbacks.errors import SettingsError

# What lightning.fabric.utilities.seed.seed_everything(workers=True) leaves behind (read at Lightning 2.6.6): the
# Trainer seeds its other processes from the first and gives DataLoader workers their seeds when the second is "1".
SEED_VARIABLE = "PL_GLOBAL_SEED"
WORKERS_VARIABLE = "PL_SEED_WORKERS"


class EarlierParameters:
    """The parameters that existed when the seed was set, by identity and without keeping them alive.

    A process has one set of generators, so there is one of these; ``known`` is replaced as a whole at each seeding.
    """

    def __init__(self) -> None:
        self.known: Mapping[int, weakref.ref[nn.Parameter]] = {}

    def note(self) -> None:
        """Look for them among everything the garbage collector follows; some 30 milliseconds."""
        kinds: dict[type, bool] = {}
        found = []
        for candidate in gc.get_objects():
            kind = type(candidate)
            if kind not in kinds:
                kinds[kind] = nn.Parameter in kind.__mro__
            if kinds[kind] and not is_lazy(candidate):
                found.append(candidate)
        self.known = {id(parameter): weakref.ref(parameter) for parameter in found}

    def has(self, parameter: nn.Parameter) -> bool:
        """Return whether a parameter was among them."""
        reference = self.known.get(id(parameter))
        return reference is not None and reference() is parameter


earlier = EarlierParameters()


def seed_all(seed: int) -> None:
    """Do what Lightning's ``seed_everything(seed, workers=True)`` does, without importing Lightning."""
    earlier.note()
    os.environ.update(_variables(seed))
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def require_seed(seed: int, model: nn.Module) -> None:
    """Raise ``SettingsError`` unless a seed was set here, for workers too, and before a model had parameters."""
    how = (
        "Seed before the model is built: seed_everything of LightningCLI, lightning.seed_everything(seed, "
        "workers=True), det_callbacks.enforce_determinism(settings), or the Hydra preset, which does."
    )
    states = [(str(seed), str(torch.initial_seed()))]
    states += [(f"{name}={value}", f"{name}={os.environ.get(name)}") for name, value in _variables(seed).items()]
    for wanted, found in states:
        if wanted != found:
            raise SettingsError(
                f"seed={seed} comes too late: the model is there, and the seed should be {wanted} and is {found}. {how}"
            )
    names = [name for name, _ in model.named_parameters()]
    if early := [name for name, parameter in model.named_parameters() if earlier.has(parameter)]:
        raise SettingsError(
            f"The seed came too late: {len(early)} of the model's {len(names)} parameters ({', '.join(early[:3])}"
            f"{', ...' if len(early) > 3 else ''}) existed when it was set, so they were drawn without it. {how}"
        )


def _variables(seed: int) -> dict[str, str]:
    """Return the environment variables that hand a seed on to Lightning's workers and processes."""
    return {SEED_VARIABLE: str(seed), WORKERS_VARIABLE: "1"}
