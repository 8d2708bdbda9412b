"""Records each error with and without the mistake, and prints what one run tells,
and what the comparison tells.
"""

import argparse
import tempfile
from pathlib import Path

from errors import ERRORS, train
from torch.multiprocessing import start_processes

from det_callbacks import compare_runs


def record(name: str, folder: Path, *, is_fixed: bool) -> None:
    """Record one arm in processes of its own."""
    training = ERRORS[name]
    assert training is not None
    start_processes(
        train, (name, folder, is_fixed), nprocs=training.world_size, start_method="fork"
    )


def rows(names: list[str], folder: Path) -> list[tuple[str, str, str]]:
    """Return the error, the findings of the run that has it,
    and the cause of its difference from the correct run.
    """
    found = []
    for name in names:
        if ERRORS[name] is None:
            found.append((name, "-", "-"))
            continue
        (folder / name).mkdir()
        record(name, folder / name / "error", is_fixed=False)
        record(name, folder / name / "fixed", is_fixed=True)
        verdict = compare_runs(folder / name / "fixed", folder / name / "error")
        of_fixed = compare_runs(folder / name / "error", folder / name / "fixed").findings
        assert not of_fixed, (name, of_fixed)
        found.append(
            (name, ", ".join(one.finding for one in verdict.findings) or "-", verdict.cause or "-")
        )
        print("{:26} {:24} {}".format(*found[-1]), flush=True)
    return found


def main(arguments: list[str] | None = None) -> list[tuple[str, str, str]]:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "names", nargs="*", metavar="ERROR", help=f"of {', '.join(ERRORS)}; all by default"
    )
    names = parser.parse_args(arguments).names or [*ERRORS]
    with tempfile.TemporaryDirectory() as folder:
        found = rows(names, Path(folder))
    in_one = sum(findings != "-" for _, findings, _ in found)
    beside = sum(findings != "-" or cause != "-" for _, findings, cause in found)
    print(f"{in_one} of {len(found)} from one run, {beside} with a correct run beside it")
    return found


if __name__ == "__main__":
    main()
