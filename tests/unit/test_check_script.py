"""What a check makes of processes that end in every way; the processes themselves are played."""

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO, Any

import pytest
import stored_runs
from verdicts import DIVERGED, MATCH, NOT_COMPARABLE, THREADS, differing

from det_callbacks import check as checks
from det_callbacks.check import CheckedRun, CheckReport, Script, check_script, run_process
from det_callbacks.cli.check import check_sections
from det_callbacks.errors import CheckError
from det_callbacks.report.console import to_text
from det_callbacks.variables import LAUNCH
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
    started: list[tuple[tuple[str, ...], Mapping[str, str]]] = field(default_factory=list)
    asked: list[Any] = field(default_factory=list)

    def run(self, words: Sequence[str], *, variables: Mapping[str, str], output: IO[bytes]) -> int:
        self.started.append((tuple(words), variables))
        self.asked.append(json.loads(variables[LAUNCH]))
        Path(self.asked[-1].pop("claim")).touch()
        given, end = self.asked[-1]["arguments"], next(self.ends)
        if given["mode"] == "record" and end.run != "none":
            path = Path(given["reference"])
            writer = stored_runs.RunWriter.create(path, manifest={"selection": {}, "environment": ENVIRONMENT})
            stored_runs.append(writer, range(4))
            writer.close(complete=end.run == "complete")
        if end.verdict is not None:
            current = Path(given["current"])
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

    def run(*ends: End, words: Sequence[str] = ("python", "train.py", "lr=1"), **options: Any) -> Any:
        processes = Processes(iter(ends))
        monkeypatch.setattr(checks, "run_process", processes.run)
        script = Script(words=words, arguments={"level": "state"}, settings=options.pop("settings", {}))
        report = check_script(script, **{"to": "runs", **options})
        assert next(processes.ends, None) is None, "not all of the processes were started"
        return report, processes

    return run


@pytest.mark.parametrize("settings", [{}, {"seed": 3}])
def test_the_script_is_started_as_given(check: Check, tmp_path: Path, settings: dict[str, int]) -> None:
    report, processes = check(End(), End(verdict=MATCH), settings=settings)
    home = tmp_path / "runs"
    assert [words for words, _ in processes.started] == [("python", "train.py", "lr=1")] * 2
    recording = {"mode": "record", "reference": f"{home}/reference", "overwrite": False}
    verifying = {"mode": "verify", "reference": f"{home}/reference", "current": f"{home}/plain"}
    assert processes.asked == [
        {"arguments": {"level": "state", **one}, "settings": settings} for one in (recording, verifying)
    ]
    others = [{name: it for name, it in one.items() if name != LAUNCH} for _, one in processes.started]
    paths = [one.pop("PYTHONPATH", "") for one in others]
    assert others == [{name: it for name, it in os.environ.items() if name != "PYTHONPATH"}] * 2
    assert ["startup" in path for path in paths] == [bool(settings)] * 2
    assert (report.exit_code, report.not_run) == (0, ())


@pytest.mark.parametrize(
    ("ends", "reason", "code"),
    [
        ([End(status=1, run="none")], "the script failed with status", 2),
        ([End(status=-signal.SIGSEGV)], "was killed by signal", 2),
        ([End(run="none")], "nothing was recorded", 2),
        ([End(run="incomplete")], "its recording is incomplete", 2),
        ([End(), End()], "nothing was verified", 2),
        ([End(), End(status=2)], "the script failed with status", 2),
        ([End(), End(status=1, verdict=MATCH)], "the script failed with status", 2),
        ([End(), End(status=-signal.SIGKILL, verdict=MATCH)], "was killed by signal", 2),
        ([End(), End(verdict="{")], "cannot be read", 2),
        ([End(), End(verdict=json.dumps(MATCH.to_dict() | {"schema": 2}))], "cannot be read", 2),
        ([End(), End(status=1, verdict=DIVERGED)], "", 1),
        ([End(), End(verdict=DIVERGED)], "", 1),  # on_divergence=warn
        ([End(), End(status=-signal.SIGKILL, verdict=DIVERGED)], "", 1),
        ([End(), End(status=3, verdict=NOT_COMPARABLE)], "", 3),
        ([End(), End(verdict=MATCH)], "", 0),
    ],
)
def test_only_a_verdict_of_match_and_a_good_end_are_a_match(
    ends: list[End], reason: str, code: int, check: Check
) -> None:
    """Nothing is varied without one."""
    vary = ("workers", "threads") if code else ()
    report, _ = check(*ends, vary=vary)
    assert reason in report.runs[-1].reason
    assert (bool(report.runs[-1].reason), report.exit_code) == (bool(reason), code)
    assert (report.runs[-1].outcome == "failed") is (code == 2)
    assert (len(report.runs), report.not_run) == (len(ends), vary)


@pytest.mark.parametrize(("given", "seeds"), [(None, ["0", "0", "1"]), (str(2**32 - 1), ["4294967295"] * 2 + ["0"])])
def test_a_factor_is_the_one_thing_that_changes(
    given: str | None, seeds: list[str], check: Check, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A hash seed of the caller stays."""
    if given is not None:
        monkeypatch.setenv("PYTHONHASHSEED", given)
    _, processes = check(End(), End(verdict=MATCH), End(verdict=HASHING), vary=("hash-seed", "hash-seed"))
    assert [variables["PYTHONHASHSEED"] for _, variables in processes.started] == seeds
    for one in processes.asked:
        one["arguments"].pop("current", None)
    assert processes.asked[2] == processes.asked[1]
    _, processes = check(End(), End(verdict=MATCH), End(verdict=THREADING), vary=("threads",), to="threads")
    assert (processes.asked[-1]["settings"], processes.started[-1][1]["OMP_NUM_THREADS"]) == ({"num_threads": 1}, "1")


HASHING = replace(MATCH, environment=(differing("env.PYTHONHASHSEED", is_machine=False),))
THREADING = replace(MATCH, environment=(THREADS,))


@pytest.mark.parametrize(
    ("vary", "ends", "outcomes", "code"),
    [
        (("threads", "hash-seed"), [THREADING, HASHING], ["match", "match"], 0),
        (("threads", "hash-seed"), [None, DIVERGED], ["failed", "diverged"], 1),
        (("threads", "hash-seed"), [NOT_COMPARABLE, None], ["not_comparable", "failed"], 2),
        (("threads", "hash-seed"), [THREADING, NOT_COMPARABLE], ["match", "not_comparable"], 3),
        (("threads",), [MATCH], ["failed"], 2),  # as many threads as before: nothing was varied
        (("hash-seed",), [MATCH], ["failed"], 2),
        (("workers",), [], ["failed"], 2),  # the training has no DataLoader
    ],
)
def test_what_is_known_best_decides_the_status(
    vary: tuple[str, ...], ends: list[Verdict | None], outcomes: list[str], code: int, check: Check
) -> None:
    played = [End(status=int(verdict is None), verdict=verdict) for verdict in ends]
    report, _ = check(End(), End(verdict=MATCH), *played, vary=vary)
    assert ([run.outcome for run in report.runs[2:]], report.exit_code) == (outcomes, code)
    assert all(bool(run.reason) is (run.outcome == "failed") for run in report.runs)


def test_a_python_that_ignores_its_variables_has_no_hash_seed(check: Check) -> None:
    report, _ = check(End(), End(verdict=MATCH), words=("python", "-E", "train.py"), vary=("hash-seed",))
    assert report.runs[-1].reason.endswith("Python was asked to ignore its environment variables (-E or -I)")


def test_what_cannot_be_started_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckError, match="No command was given"):
        Script(words=())
    with pytest.raises(CheckError, match=r"no-such-program cannot be started") as refused:
        check_script(Script(words=("no-such-program", "train.py")), to=tmp_path / "runs")
    assert refused.value.exit_code == 2


def test_the_folder_is_a_new_one_and_one_that_holds_something_is_refused(check: Check, tmp_path: Path) -> None:
    homes = {check(End(status=1), to=None)[0].folder for _ in range(2)}
    assert homes == set((tmp_path / "determinism-check").iterdir())
    with pytest.raises(CheckError, match="is not an empty folder"):
        check(to=homes.pop())
    with pytest.raises(CheckError, match="there are workers, threads, hash-seed\\."):
        check(vary=("worker",))


# in words


def test_what_it_comes_to_is_said_with_the_verdicts_that_are_no_match() -> None:
    recorded = CheckedRun(name="recording", outcome="recorded")
    plain = CheckedRun(name="plain", outcome="match", verdict=MATCH)
    diverged = replace(plain, outcome="diverged", verdict=DIVERGED)
    workers = replace(plain, name="workers", change="another number")
    threads = replace(diverged, name="threads", change="one", verdict=NOT_COMPARABLE)
    failed = replace(recorded, name="hash-seed", outcome="failed", reason="it ended")

    def said(*runs: CheckedRun, not_run: tuple[str, ...] = ()) -> list[str]:
        report = CheckReport(folder=Path("home"), runs=(recorded, *runs), not_run=not_run)
        return to_text(check_sections(report)).splitlines()

    assert said(diverged, not_run=("workers",))[-1] == (
        "det-callbacks check: diverged: the script does not repeat itself; not run: workers; kept in home"
    )
    lines = said(plain, workers, threads, failed)
    assert lines[-1] == (
        "det-callbacks check: diverged: the script repeats itself, bit for bit; bits depend on: threads; "
        "bits do not depend on: workers; could not be varied or checked: hash-seed; kept in home"
    )
    assert [line for line in lines if line][:2] == ["threads: one", "NOT COMPARABLE"]
    assert ["threads", "one", "diverged", "step", "3,", "forward:"] in [line.split()[:6] for line in lines]
    assert "hash-seed: it ended." in "\n".join(lines)


# real processes


def test_no_shell_reads_the_words_and_the_variables_are_all_there_are(capfd: pytest.CaptureFixture[str]) -> None:
    source = """if True:
        import os, sys
        print(sys.argv[1:], sorted(set(os.environ) - {"LC_CTYPE"}), sys.stdin.read() == "")
        sys.exit(7)
    """
    assert run_process([sys.executable, "-I", "-c", source, "a b", "$HOME"], variables={"X": "1"}) == 7
    assert capfd.readouterr().out == "['a b', '$HOME'] ['X'] True\n"


TRAINING = """if True:
    import os, signal, subprocess, time
    {handler}
    worker = subprocess.Popen(["/bin/sleep", "600"])
    open("pids.tmp", "w").write(f"{{os.getpid()}} {{worker.pid}}")
    os.rename("pids.tmp", "pids")
    {end}
"""
IGNORES = "signal.signal(signal.SIGINT, signal.SIG_IGN)"


@pytest.mark.parametrize(
    ("number", "handler", "end"),
    [
        (signal.SIGINT, "", "time.sleep(600)"),
        (signal.SIGTERM, "", "time.sleep(600)"),
        (signal.SIGHUP, IGNORES, "time.sleep(600)"),  # it is killed once the grace is over
        (None, "", "os.kill(os.getpid(), signal.SIGKILL)"),
    ],
)
def test_nothing_outlives_the_check(
    number: int | None, handler: str, end: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(checks, "GRACE_SECONDS", 2.0 if handler else 60.0)
    usual = {signal.SIGINT: signal.default_int_handler, signal.SIGHUP: signal.SIG_DFL}  # nohup ignores some
    before = {known: signal.signal(known, one) for known, one in usual.items()}
    sent = threading.Thread(target=send_when_started, args=(number,), daemon=True)
    sent.start()
    words = [sys.executable, "-I", "-c", TRAINING.format(handler=handler, end=end)]
    try:
        if number is None:
            assert run_process(words, variables={}) == -signal.SIGKILL
        else:
            with pytest.raises(KeyboardInterrupt if number == signal.SIGINT else SystemExit):
                run_process(words, variables={})
    finally:
        sent.join()
        for known, one in before.items():
            signal.signal(known, one)
    pids = [int(pid) for pid in Path("pids").read_text().split()]
    deadline = time.monotonic() + 30
    while any(map(is_alive, pids)):
        assert time.monotonic() < deadline
        time.sleep(0.02)


def send_when_started(number: int | None) -> None:
    while not Path("pids").exists():
        time.sleep(0.02)
    if number is not None:
        os.kill(os.getpid(), number)


def is_alive(pid: int) -> bool:
    """Whether a process runs; one that ended and that nobody asked about does not."""
    try:
        return (Path("/proc") / str(pid) / "stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
