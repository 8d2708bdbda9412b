"""What each command does, and what it is given.

Exit status: 0 match or fine, 1 diverged, 2 could not do it (usage, unreadable), 3 not comparable.
"""

import argparse
import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import version
from typing import Any

from rich.progress import Progress

from det_callbacks.cli.check import add_check
from det_callbacks.compare import compare_runs
from det_callbacks.errors import DetCallbacksError, SelectionError
from det_callbacks.export import export_run
from det_callbacks.nondeterminism import read_op_facts
from det_callbacks.report.checkpoints import render_checkpoint
from det_callbacks.report.console import count, make_console, print_error, print_line
from det_callbacks.report.doctor import render_diagnosis
from det_callbacks.report.html import write_report
from det_callbacks.report.ops import find_op_usage, ops_to_dict, render_op_facts
from det_callbacks.report.run import (
    render_digest_places,
    render_head,
    render_ops,
    render_run,
    render_step,
    run_to_dict,
    step_to_dict,
)
from det_callbacks.report.verdict import render_verdict
from det_callbacks.runs.store import RankRun, Run

INTERRUPTED = 130


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return its exit status.

    Args:
        argv: arguments; None takes those of the process.
    """
    options = _parser().parse_args(argv)
    try:
        return int(options.run(options))
    except DetCallbacksError as error:
        print_error(error, name="det-callbacks")
        return error.exit_code
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        # whoever read the output has gone; keep the interpreter from complaining about it at its end
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def _show(options: argparse.Namespace) -> int:
    run = Run.open(options.run_folder)
    rank = run.rank(options.rank)
    console = make_console()
    if options.find is not None:
        return 0 if render_digest_places(run, rank, options.find, console) else 1
    if options.step is None and not options.ops:
        if options.json:
            _print_json(run_to_dict(run, rank))
        else:
            render_run(run, rank, console, is_all=options.all)
        return 0
    view = run.view(rank.rank, options.segment, _chosen_step(run, rank, options.segment, options.step))
    if options.json:
        _print_json(step_to_dict(view))
    elif options.ops:
        render_ops(view, console)
    else:
        render_step(view, console)
    return 0


def _chosen_step(run: Run, rank: RankRun, segment: int, step: int | None) -> int:
    """Return a step that the run holds: the last one where None is asked for."""
    steps = rank.steps(segment)
    if step is None and not len(steps):
        raise SelectionError(f"{run.path} holds no step of fit {segment}; its fits are {rank.segments}.")
    if step is not None and step not in steps:
        held = f"{count(len(steps), 'step')} from {steps[0]} to {steps[-1]}" if len(steps) else "no steps"
        raise SelectionError(f"{run.path} holds no step {step} of fit {segment}, rank {rank.rank}; it holds {held}.")
    return int(steps[-1]) if step is None else step


def _diff(options: argparse.Namespace) -> int:
    with _progress_bar("comparing steps") as progress:
        verdict = compare_runs(
            options.reference,
            options.current,
            steps=options.steps,
            check_files=options.check_files or None,
            jobs=options.jobs,
            progress=progress,
        )
    if options.json:
        _print_json(verdict.to_dict())
    else:
        render_verdict(verdict, make_console())
    if options.html is not None:
        sys.stdout.flush()
        path = write_report(options.html, verdict, reference=options.reference, current=options.current)
        print_line(make_console(stderr=True), f"det-callbacks: wrote {path}")
    return verdict.exit_code


def _export(options: argparse.Namespace) -> int:
    with _progress_bar("exporting steps") as progress:
        done = export_run(options.run_folder, options.to, progress=progress)
    console = make_console()
    rows, steps, ranks = count(done.num_rows, "row"), count(done.num_steps, "step"), count(done.num_ranks, "rank")
    print_line(console, f"{done.path}: {rows} of {steps} and {ranks}, {done.num_bytes / 1e6:.1f} MB")
    if done.incomplete_reason is not None:
        print_line(console, f"The run is incomplete; its whole steps are there: {done.incomplete_reason}")
    return 0


def _ops(options: argparse.Namespace) -> int:
    run = None if options.used_by is None else Run.open(options.used_by)
    facts = read_op_facts()
    usage = None if run is None else find_op_usage(run, facts)
    if options.json:
        _print_json(ops_to_dict(facts, usage, run))
        return 0
    console = make_console()
    if run is not None:
        render_head(run, console)
    render_op_facts(facts, console, usage)
    return 0


def _doctor(options: argparse.Namespace) -> int:
    from det_callbacks.doctor import diagnose

    diagnosis = diagnose(against=None if options.against is None else Run.open(options.against))
    if options.json:
        _print_json(diagnosis.to_dict())
    else:
        render_diagnosis(diagnosis, make_console())
    return 0 if diagnosis.is_well else 1


def _check_checkpoint(options: argparse.Namespace) -> int:
    from det_callbacks.checkpoint import check_checkpoint

    report = check_checkpoint(options.checkpoint, options.other)
    if options.json:
        _print_json(report.to_dict())
    else:
        render_checkpoint(report, make_console())
    return report.exit_code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="det-callbacks",
        description="Look into recorded training runs and compare them, bit for bit.",
        epilog="Exit status: 0 match or fine, 1 diverged, 2 could not do it, 3 not comparable.",
    )
    parser.add_argument("--version", action="version", version=f"det-callbacks {version('det_callbacks')}")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    as_json: dict[str, Any] = {"action": "store_true", "help": "JSON on standard output"}

    show = commands.add_parser("show", help="what a run holds", description="Show what a run holds.")
    show.add_argument("run_folder", metavar="RUN", help="folder of the run")
    show.add_argument("--step", type=_number, metavar="N", help="the sites of this step")
    show.add_argument("--rank", type=_number, default=0, metavar="R", help="of this process (default 0)")
    show.add_argument("--segment", type=_number, default=0, metavar="S", help="of this fit of the run (default 0)")
    show.add_argument("--find", type=_digest, metavar="DIGEST", help="where this digest appears; exit 1 if nowhere")
    show.add_argument("--ops", action="store_true", help="the most frequent ops of a step (default: the last)")
    show.add_argument("--all", action="store_true", help="every step of a long run")
    show.add_argument("--json", **as_json)
    show.set_defaults(run=_show)

    diff = commands.add_parser("diff", help="compare two runs", description="Compare a run with its reference.")
    diff.add_argument("reference", metavar="REFERENCE", help="folder of the reference")
    diff.add_argument("current", metavar="CURRENT", help="folder of the run to compare")
    diff.add_argument(
        "--steps",
        choices=("all", "common"),
        default="all",
        help="all: other steps than the reference's are a divergence (default); common: those that both have",
    )
    diff.add_argument(
        "--check-files",
        action="store_true",
        help="read every step of both runs, also of large ones, where chains say that they agree",
    )
    jobs = "processes that compare ranks (default: as many as pay)"
    diff.add_argument("--jobs", type=_positive, metavar="N", help=jobs)
    diff.add_argument("--json", **as_json)
    diff.add_argument("--html", metavar="FILE", help="write a report to look at, too: one file that loads nothing")
    diff.set_defaults(run=_diff)

    add_check(commands)

    doctor = commands.add_parser(
        "doctor",
        help="which settings are in force here",
        description="Show which determinism settings are in force in a new process here, what is missing or too late, "
        "and the line to add for each. Exit 1 when something asked for is not in force.",
    )
    against = "ask for what was in force in this run, and show how this machine differs"
    doctor.add_argument("--against", metavar="RUN", help=against)
    doctor.add_argument("--json", **as_json)
    doctor.set_defaults(run=_doctor)

    ops = commands.add_parser(
        "ops",
        help="which ops are not deterministic",
        description="Show what the installed torch says of its ops: which are not deterministic, and which draw.",
    )
    ops.add_argument("--used-by", metavar="RUN", help="only those that this run uses, with their modules")
    ops.add_argument("--json", **as_json)
    ops.set_defaults(run=_ops)

    export = commands.add_parser(
        "export",
        help="a Parquet data set of a run",
        description="Write the sites of a run as a Parquet data set, one folder a rank, that DuckDB, Polars and Spark "
        "query as it is. The run is read once and checked; what an interrupted export wrote is removed.",
    )
    export.add_argument("run_folder", metavar="RUN", help="folder of the run")
    export.add_argument("--to", required=True, metavar="DIR", help="folder to make, or an empty one")
    export.set_defaults(run=_export)

    check = commands.add_parser(
        "check-checkpoint",
        help="whether a checkpoint is what was saved",
        description="Compare a checkpoint with the digests that stand beside it, or with another checkpoint. "
        "Exit 1 when something differs, 2 when it cannot be told.",
    )
    check.add_argument("checkpoint", metavar="CHECKPOINT", help="file or folder; the reference, where OTHER is given")
    check.add_argument("other", metavar="OTHER", nargs="?", help="say how this one differs from CHECKPOINT")
    check.add_argument("--json", **as_json)
    check.set_defaults(run=_check_checkpoint)
    return parser


def _print_json(content: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(content, indent=1) + "\n")


@contextmanager
def _progress_bar(title: str) -> Iterator[Callable[[int, int], None] | None]:
    """Show a progress bar on a terminal, and yield a function of (done, all) that moves it."""
    console = make_console(stderr=True)
    if not console.is_terminal:
        yield None
        return
    with Progress(console=console, transient=True) as progress:
        task = progress.add_task(title, total=None)
        yield lambda done, total: progress.update(task, completed=done, total=total)


def _number(text: str, *, least: int = 0) -> int:
    if not text.isdecimal() or int(text) < least:
        raise argparse.ArgumentTypeError(f"must be a whole number from {least} on; got {text!r}")
    return int(text)


def _positive(text: str) -> int:
    return _number(text, least=1)


def _digest(text: str) -> int:
    if not 1 <= len(text) <= 16 or not set(text.lower()) <= set("0123456789abcdef"):
        raise argparse.ArgumentTypeError(f"must be up to 16 hexadecimal digits; got {text!r}")
    return int(text, 16)
