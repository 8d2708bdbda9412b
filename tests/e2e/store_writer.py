"""A process that writes runs until it is killed; it tells of each step after it was written.

Started once, since importing torch and Lightning takes longer than all the writing: for each line of its input, a
folder, it forks a writer, prints its process id, and waits until it has ended.
"""

import os
import sys
from pathlib import Path

import numpy as np
from stored_runs import digests_of, small_layout, small_program

from det_callbacks.environment import capture_environment
from det_callbacks.runs.program import Layout, Program
from det_callbacks.runs.selection import Selection
from det_callbacks.runs.store import Run
from det_callbacks.runs.writer import RunWriter

STEPS_OF_A_FIT = 60
STEPS_OF_A_PROGRAM = 7
MANIFEST = {"selection": Selection().to_dict(), "settings": {}, "environment": capture_environment().to_dict()}


def content_of(segment: int, step: int) -> tuple[Program, Layout, np.ndarray]:
    """Return what is written in a step; programs and layouts change often, so that their writing is hit too."""
    number = (segment * STEPS_OF_A_FIT + step) // STEPS_OF_A_PROGRAM
    num_sites = 1 + number % 400
    program = small_program(num_sites, op=f"aten.op{number}.default")
    return program, small_layout(num_sites), digests_of(step, num_sites, seed=segment)


def write(writer: RunWriter, segment: int, step: int) -> None:
    """Write a step."""
    program, layout, digests = content_of(segment, step)
    writer.put_program(program)
    writer.put_layout(layout)
    writer.append(step, 0, program.id, layout.id, digests)


def next_step(path: Path, told: Path) -> tuple[int, int]:
    """Return (segment, step) of what comes after the last step told of.

    The last fit may have been killed before any of its steps was told of; a step not told of is written again.
    """
    last_segment = Run.open(path).rank(0).segments[-1]
    lines = told.read_text().splitlines() if told.exists() else []
    if not lines:
        return last_segment, 0
    segment, step = (int(word) for word in lines[-1].split())
    return (segment, step + 1) if segment == last_segment else (last_segment, 0)


def write_until_killed(path: Path) -> None:
    """Start a run, or go on with one where it ended, and never stop."""
    told = (path.parent / f"{path.name}.told").open("a", buffering=1)
    segment, step = 0, 0
    if (path / "run.json").exists():
        segment, step = next_step(path, Path(told.name))
        writer = RunWriter.resume(path, manifest=MANIFEST)
    else:
        writer = RunWriter.create(path, manifest=MANIFEST, overwrite=True)
    while True:
        if step == STEPS_OF_A_FIT:
            writer.start_segment()
            segment, step = segment + 1, 0
        write(writer, segment, step)
        told.write(f"{segment} {step}\n")
        step += 1


def main() -> None:
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    for line in sys.stdin:
        pid = os.fork()
        if not pid:
            write_until_killed(Path(line.rstrip("\n")))
        sys.stdout.write(f"{pid}\n")
        sys.stdout.flush()
        _, status = os.waitpid(pid, 0)
        sys.stdout.write(f"{os.waitstatus_to_exitcode(status)}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
