"""A process that is run to its end, with signals on both sides; none of them outlives this one."""

import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from det_callbacks.check.process import run_process

SECONDS = 60.0


@pytest.fixture(autouse=True)
def _interruptible() -> Iterator[None]:
    """Let signals mean what they mean in a terminal: what runs in the background, or by nohup, has some ignored."""
    usual = {signal.SIGINT: signal.default_int_handler, signal.SIGHUP: signal.SIG_DFL}
    before = {number: signal.signal(number, handler) for number, handler in usual.items()}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def run(source: str, folder: Path, **options: object) -> int:
    words = [sys.executable, "-I", "-c", textwrap.dedent(source), "a b", "$HOME"]
    return run_process(words, folder=folder, variables={"X": "1"}, **options)


def test_no_shell_reads_the_words_and_the_environment_is_all_there_is(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    source = """
        import os, sys
        print(sys.argv[1:], os.getcwd(), sorted(set(os.environ) - {"LC_CTYPE"}), sys.stdin.read() == "")
        sys.exit(7)
    """
    assert run(source, tmp_path) == 7
    assert capfd.readouterr().out == f"['a b', '$HOME'] {tmp_path} ['X'] True\n"
    assert run("print('aside')", tmp_path, output=2) == 0
    assert capfd.readouterr() == ("", "aside\n")


def test_a_signal_is_the_status(tmp_path: Path) -> None:
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)]
    assert run("import os; os.kill(os.getpid(), 9)", tmp_path) == -9
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)] == before


def test_a_program_that_is_not_there(tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(FileNotFoundError):
        run_process([str(tmp_path / "none")], folder=tmp_path, variables={})
    assert signal.getsignal(signal.SIGINT) is before


# a process of ours that runs one, which has started another one

# the module alone is read: importing the package takes longer than the test
OURS = """
    import sys
    from pathlib import Path
    exec(open("{source}").read())
    GRACE_SECONDS = 600.0
    sys.exit(run_process([sys.executable, "-I", "-c", sys.argv[1]], folder=Path("."), variables={{}}))
"""
TRAINING = """
    import os, signal, subprocess, sys, time
    {handler}
    worker = subprocess.Popen(["/bin/sleep", "600"])
    open("pids.tmp", "w").write(f"{{os.getpid()}} {{worker.pid}}")
    os.rename("pids.tmp", "pids")
    time.sleep(600)
"""
IGNORES = "signal.signal(signal.SIGINT, signal.SIG_IGN)"
WORKER_IGNORES = "signal.signal(signal.SIGINT, lambda *_: (open('told', 'w').close(), os._exit(3)))"


Started = Callable[[str], tuple["subprocess.Popen[str]", list[int]]]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Started]:
    """Start all three; none is left when the test fails."""
    with ExitStack() as undo:

        def started(handler: str) -> tuple["subprocess.Popen[str]", list[int]]:
            source = Path(__file__).parents[2] / "det_callbacks" / "check" / "process.py"
            ours = textwrap.dedent(OURS).format(source=source)
            words = [sys.executable, "-c", ours, textwrap.dedent(TRAINING.format(handler=handler))]
            process = undo.enter_context(subprocess.Popen(words, cwd=tmp_path, stderr=subprocess.PIPE, text=True))
            undo.callback(process.kill)
            wait_for(lambda: (tmp_path / "pids").exists())
            pids = [int(pid) for pid in (tmp_path / "pids").read_text().split()]
            undo.callback(lambda: [os.kill(pid, signal.SIGKILL) for pid in pids if is_alive(pid)])
            return process, pids

        yield started


def wait_for(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + SECONDS
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def is_alive(pid: int) -> bool:
    """Whether a process runs; one that ended and that nobody asked about does not."""
    try:
        return (Path("/proc") / str(pid) / "stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.parametrize(
    ("number", "handler", "status"),
    [
        (signal.SIGINT, "", -signal.SIGINT),  # KeyboardInterrupt, uncaught
        (signal.SIGTERM, WORKER_IGNORES, 128 + signal.SIGTERM),
        (signal.SIGHUP, WORKER_IGNORES, 128 + signal.SIGHUP),
    ],
)
def test_an_interruption_leaves_nobody_behind(
    number: int, handler: str, status: int, start: Started, tmp_path: Path
) -> None:
    process, pids = start(handler)
    assert all(map(is_alive, pids))
    process.send_signal(number)  # to it alone, as kill does
    _, errors = process.communicate(timeout=SECONDS)
    assert process.returncode == status
    assert ("KeyboardInterrupt" in errors) is (number == signal.SIGINT)
    assert (tmp_path / "told").exists() is bool(handler)
    wait_for(lambda: not any(map(is_alive, pids)))


def test_a_second_interruption_does_not_wait(start: Started) -> None:
    process, pids = start(IGNORES)
    process.send_signal(signal.SIGINT)
    time.sleep(0.3)
    assert all(map(is_alive, pids))
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=SECONDS)
    assert process.returncode == -signal.SIGINT
    wait_for(lambda: not any(map(is_alive, pids)))


def test_what_a_killed_program_had_started_ends_too(start: Started) -> None:
    process, (training, worker) = start("")
    os.kill(training, signal.SIGKILL)
    process.communicate(timeout=SECONDS)
    assert process.returncode == (-signal.SIGKILL) % 256
    wait_for(lambda: not is_alive(worker))
