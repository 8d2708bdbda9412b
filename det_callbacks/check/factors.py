"""What must not matter to the bits of a training, and how a process is started with it changed."""

import locale
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, get_args

from det_callbacks.check.command import Command, override
from det_callbacks.compare.evidence import RunEvidence
from det_callbacks.compare.live import reference_environment
from det_callbacks.errors import CheckError
from det_callbacks.trace.store import Run

Factor = Literal["workers", "threads", "hash-seed", "cwd", "locale"]
FACTORS: tuple[Factor, ...] = get_args(Factor)

NUM_WORKERS_VARIABLE = "DET_CALLBACKS_NUM_WORKERS"
"""Environment variable: ``DeterminismCallback`` gives the training's DataLoaders so many workers."""

HASH_SEED = "PYTHONHASHSEED"
THREADS_ENTRY = "torch.num_threads"

_NUM_WORKERS = "num_workers of "
_LIKE_C = frozenset({"", "C", "POSIX", "C.UTF-8", "C.utf8"})
_LANGUAGES = ("en_US", "en_GB", "de_DE", "fr_FR", "es_ES", "it_IT", "pt_BR", "pl_PL", "ru_RU", "ja_JP", "zh_CN")
"""Of them the first that is installed sorts otherwise than C does."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """What a process has different from the one that recorded.

    Attributes:
        text: in words.
        variables: of its environment.
        overrides: further ones for the script.
        folder: to start it in; None for the same.
        entry: of the environment in ``run.json``, that must then differ; "" where none shows it.
        remark: what it does not say, "" where there is nothing to add.
    """

    text: str
    variables: Mapping[str, str] = field(default_factory=dict)
    overrides: tuple[str, ...] = ()
    folder: Path | None = None
    entry: str = ""
    remark: str = ""


def fixed_variables(factors: tuple[Factor, ...], variables: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that all processes get, so that a factor is what differs and nothing else.

    Without ``PYTHONHASHSEED`` each process has another one, also two that are meant to be the same.
    """
    if "hash-seed" in factors and is_hash_seed_random(variables):
        return {HASH_SEED: "0"}
    return {}


def is_hash_seed_random(variables: Mapping[str, str]) -> bool:
    """Return whether each process hashes text with a seed of its own."""
    return variables.get(HASH_SEED, "") in ("", "random")


def make_change(
    factor: Factor, *, command: Command, run: Run, variables: Mapping[str, str], folder: Path, home: Path
) -> Change:
    """Return how to change a factor.

    Args:
        factor: one of ``FACTORS``.
        command: of the script.
        run: the reference, which says what is to be changed.
        variables: that it was recorded with.
        folder: in which it was.
        home: of the check.

    Raises:
        CheckError: it cannot be changed here; the message says why.
    """
    if factor == "workers":
        return _workers(run)
    if factor == "threads":
        return _threads(run)
    if factor == "hash-seed":
        return _hash_seed(command, variables)
    if factor == "cwd":
        return _cwd(command, variables, folder, home)
    return _locale(variables)


def _workers(run: Run) -> Change:
    steps = run.rank(0).steps(0)
    window = RunEvidence(run).window(0, 0, int(steps[0])) if len(steps) else None
    settings = {} if window is None else window.settings
    known = {int(text) for name, text in settings.items() if name.startswith(_NUM_WORKERS) and text.isdecimal()}
    if not known:
        raise CheckError("the training has no torch DataLoader, whose workers could be others")
    # the main process on one side, and workers on the other; where several loaders have both, neither
    number = next(number for number in (0, 2, 1, 3) if number not in known) if len(known) < 4 else max(known) + 1
    shown = " and ".join(map(str, sorted(known)))
    return Change(
        text=f"{number} {'worker' if number == 1 else 'workers'} instead of {shown}",
        variables={NUM_WORKERS_VARIABLE: str(number)},
    )


def _threads(run: Run) -> Change:
    entry = reference_environment(run).entries.get(THREADS_ENTRY)
    if entry is None or not isinstance(entry.value, int):
        raise CheckError("the reference does not say how many threads computed it")
    number = 2 if entry.value == 1 else 1
    return Change(
        text=f"{number} {'thread' if number == 1 else 'threads'} instead of {entry.value}",
        variables={"OMP_NUM_THREADS": str(number)},  # what NumPy's libraries ask
        overrides=(override("determinism.settings.num_threads", number),),
        entry=THREADS_ENTRY,
    )


def _hash_seed(command: Command, variables: Mapping[str, str]) -> Change:
    if command.ignores_variables:
        raise CheckError("Python was asked to ignore its environment variables (-E or -I)")
    number = (int(variables[HASH_SEED]) + 1) % 2**32
    return Change(
        text=f"{HASH_SEED} {number} instead of {variables[HASH_SEED]}",
        variables={HASH_SEED: str(number)},
        entry=f"env.{HASH_SEED}",
    )


def _cwd(command: Command, variables: Mapping[str, str], folder: Path, home: Path) -> Change:
    elsewhere = home / "elsewhere"
    elsewhere.mkdir(exist_ok=True)
    given = variables.get("PYTHONPATH", "")
    paths = [str(folder / path) for path in given.split(os.pathsep) if path]
    if command.is_module:
        paths.insert(0, str(folder))  # where Python finds a module that is started with -m
    return Change(
        text="started in an empty folder",
        variables={"PYTHONPATH": os.pathsep.join(paths)} if paths else {},
        folder=elsewhere,
    )


def _locale(variables: Mapping[str, str]) -> Change:
    now = next((variables[name] for name in ("LC_ALL", "LC_COLLATE", "LANG") if variables.get(name)), "C")
    if now not in _LIKE_C:
        other = "C"
    else:
        other = next((name for name in (f"{language}.UTF-8" for language in _LANGUAGES) if _is_installed(name)), "")
    remark = ""
    if not other:
        other = "C.UTF-8" if now in ("C", "POSIX") else "C"
        remark = f"no locale is installed here that sorts otherwise than {now}, so that sorting was not varied"
    return Change(text=f"LC_ALL {other} instead of {now}", variables={"LC_ALL": other}, remark=remark)


def _is_installed(name: str) -> bool:
    before = locale.setlocale(locale.LC_COLLATE)
    try:
        locale.setlocale(locale.LC_COLLATE, name)
    except locale.Error:
        return False
    else:
        return True
    finally:
        locale.setlocale(locale.LC_COLLATE, before)
