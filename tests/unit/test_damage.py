"""A run of two ranks that was damaged in any way: an error that names a file,
or a verdict that skips nothing.
"""

import json
import random
import shutil
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from stored_runs import (
    OneOf,
    append,
    create,
    digests_of,
    join,
    record,
    resume,
    small_layout,
    small_program,
)

from det_callbacks.cli import main
from det_callbacks.errors import ReferenceFormatError
from det_callbacks.runs.evidence import EvidenceRow, NondeterministicOp
from det_callbacks.runs.manifest import Attempt, read_manifest, write_manifest
from det_callbacks.runs.metrics import Metric, Reading
from det_callbacks.runs.store import Run

OP = NondeterministicOp(
    op="aten.kthvalue", phase="forward", module="", source=(), message="-", is_allowed=True
)


def write(path: Path, seeds: dict[int, int]) -> Path:
    writers = [create(path, peers=OneOf(0, 2)), join(path, 1)]
    loss = Metric(dtype="float32", shape=(), digest=f"{1:016x}", value="0.5")
    writers[0].put_reading(
        Reading(where="epoch", number=3, step=3, epoch=0, metrics={"val_loss": loss})
    )
    for writer in reversed(writers):  # rank 0 says in run.json how many fits there are
        writer.put_nondeterministic_ops([OP])
        for fit in range(2):
            for step in range(4):
                append(writer, [step], seed=seeds.get(step, 0) if fit else 0)
                rows = (
                    EvidenceRow(step, "batch start", "generator", "torch.cpu", value=step),
                    EvidenceRow(step, "", "loaded", "paths", value=7, text="a.png"),
                )
                writer.put_evidence(rows)
            if not fit:
                writer.start_segment()
        writer.close(complete=True)
    return path


def flip(content: bytes, other: bytes, chance: random.Random) -> bytes:
    at = chance.randrange(len(content))
    return content[:at] + bytes([content[at] ^ 1 << chance.randrange(8)]) + content[at + 1 :]


# what becomes of a file (None: it is removed), from its content and another file's
DAMAGES: dict[str, Callable[[bytes, bytes, random.Random], bytes | None]] = {
    "truncated": lambda content, other, chance: content[: chance.randrange(len(content))],
    "flipped": flip,
    "emptied": lambda content, other, chance: b"",
    "removed": lambda content, other, chance: None,
    "replaced": lambda content, other, chance: other,
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: Any) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    for name, seeds in (("reference", {}), ("current", {}), ("other", {2: 1})):
        write(folder / name, seeds)
    return folder


def diff(capsys: Any, *folders: Path) -> tuple[int, str, str]:
    return main(["diff", *map(str, folders), "--json"]), *capsys.readouterr()


def verdict_in(output: str) -> dict[str, Any]:
    content = json.loads(output)
    unread = "the findings of the current run cannot be read"
    content["evidence"] = [line for line in content["evidence"] if not line.startswith(unread)]
    # a file that lost only the marker of its end has every step
    content["explanation"] = content["explanation"].partition(" The current run is incomplete")[0]
    return content


SOAK = [pytest.mark.soak, pytest.mark.timeout(3600)]


@pytest.mark.parametrize(
    ("first", "num"),
    [
        (0, 40),
        pytest.param(40, 960, marks=[pytest.mark.slow, pytest.mark.timeout(900)]),
        *(pytest.param(first, 11_000, marks=SOAK) for first in range(1_000, 100_000, 11_000)),
    ],
)
def test_no_damage_ends_in_a_match_that_skipped_something(runs, tmp_path, capsys, first, num):
    outcomes: Counter[int] = Counter()
    for name in ("reference", "current", "other"):
        shutil.copytree(runs / name, tmp_path / name)
    known = {
        name: diff(capsys, tmp_path / "reference", tmp_path / name) for name in ("current", "other")
    }
    for seed in range(first, first + num):
        chance = random.Random(seed)
        current = chance.choice(("current", "other"))
        folders = [tmp_path / "reference", tmp_path / current]
        damaged = chance.choice(folders)
        files = sorted(path for path in damaged.rglob("*") if path.is_file())
        damage = chance.choice(list(DAMAGES))
        file, other = chance.sample(files, 2)
        before = file.read_bytes()
        content = DAMAGES[damage](before, other.read_bytes(), chance)
        file.unlink() if content is None else file.write_bytes(content)
        status, out, err = diff(capsys, *folders)
        file.write_bytes(before)
        outcomes[status] += 1
        case = f"seed {seed}: {damage} in {damaged.name}: {err or out}"
        if status == 0:
            assert known[current][0] == 0, case
            assert verdict_in(out) == verdict_in(known[current][1]), case
        elif status == 2:
            assert str(damaged) in err, case
            assert "Traceback" not in err, case
        else:
            assert json.loads(out)["verdict"] != "match", case
    assert [diff(capsys, tmp_path / "reference", tmp_path / name) for name in known] == [
        *known.values()
    ]
    assert outcomes[2] > num // 3, outcomes


@pytest.mark.parametrize(
    "changes",
    [
        {"world_size": 10**15},
        {"run_id": "another"},
        {"attempts": (Attempt(segments=10**15),)},
        {"attempts": (Attempt(segments=2), Attempt(), Attempt())},
        {"attempts": (Attempt(), Attempt())},
    ],
)
def test_a_manifest_that_is_not_that_of_the_files_is_refused(tmp_path, changes):
    run = record(tmp_path / "run", range(3), range(2), complete=False)
    append(resume(run), [1, 2], seed=1, complete=True)
    write_manifest(run, replace(read_manifest(run), **changes))
    says = r"although run\.json has it|from a different run, place, version"
    with pytest.raises(ReferenceFormatError, match=says) as caught:
        Run.open(run)
    assert str(run) in str(caught.value)


def test_a_step_whose_program_has_another_length_is_refused(tmp_path):
    path = tmp_path / "run"
    writer, layout = append(create(path), []), small_layout(4)
    writer.put_layout(layout)
    writer._layouts[layout.id] = 3
    writer.append(0, 0, small_program().id, layout.id, digests_of(0))
    writer.close(complete=True)
    with pytest.raises(
        ReferenceFormatError, match=r"has 3 sites, its layout has 4, and step 0 has 3 digests"
    ):
        Run.open(path).view(0, 0, 0)
