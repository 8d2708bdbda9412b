"""run.json: what was recorded, in which environment, and how two environments differ."""

import json
import os
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias

import msgspec

from det_callbacks.digest.host import DIGEST_VERSION, digest_bytes, format_digest
from det_callbacks.errors import ReferenceFormatError, ReferenceNotFoundError
from det_callbacks.runs.files import (
    FORMAT_VERSION,
    MANIFEST,
    parse_file,
    replace_atomically,
)
from det_callbacks.runs.selection import Selection
from det_callbacks.verdict import EnvironmentDifference, as_json

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
STAGES = "stages"  # what each part of the run is, if not all are fits: "fit", "test"
WITHOUT_EFFECT = "settings without effect"  # sentences on settings that could not act
OPTIMIZER = "optimizer"  # classes of the optimizers; prefix of their options
FOLLOWED = "loop.followed"  # the models and optimizers of a script that was followed
EACH_CALL = "none; each call of "  # begins that entry if no optimizer stepped
UNRECORDED = "loop.unrecorded"  # parts of the training of such a script that no step holds
RECORDER = "recorder"  # words on the native recorder, if it recorded
FAILED = "loop.failed"  # the attempt in which such a script failed after its last step
GENERATOR = "generators."  # digest of the first state of a generator of rank 0
ARGUMENTS = "process.argv"  # the words that started the program

TRAINER = "trainer.strategy"  # only Lightning's Trainer has it

LENGTHS = frozenset(
    {"trainer.min_epochs", "trainer.max_epochs", "trainer.min_steps", "trainer.max_steps"}
)
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

Purpose = Literal["record", "verify"]
Count = Annotated[int, msgspec.Meta(ge=1)]


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvironmentEntry:
    """One JSON-able fact: where a run ran (the machine) or how (a choice:
    a setting of the user).
    """

    value: Any
    is_machine: bool
    changes_bits: bool


_OF_GROUP = re.compile(rf"({OPTIMIZER}\..+\.group \d+)\.")  # an option of another than the first

# each run's own; a verification may stop before it knows the first
_NOTES = {UNRECORDED, WITHOUT_EFFECT, RECORDER, STAGES, FAILED}

Environment: TypeAlias = Mapping[str, EnvironmentEntry]
"""Facts that may affect the bits of a run, by name; no host or user names,
absolute paths, addresses, secrets.
"""


def compare_environments(
    reference: Environment, current: Environment
) -> tuple[EnvironmentDifference, ...]:
    """Return the entries that differ, by name; an entry is a choice if either run says so.

    Values are compared as JSON, so 1, 1.0 and true differ.
    """
    has_other_torch = reference.get(TORCH) != current.get(TORCH)
    has_build = all(
        any(name.startswith(BUILD) for name in entries) for entries in (reference, current)
    )
    # Entries that only one run has, and that are no difference by themselves: a resumed fit
    # continues from any state; the code imports a package, or an earlier version recorded none.
    lone = [GENERATOR, PACKAGE]
    if reference.get(OPTIMIZER) != current.get(OPTIMIZER):
        lone.append(f"{OPTIMIZER}.")
    if has_other_torch or not has_build:
        lone += [BUILD, BACKENDS]
    both = [
        _without_lone_groups(_without_lone_configuration(reference, current), current),
        _without_lone_groups(_without_lone_configuration(current, reference), reference),
    ]
    differences = []
    for name in sorted({*both[0], *both[1]} - _NOTES):
        sides = [entries.get(name) for entries in both]
        present = [side for side in sides if side is not None]
        values = [
            _absent(name, entries) if side is None else side.value
            for side, entries in zip(sides, both, strict=True)
        ]
        is_compared = len(present) == 2 or name.startswith(VARIABLE)
        if is_compared and _as_json_text(values[0]) == _as_json_text(values[1]):
            continue
        if len(present) == 1 and name.startswith(tuple(lone)):
            continue
        if name.startswith(BUILD) and has_other_torch:
            continue
        differences.append(
            EnvironmentDifference(
                name=name,
                reference=values[0],
                current=values[1],
                changes_bits=any(side.changes_bits for side in present),
                is_machine=all(side.is_machine for side in present),
            )
        )
    return tuple(differences)


def _as_json_text(value: object) -> str:
    return json.dumps(value, sort_keys=True)


def framework_of(environment: Environment) -> str:
    """Return what trained: "transformers", "accelerate" or "lightning", else "torch"."""
    entry_of = {
        "transformers": "transformers.version",
        "accelerate": "accelerate.version",
        "lightning": TRAINER,
    }
    found = (framework for framework, entry in entry_of.items() if entry in environment)
    return next(found, "torch")


def _absent(name: str, entries: Environment) -> object:
    """Return what a run without an entry says of it."""
    if item_of(name, CHANGED_FILE):
        return AS_COMMITTED
    if _OF_GROUP.match(f"{name}."):
        return "absent"
    # 1.0.0 recorded a few variables, and those that were not set as None
    is_of_first_version = any(
        key.startswith(VARIABLE) and entry.value is None for key, entry in entries.items()
    )
    if not is_of_first_version and name.startswith(VARIABLE):
        return None
    return (
        DEFAULT if not is_of_first_version and name.startswith((OPTION, BACKENDS)) else NOT_RECORDED
    )


def _without_lone_configuration(entries: Environment, other: Environment) -> Environment:
    """Return the entries, with a configuration as one entry if the other side has none."""
    keys = [name for name in entries if name.startswith(CONFIGURATION)]
    if not keys or any(name.startswith(CONFIGURATION) for name in other):
        return entries
    whole = EnvironmentEntry(value=f"{len(keys)} keys", is_machine=False, changes_bits=False)
    return {
        **{name: entries[name] for name in entries.keys() - keys},
        CONFIGURATION.rstrip("."): whole,
    }


def _without_lone_groups(entries: Environment, other: Environment) -> Environment:
    """Return the entries, with the options of an optimizer's group as one entry if the other side
    has no such group.
    """
    groups = {name: found[1] for name in entries if (found := _OF_GROUP.match(name)) is not None}
    in_other = {found[1] for name in other if (found := _OF_GROUP.match(name)) is not None}
    lone = {name: group for name, group in groups.items() if group not in in_other}
    whole = {
        group: EnvironmentEntry(value=f"{number} options", is_machine=False, changes_bits=True)
        for group, number in Counter(lone.values()).items()
    }
    return {**{name: entries[name] for name in entries if name not in lone}, **whole}


def choices_of_steps(environment: Sequence[EnvironmentDifference]) -> list[EnvironmentDifference]:
    """Return the differing settings that can change the bits of a step."""
    return [
        difference
        for difference in environment
        if difference.changes_bits and not difference.is_machine and difference.name not in LENGTHS
    ]


def earlier_choice(choices: Sequence[EnvironmentDifference]) -> EnvironmentDifference | None:
    """Return a setting that changed the weights in earlier steps."""
    groups = ("optimizer", "trainer.", "settings.")
    return next((choice for choice in choices if choice.name.startswith(groups)), None)


def item_of(name: str, group: str) -> str | None:
    """Return which entry of a group has a name: "train.py" for "code.file.train.py" of
    CHANGED_FILE, or None.
    """
    return name.removeprefix(group) if name.startswith(group) else None


@dataclass(frozen=True, slots=True, kw_only=True)
class ResumedFit:
    """A fit that continued from a checkpoint, and its first step after that."""

    segment: int
    step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """One launch of the run's processes: its number of fits,
    and the least number of readings of each.
    """

    segments: Count = 1
    resumed_from: tuple[ResumedFit, ...] = ()
    readings: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """The content of run.json."""

    selection: Selection
    environment: dict[str, EnvironmentEntry]
    settings: Mapping[str, Any] = field(default_factory=dict)
    replay: tuple[str, ...] = ()
    keep_tensors: tuple[str, ...] = ()
    recorded_by: str = ""  # "ObserverContext", or "" for a training
    run_id: str
    purpose: Purpose = "record"
    world_size: Count = 1
    attempts: Annotated[tuple[Attempt, ...], msgspec.Meta(min_length=1)] = (Attempt(),)
    format_version: int = FORMAT_VERSION
    digest_version: int = DIGEST_VERSION
    det_callbacks_version: str = field(default_factory=lambda: version("det_callbacks"))


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Write run.json with a digest of its content."""
    content = as_json(manifest)
    content["digest"] = _digest(content)
    replace_atomically(folder / MANIFEST, json.dumps(content, indent=1).encode() + b"\n")


def note_failure(folder: Path) -> bool:
    """Note in run.json that the script failed, and return True, if its loop was followed: only
    the script's end is the end of such a loop.
    """
    manifest = read_manifest(folder)
    if FOLLOWED not in manifest.environment:
        return False
    attempt = len(manifest.attempts) - 1
    entry = EnvironmentEntry(value=attempt, is_machine=False, changes_bits=False)
    entries = {**manifest.environment, FAILED: entry}
    write_manifest(folder, replace(manifest, environment=entries))
    return True


def has_failed(manifest: Manifest) -> bool:
    """Return whether the script failed in its last attempt, see ``note_failure``."""
    entry = manifest.environment.get(FAILED)
    return entry is not None and entry.value == len(manifest.attempts) - 1


def read_manifest(folder: Path) -> Manifest:
    """Return the content of run.json; an error if it is missing,
    damaged or has a different version.
    """
    path = folder / MANIFEST
    if not os.path.lexists(path):
        runs = folder.glob(f"*/{MANIFEST}") if os.path.isdir(folder) else ()
        inside = sorted(child.parent.name for child in runs)[:10]
        hint = (
            f"but these folders in it are runs: {', '.join(inside)}"
            if inside
            else "record one there first"
        )
        raise ReferenceNotFoundError(
            f"There is no run in {folder}: it has no {MANIFEST}; {hint}.", str(folder)
        )
    decode = msgspec.json.Decoder(dict[str, Any]).decode
    return parse_file(path, lambda content: _manifest_of(decode(content), path))


def _manifest_of(content: dict[str, Any], path: Path) -> Manifest:
    for name, ours in (("format_version", FORMAT_VERSION), ("digest_version", DIGEST_VERSION)):
        if content.get(name) != ours:
            raise ReferenceFormatError(
                f"{path} has {name} {content.get(name)!r}, but this version of det_callbacks reads "
                f"{ours}. Use the version that recorded the run, or record it again.",
                str(path),
            )
    if content.pop("digest", None) != _digest(content):
        raise ValueError("its content does not match its digest")
    manifest = msgspec.convert(content, Manifest)
    if as_json(manifest) != content:
        raise ValueError("it has entries that this version of det_callbacks does not know")
    return manifest


def _digest(content: Mapping[str, Any]) -> str:
    return format_digest(digest_bytes(json.dumps(content, sort_keys=True).encode()))
