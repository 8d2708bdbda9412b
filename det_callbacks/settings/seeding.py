"""Seeds of every generator, and which parameters were drawn before they were set."""

import gc
import os
import random
import weakref
from collections.abc import Callable, Mapping

import numpy as np
import torch
from torch import nn
from torch.nn.parameter import is_lazy

# What lightning.fabric.utilities.seed.seed_everything(workers=True) leaves behind (read at Lightning 2.6.6): the
# Trainer seeds its other processes from the first and gives DataLoader workers their seeds when the second is "1".
SEED_VARIABLE = "PL_GLOBAL_SEED"
WORKERS_VARIABLE = "PL_SEED_WORKERS"


def seed_variables(seed: int) -> dict[str, str]:
    """Return the environment variables that hand a seed on to Lightning's workers and processes."""
    return {SEED_VARIABLE: str(seed), WORKERS_VARIABLE: "1"}


def seed_all(seed: int) -> None:
    """Do what Lightning's ``seed_everything(seed, workers=True)`` does, without importing Lightning."""
    _parameters.note()
    os.environ.update(seed_variables(seed))
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def drawn_before_seeding(module: nn.Module) -> list[str]:
    """Return the names of a module's parameters that were there when the seed was last set."""
    return [name for name, parameter in module.named_parameters() if _parameters.has(parameter)]


def keep_earlier_parameters() -> Callable[[], None]:
    """Return what makes it known again which parameters were there at the seeding before the one to come."""
    known = _parameters.known

    def put_back() -> None:
        _parameters.known = known

    return put_back


class _Earlier:
    """The parameters that existed when the seed was set, by identity and without keeping them alive.

    A process has one set of generators, so there is one of these; it is replaced as a whole at each seeding.
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


_parameters = _Earlier()
