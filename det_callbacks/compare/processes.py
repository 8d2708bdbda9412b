"""Comparing ranks in several processes.

Measured on two cores: 256 ranks x 200 steps x 4,000 sites (1.6 GB of digests a run) take 1 to 3 s in one process where
the chains agree or one digest differs, and 10 s where every step differs; reading releases the interpreter too rarely
for threads to make that faster. A process takes a second and 100 MB to start, so processes pay where much is left to
compare in Python: many steps whose programs differ, at 10 to 20 microseconds a site.

They are spawned: a fork would copy the locks and threads of whoever called. They ignore Ctrl-C, which their parent
answers by ending them, and end by themselves when it is gone.
"""

import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from det_callbacks.compare.ranks import RankFindings, RankWalk
from det_callbacks.errors import DetCallbacksError, ReferenceFormatError, WorkerError
from det_callbacks.runs.store import Run

MAX_JOBS = 8
"""Processes that are started without being asked for."""
WORTHWHILE_SITES = 2_000_000
"""Sites to be aligned from which on others are started: half a minute's work for one."""
_REPORT_STEPS = 50


def choose_jobs(jobs: int | None, walk: RankWalk) -> int:
    """Return how many processes compare: as many as asked for, but no more than there are ranks.

    Args:
        jobs: processes that were asked for; None for as many as pay.
        walk: through the runs.
    """
    ranks = walk.reference.ranks
    if walk.records:
        return 1  # of a verification one step a rank is read
    if jobs is not None:
        return min(jobs, len(ranks))
    most = min(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1, MAX_JOBS)
    most = min(most, len(ranks))
    return most if most > 1 and sum(map(walk.num_left, ranks)) > WORTHWHILE_SITES else 1


def compare_in_processes(walk: RankWalk, num_jobs: int, report: Callable[[int], None]) -> Iterator[RankFindings]:
    """Yield what each rank tells, in the order in which they are done.

    Args:
        walk: through the runs, which each process opens by itself.
        num_jobs: how many processes.
        report: called with numbers of steps that were looked at.

    Raises:
        ReferenceFormatError: a file is damaged; of several ranks, the one that noticed first.
        WorkerError: a process ended before it had compared its rank.
    """
    ranks = iter(walk.reference.ranks)
    context = multiprocessing.get_context("spawn")
    workers: dict[Connection, BaseProcess] = {}
    try:
        for _ in range(num_jobs):
            here, there = context.Pipe()
            process: BaseProcess = context.Process(target=_work, args=(there, _place(walk)), daemon=True)
            with _blocked_interrupts():
                process.start()
            there.close()
            workers[here] = process
            here.send(next(ranks))
        busy = set(workers)
        while busy:
            for connection in wait(list(busy)):
                assert isinstance(connection, Connection)
                message = _receive(connection, workers[connection])
                if isinstance(message, int):
                    report(message)
                    continue
                following = next(ranks, None)
                if following is None:
                    busy.remove(connection)
                else:
                    connection.send(following)
                yield message
    finally:
        for connection, process in workers.items():
            connection.close()
            process.terminate()
        for process in workers.values():
            process.join()


@contextmanager
def _blocked_interrupts() -> Iterator[None]:
    """Hold Ctrl-C back: a process that is started meanwhile never gets it, not even while it imports."""
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


_Place = tuple[Path, object, Path, object, bool, bool]


def _place(walk: RankWalk) -> _Place:
    """Return what a process needs to walk through the same runs."""
    reference, current = walk.reference, walk.current
    return (
        reference.path,
        reference.manifest.digest,
        current.path,
        current.manifest.digest,
        walk.is_common,
        walk.check_files,
    )


def _receive(connection: Connection, process: BaseProcess) -> Any:
    try:
        message = connection.recv()
    except (EOFError, ConnectionError) as error:
        process.join()
        raise WorkerError(
            f"A process that compared ranks ended (exit code {process.exitcode}; a negative one is a signal) before it "
            "was done; was there too little memory? Nothing is said about the runs. Compare in one process: --jobs 1."
        ) from error
    if isinstance(message, DetCallbacksError):
        raise message
    return message


def _work(connection: Connection, place: _Place) -> None:
    """Compare the ranks that are asked for, until nobody asks any more."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    num_steps = 0

    def report(count: int) -> None:
        nonlocal num_steps
        num_steps += count
        if num_steps >= _REPORT_STEPS:
            connection.send(num_steps)
            num_steps = 0

    try:
        walk = _walk(*place)
        while True:
            done = walk.compare(connection.recv(), report)
            connection.send(num_steps)
            num_steps = 0
            connection.send(done)
    except DetCallbacksError as error:
        connection.send(error)
    except (EOFError, ConnectionError):
        return


def _walk(
    reference: Path, reference_digest: object, current: Path, current_digest: object, is_common: bool, check_files: bool
) -> RankWalk:
    runs = Run.open(reference, check_steps=False), Run.open(current, check_steps=False)
    for run, digest in zip(runs, (reference_digest, current_digest), strict=True):
        if run.manifest.digest != digest:
            raise ReferenceFormatError(
                f"{run.path} was changed while it was compared: its run.json is another one. Nothing is said about the "
                "runs; compare them when nothing is recorded there.",
                str(run.path),
            )
    return RankWalk(reference=runs[0], current=runs[1], is_common=is_common, check_files=check_files, records={})
