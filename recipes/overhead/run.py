"""Print what recording costs: time of a training step as a ratio to plain, peak of memory, and bytes on disk."""

import argparse
import json
import platform
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from measure import OPTIMIZERS, VARIANTS, Times, measure_memory_apart, measure_time
from models import NETWORKS

# Steps that each variant trains in a round: enough to be timed, few enough to take turns often.
STEPS = {"mlp": 50, "transformer": 1, "resnet": 2, "transformer-random-length": 2}

WIDTHS = (11, 9, 10, 9, 7, 7, 14)


def positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a number from 1 on")
    return number


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--networks", nargs="+", default=list(NETWORKS), choices=NETWORKS, help="default: all")
    parser.add_argument(
        "--optimizers", nargs="+", default=["plain"], choices=OPTIMIZERS, help="kinds of AdamW; default: plain"
    )
    parser.add_argument("--variants", nargs="+", default=list(VARIANTS), choices=VARIANTS, help="default: all")
    parser.add_argument("--rounds", type=positive, default=7, help="turns of all variants; default: %(default)s")
    parser.add_argument("--steps", type=positive, help="steps of a variant in a round; default: 1 to 50 by network")
    parser.add_argument(
        "--memory-steps", type=int, default=4, help="steps for memory and disk, 0 for none; default: %(default)s"
    )
    parser.add_argument("--compile", metavar="BACKEND", help="compile the networks, all variants: inductor, aot_eager")
    parser.add_argument("--json", type=Path, help="also write all figures to this file")
    return parser


def print_case(case: dict[str, Any], times: dict[str, Times]) -> None:
    compiled = "" if case["compiler"] is None else f", compiled by {case['compiler']}"
    print(f"\n{case['network']}{compiled}, AdamW {case['optimizer']}")
    names = ("ms a step", "x plain", "MiB peak", "+ plain", "ops", "sites", "bytes a step")
    print(" " * 22 + "".join(f"{name:>{width}}" for name, width in zip(names, WIDTHS, strict=True)))
    plain = case["variants"]["plain"].get("peak_growth_mib")
    for variant, taken in times.items():
        figures = case["variants"][variant]
        cells = [f"{taken.median * 1e3:.2f}", f"{taken.ratio:.2f}"]
        if plain is not None:
            cells += [f"{figures['peak_growth_mib']:.0f}", f"{figures['peak_growth_mib'] - plain:.0f}"]
        if "sites" in figures:
            cells += [f"{figures[name]:,}" for name in ("ops", "sites", "bytes_a_step")]
        print(f"{variant:22}" + "".join(f"{cell:>{width}}" for cell, width in zip(cells, WIDTHS, strict=False)))
    if {"op", "DebugMode hash_tensor"} <= set(times):
        share = (times["op"].ratio - 1) / (times["DebugMode hash_tensor"].ratio - 1)
        print(f"level op adds {share:.2f} of the time that DebugMode with hash_tensor adds")
    once = case["variants"].get("op", {})
    if "num_layouts" in once:
        print(
            f"programs and layouts of level op, kept once: {once['num_programs']} and {once['num_layouts']}, "
            f"{once['bytes_of_programs_and_layouts'] / 1e6:.2f} MB"
        )


def main() -> None:
    options = make_parser().parse_args()
    variants = ["plain", *(variant for variant in VARIANTS if variant in options.variants and variant != "plain")]
    machine = {
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "processor": platform.machine(),
        "python": platform.python_version(),
    }
    print(", ".join(f"{name} {value}" for name, value in machine.items()) + f"; median of {options.rounds} rounds")
    cases = []
    for network in options.networks:
        for optimizer in options.optimizers:
            times = measure_time(
                network,
                optimizer,
                variants,
                rounds=options.rounds,
                num_steps=options.steps or STEPS[network],
                compiler=options.compile,
            )
            case: dict[str, Any] = {
                "network": network,
                "optimizer": optimizer,
                "compiler": options.compile,
                "variants": {
                    variant: {"ratio": taken.ratio, "median_seconds": taken.median, **asdict(taken)}
                    for variant, taken in times.items()
                },
            }
            if options.memory_steps:
                for variant in variants:
                    case["variants"][variant] |= measure_memory_apart(
                        network, optimizer, variant, options.memory_steps, options.compile
                    )
            print_case(case, times)
            cases.append(case)
    if options.json is not None:
        options.json.write_text(json.dumps({"machine": machine, "rounds": options.rounds, "cases": cases}, indent=1))


if __name__ == "__main__":
    main()
