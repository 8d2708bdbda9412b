"""How many planted faults are detected, located and given the right cause,
here and by torch's DebugMode.
"""

import argparse
import io
import json
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext, redirect_stdout
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from faults import Fault, begin, draw_faults, named_first, planted, strike
from torch.utils._debug_mode import DebugMode
from trainings import KINDS, Training

from det_callbacks import DivergenceError, TrainingRun, Verdict, digest_state

HASHES = ("norm", "hash_tensor")  # those of DebugMode
Result = dict[str, Any]


def train(
    training: Training, fault: Fault | None = None, around: Callable[..., Any] = nullcontext
) -> bool:
    """Train with a fault, or without, within what is opened around each step;
    return whether bits were changed.
    """
    with planted(fault) as (above, has_changed):
        for step, batch in enumerate(training.batches):
            strike(fault, training, step)
            with around(batch), above(step):
                training.step(batch)
        return has_changed()


def record(kind: str, folder: Path) -> bool:
    """Record a kind of training; return whether it ended with the bits that
    it has without a recording.
    """
    plain = KINDS[kind]()
    train(plain)
    after_plain, seen = torch.get_rng_state(), KINDS[kind]()
    with TrainingRun(folder, mode="record", model=seen.model, optimizers=seen.optimizer) as run:
        train(seen, around=run.step)
    is_same = digest_state(plain.model).tensors == digest_state(seen.model).tensors
    return is_same and torch.equal(after_plain, torch.get_rng_state())


def verify(kind: str, fault: Fault | None, reference: Path) -> Verdict | None:
    """Verify a training that may have a fault; return the verdict where it diverged."""
    training = KINDS[kind]()
    begin(fault, training)
    current = reference.with_name("current")
    shutil.rmtree(current, ignore_errors=True)
    try:
        options: Any = {
            "model": training.model,
            "optimizers": training.optimizer,
            "current": current,
        }
        with TrainingRun(reference, **options) as run:
            train(training, fault, run.step)
    except DivergenceError as error:
        return error.verdict
    return None


def log_hashes(kind: str, fault: Fault | None = None) -> tuple[list[Any], bool]:
    """Return DebugMode's log of a training, with both of its hashes of each output;
    and whether bits were changed.
    """
    training = KINDS[kind]()
    begin(fault, training)
    logs: list[Any] = []

    class Around:
        def __init__(self, batch: object) -> None:
            self.mode, self.hashes = DebugMode(), DebugMode.log_tensor_hashes([*HASHES])

        def __enter__(self) -> None:
            self.mode.__enter__()
            self.hashes.__enter__()

        def __exit__(self, *error: Any) -> None:
            self.hashes.__exit__(*error)
            self.mode.__exit__(*error)
            logs.extend(self.mode.logs)

    has_changed = train(training, fault, Around)
    return logs, has_changed


def judge(fault: Fault, verdict: Verdict | None) -> Result:
    """Compare a verdict with what was planted."""
    if verdict is None or verdict.first_divergence is None:
        return {"detected": False, "located": False, "cause": None, "is_cause_right": False}
    first = verdict.first_divergence
    found = (first.step, first.op) if fault.op else (first.step, first.name or "")
    is_named = (
        fault.op == first.op if fault.op else named_first(fault) in (first.name or first.op or "")
    )
    return {
        "detected": True,
        "located": first.step == fault.step and is_named,
        "cause": verdict.cause,
        "is_cause_right": verdict.cause == fault.cause,
        "found": list(found),
    }


def judge_hashes(fault: Fault, reference: list[Any], current: list[Any]) -> dict[str, Result]:
    """Compare what DebugMode's own comparison of two logs says with what was planted."""
    try:
        mismatches = DebugMode.check_hash_mismatches(reference, current)
    except ValueError as error:  # logs of another length or with other ops
        return {name: {"detected": True, "located": False, "raised": str(error)} for name in HASHES}
    results = {}
    for number, name in enumerate(HASHES):
        own = [one for one in mismatches if one["pytree_path"].endswith(f"[{number}]")]
        # "aten::addmm", "aten::sum.dim_IntList"
        call = own[0]["call"].replace("::", ".") if own else ""
        is_first = bool(call) and fault.op in (call, f"{call}.default")
        results[name] = {"detected": bool(own), "located": is_first}
    return results


def table(results: Sequence[Mapping[str, Any]]) -> str:
    """Return a row for each change, and one for all."""
    head = (
        "change",
        "faults",
        "detected",
        "located",
        "cause",
        "DebugMode norm",
        "its op",
        "hash_tensor",
        "its op",
    )
    rows = [head]
    changes = dict.fromkeys(one["fault"]["change"] for one in results)
    for change in [*changes, "all"]:
        own = [one for one in results if change in ("all", one["fault"]["change"])]
        in_ops = [one for one in own if one["fault"]["op"]]
        cells = [
            sum(one["ours"][key] for one in own)
            for key in ("detected", "located", "is_cause_right")
        ]
        row = [change, str(len(own)), *map(str, cells)]
        for name in HASHES:
            located = sum(one["debug_mode"][name]["located"] for one in in_ops)
            row += [str(sum(one["debug_mode"][name]["detected"] for one in own))]
            row += [f"{located} of {len(in_ops)}" if in_ops else "-"]
        rows.append(tuple(row))
    widths = [max(len(row[column]) for row in rows) for column in range(len(head))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        for row in rows
    )


def main(arguments: Sequence[str] | None = None) -> Result:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--faults", type=int, default=100, help="how many (default: 100)")
    parser.add_argument("--seed", type=int, default=0, help="what they are drawn from (default: 0)")
    parser.add_argument("--json", type=Path, help="where to write all results")
    options = parser.parse_args(arguments)
    begun = time.monotonic()
    faults = [*draw_faults(options.faults, options.seed)]
    kinds = sorted({fault.training for fault in faults})
    results: list[Result] = []
    num_without_effect = 0
    # the closing line of each run would bury the table
    with tempfile.TemporaryDirectory() as folder, redirect_stdout(io.StringIO()):
        references = {
            kind: Path(folder) / str(number) / "reference" for number, kind in enumerate(kinds)
        }
        unchanged = {kind: record(kind, references[kind]) for kind in kinds}
        alarms = [kind for kind in kinds if verify(kind, None, references[kind]) is not None]
        logs = {kind: log_hashes(kind)[0] for kind in kinds}
        try:
            for fault in faults:
                faulty_logs, has_changed = log_hashes(fault.training, fault)
                if not has_changed:  # two equal elements were swapped, or all of a constant
                    num_without_effect += 1
                    continue
                ours = judge(fault, verify(fault.training, fault, references[fault.training]))
                theirs = judge_hashes(fault, logs[fault.training], faulty_logs)
                results.append({"fault": asdict(fault), "ours": ours, "debug_mode": theirs})
        except KeyboardInterrupt:
            print(f"interrupted after {len(results)} of {len(faults)} faults", file=sys.stderr)
    summary = {
        "torch": torch.__version__,
        "seed": options.seed,
        "trainings": kinds,
        "false_alarms": alarms,
        "without_effect": num_without_effect,
        "bits_changed": [kind for kind in kinds if not unchanged[kind]],
        "seconds": round(time.monotonic() - begun, 1),
        "faults": results,
    }
    if options.json:
        options.json.write_text(json.dumps(summary, indent=1))
    print(table(results))
    print(
        f"{len(kinds)} kinds of trainings; without a fault: {len(alarms)} false alarms, bits "
        f"changed in {len(summary['bits_changed'])}; {num_without_effect} faults changed no bit "
        f"and do not count; torch {torch.__version__}, seed {options.seed}, {summary['seconds']} s"
    )
    return summary


if __name__ == "__main__":
    main()
