"""The pytest plugin, in sessions of projects that use it;
each session is a fork of this process.
"""

import os
import re
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from forks import fork_process, outside_ci

from det_callbacks.integrations.pytest_plugin import folder_name
from det_callbacks.integrations.pytest_runs import (
    TrainingRuns as TrainingRuns,  # before the forks, which would each load it
)

TESTS = """
    import os

    import lightning.pytorch as pl
    import pytest
    import torch
    from lightning.pytorch.demos.boring_classes import BoringModel

    START = torch.initial_seed()
    PLANTED = os.environ.get("PLANTED", "")

    class Model(BoringModel):
        def __init__(self):
            torch.rand(int(PLANTED == "before the seed"))
            super().__init__()
            self.save_hyperparameters({"alpha": 2 if PLANTED == "elsewhere, another choice" else 1})
            if PLANTED == "elsewhere, another shape":
                self.layer = torch.nn.Linear(32, 3)

        def training_step(self, batch, batch_idx):
            return super().training_step(batch, batch_idx)["loss"] * (2 if PLANTED and batch_idx == 1 else 1)

    def train(callback):
        torch.set_num_threads(2 if PLANTED.startswith("elsewhere") else 1)
        quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
        pl.Trainer(callbacks=[callback], max_steps=2, limit_val_batches=0, accelerator="cpu", **quiet).fit(Model())

    def test_plain(training_snapshot):
        train(training_snapshot(level="state"))

    class TestNet:
        @pytest.mark.parametrize("lr", [0.1])
        def test_two(self, training_snapshot, lr):
            for name in ("first", "second"):
                train(training_snapshot(name=name, level="state", settings={"seed": 3}))

    def test_without():
        assert torch.initial_seed() == START
        assert not torch.are_deterministic_algorithms_enabled()
"""  # noqa: E501  # a text


class Ended(NamedTuple):
    """How a session of pytest ended."""

    status: int
    text: str

    def counts(self, **outcomes: int) -> bool:
        last = self.text.rstrip().splitlines()[-1].partition(" in ")[0]
        return {
            word: int(number) for number, word in re.findall(r"(\d+) ([a-z]+)", last)
        } == outcomes


LEFT_OUT = ("-p", "no:cacheprovider", "-p", "no:hypothesispytest", "-p", "no:timeout")


def run_in(folder: Path, *arguments: str, **variables: str) -> Ended:
    (folder / "runner.py").write_text("import sys, pytest\nsys.exit(pytest.main(sys.argv[1:]))\n")
    words = [
        sys.executable,
        "runner.py",
        *LEFT_OUT,
        "-p",
        "no:xdist",
        "--basetemp",
        "temporary",
        *arguments,
    ]
    with (folder / "printed").open("w+b") as printed:
        status = fork_process(
            words, variables={**outside_ci(), **variables}, folder=folder, output=printed.fileno()
        )
    return Ended(status, (folder / "printed").read_text())


def run_fresh(folder: Path, *arguments: str) -> Ended:
    words = [sys.executable, "-m", "pytest", *LEFT_OUT, *arguments]
    done = subprocess.run(
        words,
        cwd=folder,
        env=outside_ci(),
        capture_output=True,
        text=True,
        check=False,
        timeout=280,
    )
    return Ended(done.returncode, done.stdout)


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: Any) -> Path:
    """A project whose tests have their references."""
    folder = tmp_path_factory.mktemp("recorded") / "project"
    (folder / "tests").mkdir(parents=True)
    (folder / "tests" / "test_net.py").write_text(textwrap.dedent(TESTS))
    (folder / "pytest.ini").write_text("[pytest]\n")

    done = run_in(folder)
    assert done.status == 1
    assert "During handling of the above exception" not in done.text
    assert done.counts(failed=2, passed=1), done.text
    assert "pytest --determinism-record 'tests/test_net.py::TestNet::test_two[0.1]'" in done.text
    assert "det_callbacks/" not in done.text, "no frame of ours"
    assert not (folder / "tests" / "__determinism__").exists()

    done = run_in(folder, "--determinism-record", "tests")
    assert done.status == 0, done.text
    assert "references of runs: 3 recorded\n" in done.text
    return folder


@pytest.fixture
def project(recorded: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(recorded, tmp_path / "project"))


def references(project: Path) -> dict[Path, tuple[int, bytes]]:
    home = project / "tests" / "__determinism__"
    files = (file for file in home.rglob("*") if file.is_file())
    return {file.relative_to(home): (file.stat().st_mtime_ns, file.read_bytes()) for file in files}


def test_references_have_the_names_of_their_tests(recorded):
    runs = {file.parent.as_posix() for file in references(recorded) if file.name == "run.json"}
    of_class = {f"test_net/TestNet.test_two[0.1]/{name}" for name in ("first", "second")}
    assert runs == {"test_net/test_plain", *of_class}
    odd = [
        folder_name(f"test_a.py::test[{text}]")
        for text in ("a/b", "a:b", "a?b", "x" * 300, "x" * 301)
    ]
    assert len(set(odd)) == 5
    assert all(re.fullmatch(r"test\[[\w]+\]?-[0-9a-f]{8}", name) for name in odd)


def test_what_is_equal_passes_and_is_not_recorded_again(project):
    before = references(project)
    for arguments, variables, word in (
        ((), {}, "matched"),
        (("--determinism-record=missing",), {}, "matched"),
        (("--determinism-record=force",), {"CI": "true"}, "unchanged"),
    ):
        done = run_in(project, *arguments, **variables)
        assert done.counts(passed=3), done.text
        assert f"references of runs: 3 {word}\n" in done.text
    assert references(project) == before
    done = run_in(project, "--determinism-record", CI="true")
    assert done.status == 4
    assert "or pass --determinism-record=force" in done.text


def test_a_difference_fails_its_test_and_is_recorded_where_that_is_asked_for(project):
    before = references(project)
    for arguments in ((), ("--determinism-record=missing",)):
        done = run_in(project, "-k", "plain", *arguments, PLANTED="yes")
        assert done.counts(failed=1, deselected=2), done.text
        assert done.text.count("DIVERGED\nStep 1, ") == done.text.count("First divergence") == 1, (
            "all of it, once"
        )
        accept = (
            "record the reference again and commit it:\n"
            "    pytest --determinism-record tests/test_net.py::test_plain\n"
        )
        assert accept in done.text
        line = "DIVERGED forward: loss (step 1)"
        assert done.text.split("test_plain ___")[1].lstrip("_").lstrip().startswith(f"{line}\n")
        summary = done.text.split("short test summary info")[1]
        assert re.search(
            rf"FAILED tests/test_net.py::test_plain - .*{re.escape(line)}$", summary, re.MULTILINE
        )
        assert ("Traceback" in done.text, "det_callbacks/" in done.text) == (False, False)
        report = re.search(r"^report: (.*/temporary/.*/report\.html)$", done.text, re.MULTILINE)
        assert report is not None, done.text
        assert Path(report[1]).is_file()
    assert (
        "training_snapshot() first"
        in run_in(project, "-k", "plain", PLANTED="before the seed").text
    )
    assert references(project) == before
    done = run_in(project, "-k", "plain", "--determinism-record", PLANTED="yes")
    assert done.counts(passed=1, deselected=2), done.text
    assert "references of runs: 1 re-recorded\n" in done.text
    assert run_in(project, "-k", "plain", PLANTED="yes").status == 0
    assert run_in(project, "-k", "plain").status == 1
    assert [
        name
        for name in os.listdir(project / "tests" / "__determinism__" / "test_net")
        if name[0] == "."
    ] == []


@pytest.mark.parametrize(
    ("outcome", "word"), [("fail", "failed"), ("skip", "skipped"), ("xfail", "xfailed")]
)
def test_another_machine_is_what_the_project_says(outcome, word, project):
    (project / "pytest.ini").write_text(f"[pytest]\ndeterminism_not_comparable = {outcome}\n")
    done = run_in(project, "-rsx", "-k", "plain", PLANTED="elsewhere")
    assert done.counts(**{word: 1, "deselected": 2}), done.text
    assert "torch.num_threads" in done.text
    for planted in (
        ("elsewhere, another shape", "elsewhere, another choice") if outcome == "skip" else ()
    ):
        done = run_in(project, "-k", "plain", PLANTED=planted)
        assert done.counts(failed=1, deselected=2), (planted, done.text)
        assert "NOT COMPARABLE" in done.text


BAD = """
    import pytest
    from test_net import train

    def test_never_trains(training_snapshot):
        training_snapshot()

    def test_fails_by_itself(training_snapshot):
        train(training_snapshot(level="state"))
        assert False, "the test's own"

    def test_stops(training_snapshot):
        train(training_snapshot(level="state"))
        raise KeyboardInterrupt

    def test_two_without_names(training_snapshot):
        training_snapshot()
        training_snapshot(name="other")

    def test_arguments(training_snapshot):
        training_snapshot(mode="verify")

    def test_unknown_argument(training_snapshot):
        training_snapshot(nonsense=1)
"""


def test_only_a_test_that_passes_keeps_what_it_recorded(project):
    (project / "tests" / "test_bad.py").write_text(textwrap.dedent(BAD))
    before = references(project)
    done = run_in(project, "tests/test_bad.py", "--determinism-record", "-k", "not stops")
    assert done.counts(failed=5, deselected=1), done.text
    assert "No run completed, so nothing was recorded for" in done.text
    unknown = "training_snapshot has no argument nonsense. It takes name, tolerance, level, "
    for text in (
        "AssertionError: the test's own",
        "give each a different name",
        "chooses mode itself",
        unknown,
    ):
        assert text in done.text
    assert run_in(project, "tests/test_bad.py", "--determinism-record", "-k", "stops").status == 2
    assert references(project) == before


LOOP = """
    import os

    import torch
    from torch.utils.data import DataLoader

    def train(follow):
        model = torch.nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        loader = DataLoader(torch.randn(16, 2), batch_size=4, shuffle=True)
        with follow(model=model, optimizers=optimizer) as run:
            for number, batch in enumerate(run.batches(loader)):
                with run.step(batch):
                    (model(batch).mean() * (2 if os.environ.get("PLANTED") and number == 2 else 1)).backward()
                    optimizer.step()
                    optimizer.zero_grad()
        return model

    def test_loop(training_snapshot):
        assert isinstance(training_snapshot(train, level="state", settings={"seed": 5}), torch.nn.Linear)

    def test_two(training_snapshot):
        for name in ("first", "second"):
            training_snapshot(train, name=name)
"""  # noqa: E501  # a text

BAD_LOOP = """
    def test_no_function(training_snapshot):
        training_snapshot("train")

    def test_not_entered(training_snapshot):
        training_snapshot(lambda follow: None)
"""


def test_a_function_with_a_loop_is_recorded_and_compared(tmp_path):
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_loop.py").write_text(textwrap.dedent(LOOP))
    done = run_in(tmp_path, "--determinism-record", "tests")
    assert done.counts(passed=2), done.text
    assert "references of runs: 3 recorded" in done.text
    done = run_in(tmp_path, "tests")
    assert "references of runs: 3 matched" in done.text
    done = run_in(tmp_path, "tests", PLANTED="1")
    assert done.counts(failed=2), done.text
    assert re.search(r"^DIVERGED .*\(step 2\)", done.text, re.MULTILINE), done.text

    (tmp_path / "tests" / "test_bad.py").write_text(textwrap.dedent(BAD_LOOP))
    done = run_in(tmp_path, "tests/test_bad.py", "--determinism-record")
    assert done.counts(failed=2), done.text
    assert "takes a function with a training loop, but got 'train'" in done.text
    assert "No run completed, so nothing was recorded for" in done.text


def test_references_that_no_test_uses_or_that_are_large_are_listed_where_all_tests_ran(
    project, monkeypatch
):
    monkeypatch.setattr("det_callbacks.integrations.pytest_plugin.LARGE_BYTES", 1000)
    home = project / "tests" / "__determinism__"
    shutil.copytree(home / "test_net" / "test_plain", home / "test_net" / "test_gone")
    shutil.copytree(home / "test_net" / "test_plain", home / "test_removed" / "test_plain")
    done = run_in(project)
    assert done.status == 0
    listed = re.findall(r"^  tests/__determinism__/(.*)$", done.text, re.MULTILINE)
    assert listed == ["test_net/test_gone", "test_removed/test_plain"], done.text
    assert re.search(
        r"(?m)^tests/__determinism__/test_net/test_plain is 0.\d MB: train fewer steps, or",
        done.text,
    )
    done = run_in(project, "--determinism-unused=fail")
    assert (done.status, "The session fails (--determinism-unused=fail): No test" in done.text) == (
        1,
        True,
    ), done.text
    for arguments in (
        ("--determinism-unused=fail", "tests/test_net.py::test_plain"),
        ("-k", "plain"),
    ):
        assert "No test uses" not in run_in(project, *arguments).text
    assert "No test uses" not in run_in(project, "-x", PLANTED="yes").text
    done = run_in(project, PLANTED="yes")
    assert done.text.count("  tests/__determinism__/") == 2, (
        "those of tests that failed are not known"
    )


def test_nothing_heavy_is_loaded_before_a_test_asks(tmp_path):
    (tmp_path / "test_light.py").write_text(
        "import sys\n"
        "def test_light():\n"
        "    assert 'det_callbacks.integrations.pytest_plugin' in sys.modules\n"
        "    assert not {'torch', 'lightning', 'numpy'} & set(sys.modules)\n"
    )
    done = run_fresh(tmp_path)
    assert done.status == 0, done.text
    assert "determinism" not in done.text.partition("collected")[2]


@pytest.mark.slow
def test_processes_of_xdist_report_together(project):
    home = project / "tests" / "__determinism__"
    shutil.copytree(home / "test_net" / "test_plain", home / "test_net" / "test_gone")
    shutil.rmtree(home / "test_net" / "TestNet.test_two[0.1]")
    done = run_fresh(project, "-n2", "--determinism-record=missing")
    assert done.status == 0, done.text
    assert "references of runs: 1 matched, 2 recorded\n" in done.text
    assert done.text.count("  tests/__determinism__/") == 1


TOLERANT = """
    import os

    import torch

    PLANTED = os.environ.get("PLANTED", "")

    def loop(follow):
        model = torch.nn.Linear(64, 8)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with follow(model=model, optimizers=optimizer) as run:
            for step in range(1 if PLANTED == "shorter" else 3):
                batch = torch.randn(512, 64)
                with run.step(batch):
                    if PLANTED == "rounding" and step == 0:
                        batch += 2e-7
                    out = model(batch)
                    out = torch.tanh(out) if PLANTED == "change" and step == 1 else out
                    out.square().mean().backward()
                    optimizer.step()
                    optimizer.zero_grad()

    def test_numbers(training_snapshot):
        training_snapshot(loop, tolerance="torch.testing", tensor_budget_mib=0.05)

    def test_bits(training_snapshot):
        training_snapshot(loop)
"""


def test_with_a_tolerance_numbers_are_compared_and_the_failure_shows_the_jump(tmp_path):
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_net.py").write_text(textwrap.dedent(TOLERANT))
    (tmp_path / "pytest.ini").write_text("[pytest]\ndeterminism_not_comparable = skip\n")
    assert run_in(tmp_path, "--determinism-record").counts(passed=2)
    (run,) = (tmp_path / "tests").rglob("test_numbers/run.json")
    assert sum(file.stat().st_size for file in run.parent.rglob("*.safetensors")) < 200_000
    done = run_in(tmp_path, PLANTED="rounding")
    assert done.counts(passed=1, failed=1), done.text
    assert "FAILED tests/test_net.py::test_bits - " in done.text
    done = run_in(tmp_path, "-k", "numbers", "--determinism-record", PLANTED="rounding")
    assert "1 unchanged" in done.text, "it is within the tolerance, so it is not recorded again"
    done = run_in(tmp_path, "-k", "numbers", PLANTED="change")
    assert done.counts(failed=1, deselected=1), done.text
    assert "Failed: A real change starts at " in done.text
    assert "through aten.tanh.default" in done.text
    assert "Jumps, by how much the error grows, the largest first" in done.text
    assert "times what its inputs explain, at" in done.text
    done = run_in(tmp_path, "-k", "numbers", PLANTED="shorter")
    assert done.counts(failed=1, deselected=1), done.text
    assert "The run has different steps from its reference" in done.text
