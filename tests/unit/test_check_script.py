"""What a check makes of processes that end in every way; the processes themselves are played."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import IO, Any, NamedTuple

import pytest
import stored_runs
from verdicts import DIVERGED, MATCH, NOT_COMPARABLE, THREADS, differing

from det_callbacks.cli import check as checks
from det_callbacks.cli import main
from det_callbacks.cli.check import Script, new_folder, run_process
from det_callbacks.environment.variables import LAUNCH
from det_callbacks.errors import CheckError
from det_callbacks.verdict import Resume, Verdict


class End(NamedTuple):
    """How a process ends: what it wrote and its status."""

    status: int = 0
    verdict: Verdict | str | None = None
    run: str = "complete"


class Processes:
    """Plays the processes of a check, in order, and keeps how they were started."""

    def __init__(self, ends: Iterator[End]) -> None:
        self.ends, self.variables, self.asked = ends, list[Mapping[str, str]](), list[Any]()
        self.words: list[Sequence[str]] = []

    def run(self, words: Sequence[str], *, variables: Mapping[str, str], output: IO[bytes]) -> int:
        self.variables.append(variables)
        self.words.append(words)
        self.asked.append(json.loads(variables[LAUNCH]))
        given, end = self.asked[-1]["arguments"], next(self.ends)
        Path(self.asked[-1].pop("claim")).touch()
        if given["mode"] == "record" and end.run != "none":
            path = Path(given["reference"])
            writer = stored_runs.RunWriter.create(path, manifest=MANIFEST)
            stored_runs.append(writer, range(4))
            writer.close(complete=end.run == "complete")
        if given["mode"] == "verify" and end.run == "incomplete":
            writer = stored_runs.RunWriter.create(
                Path(given["current"]), manifest=MANIFEST, purpose="verify"
            )
            writer.close(complete=False)
            writer.release()
        if end.verdict is not None:
            current = Path(given["current"])
            current.mkdir()
            text = (
                end.verdict if isinstance(end.verdict, str) else json.dumps(end.verdict.to_dict())
            )
            (current / "verdict.json").write_text(text)
        return end.status


ENVIRONMENT = {"torch.num_threads": {"value": 2, "is_machine": True, "changes_bits": True}}
MANIFEST = {"selection": {}, "environment": ENVIRONMENT}
FILLING = replace(MATCH, environment=(differing("env.MALLOC_PERTURB_", is_machine=False),))
HASHING = replace(MATCH, environment=(differing("env.PYTHONHASHSEED", is_machine=False),))
THREADING = replace(MATCH, environment=(THREADS,))
Check = Callable[..., tuple[int, list[str], Processes]]


@pytest.fixture
def check(tmp_path: Path, monkeypatch: Any, capsys: Any) -> Check:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)

    def run(
        *ends: End, options: str = "", resume: str | None = None
    ) -> tuple[int, list[str], Processes]:
        processes = Processes(iter(ends))
        monkeypatch.setattr(checks, "run_process", processes.run)
        given = [*options.split(), *([] if resume is None else ["--resume", resume])]
        status = main(["check", "--level", "state", *given, "--", "python", "train.py", "lr=1"])
        assert next(processes.ends, None) is None, "not all of the processes were started"
        return status, capsys.readouterr().out.splitlines(), processes

    return run


@pytest.mark.parametrize(
    ("ends", "reason", "code"),
    [
        ([End(status=1, run="none")], "The script exited with status", 2),
        ([End(status=-signal.SIGSEGV)], "was killed by signal", 2),
        ([End(run="none")], "nothing was recorded", 2),
        ([End(run="incomplete")], "its recording is incomplete", 2),
        ([End(), End()], "nothing was verified", 2),
        (
            [End(), End(run="incomplete")],
            "its verification is incomplete: the process did not end as it should",
            2,
        ),
        ([End(), End(status=2)], "The script exited with status", 2),
        ([End(), End(status=1, verdict=MATCH)], "The script exited with status", 2),
        ([End(), End(verdict="{")], "cannot be read", 2),
        ([End(), End(verdict=json.dumps(MATCH.to_dict() | {"schema": 2}))], "cannot be read", 2),
        ([End(), End(verdict=DIVERGED)], "DIVERGED", 1),  # on_divergence=warn
        ([End(), End(status=-signal.SIGKILL, verdict=DIVERGED)], "DIVERGED", 1),
        ([End(), End(status=3, verdict=NOT_COMPARABLE)], "NOT COMPARABLE", 3),
    ],
)
def test_only_a_verdict_of_match_and_a_good_end_are_a_match(ends, reason, code, check):
    """Nothing is varied without one."""
    status, lines, _ = check(*ends, options="--vary threads,workers")
    assert reason in "\n".join(lines)
    assert not [line for line in lines if line.endswith("..")]
    assert (status, table(lines)[-2:]) == (code, [["workers", "not run"], ["threads", "not run"]])
    assert (f"det-callbacks check: failed (exit status {code})" in lines[-1]) is (code == 2)


@pytest.mark.parametrize(("given", "seeds"), [(None, ["0", "0", "1"]), ("7", ["7", "7", "0"])])
def test_a_factor_is_the_one_thing_that_changes(given, seeds, check, monkeypatch):
    """A hash seed of the caller stays."""
    if given is not None:
        monkeypatch.setenv("PYTHONHASHSEED", given)
    *_, processes = check(
        End(), End(verdict=MATCH), End(verdict=HASHING), options="--vary hash-seed,hash-seed"
    )
    assert [variables["PYTHONHASHSEED"] for variables in processes.variables] == seeds
    for one in processes.asked:
        one["arguments"].pop("current", None)
    assert processes.asked[2] == processes.asked[1]
    *_, processes = check(
        End(), End(verdict=MATCH), End(verdict=THREADING), options="--vary threads"
    )
    assert (processes.asked[-1]["settings"], processes.variables[-1]["OMP_NUM_THREADS"]) == (
        {"num_threads": 1},
        "1",
    )


@pytest.mark.parametrize(("given", "filled"), [(None, ("90", "165")), ("90", ("195", "60"))])
def test_memory_is_filled_by_glibc_and_by_the_recording_alike(given, filled, check, monkeypatch):
    monkeypatch.setenv("GLIBC_TUNABLES", "glibc.malloc.check=0")
    if given is not None:
        monkeypatch.setenv("MALLOC_PERTURB_", given)
    *_, processes = check(End(), End(verdict=MATCH), End(verdict=FILLING), options="--vary memory")
    plain, varied = processes.variables[1:]
    assert (varied["MALLOC_PERTURB_"], varied["DET_CALLBACKS_FILL_MEMORY"]) == filled
    assert varied["GLIBC_TUNABLES"] == "glibc.malloc.check=0:glibc.malloc.tcache_count=0"
    assert (plain.get("MALLOC_PERTURB_"), plain["GLIBC_TUNABLES"]) == (
        given,
        "glibc.malloc.check=0",
    )
    if given is not None:
        return  # a process is started for one of them
    script = (
        "import torch; print({torch.empty(size, dtype=torch.uint8)[size // 2].item() for size in "
        "(8, 999, 1 << 22)})"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], env={**varied, LAUNCH: ""}, capture_output=True, text=True
    )
    assert done.stdout == f"{{{filled[1]}}}\n", done.stderr


def test_memory_of_another_library_than_glibc_is_not_varied(check, monkeypatch):
    monkeypatch.setattr("platform.libc_ver", lambda: ("", ""))
    status, lines, _ = check(options="--vary memory")
    assert (status, lines) == (2, [])


@pytest.mark.parametrize(
    ("vary", "ends", "outcomes", "code"),
    [
        ("threads,hash-seed", [THREADING, HASHING], "match match", 0),
        ("threads,hash-seed", [None, DIVERGED], "failed diverged", 1),
        ("threads,hash-seed", [NOT_COMPARABLE, None], "not_comparable failed", 2),
        ("threads,hash-seed", [THREADING, NOT_COMPARABLE], "match not_comparable", 3),
        ("threads", [MATCH], "failed", 2),  # as many threads as before
        ("hash-seed", [MATCH], "failed", 2),
        ("memory", [FILLING], "match", 0),
        ("memory", [MATCH], "failed", 2),
    ],
)
def test_what_is_known_best_decides_the_status(vary, ends, outcomes, code, check):
    played = [End(status=int(verdict is None), verdict=verdict) for verdict in ends]
    status, lines, _ = check(End(), End(verdict=MATCH), *played, options=f"--vary {vary}")
    expected = [
        [name, one.replace("_", " ")]
        for name, one in zip(vary.split(","), outcomes.split(), strict=True)
    ]
    assert (status, table(lines)) == (code, [["plain", "match"], *expected])
    assert f"bit for bit;{' its results depend on hash-seed;' * (code == 1)} kept in" in lines[-1]


RESUME = Resume(step=2, how="found", restored={"parameters": "restored"})
WHOLE, LOST = replace(MATCH, resume=RESUME), replace(DIVERGED, resume=RESUME)


@pytest.mark.parametrize(
    ("ends", "words", "code"),
    [
        ([End(), End(verdict=WHOLE)], "the resume is exact, bit for bit", 0),
        ([End(), End(status=1, verdict=LOST)], "the resume is not exact", 1),
        (
            [End(), End(verdict=MATCH)],
            "It did not begin with the state that a step of python train.py lr=1 left",
            2,
        ),
        ([End(), End(status=1, verdict=DIVERGED)], "so it resumed from no checkpoint of it", 1),
        ([End(), End()], "nothing was verified", 2),
        ([End(status=1, run="none")], "the script could not be checked", 2),
    ],
)
def test_a_resume_is_exact_only_if_the_command_resumed_and_matches(ends, words, code, check):
    status, lines, processes = check(*ends, resume="python train.py --from 'last one.pt'")
    text = " ".join(lines)
    assert (status, words in text) == (code, True), text
    assert not [
        words
        for words in processes.words[1:]
        if words != ["python", "train.py", "--from", "last one.pt"]
    ]


def test_the_program_is_interrupted_before_it_is_resumed(check):
    ends = End(), End(verdict=MATCH), End(verdict=WHOLE)
    status, _, processes = check(
        *ends, options="--until 700", resume="python train.py --from last.pt"
    )
    _, interrupted, resumed = processes.asked
    asked = [one.get("DET_CALLBACKS_LAST_STEP") for one in processes.variables]
    assert (status, asked) == (0, [None, "700", None])
    assert (interrupted["arguments"]["steps"], "steps" in resumed["arguments"]) == ("common", False)
    status, lines, _ = check(
        End(), End(status=1, verdict=DIVERGED), options="--until 700", resume="python train.py"
    )
    assert (status, "the script is not reproducible" in lines[-1]) == (1, True)


@pytest.mark.parametrize(
    ("options", "resume"), [("--until 3", None), ("", " "), ("--vary threads", "python a.py")]
)
def test_what_resumes_is_needed_and_nothing_else_varies(options, resume, check):
    status, lines, _ = check(options=options, resume=resume)
    assert (status, lines) == (2, [])


@pytest.mark.parametrize("options", ["", "--vary threads"])
def test_check_names_the_command_that_finds_the_op_unless_nothing_more_can_be_learned(
    options, check
):
    runs = (End(), End(1, replace(DIVERGED, record_next={"level": "op"})))
    _, lines, _ = check(*runs, options=options)
    words = " ".join(["det-callbacks find", *options.split(), "-- python train.py lr=1"])
    assert words in " ".join(lines)
    assert "det-callbacks find" not in " ".join(
        check(End(), End(1, DIVERGED), options="--to other")[1]
    )


@pytest.mark.parametrize(("options", "seed"), [("", None), ("", 7), ("--seed 0", 0)])
def test_a_script_without_a_seed_is_told_of_the_option(options, seed, check, monkeypatch):
    monkeypatch.setitem(MANIFEST, "settings", {"seed": seed})
    _, lines, _ = check(End(), End(verdict=DIVERGED), options=options)
    assert ("the script sets no seed: add --seed 0; kept in" in lines[-1]) is (seed is None)


def table(lines: Sequence[str]) -> list[list[str]]:
    rows = [
        re.split("  +", line)
        for line in lines
        if re.match(r"(plain|workers|threads|hash-seed|memory) ? .* +\S", line)
    ]
    return [[row[0], row[2]] for row in rows if len(row) == 5]


def test_what_cannot_be_started_or_has_no_new_folder_is_refused(check, tmp_path, capsys):
    for words, shown in (
        ("check", "check --"),
        ("record refs/q --level state", "record refs/q --level state --"),
        ("verify refs/q --", "verify refs/q --"),
    ):
        assert main(words.split()) == 2
        says = (
            f"There is no command to run. Put it after --: det-callbacks {shown} python train.py\n"
        )
        assert capsys.readouterr().err.endswith(says)
    for words, says in (
        (
            "record ref2 python train.py --lr 3",
            "after --: det-callbacks record ref2 -- python train.py --lr 3\n",
        ),
        (
            "check --level state ./train.sh",
            "after --: det-callbacks check --level state -- ./train.sh\n",
        ),
    ):
        assert main(words.split()) == 2
        assert says in capsys.readouterr().err
    for words in ("show run other", "record --levels state"):
        with pytest.raises(SystemExit, match="2"):
            main(words.split())
        assert "error: " in capsys.readouterr().err
    for words in (
        "record @ -- true",
        "show @",
        "diff @ run",
        "diff run @",
        "doctor --against @",
        "check --to @ -- true",
    ):
        with pytest.raises(SystemExit, match="2"):
            main(["" if word == "@" else word for word in words.split()])
        assert "must be a path; got ''" in capsys.readouterr().err
    assert not [*tmp_path.iterdir()]
    with pytest.raises(
        CheckError, match=r"no-such-program cannot be started: [^:]*: 'no-such-program'$"
    ):
        Script(words=("no-such-program", "train.py")).record(tmp_path / "run")
    (tmp_path / "train.py").touch()
    for name in ("train.py", "./train.py"):
        with pytest.raises(
            CheckError,
            match=rf"{name} cannot be started: .*\. Start it with Python: -- python {name} -x$",
        ):
            Script(words=(name, "-x")).record(tmp_path / "run")
    for _ in range(2):
        check(End(status=1))
    first, _ = (tmp_path / "determinism-check").iterdir()
    with pytest.raises(CheckError, match="exists and is not empty"):
        new_folder(first, "determinism-check", option="--to")


# real processes


def test_no_shell_reads_the_words_and_the_variables_are_all_there_are(capfd):
    source = (
        "import os, sys; print(sys.argv[1:], {*os.environ} - {'LC_CTYPE'}, sys.stdin.read() == "
        "''); sys.exit(7)"
    )
    assert (
        run_process([sys.executable, "-I", "-c", source, "a b", "$HOME"], variables={"X": "1"}) == 7
    )
    assert capfd.readouterr().out == "['a b', '$HOME'] {'X'} True\n"


LAUNCHER = """if True:
    import signal, sys
    from det_callbacks.cli import check
    signal.signal(signal.SIGINT, signal.default_int_handler)
    check.GRACE_SECONDS = 1
    sys.exit(check.run_process([sys.executable, "-I", "-c", sys.argv[1]], variables={}))
"""
TRAINING = """if True:
    import os, signal, time
    signal.signal(signal.SIGINT, signal.{handler})
    open("pid.tmp", "w").write(str(os.getpid()))
    os.rename("pid.tmp", "pid")
    time.sleep(600)
"""


@pytest.mark.parametrize(
    ("number", "handler"),
    [
        (signal.SIGINT, "default_int_handler"),
        (signal.SIGINT, "SIG_IGN"),  # it is killed once the grace is over
        (signal.SIGTERM, "SIG_IGN"),
    ],
)
def test_no_training_outlives_the_check(number, handler, tmp_path):
    words, pid = (
        [sys.executable, "-c", LAUNCHER, TRAINING.format(handler=handler)],
        tmp_path / "pid",
    )
    with subprocess.Popen(
        words, cwd=tmp_path, stderr=subprocess.DEVNULL, start_new_session=True
    ) as launcher:
        while not pid.exists():
            time.sleep(0.02)
        if number == signal.SIGINT:
            os.killpg(launcher.pid, number)  # as a terminal does
        else:
            launcher.send_signal(number)
        assert launcher.wait(30) not in (0, None)
    assert not is_alive(pid.read_text())


def is_alive(pid: str) -> bool:
    stat = Path("/proc") / pid / "stat"
    return stat.exists() and stat.read_text().rpartition(")")[2].split()[0] != "Z"
