"""The tables that run.py prints."""

from typing import Any

from bandwidth import Bandwidth

_KINDS = {
    "time": ("ms a step", "x plain"),
    "host": ("MiB peak", "+ plain"),
    "device": ("device MiB", "+ plain", "syncs", "at end"),
    "trace": ("ops", "sites", "bytes a step"),
}
_WIDTH = 11
_DIGEST_COLUMNS = (
    "size",
    "copy us",
    "digest us",
    "x copy",
    "copy GB/s",
    "digest GB/s",
    "share",
    "enqueue us",
    "fetched us",
)


def print_case(case: dict[str, Any]) -> None:
    """Print the figures of each variant of a network, and what level op adds and leaves on disk."""
    compiled = "" if case["compiler"] is None else f", compiled by {case['compiler']}"
    variants = case["variants"]
    print(f"\n{case['network']}{compiled}, AdamW {case['optimizer']}")
    rows = {variant: _cells(figures, variants["plain"]) for variant, figures in variants.items()}
    shown = [kind for kind in _KINDS if any(kind in cells for cells in rows.values())]
    print(" " * 22 + _row([name for kind in shown for name in _KINDS[kind]]))
    for variant, cells in rows.items():
        words = [cell for kind in shown for cell in cells.get(kind, ("",) * len(_KINDS[kind]))]
        print(f"{variant:22}{_row(words)}".rstrip())
    if {"op", "DebugMode hash_tensor"} <= set(variants):
        share = (variants["op"]["ratio"] - 1) / (variants["DebugMode hash_tensor"]["ratio"] - 1)
        print(f"level op adds {share:.2f} of the time that DebugMode with hash_tensor adds")
    once = variants.get("op", {})
    if "num_layouts" in once:
        print(
            f"programs and layouts of level op, kept once: {once['num_programs']} and "
            f"{once['num_layouts']}, {once['bytes_of_programs_and_layouts'] / 1e6:.2f} MB"
        )


def _cells(figures: dict[str, Any], plain: dict[str, Any]) -> dict[str, tuple[str, ...]]:
    cells: dict[str, tuple[str, ...]] = {
        "time": (f"{figures['median_seconds'] * 1e3:.2f}", f"{figures['ratio']:.2f}")
    }
    for kind, name in (("host", "peak_growth_mib"), ("device", "device_peak_growth_mib")):
        if name in figures:
            cells[kind] = (f"{figures[name]:.0f}", f"{figures[name] - plain[name]:.0f}")
    if "device" in cells:
        last = figures["synchronizations"][-1]
        cells["device"] += (f"{last['inside']:,}", f"{last['at_end']:,}")
    if "sites" in figures:
        cells["trace"] = (
            f"{figures['ops']:,}",
            f"{figures['sites']:,}",
            f"{figures['bytes_a_step']:,}",
        )
    return cells


def print_summary(cases: list[dict[str, Any]]) -> None:
    """Print a row for each network: the ratio of each level to plain, what op
    costs the host, and its waits.
    """
    levels = [level for level in ("state", "module", "op") if level in cases[0]["variants"]]
    print(
        "\n"
        "all networks: ratio to plain; of level op what an op adds on the host, and its waits for "
        "the device"
    )
    print(" " * 32 + _row([*levels, "us an op", "syncs", "at end", "programs"]))
    for case in cases:
        variants = case["variants"]
        op = variants.get("op", {})
        cells = [f"{variants[level]['ratio']:.2f}" for level in levels]
        if "ops" in op:
            added = op["enqueue_seconds"] - variants["plain"]["enqueue_seconds"]
            cells.append(f"{added / op['ops'] * 1e6:.1f}")
            waits = op.get("synchronizations", [])
            cells += [
                str(max(one[place] for one in waits)) if waits else "-"
                for place in ("inside", "at_end")
            ]
            cells.append(str(op["num_programs"]))
        print(f"{case['network'] + ', ' + case['optimizer']:32}{_row(cells)}")
    print("syncs: while a step trains, 0 is what it should be; on the CPU there are none to count")


def print_digests(measured: list[Bandwidth]) -> None:
    """Print what a digest of each size takes, and what a copy of it."""
    print("\ndigests of one tensor, against a copy of it on the same device")
    print(_row(_DIGEST_COLUMNS))
    for one in measured:
        figures = one.figures()
        enqueue = "" if one.enqueue is None else f"{one.enqueue * 1e6:.1f}"
        cells = [_size(one.num_bytes), f"{one.copy * 1e6:.1f}", f"{one.digest * 1e6:.1f}"]
        cells += [
            f"{figures['time_ratio']:.2f}",
            f"{figures['copy_bytes_moved_per_second'] / 1e9:.1f}",
        ]
        cells += [
            f"{figures['digest_bytes_moved_per_second'] / 1e9:.1f}",
            f"{figures['bandwidth_ratio']:.2f}",
        ]
        print(_row([*cells, enqueue, f"{one.fetched * 1e6:.1f}"]))
    print(
        "x copy: time; GB/s and share: bytes moved, by a copy twice the size (read, written), by a "
        "digest once"
    )


def _size(num_bytes: int) -> str:
    for unit, name in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if num_bytes >= unit and num_bytes % unit == 0:
            return f"{num_bytes // unit} {name}"
    return f"{num_bytes} B"


def _row(words: list[str] | tuple[str, ...]) -> str:
    return "".join(f"{word:>{max(_WIDTH, len(word) + 2)}}" for word in words)
