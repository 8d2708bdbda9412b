"""The environment of a run, and how two differ."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from det_callbacks.verdict import EnvironmentDifference

NOT_RECORDED = "<not recorded>"
AS_COMMITTED = "<as committed>"
DEFAULT = "<default>"
PLACE = "<place"  # where a value had an absolute path

# Names of entries, or their prefixes.
DIGEST = "digest."  # how a device computes digests
VARIABLE = "env."  # an environment variable that is set
OPTION = "option."  # an option of torch's compiler that the program changed, by its path
PACKAGE = "package."  # the version of an imported package
BUILD = "torch.build."  # how torch was built
BACKENDS = "torch.backends."  # a flag there
TORCH = "torch.version"
CONFIGURATION = "config."  # a key of an application's configuration
COMMIT = "code.git_commit"
CHANGED_FILE = "code.file."  # digest of a source file that differs from the commit
SETTINGS = "settings."  # one that det_callbacks enforced
WITHOUT_EFFECT = "settings without effect"  # sentences on settings that could not act
OPTIMIZER = "optimizer"  # classes of the optimizers; prefix of their options
FOLLOWED = "loop.followed"  # the models and optimizers of a script that was followed
EACH_CALL = "none; each call of "  # begins that entry if no optimizer stepped
UNRECORDED = "loop.unrecorded"  # parts of the training of such a script that no step holds
RECORDER = "recorder"  # words on the native recorder, if it recorded
GENERATOR = "generators."  # digest of the first state of a generator of rank 0
ARGUMENTS = "process.argv"  # the words that started the program

TRAINER = "trainer.strategy"  # only Lightning's Trainer has it

LENGTHS = frozenset({"trainer.min_epochs", "trainer.max_epochs", "trainer.min_steps", "trainer.max_steps"})
"""Settings of the number of steps, which change nothing in common steps."""

DTYPES = ("trainer.precision", "torch.default_dtype")
"""Settings of the dtype that weights and batches have before anything is computed."""

VALIDATION = (
    "trainer.limit_val_batches",
    "trainer.val_check_interval",
    "trainer.check_val_every_n_epoch",
    "trainer.num_sanity_val_steps",
)
"""Settings that determine when a validation runs, and on which data."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvironmentEntry:
    """One JSON-able fact: where a run ran (the machine) or how (a choice: a setting of the user)."""

    value: Any
    is_machine: bool
    changes_bits: bool


_NOTES = {UNRECORDED, WITHOUT_EFFECT, RECORDER}  # each run's own; a verification may stop before it knows the first

Environment: TypeAlias = Mapping[str, EnvironmentEntry]
"""Facts that may affect the bits of a run, by name; no host or user names, absolute paths, addresses, secrets."""


def compare_environments(reference: Environment, current: Environment) -> tuple[EnvironmentDifference, ...]:
    """Return the entries that differ, by name; an entry is a choice if either run says so.

    Values are compared as JSON, so 1, 1.0 and true differ.
    """
    differences = []
    has_other_torch = reference.get(TORCH) != current.get(TORCH)
    is_of_older = not all(any(name.startswith(BUILD) for name in entries) for entries in (reference, current))
    has_other_optimizer = reference.get(OPTIMIZER) != current.get(OPTIMIZER)
    both = [_without_lone_configuration(reference, current), _without_lone_configuration(current, reference)]
    for name in sorted({*both[0], *both[1]} - _NOTES):
        sides = [entries.get(name) for entries in both]
        known = [side for side in sides if side is not None]
        values = [
            _absent(name, entries) if side is None else side.value for side, entries in zip(sides, both, strict=True)
        ]
        if (len(known) == 2 or name.startswith(VARIABLE)) and json.dumps(values[0], sort_keys=True) == json.dumps(
            values[1], sort_keys=True
        ):
            continue
        if item_of(name, GENERATOR) and len(known) < 2:  # a resumed fit continues from any state
            continue
        if has_other_optimizer and len(known) == 1 and name.startswith(f"{OPTIMIZER}."):
            continue
        if name.startswith(BUILD) and has_other_torch:
            continue
        if name.startswith((BUILD, BACKENDS)) and len(known) == 1 and (has_other_torch or is_of_older):
            continue
        if name.startswith(PACKAGE) and len(known) == 1:  # the code imports it, or an earlier version recorded none
            continue
        differences.append(
            EnvironmentDifference(
                name=name,
                reference=values[0],
                current=values[1],
                changes_bits=any(side.changes_bits for side in known),
                is_machine=all(side.is_machine for side in known),
            )
        )
    return tuple(differences)


def framework_of(environment: Environment) -> str:
    """Return what trained: "transformers", "accelerate" or "lightning", else "torch"."""
    known = ("transformers", "transformers.version"), ("accelerate", "accelerate.version"), ("lightning", TRAINER)
    return next((framework for framework, entry in known if entry in environment), "torch")


def _absent(name: str, entries: Environment) -> object:
    """Return what a run without an entry says of it."""
    if item_of(name, CHANGED_FILE):
        return AS_COMMITTED
    # 1.0.0 recorded a few variables, and those that were not set as None
    is_of_first_version = any(key.startswith(VARIABLE) and entry.value is None for key, entry in entries.items())
    if not is_of_first_version and name.startswith(VARIABLE):
        return None
    return DEFAULT if not is_of_first_version and name.startswith((OPTION, BACKENDS)) else NOT_RECORDED


def _without_lone_configuration(entries: Environment, other: Environment) -> Environment:
    """Return the entries, with a configuration as one entry if the other side has none."""
    keys = [name for name in entries if name.startswith(CONFIGURATION)]
    if not keys or any(name.startswith(CONFIGURATION) for name in other):
        return entries
    whole = EnvironmentEntry(value=f"{len(keys)} keys", is_machine=False, changes_bits=False)
    return {**{name: entries[name] for name in entries.keys() - keys}, CONFIGURATION.rstrip("."): whole}


def choices_of_steps(environment: Sequence[EnvironmentDifference]) -> list[EnvironmentDifference]:
    """Return the differing settings that can change the bits of a step."""
    return [one for one in environment if one.changes_bits and not one.is_machine and one.name not in LENGTHS]


def earlier_choice(choices: Sequence[EnvironmentDifference]) -> EnvironmentDifference | None:
    """Return a setting that changed the weights in earlier steps."""
    return next((one for one in choices if one.name.startswith(("optimizer", "trainer.", "settings."))), None)


def item_of(name: str, group: str) -> str | None:
    """Return which entry of a group has a name: "train.py" for "code.file.train.py" of CHANGED_FILE, or None."""
    return name.removeprefix(group) if name.startswith(group) else None
