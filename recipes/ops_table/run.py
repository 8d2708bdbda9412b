"""Which torch ops are deterministic, and on what their bits depend: ``make ops-table``.

Examines each op of torch's operator database (``op_db``) in a process of its own, with its own
samples and with larger ones, and makes docs/reference/ops-determinism.md of what
was found on each device.
"""

import argparse
import json
import multiprocessing
import platform
import random
import re
import sys
import types
import unittest
import warnings
from collections.abc import Iterator, Sequence
from datetime import date
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from conditions import examine, limit_time

HERE = Path(__file__).resolve().parent
PAGE = HERE.parents[1] / "docs" / "reference" / "ops-determinism.md"
SECONDS = 90  # for one op
Results = dict[str, dict[str, Any]]


def ops() -> dict[str, Any]:
    """Return the ops of torch's database by their names; a variant of a test has one, too."""
    # torch's test package imports it for assertions that are not used here
    stand_in = types.ModuleType("expecttest")
    stand_in.TestCase = unittest.TestCase  # type: ignore[attr-defined]
    stand_in.assert_expected_inline = None  # type: ignore[attr-defined]
    sys.modules.setdefault("expecttest", stand_in)
    from torch.testing._internal.common_methods_invocations import op_db  # looked at in torch 2.15

    named = {f"{op.name}.{op.variant_test_name}".rstrip("."): op for op in op_db}
    # those are for GPUs only
    return {name: op for name, op in named.items() if not name.startswith("jiterator")}


def _in_child(chosen: list[tuple[str, Any]], device: str, results: Connection) -> None:
    warnings.simplefilter("ignore")
    for name, op in chosen:
        limit_time(SECONDS)
        results.send((name, examine(op, device)))


def examine_all(chosen: dict[str, Any], device: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Examine ops in another process, since some samples end it, or take too long;
    it is started again for the rest.
    """
    context = multiprocessing.get_context("fork" if device == "cpu" else "spawn")
    left = [*chosen.items()]
    while left:
        receiving, sending = context.Pipe(duplex=False)
        process = context.Process(target=_in_child, args=(left, device, sending))
        process.start()
        sending.close()
        try:
            while left:
                yield receiving.recv()
                del left[0]
        except EOFError:
            process.join()
            yield (
                left[0][0],
                {"samples": 0, "problem": f"ended with {process.exitcode}", "found": {}},
            )
            del left[0]
        process.join()


def cell(result: dict[str, Any] | None) -> str:
    """Return what is to be said of an op on one device."""
    if result is None or (not result["samples"] and result["problem"]):
        return "not run"
    return (
        "; ".join(f"{name} ({', '.join(parts)})" for name, parts in sorted(result["found"].items()))
        or "-"
    )


def page(devices: dict[str, dict[str, Any]]) -> str:
    """Return the page: ops with something to say in a table, and the others by name."""
    names = sorted({name for one in devices.values() for name in one["ops"]})
    rows = [(name, [cell(one["ops"].get(name)) for one in devices.values()]) for name in names]
    told = [
        (name, cells) for name, cells in rows if any(one not in ("-", "not run") for one in cells)
    ]
    silent = [name for name, cells in rows if all(one == "-" for one in cells)]
    not_run = [name for name, cells in rows if (name, cells) not in told and "not run" in cells]
    head = (HERE / "head.md").read_text().rstrip()
    counts = [
        f"| {' | '.join(map(str, _counts(device, one)))} |" for device, one in devices.items()
    ]
    table = [f"| op | {' | '.join(devices)} |", f"| --- |{' --- |' * len(devices)}"]
    table += [f"| `{name}` | {' | '.join(cells)} |" for name, cells in told]
    columns = "device", "machine", "date", "torch", "ops", "run", "with something to say"
    summary = [f"| {' | '.join(columns)} |", f"|{' --- |' * len(columns)}", *counts]
    parts = [head, "\n".join(summary), "## Ops whose bits depend on something", "\n".join(table)]
    parts += [f"## Ops that are deterministic under all conditions\n\n{_listed(silent)}"]
    parts += (
        [f"## Not run\n\nNo sample of these could be run alone: {_listed(not_run)}"]
        if not_run
        else []
    )
    return "\n\n".join(parts) + "\n"


def machine(device: str) -> str:
    """Return the GPU, or the CPU and its vector instructions."""
    if device == "cuda":
        return torch.cuda.get_device_name()
    file = Path("/proc/cpuinfo")
    found = re.search(r"(?m)^model name\s*: (.*)$", file.read_text()) if file.exists() else None
    return f"{found[1] if found else platform.machine()}, {torch.backends.cpu.get_cpu_capability()}"


def _counts(device: str, one: dict[str, Any]) -> list[Any]:
    """Return the row of a device: where and when it was examined, and how many ops."""
    results = one["ops"].values()
    told = [result for result in results if cell(result) not in ("-", "not run")]
    return [
        device,
        one["machine"],
        one["date"],
        one["torch"],
        len(results),
        sum(map(_runs, results)),
        len(told),
    ]


def _runs(result: dict[str, Any]) -> bool:
    return bool(result["samples"])


def _listed(names: Sequence[str]) -> str:
    return ", ".join(f"`{name}`" for name in names) or "none"


def main(arguments: Sequence[str] | None = None) -> Results:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--device", choices=["cpu", "cuda"], default="cuda" if torch.cuda.is_available() else "cpu"
    )
    parser.add_argument(
        "--sample", type=int, help="examine so many ops only, and leave the page as it is"
    )
    parser.add_argument(
        "--only", nargs="+", default=[], help="examine these ops only, and leave the page as it is"
    )
    parser.add_argument(
        "--page", action="store_true", help="make the page of the results that are there"
    )
    options = parser.parse_args(arguments)
    results: Results = {}
    if not options.page:
        chosen = ops()
        if options.sample:
            names = random.Random(0).sample(sorted(chosen), options.sample)
            chosen = {name: chosen[name] for name in names}
        chosen = {
            name: op for name, op in chosen.items() if not options.only or name in options.only
        }
        for name, result in examine_all(chosen, options.device):
            results[name] = result
            if result["found"] or options.only:
                print(name, json.dumps(result), flush=True)
        print(f"{len(results)} ops, {sum(map(_runs, results.values()))} run on {options.device}")
        if options.sample or options.only:
            return results
        lines = ",\n".join(
            f"{json.dumps(name)}: {json.dumps(result)}" for name, result in sorted(results.items())
        )
        conditions = {
            "machine": machine(options.device),
            "date": str(date.today()),
            "torch": torch.__version__,
        }
        head = json.dumps(conditions).removesuffix("}")
        text = f'{head}, "ops": {{\n{lines}\n}}}}\n'  # a line for each op
        (HERE / f"{options.device}.json").write_text(text)
    PAGE.write_text(page(stored()))
    return results


def stored() -> dict[str, dict[str, Any]]:
    """Return the results of each device that this was run on."""
    return {path.stem: json.loads(path.read_text()) for path in sorted(HERE.glob("*.json"))}


if __name__ == "__main__":
    main()
