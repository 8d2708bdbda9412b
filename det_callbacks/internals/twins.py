"""``lightning.pytorch`` and ``pytorch_lightning``: one code base, released under two names.

Each package has its own classes. This module does not import ``pytorch_lightning``, which has no
instances unless the program loads it.
"""

import sys
from typing import Any, TypeVar

_NAMES = (("lightning.pytorch.", "pytorch_lightning."), ("lightning.fabric.", "lightning_fabric."))

Class = TypeVar("Class", bound=type)


def either(*classes: Any) -> tuple[Any, ...]:
    """Return classes of ``lightning``, and their twins if ``pytorch_lightning`` is loaded.

    >>> isinstance(trainer.strategy, either(DDPStrategy))  # doctest: +SKIP
    """
    twins = (_twin(one) for one in classes)
    return (*classes, *(one for one in twins if one is not None))


def own_class(instance: object, one: Any) -> Any:
    """Return a class of ``lightning`` or its twin, whichever the object is an instance of."""
    twin = _twin(one)
    return one if twin is None or not isinstance(instance, twin) else twin


def package_of(instance: object) -> str:
    modules = {kind.__module__.partition(".")[0] for kind in type(instance).__mro__}
    return "pytorch_lightning" if "pytorch_lightning" in modules else "lightning"


def join_twins(cls: Class) -> Class:
    """Also make a subclass of a Lightning class a subclass of its twin, if that is loaded by now.

    A callback is then a ``Callback`` for LightningCLI, and for ``Trainer(callbacks=callback)`` without
    a list.
    """
    missing = [twin for base in cls.__bases__ if (twin := _twin(base)) is not None and not issubclass(cls, twin)]
    if missing:
        cls.__bases__ += tuple(missing)
    return cls


def _twin(one: Any) -> Any:
    """Return the class of the same name in the other package, if it is loaded."""
    for name, other in _NAMES:
        if one.__module__.startswith(name):
            return getattr(sys.modules.get(other + one.__module__.removeprefix(name)), one.__name__, None)
    return None
