"""What a check makes of processes that end in every way; the processes themselves are played."""

import json
import os
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import stored_runs
from verdicts import DIVERGED, MATCH, NOT_COMPARABLE, THREADS, differing

from det_callbacks.check import CheckReport, check_script, runner
from det_callbacks.errors import CheckError
from det_callbacks.verdict import Verdict


@dataclass(frozen=True, kw_only=True)
class End:
    """How a process ends: what it wrote and its status."""

    status: int = 0
    verdict: Verdict | str | None = None
    run: str = "complete"


@dataclass
class Processes:
    """Plays the processes of a check, in order, and keeps how they were started."""

    ends: Iterator[End]
    started: list[tuple[tuple[str, ...], Path, Mapping[str, str]]] = field(default_factory=list)

    def run(
        self, words: Sequence[str], *, folder: Path, variables: Mapping[str, str], output: int | None = None
    ) -> int:
        self.started.append((tuple(words), folder, variables))
        given = dict(word.split("=", 1) for word in words if "=" in word)
        end = next(self.ends)
        if given["+determinism"] == "record" and end.run != "none":
            path = Path(given["determinism.reference"])
            writer = stored_runs.RunWriter.create(path, manifest={"selection": {}, "environment": ENVIRONMENT})
            stored_runs.append(writer, range(4))
            writer.close(complete=end.run == "complete")
        if end.verdict is not None:
            current = Path(given["determinism.current"])
            current.mkdir()
            text = end.verdict if isinstance(end.verdict, str) else json.dumps(end.verdict.to_dict())
            (current / "verdict.json").write_text(text)
        return end.status


ENVIRONMENT = {"torch.num_threads": {"value": 2, "is_machine": True, "changes_bits": True}}
Check = Callable[..., tuple[CheckReport, Processes]]


@pytest.fixture
def check(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Check:
    """Check a script whose processes end like this."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    monkeypatch.delenv("PYTHONPATH", raising=False)
    (tmp_path / "train.py").touch()

    def run(*ends: End, words: Sequence[str] = ("python", "train.py", "lr=1"), **options: Any) -> Any:
        processes = Processes(iter(ends))
        monkeypatch.setattr(runner, "run_process", processes.run)
        report = check_script(words, to="runs", **options)
        assert next(processes.ends, None) is None, "not all of the processes were started"
        return report, processes

    return run


def test_the_script_is_started_as_given_with_the_presets_added(check: Check, tmp_path: Path) -> None:
    report, processes = check(End(), End(verdict=MATCH))
    home = tmp_path / "runs"
    words = [list(words[1:]) for words, _, _ in processes.started]
    assert words == [
        [f"{tmp_path}/train.py", "lr=1", "+determinism=record", f"determinism.reference={home}/reference"],
        [
            f"{tmp_path}/train.py",
            "lr=1",
            "+determinism=verify",
            f"determinism.reference={home}/reference",
            f"determinism.current={home}/plain",
        ],
    ]
    assert [(folder, variables) for _, folder, variables in processes.started] == [(tmp_path, dict(os.environ))] * 2
    assert (report.exit_code, report.breaking) == (0, ())
    assert report.command == ("python", "train.py", "lr=1")
    assert json.loads((home / "check.json").read_text()) == report.to_dict()
    plain = report.runs[1].verdict
    assert plain is not None
    assert (plain.reference, plain.current) == ("runs/reference", "runs/plain")


@pytest.mark.parametrize(
    ("ends", "problem", "code"),
    [
        ([End(status=1, run="none")], "ended", 2),
        ([End(status=1)], "ended", 2),
        ([End(status=-signal.SIGSEGV)], "killed", 2),
        ([End(run="none")], "nothing recorded", 2),
        ([End(run="incomplete")], "incomplete", 2),
        ([End(), End()], "no verdict", 2),
        ([End(), End(status=2)], "ended", 2),
        ([End(), End(status=-signal.SIGKILL)], "killed", 2),
        ([End(), End(status=1, verdict=MATCH)], "ended", 2),
        ([End(), End(status=-signal.SIGKILL, verdict=MATCH)], "killed", 2),
        ([End(), End(verdict="{")], "unreadable", 2),
        ([End(), End(verdict="[]")], "unreadable", 2),
        ([End(), End(verdict='{"schema": 1, "verdict": "match", "cause": null}')], "unreadable", 2),
        ([End(), End(verdict=json.dumps(MATCH.to_dict() | {"schema": 2}))], "unreadable", 2),
        ([End(), End(verdict=json.dumps(MATCH.to_dict() | {"verdict": "fine"}))], "unreadable", 2),
        ([End(), End(status=1, verdict=DIVERGED)], "", 1),
        ([End(), End(verdict=DIVERGED)], "", 1),  # on_divergence=warn
        ([End(), End(status=-signal.SIGKILL, verdict=DIVERGED)], "", 1),
        ([End(), End(status=3, verdict=NOT_COMPARABLE)], "", 3),
        ([End(), End(verdict=MATCH)], "", 0),
    ],
)
def test_only_a_verdict_of_match_and_a_good_end_are_a_match(
    ends: list[End], problem: str, code: int, check: Check
) -> None:
    report, _ = check(*ends)
    assert (report.runs[-1].problem, report.exit_code) == (problem, code)
    assert (report.runs[-1].outcome == "failed") is (code == 2)
    assert len(report.runs) == len(ends)


def test_a_factor_is_the_one_thing_that_changes(check: Check, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LC_ALL", "de_DE.UTF-8")
    monkeypatch.setenv("PYTHONPATH", f"src{os.pathsep}/lib")
    hashing = replace(MATCH, environment=(differing("env.PYTHONHASHSEED", is_machine=False),))
    ends = [End(), End(verdict=MATCH), *(End(verdict=v) for v in (hashing, MATCH, MATCH))]
    report, processes = check(*ends, vary=("hash-seed", "cwd", "locale", "cwd"))
    assert report.exit_code == 0
    assert [run.name for run in report.runs] == ["recording", "plain", "hash-seed", "cwd", "locale"]
    base = {**os.environ, "PYTHONHASHSEED": "0"}
    assert report.variables == {"PYTHONHASHSEED": "0"}
    elsewhere = tmp_path / "runs" / "elsewhere"
    assert [(folder, variables) for _, folder, variables in processes.started] == [
        (tmp_path, base),
        (tmp_path, base),
        (tmp_path, base | {"PYTHONHASHSEED": "1"}),
        (elsewhere, base | {"PYTHONPATH": f"{tmp_path}/src{os.pathsep}/lib"}),
        (tmp_path, base | {"LC_ALL": "C"}),
    ]
    words = [words for words, _, _ in processes.started]
    assert {other[:-1] for other in words[2:]} == {words[1][:-1]}
    assert list(elsewhere.iterdir()) == []


def test_a_hash_seed_of_the_caller_stays(check: Check, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONHASHSEED", str(2**32 - 1))
    report, processes = check(End(), End(verdict=MATCH), End(verdict=MATCH), vary=("hash-seed",))
    assert [variables["PYTHONHASHSEED"] for _, _, variables in processes.started] == ["4294967295"] * 2 + ["0"]
    assert report.variables == {}
    assert not report.is_hash_seed_random


@pytest.mark.parametrize(
    ("verdict", "outcome", "breaks", "code"),
    [
        (replace(MATCH, environment=(THREADS,)), "match", False, 0),
        (NOT_COMPARABLE, "not_comparable", True, 1),
        (
            replace(
                NOT_COMPARABLE,
                environment=(
                    THREADS,
                    differing("env.OMP_NUM_THREADS", changes_bits=False),
                    differing("hparams.x", is_machine=False),
                ),
            ),
            "not_comparable",
            True,
            1,
        ),
        (replace(NOT_COMPARABLE, environment=(THREADS, differing("torch.cpu_capability"))), "not_comparable", False, 3),
        (replace(NOT_COMPARABLE, first_divergence=None), "not_comparable", False, 3),
        (DIVERGED, "diverged", True, 1),
        (MATCH, "failed", False, 2),  # as many threads as before: nothing was varied
    ],
)
def test_threads_that_were_changed_on_purpose_excuse_nothing(
    verdict: Verdict, outcome: str, breaks: bool, code: int, check: Check
) -> None:
    report, processes = check(End(), End(verdict=MATCH), End(verdict=verdict), vary=("threads",))
    words, _, variables = processes.started[-1]
    assert (words[-1], variables["OMP_NUM_THREADS"]) == ("determinism.settings.num_threads=1", "1")
    run = report.runs[-1]
    assert (run.outcome, run.breaks_bits, report.exit_code) == (outcome, breaks, code)


def test_a_plain_pair_on_other_threads_is_not_comparable(check: Check) -> None:
    report, _ = check(End(), End(status=3, verdict=NOT_COMPARABLE))
    assert (report.runs[1].breaks_bits, report.exit_code) == (False, 3)


@pytest.mark.parametrize("plain", [End(verdict=DIVERGED), End(status=1), End(verdict=NOT_COMPARABLE)])
def test_nothing_is_varied_without_a_match(plain: End, check: Check) -> None:
    report, _ = check(End(), plain, vary=("cwd", "locale"))
    assert [(run.name, run.outcome) for run in report.runs[2:]] == [("cwd", "not_run"), ("locale", "not_run")]
    assert report.exit_code != 0


def test_unless_it_is_asked_for(check: Check) -> None:
    report, _ = check(End(), End(verdict=DIVERGED), End(verdict=MATCH), vary=("cwd",), go_on=True)
    assert [run.outcome for run in report.runs] == ["recorded", "diverged", "match"]
    assert report.exit_code == 1


def test_what_a_factor_changes_cannot_be_told_beside_a_pair_that_differs(check: Check) -> None:
    report, _ = check(End(), End(verdict=DIVERGED), End(verdict=DIVERGED), vary=("cwd",), go_on=True)
    assert [(run.outcome, run.breaks_bits) for run in report.runs[1:]] == [("diverged", True), ("diverged", False)]
    assert [run.name for run in report.breaking] == ["plain"]


@pytest.mark.parametrize(
    ("ends", "code"),
    [
        ([End(status=1), End(verdict=DIVERGED)], 1),
        ([End(status=1), End(verdict=MATCH)], 2),
        ([End(verdict=MATCH), End(status=1)], 2),
        ([End(status=1), End(verdict=NOT_COMPARABLE)], 2),
        ([End(verdict=MATCH), End(verdict=NOT_COMPARABLE)], 3),
    ],
)
def test_what_is_known_best_decides_the_status(ends: list[End], code: int, check: Check) -> None:
    report, _ = check(End(), End(verdict=MATCH), *ends, vary=("cwd", "locale"))
    assert report.exit_code == code


def test_what_cannot_be_varied_is_said(check: Check) -> None:
    words = ("python", "-E", "train.py")
    report, _ = check(End(), End(verdict=MATCH), words=words, vary=("workers", "hash-seed"))
    assert [(run.problem, run.detail) for run in report.runs[2:]] == [
        ("not varied", "the training has no torch DataLoader, whose workers could be others"),
        ("not varied", "Python was asked to ignore its environment variables (-E or -I)"),
    ]
    assert report.exit_code == 2


def test_a_module_is_found_from_elsewhere(check: Check, tmp_path: Path) -> None:
    ends = (End(), End(verdict=MATCH), End(verdict=MATCH))
    _, processes = check(*ends, words=("python", "-m", "train", "lr=1"), vary=("cwd",))
    assert processes.started[-1][2]["PYTHONPATH"] == str(tmp_path)
    assert "PYTHONPATH" not in processes.started[0][2]


def test_a_folder_that_holds_something_is_refused(check: Check, tmp_path: Path) -> None:
    (tmp_path / "runs").mkdir()
    check(End(status=1))
    with pytest.raises(CheckError, match="is not an empty folder"):
        check()
    with pytest.raises(CheckError, match="there are workers, threads, hash-seed, cwd, locale"):
        check(vary=("worker",))


def test_an_interruption_ends_the_check(check: Check, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted() -> Iterator[End]:
        yield End()
        raise KeyboardInterrupt

    monkeypatch.setattr(runner, "run_process", Processes(interrupted()).run)
    announced: list[str] = []
    with pytest.raises(KeyboardInterrupt):
        check_script(["python", "train.py"], to="runs", vary=("cwd",), announce=lambda run: announced.append(run.name))
    assert announced == ["recording", "plain"]
    assert not Path("runs/check.json").exists()


def test_a_program_that_does_not_start_is_an_error(check: Check, tmp_path: Path) -> None:
    program = tmp_path / "train"
    program.write_text("#!/no/such/interpreter\n")
    program.chmod(0o700)
    with pytest.raises(CheckError, match="cannot be started"):
        check_script([str(program)])
