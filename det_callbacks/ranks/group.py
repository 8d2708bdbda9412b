"""A separate gloo group for the few bytes that the ranks exchange.

A rank that fails in an exchange tells the others; a rank that fails elsewhere closes its group, so
that the others fail too.
"""

import json
import socket
import uuid
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path
from time import monotonic, sleep
from typing import Any, Literal, TypeVar

import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore

from det_callbacks.digest.components import digest_state
from det_callbacks.errors import RankError, SettingsError
from det_callbacks.internals.torch import default_store, without_dispatch
from det_callbacks.runs.files import MANIFEST, writing
from det_callbacks.runs.peers import END_OF_FIT, Peers
from det_callbacks.text import at_most, ranks_text

SYNC_EVERY_N_STEPS = 10
"""Steps between two exchanges in which ranks learn whether a step differs, to stop together."""

Place = Literal["step", "between", "end", "gone"]
"""The place of a rank: in a step, between steps (validation, save, hook), at the end, or failed."""

_MAX_NAMED = 5

_ALIKE = (
    *(
        "settings.",
        "python.",
        "numpy.",
        "lightning.",
        "pytorch_lightning.",
        "det_callbacks.",
        "triton.",
    ),
    *("trainer.", "torch.", "code.git_commit"),
)
"""Prefixes of environment entries that must be equal on all ranks."""

_BY_DESIGN = frozenset({"settings.seed", "torch.cpu_capability", "torch.num_interop_threads"})
"""Exceptions: seeds, and properties of a node's CPU."""

Value = TypeVar("Value")


class RankGroup(Peers):
    """The processes of a run, or a single process. It is opened and closed for each fit.

    Every method raises ``RankError`` if a process does not take part in time. An exchange takes two
    small collectives, about 0.3 milliseconds on one machine.
    """

    # Ranks wait this long for each other, since a rank may load, save or redraw batches.
    timeout_seconds = 1800.0
    # A rank at the end waits this long for a rank in a step, which may hang in
    # the training's collective.
    end_seconds = 30.0

    def __init__(self) -> None:
        self.rank, self.world_size = 0, 1
        self._group: Any = None
        self._places: Any = None
        self._place: Place | None = None
        self._has_differed = False

    def __reduce__(self) -> tuple[type["RankGroup"], tuple[()]]:
        return RankGroup, ()  # copies start closed

    def open(self, world_size: int | None = None) -> "RankGroup":
        """Open a group of this many processes (None: all of torch.distributed), and return it.

        This is a collective of the default group, so call it before anything that
        can fail on a single rank.
        """
        self.close()
        known = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
        self.rank, self.world_size, self._has_differed = 0, world_size or known, False
        if self.world_size == 1:
            return self
        if known != self.world_size:
            raise RankError(
                f"This run has {self.world_size} processes, but torch.distributed has {known}, so "
                "the processes cannot exchange results. Use a strategy based on torch.distributed, "
                "such as ddp, or devices=1."
            )
        self.rank = dist.get_rank()
        self._group = dist.new_group(
            backend="gloo", timeout=timedelta(seconds=self.timeout_seconds)
        )
        self._places = PrefixStore(f"det_callbacks/{self._group.group_name}", default_store())
        self.set_place("between")
        return self

    def close(self) -> None:
        group, self._group = self._group, None
        if group is not None and dist.is_initialized():
            try:
                self.set_place("gone")  # so that others do not wait for this rank
            except RuntimeError:  # the rank that hosts the store has ended
                self._places = None
            dist.destroy_process_group(group)
        self._places = self._place = None

    def set_place(self, place: Place) -> None:
        """Publish the place of this rank; costs a message if it changed."""
        if self._places is not None and place != self._place:
            self._places.set(str(self.rank), place)
            self._place = place

    def gather(self, action: Callable[[], Any], *, task: str) -> list[Any]:
        """Run an action on every rank; return its results (plain data) by rank,
        or raise on every rank.

        A rank whose action failed raises its error; the others raise ``RankError`` with that
        message and exit code. All ranks must call it with the same task.
        """
        if self.world_size == 1:
            return [action()]
        value, error, failure = None, None, ""
        try:
            value = action()
        except Exception as caught:  # noqa: BLE001  # tell the others first
            error, failure = caught, f"{type(caught).__name__}: {caught}"
        if self._group is None:
            raise RankError(
                f"The group of the {self.world_size} processes is closed, so they cannot agree in "
                f"{task}."
            )
        rows: list[Any] = [None] * self.world_size
        try:
            if task == END_OF_FIT:
                self._meet()
            with without_dispatch():
                said = (task, value, failure, getattr(error, "exit_code", 1))
                dist.all_gather_object(rows, said, group=self._group)
        except RuntimeError as gone:  # gloo: a timeout or a closed connection
            raise RankError(
                f"Rank {self.rank} of {self.world_size} did not hear from all others within "
                f"{self.timeout_seconds:.0f} seconds, or one of them ended, in {task}: "
                f"{str(gone).splitlines()[0]}. Check the output of the other ranks: one raised, "
                "was killed, or left the training early."
            ) from gone
        if error is not None:
            raise error
        for rank, (at, _, text, exit_code) in enumerate(rows):
            if text:
                stops = f"so this rank ({self.rank} of {self.world_size}) stops too"
                raise RankError(f"Rank {rank} failed in {at}, {stops}: {text}", rank, exit_code)
            if at != task:
                raise RankError(
                    f"Rank {self.rank} of {self.world_size} is at {task}, but rank {rank} at {at}, "
                    "most likely because a rank has fewer batches or stopped early. Give all ranks "
                    "the same number of steps, and stop them together.",
                    rank,
                )
        return [found for _, found, _, _ in rows]

    def require_shared(self, folder: Path) -> None:
        """Raise ``RankError`` on all ranks if any does not see a folder that rank 0 sees."""
        if self.world_size == 1:
            return
        # named like a temporary file of run.json, which readers ignore
        marker = folder / f".{MANIFEST}.{uuid.uuid4().int}.tmp"
        task = f"looking into {folder}"

        def lead() -> str:
            with writing(folder):
                marker.touch()
            return marker.name

        name = self.broadcast(lead, task=task)
        seen = self.gather(lambda: ((folder / name).exists(), socket.gethostname()), task=task)
        with writing(folder):
            marker.unlink(missing_ok=True)  # of rank 0
        for rank, (sees_it, host) in enumerate(seen):
            if not sees_it:
                raise RankError(
                    f"Rank {rank} on {host} does not see the folder {folder}, which rank 0 made on "
                    f"{seen[0][1]}, but all processes of a run write into one folder. Nothing was "
                    "trained. Pass a folder on a file system that the nodes share at the same "
                    "path, or record the processes of one node only.",
                    rank,
                )

    def stops_after(
        self, step: int, *, differs: bool, may_stop: bool, asks_now: bool = False
    ) -> bool:
        """Return whether all ranks stop now because a step differed on any of them.

        ``may_stop`` and ``asks_now`` must be equal on all ranks.
        """
        if self.world_size == 1:
            return differs
        self._has_differed |= differs
        if not may_stop or ((step + 1) % SYNC_EVERY_N_STEPS and not asks_now):
            return False
        return any(self.gather(lambda: self._has_differed, task=f"the sync after step {step}"))

    def _meet(self) -> None:
        """Wait until all ranks are at the end of a fit; a rank between steps may take long."""
        self.set_place("end")
        keys, pause = [str(rank) for rank in range(self.world_size)], 0.005
        begun = last_without_step = monotonic()
        while set(places := [place.decode() for place in self._places.multi_get(keys)]) != {"end"}:
            why, now = "", monotonic()
            if "step" not in places:
                last_without_step = now
            if "gone" in places:
                why = f"rank {places.index('gone')} has left"
            elif now - last_without_step > self.end_seconds:
                why = (
                    f"rank {places.index('step')} is in a training step, for "
                    f"{self.end_seconds:.0f} seconds"
                )
            elif now - begun > self.timeout_seconds:
                why = f"not all others reached the end within {self.timeout_seconds:.0f} seconds"
            if why:
                raise RankError(
                    f"Rank {self.rank} of {self.world_size} has finished its training, but {why}: "
                    "a rank got fewer batches, stopped early, or failed. Give all ranks the same "
                    "number of steps, and stop them together."
                )
            sleep(pause := min(2 * pause, 0.5))


def by_majority(values: Mapping[int, Value]) -> list[tuple[Value, tuple[int, ...]]]:
    """Return each value with its ranks: the most frequent value first, then by lowest rank."""
    ranks: dict[Value, list[int]] = {}
    for rank, value in values.items():
        ranks.setdefault(value, []).append(rank)
    found = [(value, tuple(held)) for value, held in ranks.items()]
    return sorted(found, key=lambda one: (-len(one[1]), one[1]))


def require_same_start(
    group: Peers, manifest: Mapping[str, Any], weights: Mapping[str, Tensor] | None
) -> None:
    """Raise ``SettingsError`` on all ranks if their starts differ; it names the minority."""
    if group.world_size == 1:
        return
    digests = {} if weights is None else digest_state(weights).tensors
    facts = start_facts(manifest) | {
        f"weights of {name}": digest for name, digest in digests.items()
    }
    told = group.gather(lambda: facts, task="comparing how the ranks start")
    names = sorted({name for facts in told for name in facts})
    problems = []
    for name in names:
        values = {
            rank: json.dumps(facts.get(name), sort_keys=True) for rank, facts in enumerate(told)
        }
        (value, ranks), *others = by_majority(values)
        if others:
            shown = ", ".join(
                f"{other} on {ranks_text(held)}" for other, held in others[:_MAX_NAMED]
            )
            problems.append(f"{name} is {shown}, but {value} on {ranks_text(ranks)}")
    if problems:
        raise SettingsError(
            f"The {len(told)} processes of this run start differently: "
            f"{'; '.join(at_most(_MAX_NAMED, problems))}. Nothing was trained; "
            f"{len(names) - len(problems)} other entries agree. Give all processes the same code, "
            "packages, settings and weights; only seeds and data may differ."
        )


def start_facts(manifest: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entries that must be equal on all ranks."""
    facts = {
        name: entry["value"]
        for name, entry in manifest["environment"].items()
        if name.startswith(_ALIKE) and name not in _BY_DESIGN
        if entry["changes_bits"] or not name.startswith("settings.")
    }
    selection = {f"selection.{name}": value for name, value in manifest["selection"].items()}
    return {
        **facts,
        **selection,
        **{name: manifest.get(name, ()) for name in ("replay", "keep_tensors")},
    }
