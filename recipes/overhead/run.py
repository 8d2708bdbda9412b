"""Print what recording costs: time of a training step as a ratio to plain,
and how fast digests are against a copy.

With --memory-steps also the peak of memory, bytes on disk, and how often a step waits for a GPU.
"""

import argparse
import json
import platform
from dataclasses import asdict
from datetime import UTC, datetime
from itertools import product
from pathlib import Path
from typing import Any

import torch
from bandwidth import POOL_BYTES, SIZES_KIB, measure_bandwidth
from device import describe, torch_device
from measure import FITTED, LOOPS, OPTIMIZERS, VARIANTS, Case, measure_memory_apart, measure_time
from models import FLOAT32_NETWORKS, MIXED_NETWORKS, NETWORKS
from tables import print_case, print_digests, print_summary
from tiny import TINY

from det_callbacks.digest.triton_digest import device_choice

# Steps that each variant trains in a round: enough to be timed, few enough to take turns often.
STEPS = {
    "mlp": 50,
    "transformer": 1,
    "resnet": 2,
    "transformer-random-length": 2,
    "gpt2": 1,
    "resnet50": 1,
}
STEPS |= {"blocks": 10, "layerdrop": 10} | dict.fromkeys(TINY, 20)

# What --all takes: the networks of the device, and steps that vary beside
# the same ones that do not.
VARYING = ("blocks", "layerdrop")
SIZES_OF_ALL_KIB = (1, 256, 16_384)  # on the CPU


def positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a number from 1 on")
    return number


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--device", default="cpu", choices=("cpu", "cuda"), help="default: %(default)s"
    )
    parser.add_argument(
        "--all",
        action="store_true",
        help=(
            "all that a machine has to tell: networks of its kind, steps that vary, memory, waits, "
            "digests against copies, and a table of all; what other options choose is as they say"
        ),
    )
    parser.add_argument(
        "--networks",
        nargs="*",
        choices=NETWORKS,
        help=(
            f"none given: no network; default: on cuda {' '.join(MIXED_NETWORKS)}, else "
            f"{FLOAT32_NETWORKS[0]}"
        ),
    )
    parser.add_argument(
        "--optimizers",
        nargs="+",
        choices=OPTIMIZERS,
        help="kinds of AdamW, or L-BFGS; default: on cuda foreach, else plain",
    )
    parser.add_argument(
        "--variants",
        nargs="+",
        default=list(VARIANTS),
        choices=[*VARIANTS, *LOOPS, *FITTED],
        help="default: all but those of loops and Trainers",
    )
    parser.add_argument(
        "--rounds", type=positive, default=7, help="turns of all variants; default: %(default)s"
    )
    parser.add_argument(
        "--steps", type=positive, help="steps of a variant in a round; default: 1 to 50 by network"
    )
    parser.add_argument(
        "--memory-steps",
        type=int,
        help=(
            "steps for memory, disk and, on cuda, synchronisations, 0 for none; default: with "
            "--all 4, else 0"
        ),
    )
    parser.add_argument(
        "--compile",
        metavar="BACKEND",
        help="compile the networks, all variants: inductor, aot_eager",
    )
    parser.add_argument(
        "--tiny",
        action="store_true",
        help=f"{' and '.join(MIXED_NETWORKS)} so small that any machine trains them",
    )
    parser.add_argument(
        "--sizes",
        nargs="*",
        type=positive,
        metavar="KIB",
        help=(
            "digest tensors of so many KiB; none given: no digests; default: on cuda 1 KiB to 1 "
            "GiB, else none"
        ),
    )
    parser.add_argument("--json", type=Path, help="also write all figures to this file")
    return parser


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Return the options, with the defaults of the device; ends with
    status 2 where it is not there.
    """
    parser = make_parser()
    options = parser.parse_args(arguments)
    is_on_cuda = options.device == "cuda"
    if is_on_cuda and not torch.cuda.is_available():
        parser.exit(
            2,
            f"{parser.prog}: --device cuda: torch {torch.__version__} finds no CUDA device here, "
            "so nothing was measured. A GPU needs its driver and a build of torch with CUDA; "
            "--device cpu works without.\n",
        )
    if options.networks is None:
        options.networks = list(
            MIXED_NETWORKS if is_on_cuda else FLOAT32_NETWORKS[: 3 if options.all else 1]
        )
        options.networks += VARYING if options.all else ()
    if options.memory_steps is None:
        options.memory_steps = 4 if options.all else 0
    if options.optimizers is None:
        # what torch takes by itself on that device
        options.optimizers = ["foreach" if is_on_cuda else "plain"]
    if options.sizes is None:
        options.sizes = list(SIZES_KIB if is_on_cuda else SIZES_OF_ALL_KIB if options.all else ())
    return options


def describe_machine(device: torch.device) -> dict[str, Any]:
    machine: dict[str, Any] = {
        "date": datetime.now(UTC).date().isoformat(),
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "processor": platform.machine(),
        "python": platform.python_version(),
    }
    if device.type == "cuda":
        machine |= {**describe(device), "digests": str(device_choice(device))}
    return machine


def measure_case(case: Case, variants: list[str], options: argparse.Namespace) -> dict[str, Any]:
    num_steps = options.steps or (1 if case.optimizer == "lbfgs" else STEPS[case.network])
    times = measure_time(case, variants, rounds=options.rounds, num_steps=num_steps)
    figures: dict[str, Any] = {
        variant: {"ratio": taken.ratio, "median_seconds": taken.median, **asdict(taken)}
        for variant, taken in times.items()
    }
    if options.memory_steps:
        for variant in (one for one in variants if one not in FITTED):
            figures[variant] |= measure_memory_apart(case, variant, options.memory_steps)
    return {**asdict(case), "variants": figures}


def main(arguments: list[str] | None = None) -> None:
    options = parse(arguments)
    device = torch_device(options.device)
    variants = [
        "plain",
        *(
            one
            for one in (*VARIANTS, *LOOPS, *FITTED)
            if one in options.variants and one != "plain"
        ),
    ]
    machine = describe_machine(device)
    print(
        ", ".join(f"{name} {value}" for name, value in machine.items())
        + f"; median of {options.rounds} rounds"
    )
    digests = [
        measure_bandwidth(device, size * 1024, rounds=options.rounds) for size in options.sizes
    ]
    if digests:
        print_digests(digests)
    trained = [*product(options.networks, options.optimizers)]
    if options.all and "lbfgs" not in options.optimizers:
        trained.append((VARYING[0], "lbfgs"))
    cases = []
    for network, optimizer in trained:
        case = Case(
            network=network,
            optimizer=optimizer,
            compiler=options.compile,
            device=options.device,
            is_tiny=options.tiny,
        )
        cases.append(measure_case(case, variants, options))
        print_case(cases[-1])
    if options.all:
        print_summary(cases)
    if options.json is not None:
        content = {
            "machine": machine,
            "rounds": options.rounds,
            "pool_bytes": POOL_BYTES,
            "digests": [one.figures() for one in digests],
            "cases": cases,
        }
        options.json.write_text(json.dumps(content, indent=1))


if __name__ == "__main__":
    main()
