"""Builds the recording of a step without a model: each op's digest follows from what
it read, as in a real one.

And runs of a few such steps, recorded or verified, and the verdict on two of them.
"""

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from stored_runs import OneOf, join

from det_callbacks.runs.program import (
    Layout,
    Program,
    Site,
    StepView,
    TensorLayout,
    argument_bits,
    plain_value,
    subject_of,
)
from det_callbacks.runs.selection import Selection
from det_callbacks.runs.steps import StepTrace
from det_callbacks.runs.store import Run
from det_callbacks.runs.writer import RunWriter
from det_callbacks.verdict import EnvironmentDifference, Verdict
from det_callbacks.verify.judge import compare_runs
from det_callbacks.verify.verification import Verification, write_step

FLOAT = TensorLayout(dtype="float32", shape=(8, 4), stride=(4, 1))


def mix(*parts: object) -> int:
    return int.from_bytes(hashlib.blake2b(repr(parts).encode(), digest_size=8).digest(), "little")


@dataclass
class StepBuilder:
    sites: list[Site] = field(default_factory=list)
    entries: list[TensorLayout | None] = field(default_factory=list)
    digests: list[int] = field(default_factory=list)
    unseen: set[int] = field(default_factory=set)
    checked: frozenset[int] | None = None
    values: dict[int, str] = field(default_factory=dict)
    known_inputs: dict[str, int] = field(default_factory=dict)
    counts: Counter[tuple[Any, ...]] = field(default_factory=Counter)
    skipped: dict[str, int] = field(default_factory=dict)

    def row(self, bits: int, entry: TensorLayout | None = FLOAT, **fields: Any) -> int:
        values = {
            "phase": "forward",
            "module": "",
            "op": "",
            "output": 0,
            "role": "output",
            **fields,
        }
        key = (
            values["phase"],
            values["module"],
            values["op"],
            values["output"],
            values["role"],
            values.get("name"),
        )
        subject = subject_of(values.pop("name", None), phase=values["phase"], role=values["role"])
        self.sites.append(Site(occurrence=self.counts[key], **subject, **values))
        self.counts[key] += 1
        self.entries.append(entry)
        self.digests.append(bits)
        return len(self.sites) - 1

    def named(
        self,
        name: str,
        bits: int,
        *,
        phase: str = "state",
        inputs: tuple[int, ...] = (),
        **fields: Any,
    ) -> int:
        return self.row(bits, phase=phase, name=name, role="named", inputs=inputs, **fields)

    def batch(self, name: str, rows: list[int]) -> int:
        position = self.named(name, mix(rows), phase="data")
        self.row(mix(sorted(rows)), None, phase="data", name=name, role="samples")
        return position

    def generators(self, state: int) -> int:
        self.row(mix("python"), None, phase="rng", name="python", role="generator")
        return self.row(mix(state), None, phase="rng", name="torch.cpu", role="generator")

    def op(
        self,
        name: str,
        /,
        *reads: int | str,
        module: str = "net",
        phase: str = "forward",
        arguments: dict[str, Any] | None = None,
        varying: dict[str, Any] | None = None,
        keeps_text: bool = True,
        outputs: int = 1,
        noise: object = None,
        layout: TensorLayout = FLOAT,
        generator: int | None = None,
        weights: dict[str, int] | None = None,
        **fields: Any,
    ) -> int:
        """Add a call; return the position of its first output.

        ``reads`` are positions, or names of tensors from outside the trace, which get an input row
        when first read; ``weights`` gives bits to those names; ``generator`` is the state of the
        generator it draws from.
        """
        for read in reads:
            if isinstance(read, str) and read not in self.known_inputs:
                bits, title = (
                    (weights or {}).get(read, mix("input", read)),
                    None if read.startswith("?") else read,
                )
                self.known_inputs[read] = self.row(
                    bits, phase="input", role="input", name=title, module=module
                )
        places = [self.known_inputs[read] if isinstance(read, str) else read for read in reads]
        if generator is not None:
            places.append(
                self.row(
                    mix("generator", generator),
                    None,
                    phase="rng",
                    name="torch.cpu",
                    role="generator",
                )
            )
        if varying:
            bits, tag, text = argument_bits(list(varying.values()))
            if text is not None and keeps_text:
                self.values[bits] = text
            entry = TensorLayout(dtype=tag, shape=())
            self.row(
                bits,
                entry,
                phase=phase,
                module=module,
                op=name,
                role="argument",
                varying=tuple(varying),
            )
        everything = sorted({**(arguments or {}), **(varying or {})}.items())
        constants = {key: plain_value(value) for key, value in (arguments or {}).items()}
        content = (name, everything, [self.digests[place] for place in places], layout.dtype, noise)
        positions = [
            self.row(
                mix(content, output),
                layout,
                phase=phase,
                module=module,
                op=name,
                output=output,
                arguments=json.dumps(constants, separators=(",", ":")),
                varying=tuple(varying or ()),
                inputs=tuple(sorted(set(places))),
                **fields,
            )
            for output in range(outputs)
        ]
        return positions[0] if positions else -1

    def trace(self) -> StepTrace:
        skipped = {"view": 1, **self.skipped}
        program = Program.of(self.sites, ops_seen=3, ops_digested=3, ops_skipped=skipped)
        layout = Layout(entries=tuple(self.entries))
        digests = np.array(self.digests, dtype=np.uint64)
        unseen = frozenset(self.unseen)
        return StepTrace(
            program, digests, layout.id, unseen, self.values, lambda: layout, checked=self.checked
        )

    def view(self, **place: int) -> StepView:
        return self.trace().view(**place)


def both(fill: Callable[[StepBuilder, bool], object]) -> tuple[StepBuilder, StepBuilder]:
    """Return the step of the reference and the current one, both of which one function fills."""
    steps = StepBuilder(), StepBuilder()
    for is_current, step in enumerate(steps):
        fill(step, bool(is_current))
    return steps


def training_step(
    *,
    rows: tuple[int, ...] = (1, 2, 3, 4),
    seed: int = 0,
    weight: int = 11,
    muls: int = 20,
    factor: object = 2.0,
    noise_at: int | None = None,
    insert_at: int | None = None,
    lr: float = 0.1,
    lr_varies: bool = False,
    dtype: str = "float32",
    unseen_at: int | None = None,
    is_first: bool = True,
) -> StepBuilder:
    """Return a step of a small model: a batch, dropout, twenty equal ``mul``, a layer norm,
    backward and update.
    """
    step = StepBuilder()
    if is_first:
        step.named("net.weight", weight)
        step.named("net.bias", 12)
    batch = step.batch("batch[0]", list(rows))
    step.generators(seed)
    layout = TensorLayout(dtype=dtype, shape=(8, 4), stride=(4, 1))
    mask = step.op(
        "aten.bernoulli_.float", generator=seed, module="net.dropout", arguments={"p": 0.1}
    )
    value = step.op(
        "aten.mm.default",
        batch,
        0 if is_first else "net.weight",
        module="net.linear",
        layout=layout,
    )
    value = step.op("aten.mul.Tensor", value, mask, module="net.dropout", layout=layout)
    for index in range(muls):
        place = {"module": "net.chain", "source": (f"train.py:{40 + index} in forward",)}
        if index == insert_at:
            value = step.op("aten.mul.Tensor", value, arguments={"other": factor}, **place)
        noise = "ulp" if index == noise_at else None
        value = step.op("aten.mul.Tensor", value, arguments={"other": 2.0}, noise=noise, **place)
        if index == unseen_at:
            step.unseen.add(value)
    value = step.op(
        "aten.native_layer_norm.default",
        value,
        module="net.norm",
        arguments={"eps": 1e-05},
        outputs=3,
    )
    step.named("output", step.digests[value], phase="forward", module="net", inputs=(value,))
    step.named("loss", step.digests[value] ^ 1, phase="forward", inputs=(value,))
    gradient = step.op(
        "aten.native_layer_norm_backward.default", value, phase="backward", module="net.norm"
    )
    gradient = step.op("aten.mm.default", gradient, batch, phase="backward", module="net.linear")
    step.named("grad of net.weight", step.digests[gradient], phase="gradient", inputs=(gradient,))
    update = {"value": -lr}
    kind = {"varying": update} if lr_varies else {"arguments": update}
    weight = 0 if is_first else "net.weight"
    place = step.op(
        "aten.addcdiv_.default", gradient, weight, phase="optimizer", module="net", **kind
    )
    step.named("net.weight", step.digests[place], inputs=(place,))
    return step


def reducing_step(
    *,
    noise: object = None,
    delivered: object = "all",
    reduce: str = "sum",
    batch: int = 1,
    detail: str = "",
    num_before: int = 0,
) -> StepBuilder:
    """Return a step of a rank: a batch, a product, an all-reduce, a sum of what came out."""
    made = StepBuilder()
    for index in range(num_before):
        made.op("aten.add.Tensor", arguments={"other": index})
    place = made.op("aten.mul.Tensor", made.batch("batch[0]", [batch, 2]), noise=noise)
    call = {"phase": "forward", "op": "c10d.allreduce_.default"}
    arguments = json.dumps({"reduce_op": reduce, "group": "0-1"})
    about = {"arguments": arguments, "inputs": (place,), "source": ("train.py:9 in step",)}
    sent = made.row(made.digests[place], role="sent", **call, **about)
    layout = TensorLayout(dtype="float32", shape=(8, 4), detail=detail) if detail else FLOAT
    arrived = made.row(
        0 if detail else mix(delivered, reduce), layout, role="delivered", inputs=(sent,), **call
    )
    made.op("aten.sum.default", arrived)
    return made


Steps = Mapping[int, StepBuilder]
Pair = tuple[StepBuilder, StepBuilder]


def manifest_of(
    environment: Mapping[str, Any] | None = None, selection: Selection | None = None
) -> dict[str, Any]:
    chosen = (selection or Selection()).to_dict()
    return {"selection": chosen, "environment": dict(environment or {}), "settings": {}}


def record(
    path: Path,
    steps: Steps | Sequence[Steps],
    *,
    complete: bool = True,
    others: Sequence[Steps | Sequence[Steps]] = (),
    selection: Selection | None = None,
    environment: Mapping[str, Any] | None = None,
    resumed: int | None = None,
    **options: Any,
) -> Path:
    """Write a run; ``steps`` is {step: builder}, or a list of these, one a fit;
    ``others`` those of further ranks.
    """
    manifest, world_size = manifest_of(environment, selection), 1 + len(others)
    writers = [RunWriter.create(path, peers=OneOf(0, world_size), manifest=manifest, **options)]
    if resumed is not None:
        writers[0].note_resumed(resumed)
    writers += [join(path, rank) for rank in range(1, world_size)]
    for rank, (writer, known) in enumerate(zip(writers, (steps, *others), strict=True)):
        for number, fit in enumerate(known if isinstance(known, list) else [known]):
            if number:
                writer.start_segment()
            for step, builder in fit.items():
                write_step(writer, builder.view(step=step, rank=rank))
        writer.close(complete=complete)
        writer.release()
    return path


def steps_of(numbers: Iterable[int], **changes: Any) -> dict[int, StepBuilder]:
    """Return a run's steps; ``changes`` is {"s5": {...}} for what is planted in step 5."""
    numbers = list(numbers)
    return {
        step: training_step(
            rows=(step, 2, 3, 4), is_first=step == numbers[0], **changes.get(f"s{step}", {})
        )
        for step in numbers
    }


def judge(
    folder: Path,
    *pairs: Pair | None,
    step: int = 7,
    steps: Mapping[int, int] | None = None,
    environment: Iterable[EnvironmentDifference] = (),
    is_resumed: bool = False,
    begins_before: bool = False,
    selection: Selection | None = None,
) -> Verdict:
    """Return the verdict on ranks each of which ran one step in two ways,
    in the reference and in the current run.

    A pair of None is the same step; ``steps`` has another number for some ranks, and
    ``environment`` what differs besides. ``is_resumed``: the current run has gone on with the step;
    ``begins_before``: an equal one comes before it.
    """
    number, before, runs = (
        len(list(folder.iterdir())),
        {0: training_step()} if begins_before else {},
        [],
    )
    for side, word in enumerate(("reference", "current")):
        entries = {
            one.name: {
                "value": getattr(one, word),
                "changes_bits": one.changes_bits,
                "is_machine": one.is_machine,
            }
            for one in environment
        }
        ranks = [
            {
                **before,
                (steps or {}).get(rank, step): reducing_step() if pair is None else pair[side],
            }
            for rank, pair in enumerate(pairs)
        ]
        options = {
            "environment": entries,
            "resumed": step if side and is_resumed else None,
            "selection": selection,
        }
        runs.append(record(folder / f"{number}-{side}", ranks[0], others=ranks[1:], **options))
    return compare_runs(*runs)


def detector(reference: Path, current: Path, **options: Any) -> Verification:
    return Verification(Run.open(reference), current, manifest=manifest_of(), **options)


def run_fits(verification: Verification, fits: Sequence[Steps], *, ends: bool = True) -> None:
    """Let a verification see the steps of some fits, of which the last may not come to its end."""
    for number, fit in enumerate(fits):
        if number:
            verification.close(complete=True)
        verification.begin_fit(number)
        for step, builder in fit.items():
            verification.add(builder.trace(), step=step, epoch=0)
        if ends or number < len(fits) - 1:
            verification.end_fit()
