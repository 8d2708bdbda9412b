"""A full disk, a disk error and a kill at each operation on files: nothing is lost,
and nothing matches by mistake.
"""

import json
import random
import shutil
import sys
import traceback
from collections.abc import Callable
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from fits import Fit, RaiseAt, Steady, StopError
from injected import ERRORS, KILL, Injection
from loops import Loop
from resumes import RESUMING, SaveAfter
from test_kills import start, wait

from det_callbacks import DetCallbacksError, DeterminismCallback, TrainingRun, compare_runs
from det_callbacks.compare.record import VERDICT_FILE
from det_callbacks.runs.store import Run
from det_callbacks.verdict import Verdict

pytestmark = RESUMING

NUM_STEPS = 3
Train = Callable[..., None]


def train_loop(
    mode: Any, path: Path, *, fits: int = 1, first: int = 0, other: bool = False, **options: Any
) -> None:
    loop = Loop()
    loop.model.factor = 2.0 if other else 1.0
    run = TrainingRun(path, mode=mode, model=loop.model, optimizers=loop.optimizers, **options)
    for _ in range(fits):
        batches = islice(loop.loader, NUM_STEPS)
        for batch in islice(batches, first):
            loop.train_step(batch)
        if first:
            run.resume_from(step=first)
        with run:
            for batch in batches:
                with run.step(batch):
                    loop.train_step(batch)


def record_half_a_loop(path: Path) -> None:
    loop = Loop()
    with TrainingRun(path, mode="record", model=loop.model, optimizers=loop.optimizers) as run:
        for batch in islice(loop.loader, NUM_STEPS - 1):
            with run.step(batch):
                loop.train_step(batch)
        raise StopError


def train_with_lightning(
    mode: Any, path: Path, *, fits: int = 1, first: int = 0, other: bool = False, **options: Any
) -> None:
    callback = DeterminismCallback(path, mode=mode, **options)
    fit = Fit(callback, model=Steady, limit_train_batches=NUM_STEPS)
    if other:
        fit.model.last.bias.data += 1
    fit.run(**({"ckpt_path": str(path.parents[1] / "1.ckpt")} if first else {}))
    for number in range(1, fits):
        fit.again(epochs=1 + number)


class Scenario(NamedTuple):
    """What is recorded before, what is done under faults, and the runs
    that may be there afterwards.
    """

    before: Callable[[Train, Path], None]
    body: Callable[[Train, Path], None]
    later: str = ""  # the recordings that may be there
    earlier: str = ""
    status: int = 0


def record(train: Train, home: Path, **options: Any) -> None:
    train("record", home / "run", **options)


def record_half(train: Train, home: Path) -> None:
    """Record up to an exception, and have a checkpoint after step 0."""
    shutil.copytree(home.parent / "half", home / "run")


def verify(train: Train, home: Path, **options: Any) -> None:
    train("verify", home / "run", current=home / "current", **options)


def record_and_verify(train: Train, home: Path) -> None:
    record(train, home)
    verify(train, home)


def record_again(train: Train, home: Path, **options: Any) -> None:
    record(train, home, overwrite=(home / "run/run.json").exists(), **options)


def resume(train: Train, home: Path) -> None:
    record(train, home, first=1)


def nothing(train: Train, home: Path) -> None:
    pass


SCENARIOS = {
    "record": Scenario(nothing, record_again, later="one"),
    "overwrite": Scenario(record, partial(record_again, other=True), later="other", earlier="one"),
    "overwrite with two fits": Scenario(
        partial(record, fits=2),
        partial(record_again, fits=2, other=True),
        later="other two",
        earlier="two",
    ),
    "resume": Scenario(record_half, resume, later="one", earlier="half"),
    "verify": Scenario(record, verify, earlier="one"),
    "verify again": Scenario(record_and_verify, verify, earlier="one"),
    "verify again what differs": Scenario(
        record_and_verify, partial(verify, other=True), earlier="one", status=1
    ),
}
WAYS = {"loop": train_loop, "lightning": train_with_lightning}


@pytest.fixture(scope="module", params=WAYS)
def way(request: Any) -> Train:
    return WAYS[request.param]


@pytest.fixture(scope="module")
def home(way: Train, tmp_path_factory: Any) -> Path:
    """Whole runs to compare with, and half a run with a checkpoint."""
    folder = tmp_path_factory.mktemp("whole")
    for name, options in (
        ("one", {}),
        ("other", {"other": True}),
        ("two", {"fits": 2}),
        ("other two", {"fits": 2, "other": True}),
    ):
        way("record", folder / name, **options)
    if way is train_loop:
        with pytest.raises(StopError):
            record_half_a_loop(folder / "half")
    else:
        callbacks = SaveAfter(folder, 1), RaiseAt("on_train_batch_start", StopError(), call=3)
        callback = DeterminismCallback(folder / "half", mode="record")
        with pytest.raises(StopError):
            Fit(callback, *callbacks, model=Steady, limit_train_batches=NUM_STEPS).run()
    return folder


def run_forked(body: Callable[[], None], folder: Path) -> int:
    """Run a body as a script that ends with the status of our errors."""

    def script() -> None:
        try:
            body()
        except DetCallbacksError as error:
            traceback.print_exc()
            sys.last_value = error
            sys.exit(error.exit_code)

    return wait(start(script, folder))


def matches(whole: Path, path: Path, **options: Any) -> bool:
    try:
        return compare_runs(whole, path, **options).verdict == "match"
    except DetCallbacksError:
        return False


@pytest.fixture
def inject(way: Train, home: Path, tmp_path: Path) -> Callable[..., list[str]]:
    """Run a scenario with a fault at one operation, and look at what is left;
    return the operations without one.
    """
    prepared: dict[str, Path] = {}

    def run(name: str, *, at: int | None = None, fault: int = KILL) -> list[str]:
        scenario, work = SCENARIOS[name], home / "work"
        if name not in prepared:
            shutil.rmtree(work, ignore_errors=True)
            work.mkdir()
            scenario.before(way, work)
            prepared[name] = Path(shutil.copytree(work, tmp_path / name))
        shutil.rmtree(work)
        shutil.copytree(prepared[name], work)

        def body() -> None:
            Injection(work, tmp_path / "operations", at=at, fault=fault).begin()
            scenario.body(way, work)

        status = run_forked(body, tmp_path)
        told = (
            f"{name}, {at}, fault {fault}: status {status}\n{(tmp_path / 'output.txt').read_text()}"
        )
        if at is None:
            assert status == scenario.status, told
            return (tmp_path / "operations").read_text().splitlines()
        assert status in ((-9,) if fault == KILL else (2, scenario.status)), told
        assert_nothing_is_lost(scenario, work, told, has_ended=status == scenario.status)
        if fault == KILL:  # nothing that it leaves is in the way of the next one
            assert run_forked(lambda: scenario.body(way, work), tmp_path) == scenario.status, told
            assert_nothing_is_lost(scenario, work, told, has_ended=True)
        return []

    def assert_nothing_is_lost(
        scenario: Scenario, work: Path, told: str, *, has_ended: bool
    ) -> None:
        path = work / "run"
        if scenario.earlier == "half":
            assert (
                compare_runs(home / "one", path, steps="common").counts.steps_compared
                >= NUM_STEPS - 1
            ), told
        elif scenario.earlier and not (has_ended and scenario.later):
            names = [scenario.earlier, scenario.later]
            assert any(matches(home / name, path) for name in names if name), told
        if has_ended and scenario.later:
            assert matches(home / scenario.later, path), told
            assert Run.open(path).is_complete, told
        verdict = work / "current" / VERDICT_FILE
        if has_ended and not scenario.later:
            assert verdict.exists(), told
        if verdict.exists():
            found = Verdict.from_dict(json.loads(verdict.read_text()))
            assert (found.verdict == "match") == (scenario.status == 0), told

    return run


def points(name: str, num_operations: int, num: int | None) -> list[tuple[int, int]]:
    """Return places and faults: a kill at each operation, and by turns one of the errors;
    or a sample of them.
    """
    errors = [(at, ERRORS[at % len(ERRORS)]) for at in range(num_operations)]
    every = [*errors, *((at, KILL) for at in range(num_operations))]
    return every if num is None else random.Random(name).sample(every, num)


@pytest.mark.parametrize("name", SCENARIOS)
@pytest.mark.parametrize(
    "num", [4, pytest.param(None, marks=[pytest.mark.soak, pytest.mark.timeout(7200)])]
)
def test_a_fault_at_any_operation_loses_nothing_and_makes_no_match(name, num, inject):
    operations = inject(name)
    kinds = {operation.split()[0] for operation in operations}
    assert {
        "open",
        "write",
        "fsync",
        "truncate",
        "fcntl.flock",
        "os.rename",
        "os.remove",
        "os.mkdir",
    } <= kinds
    assert ("os.rmdir" in kinds) == (name not in ("record", "verify"))
    failures = []
    for at, fault in points(name, len(operations), num):
        try:
            inject(name, at=at, fault=fault)
        except AssertionError as failure:
            failures.append(f"{operations[at]}: {failure}")
    assert not failures, f"{len(failures)} of {2 * len(operations)}:\n" + "\n----\n".join(failures)
