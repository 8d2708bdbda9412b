"""``det-callbacks record``, ``verify`` and ``check`` on scripts that know nothing of it."""

import json
import os
import random
import re
import subprocess
import sys
from pathlib import Path

import pytest
from checking import write_app
from trainers import LIGHTNING_ADVICE

from det_callbacks import compare_runs
from det_callbacks.environment.variables import LAUNCH
from det_callbacks.errors import ReferenceFormatError
from det_callbacks.integrations.launch import callbacks
from det_callbacks.runs.store import Run as StoredRun

pytestmark = LIGHTNING_ADVICE


def test_a_script_is_recorded_and_verified_as_it_is(run_command):
    """Two Trainers are two segments; the table of pyproject.toml counts,
    and the command line counts more.
    """
    table = 'level = "op"\nmodules = ["net*", "!metric/time"]\ndeterministic = false\n'
    Path("pyproject.toml").write_text(f"[tool.det_callbacks]\n{table}")
    done = run_command("record", "refs/run1", "--level", "state", faults=["twice"])
    assert (done.status, done.errors) == (0, "")
    assert "training with ['twice'], seed 0" in done.text
    assert done.last == (
        f"det-callbacks record: recorded (exit status 0); the run: {Path('refs/run1').absolute()}"
    )
    run = StoredRun.open(Path("refs/run1"))
    assert (run.manifest.selection.level, run.manifest.selection.modules) == (
        "state",
        ("net*", "!metric/time"),
    )
    assert run.rank(0).segments == [0, 1]

    done = run_command(
        "verify", "refs/run1", "--level", "state", "--current", "same", faults=["twice"]
    )
    assert done.status == 0
    assert "\nMATCH\n" in done.text
    assert (
        done.last
        == f"det-callbacks verify: match (exit status 0); kept in {Path('same').absolute()}"
    )
    done = run_command(
        "verify", "refs/run1", "--level", "state", "--current", "other", faults=["twice", "planted"]
    )
    assert (done.status, "Traceback" in done.errors) == (1, False)
    assert "\nDIVERGED\nStep 1" in done.text
    assert done.last.endswith(f"report: {Path('other/run/report.html').absolute()}")
    assert Path("other/run/report.html").stat().st_size > 1000


def test_what_rounding_does_is_measured_and_is_the_tolerance_of_a_diff(run_command):
    done = run_command("check", "--numerics", "--to", "tol")
    assert (done.status, done.errors) == (0, "")
    assert "Rounding: with the last bit of its first inputs changed, " in done.text
    assert done.last.endswith(
        f"det-callbacks diff REFERENCE CURRENT --numerics --tolerance {Path('tol').absolute()}"
    )
    reference, perturbed = (
        StoredRun.open(Path("tol", name)) for name in ("reference", "perturbed")
    )
    assert "inputs of the first step" in perturbed.manifest.environment
    assert "inputs of the first step" not in reference.manifest.environment

    plain = compare_runs(reference.path, perturbed.path, numerics=True)
    measured = compare_runs(reference.path, perturbed.path, numerics=True, tolerance="tol").numerics
    assert (plain.numerics.tolerance, measured.tolerance) == ("torch.testing", "tol/rounding.json")
    assert plain.first_divergence.name == "batch[0]"
    assert (measured.conclusion, measured.num_beyond, measured.num_default) == ("rounding", 0, 0)
    assert 0 < measured.worst.excess <= 0.1 + 1e-9  # ten times what was measured is tolerated
    first = next(site for site in measured.sites if site.op == "aten.addmm.default")
    assert 0 < first.relative < 1e-6

    # what was measured as less is beyond; a site that was not measured has the
    # tolerance of torch.testing
    path = Path("tol", "rounding.json")
    content = json.loads(path.read_text())
    optimized = [site for site in content["sites"] if site[3] == "optimizer"]
    path.write_text(
        json.dumps({**content, "sites": [[*site[:8], site[8] / 1e4] for site in optimized]})
    )
    found = compare_runs(reference.path, perturbed.path, numerics=True, tolerance="tol").numerics
    others = [site for site in found.sites if site.phase != "optimizer" and site.relative]
    assert found.num_default == len(others) > 10
    for damage in (
        "{}",
        json.dumps({**content, "sites": [[*site[:8], float("nan")] for site in optimized]}),
    ):
        path.write_text(damage)
        with pytest.raises(ReferenceFormatError, match="it is not a measured tolerance"):
            compare_runs(reference.path, perturbed.path, numerics=True, tolerance=path)
    done = run_command("check", "--numerics", "--vary", "threads", "--to", "other")
    assert (done.status, "one after the other" in done.errors) == (2, True)
    done = run_command("check", "--numerics", "--level", "state", "--to", "other")
    assert (done.status, 'keep_tensors needs level="op"' in done.text) == (2, True)


def test_what_goes_wrong_has_a_status_and_is_said_once(run_command):
    """Of several processes the last one would replace the verdict of the first."""
    assert run_command("record", "run", "--level", "state").status == 0
    failed = "The script exited with status 1"
    for command, faults, status, says in (
        ("record other", ["no fit"], 2, "no process told what it did with torch"),
        ("verify run", ["no fit"], 2, "no process told what it did with torch"),
        (
            "verify run",
            ["own", "twice"],
            2,
            "the script has its own DeterminismCallback, which is used",
        ),
        ("verify run", ["broken"], 2, failed),
        ("check", ["broken"], 2, failed),
    ):
        done = run_command(*command.split(), "--level", "state", faults=faults)
        assert (done.status, done.text.count(says)) == (status, 1), done.text
        shown = done.text if command == "check" else done.errors
        assert ("ZeroDivisionError: the script's own error" in shown) is ("broken" in faults)
        assert ("Traceback" in shown) is ("broken" in faults)
    for faults in (["planted", "processes"], ["processes"]):
        done = run_command("verify", "run", "--level", "state", faults=faults)
        assert (done.status, "MATCH" in done.text, "DIVERGED" in done.text) == (2, False, False)
        assert (
            "det-callbacks: The command trains in several processes that are not ranks of one"
            in done.errors
        )
    for words, says in (
        (("record", "run", "--level", "ops"), "--level: invalid choice: 'ops'"),
        (("record", "run", "--every-n-steps", "x"), "--every-n-steps: must be an integer"),
        (("record", "run", "--keep", "add"), "The op pattern 'add' names no op"),
        (("verify", "nothing"), "nothing"),
        (
            ("verify", "run", "--current", "train.py"),
            "it is a file; nothing was run; pass another folder (--current)",
        ),
        (
            ("record", "run", "--seed", "4294967296"),
            "must be an integer from 0 to 4294967295; got '4294967296'",
        ),
        (("check", "--vary", "worker"), "Use workers, threads, hash-seed, memory."),
    ):
        done = run_command(*words)
        assert (done.status, done.text) == (2, "")
        assert says in done.errors
    for table, says in (
        ("[[tool.det_callbacks]]", "is not a table of options"),
        ("levels = 1", "has the unknown option levels. Use --level, --modules, "),
        (
            "only_steps = [1, true]",
            "[tool.det_callbacks] of pyproject.toml adds --only-steps=1,True",
        ),
        ("level = ", "pyproject.toml cannot be read"),
        ("seed = true", "got 'True'"),
        ("modules = []", "modules must have at least one pattern"),
    ):
        Path("pyproject.toml").write_text(
            table if table.startswith("[") else f"[tool.det_callbacks]\n{table}\n"
        )
        done = run_command("record", "other")
        assert (done.status, done.text) == (2, "")
        assert says in done.errors


def test_a_refusal_of_ours_is_said_once_and_is_no_failure_of_the_script(run_command):
    """A run that is whole is refused before anything is loaded;
    one that was cut off may be resumed by the script.
    """
    assert run_command("record", "run", "--level", "state").status == 0
    done = run_command("record", "run", "--level", "state")
    assert (done.status, done.text) == (2, "")
    says = (
        f"det-callbacks: {Path('run').absolute()} already holds a run. Nothing was run or changed. "
        "Record to another "
    )
    assert done.errors.startswith(f"{says}folder, replace the run with --overwrite, or verify")
    assert run_command("record", "run", "--level", "state", "--overwrite").status == 0

    stream = Path("run/rank-00000/attempt-000.arrows")
    stream.write_bytes(stream.read_bytes()[:-8])
    done = run_command("record", "run", "--level", "state")
    assert (done.status, "training with" in done.text, "Traceback" in done.errors) == (
        2,
        True,
        False,
    )
    assert done.text.count("(det-callbacks record: --overwrite, ") == 1
    assert "already holds a run" not in done.errors
    assert "failed with status" not in done.text + done.errors
    assert done.last == "det-callbacks record: failed (exit status 2)"
    done = run_command("check", "--level", "state", "--modules", "nothing", "--to", "home")
    assert (done.status, "failed with status" in done.text) == (2, False)
    assert done.text.count("matches no module") == 1, done.text


@pytest.mark.slow
def test_a_locale_without_utf_8_changes_nothing_of_a_run(tmp_path):
    script = write_app(tmp_path / "app")
    name = script.rename(script.with_name("träin.py")).name
    ascii_only = {"LC_ALL": "C", "PYTHONUTF8": "0"}
    words = ("--", sys.executable, name)
    done = start("record", "rün", *words, folder=script.parent, **ascii_only)
    assert done.returncode == 0, done.stderr
    assert StoredRun.open(script.parent / "rün").manifest.environment["process.argv"].value == [
        "träin.py"
    ]
    done = start(
        "verify",
        "rün",
        "--current",
        "cürrent",
        *words,
        "planted",
        folder=script.parent,
        **ascii_only,
    )
    assert (done.returncode, "Traceback" in done.stderr) == (1, False), done.stderr
    assert re.search(r"\(tr\\xe4in\.py:\d+, training_step\)", done.stdout)
    done = start("check", "--to", "home", *words, "broken", folder=script.parent, **ascii_only)
    assert (done.returncode, "det-callbacks check: failed (exit status 2)" in done.stdout) == (
        2,
        True,
    ), done.stderr
    assert start("verify", "rün", "--current", "same", *words, folder=script.parent).returncode == 0


def test_the_entry_point_gives_nothing_unless_asked(monkeypatch):
    assert LAUNCH not in os.environ
    assert callbacks() == []
    script = (
        "import sys; from det_callbacks.integrations.launch import callbacks as c; c(); "
        "print(sorted(sys.modules))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    loaded = [
        name
        for name in eval(done.stdout)
        if name.startswith(("det_callbacks", "torch", "numpy", "msgspec"))
    ]
    rooms = [
        "det_callbacks",
        "det_callbacks.environment",
        "det_callbacks.errors",
        "det_callbacks.integrations",
    ]
    rooms.append("det_callbacks.text")
    assert loaded == sorted(
        [*rooms, "det_callbacks.environment.variables", "det_callbacks.integrations.launch"]
    )


def test_augmentation_in_the_main_process_depends_on_the_workers(run_command):
    done = run_command(
        "check", "--level", "state", "--vary", "workers", "--to", "home", faults=["augmentation"]
    )
    assert done.status == 1
    assert "training with" not in done.text
    assert "training with ['augmentation']" in Path("home/plain.txt").read_text()
    assert "\nworkers: 2 instead of 0\n\nDIVERGED\n" in done.text
    assert "num_workers of train_dataloader is 0 in the reference and 2" in " ".join(
        done.text.split()
    )
    assert re.search(r"^plain +nothing +match +- +-$", done.text, re.MULTILINE)
    row = r"^workers +2 instead of 0 +diverged +step 0, data: batch\[0\] +data_content$"
    assert re.search(row, done.text, re.MULTILINE)
    assert "bit for bit; its results depend on workers; kept in" in done.last


def test_a_read_of_unwritten_memory_depends_on_the_memory(run_command):
    """In a process that was forked only the recording fills memory:
    glibc does from a process's start.
    """
    done = run_command("check", "--vary", "memory", "--to", "home", faults=["memory"])
    assert done.status == 1, done.text
    row = (
        r"^memory +filled with 0xa5 .* +diverged +step 0, forward: aten\.sum\.default "
        r"+uninitialised_memory$"
    )
    assert re.search(row, done.text, re.MULTILINE), done.text
    assert "it reads a tensor (float32 [1000]) that was allocated in the step" in " ".join(
        done.text.split()
    )
    assert "bit for bit; its results depend on memory; kept in" in done.last


# real processes

EARLY = """
import os, random, sys
assert "torch" not in sys.modules
os.environ["OMP_NUM_THREADS"] = "1"
drawn = random.random()
import torch
print("drawn", drawn, torch.get_num_threads(), torch.initial_seed())
assert not any("startup" in path for path in sys.path)
"""


def start(*words: str, folder: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    command, environment = (
        (sys.executable, "-m", "det_callbacks", *words),
        {**os.environ, **variables},
    )
    return subprocess.run(
        command, cwd=folder, env=environment, timeout=280, capture_output=True, text=True
    )


def test_settings_are_in_force_before_the_first_line(tmp_path):
    """Also those of Python's generator; what the script sets before it imports
    torch decides as without us.
    """
    (tmp_path / "train.py").write_text(EARLY)
    (tmp_path / "sitecustomize.py").write_text("print('that of the machine')")
    words = ["record", "run", "--seed", "7", "--", "sh", "-c", f"{sys.executable} train.py"]
    done = start(*words, folder=tmp_path, PYTHONPATH=str(tmp_path), OMP_NUM_THREADS="2")
    assert f"drawn {random.Random(7).random()} 1 7\n" in done.stdout, done.stderr
    assert done.stdout.count("that of the machine") == 2, (
        "the command's own process, and the script's"
    )
    assert done.returncode == 2, "it never fits"


TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")


@pytest.mark.slow
@pytest.mark.ddp
@pytest.mark.parametrize("launcher", [(), TORCHRUN], ids=["Lightning's", "torchrun"])
def test_ranks_inherit_everything(launcher, tmp_path):
    script = write_app(tmp_path / "app")
    options, words = (
        ("--seed", "5", "--level", "state"),
        (sys.executable, *launcher, "train.py", "ddp", "unseeded"),
    )
    done = start("record", "run", *options, "--", *words, folder=script.parent)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("seed 5") == 2
    assert StoredRun.open(script.parent / "run").ranks == [0, 1]
    done = start("verify", "run", *options, "--", *words, "planted", folder=script.parent)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "\nDIVERGED\nStep 1" in done.stdout


@pytest.mark.slow
def test_a_python_that_ignores_its_variables_looks_neither_seeded_nor_varied(tmp_path):
    folder = write_app(tmp_path / "app").parent
    for words, says in (
        (
            ["record", "run", "--seed", "5"],
            "reach the script through PYTHONPATH, which this Python ignores",
        ),
        (["check", "--vary", "hash-seed"], "hash-seed: The script sets env.PYTHONHASHSEED itself"),
    ):
        command = [
            sys.executable,
            "-I" if "run" in words else "-E",
            "train.py",
            *["unseeded"] * ("run" in words),
        ]
        done = start(*words, "--level", "state", "--", *command, folder=folder)
        assert done.returncode == 2, done.stdout + done.stderr
        assert says in done.stdout + done.stderr


@pytest.mark.slow
def test_hash_seed_and_threads_are_named(tmp_path):
    script = write_app(tmp_path / "app")
    words = [
        "check",
        "--level",
        "state",
        "--vary",
        "threads,hash-seed,memory",
        "--to",
        "runs",
        "--",
        sys.executable,
    ]
    done = start(*words, script.name, "set", "reduction", "memory", folder=script.parent)
    assert done.returncode == 1, done.stderr
    home = script.parent / "runs"
    threads, hashing = (
        compare_runs(home / "reference", home / name) for name in ("threads", "hash-seed")
    )
    assert (threads.verdict, threads.first_divergence.name) == ("diverged", "loss"), (
        "they excuse nothing"
    )
    assert (hashing.verdict, hashing.first_divergence.phase) == ("diverged", "data")
    assert [entry.name for entry in hashing.environment] == ["env.PYTHONHASHSEED"]
    memory = compare_runs(home / "reference", home / "memory")
    assert (memory.verdict, memory.first_divergence.name) == ("diverged", "loss")
    assert (
        "is reproducible, bit for bit; its results depend on threads, hash-seed, memory; kept in"
        in done.stdout
    )
