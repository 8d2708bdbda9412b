"""Print what many ranks cost: write two synthetic runs that differ in one place,
and compare them.
"""

import argparse
import sys
import tempfile
import time
from pathlib import Path

from synthetic import Difference, write_run

from det_callbacks import Verdict, compare_runs

sys.path.append(str(Path(__file__).parents[1] / "overhead"))  # recipes are folders, not packages

from memory import resident_mib  # found by the line above

CASES = {
    "equal": "nothing differs",
    "one": "one digest differs",
    "late": "the last digest of all differs",
    "spread": "differs from step 2 on, on all ranks",
}


def planted(case: str, ranks: int, steps: int, sites: int) -> tuple[Difference, ...]:
    """Return what is planted: one digest in the middle, one at the end,
    or one that spreads from the third step on.
    """
    if case == "one":
        return (Difference(rank=ranks // 2, step=steps // 2, site=sites // 3),)
    if case == "late":
        return (Difference(rank=ranks - 1, step=steps - 1, site=sites - 1),)
    if case == "spread":
        return (Difference(rank=ranks // 2, step=min(2, steps - 1), site=sites // 3, spreads=True),)
    return ()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for name, default in (("ranks", 8), ("steps", 50), ("sites", 4000)):
        parser.add_argument(f"--{name}", type=int, default=default, help="default: %(default)s")
    parser.add_argument(
        "--folder", type=Path, help="keep the runs there; default: a temporary folder"
    )
    parser.add_argument(
        "--cases",
        nargs="+",
        choices=CASES,
        default=CASES,
        help="what the second run is; default: all",
    )
    options = parser.parse_args()
    ranks, steps, sites = options.ranks, options.steps, options.sites
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.folder or Path(temporary)
        num_bytes = write_run(
            folder / "reference", num_ranks=ranks, num_steps=steps, num_sites=sites
        )
        files = [
            file.stat().st_size for file in (folder / "reference").rglob("*") if file.is_file()
        ]
        per_step = (sum(files) - num_bytes) / (ranks * steps)
        print(
            f"{ranks} ranks x {steps} steps x {sites} sites: {len(files)} files, "
            f"{sum(files) / 1e6:,.1f} MB; 8 bytes a site and {per_step:.0f} bytes a step of a rank"
        )
        before = resident_mib("VmHWM")
        for case in options.cases:
            differences = planted(case, ranks, steps, sites)
            write_run(
                folder / case,
                num_ranks=ranks,
                num_steps=steps,
                num_sites=sites,
                differences=differences,
            )
            start = time.perf_counter()
            verdict = compare_runs(folder / "reference", folder / case)
            print(f"{CASES[case]:38} {time.perf_counter() - start:6.2f} s, {shown(verdict)}")
        print(
            f"peak of memory: {resident_mib('VmHWM'):.0f} MiB, {before:.0f} MiB of it before the "
            "first comparison"
        )


def shown(verdict: Verdict) -> str:
    first = verdict.first_divergence
    if first is None:
        return verdict.verdict
    found = (
        f"rank {first.rank}, step {first.step}, {first.op} #{first.occurrence} in {first.module}"
    )
    return f"{verdict.verdict}: {found}; {verdict.counts.sites_differing:,} sites differ"


if __name__ == "__main__":
    main()
