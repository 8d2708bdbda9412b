"""Findings about what a step computes from its inputs: values that do not change,
or that the step computes wrongly.
"""

from collections.abc import Sequence
from math import prod

import numpy as np

from det_callbacks.digest.host import digest_bytes
from det_callbacks.findings.fit_summary import (
    MIN_BATCHES,
    MIN_STEPS,
    FitSummary,
    ancestors,
    before_casts,
    held_name,
    is_loss,
    outputs_of,
    place,
)
from det_callbacks.findings.rule import Found, found_in, from_to, of_one_process, span
from det_callbacks.runs.program import (
    UNWRITTEN,
    Layout,
    Program,
    Site,
    TensorLayout,
    describe_tensor,
    reads_expanded,
)
from det_callbacks.text import listed

# of larger tensors, the recording does not track bytes, and no digest is made here
MAX_ELEMENTS = 2**20
_COARSE = ("float16", "bfloat16")  # in which a loss often repeats a value


@of_one_process("state")
def constant_loss(fit: FitSummary) -> Found | None:
    """The loss has the same bits in all steps, while the batches differ.

    Example:
        The loss has the same bits in all 8 examined steps, from step 0 to 7, although the batches
        differ. Check whether it depends on the batch: dead ReLUs, an output that is saturated,
        detached or overwritten, or a loss computed from constants make it constant.
    """
    if fit.num_batches < MIN_BATCHES:
        return None
    losses: dict[int, bytes] = {}  # by step
    for program, records in fit.programs:
        chosen = [at for at, site in enumerate(program.sites) if is_loss(site)]
        layouts = [fit.layout(records[0]).entries[at] for at in chosen]
        if not chosen or any(entry is not None and entry.dtype in _COARSE for entry in layouts):
            return None
        losses.update((record.step, record.digests[chosen].tobytes()) for record in records)
    if len(losses) < MIN_STEPS or len({*losses.values()}) > 1:
        return None
    return found_in(
        fit,
        steps=losses,
        names=["loss"],
        explanation=(
            f"The loss has the same bits in all {len(losses)} examined steps, {from_to(losses)}, "
            "although the batches differ"
        ),
        advice=(
            "Check whether it depends on the batch: dead ReLUs, an output that is saturated, "
            "detached or overwritten, or a loss computed from constants make it constant"
        ),
    )


_ONES = {
    "float32": b"\0\0\x80\x3f",
    "bfloat16": b"\x80\x3f",
    "float16": b"\0\x3c",
    "float64": bytes(6) + b"\xf0\x3f",
}
# in names of ops that read no bits
_SHAPE_ONLY = ("_like.", ".new_", "aten.zero", "aten.fill", "aten.ones")


@of_one_process("op")
def constant_output(fit: FitSummary) -> Found | None:
    """A module returns only zeros, or only ones, in all steps, although its inputs change.

    Example:
        act returned only zeros or only ones in all 7 examined steps, from step 1 to 7, although the
        inputs changed. Check for dead ReLUs, saturated gates, and weights or a scale of zero; the
        modules after it learn nothing from the data.
    """
    if fit.num_batches < MIN_BATCHES or not fit.programs:
        return None
    program, records = max(fit.programs, key=lambda one: len(one[1]))
    if len(records) < MIN_STEPS:
        return None
    digests = np.stack([record.digests for record in records])
    changes = (digests != digests[0]).any(axis=0)
    loses = _losing_change(program, changes)
    entries = fit.layout(records[0]).entries
    names = []
    for at, site in enumerate(program.sites):
        is_output = (
            site.phase == "forward" and not site.op and (site.name or "").startswith("output")
        )
        is_lost_there = site.module and loses[at] == site.module and not changes[at]
        if is_output and is_lost_there and _is_zeros_or_ones(entries[at], int(digests[0, at])):
            names.append(site.module)
    if not names:
        return None
    steps = [record.step for record in records]
    return found_in(
        fit,
        steps=steps,
        names=names,
        explanation=(
            f"{listed(names)} returned only zeros or only ones in all {len(steps)} examined steps, "
            f"{from_to(steps)}, although the inputs changed"
        ),
        advice=(
            "Check for dead ReLUs, saturated gates, and weights or a scale of zero; the modules "
            "after it learn nothing from the data"
        ),
    )


def _losing_change(program: Program, changes: np.ndarray) -> list[str | None]:
    """Return the module in which each constant site lost a change:
    that of an op with inputs that change.

    The entry is None if the site changes or depends on no site that does;
    states of generators do not count.
    """
    follows = changes & (program.roles != "generator")
    modules: list[str | None] = [None] * len(program)
    for at, site in enumerate(program.sites):
        if changes[at] or any(part in site.op for part in _SHAPE_ONLY):
            continue
        if site.op and any(follows[read] for read in site.inputs):
            modules[at] = site.module
        else:
            modules[at] = next(
                (one for read in site.inputs if (one := modules[read]) is not None), None
            )
    return modules


def _is_zeros_or_ones(entry: TensorLayout | None, digest: int) -> bool:
    """Return whether a tensor has several elements that are all 0, or all 1;
    other values may be equal by rounding.
    """
    num = 1 if entry is None else prod(entry.shape)
    if entry is None or entry.dtype not in _ONES or not 1 < num <= MAX_ELEMENTS:
        return False
    bits_of_one = _ONES[entry.dtype]
    return digest in (digest_bytes(bytes(len(bits_of_one) * num)), digest_bytes(bits_of_one * num))


@of_one_process("op")
def uninitialised_read(fit: FitSummary) -> Found | None:
    """An op reads a torch.empty tensor that the step's ops only partly wrote.

    Example:
        aten.nan_to_num.default reads a tensor (float32 [8, 18]) that was only partly written after
        its allocation, in steps 0 to 7, at net.py:7 in forward. Its other elements hold whatever
        was in memory, so they can differ from run to run: write all of the tensor, or allocate it
        with torch.zeros. If NumPy or a raw kernel writes it, the recorder cannot see that write.
    """
    # where it is read: module or op, op with tensor, line
    steps: dict[tuple[str, str, str], list[int]] = {}
    for program, records in fit.programs:
        layout = fit.layout(records[0])
        for at, site in enumerate(program.sites):
            tensor = _filled_in_part(site, at, layout)
            if tensor:
                reader = next(one for one in program.sites[at:] if at in one.inputs and one.op)
                line = f", at {reader.source[0]}" if reader.source else ""
                read = f"{reader.op} reads a tensor ({tensor})"
                key = reader.module or reader.op, read, line
                steps.setdefault(key, []).extend(record.step for record in records)
    if not steps:
        return None
    (_, read, line), of_first = next(iter(steps.items()))
    return found_in(
        fit,
        steps=of_first,
        names=dict.fromkeys(module_or_op for module_or_op, *_ in steps),
        explanation=(
            f"{read} that was only partly written after its allocation, in {span(of_first)}{line}"
        ),
        advice=(
            "Its other elements hold whatever was in memory, so they can differ from run to run: "
            "write all of the tensor, or allocate it with torch.zeros. If NumPy or a raw kernel "
            "writes it, the recorder cannot see that write"
        ),
    )


def _filled_in_part(site: Site, at: int, layout: Layout) -> str:
    """Return the description of a tensor that the step wrote only partly; "" for other sites."""
    entry = layout.entries[at]
    if site.role != "input" or entry is None or entry.detail != UNWRITTEN or not site.inputs:
        return ""
    written = [one for read in site.inputs if (one := layout.entries[read]) is not None]
    if any(prod(one.shape) > MAX_ELEMENTS for one in (entry, *written)):
        return ""
    return describe_tensor(entry).removesuffix(f" {UNWRITTEN}")


_SIGMOIDS = "aten.sigmoid."


@of_one_process("op")
def softmax_twice(fit: FitSummary) -> Found | None:
    """A loss that applies softmax or sigmoid to its input gets probabilities,
    to which it was already applied.

    Example:
        The loss applies softmax to the output of a softmax, in steps 0 to 7, at net.py:7 in
        softmax_of_softmax. cross_entropy and binary_cross_entropy_with_logits take logits: pass the
        output of the last linear layer.
    """
    steps: dict[tuple[str, str], list[int]] = {}
    for program, records in fit.programs:
        places = {("softmax", place(site)) for site in _softmaxes_of_softmax(program)}
        places |= {("sigmoid", place(site)) for site in _sigmoids_of_sigmoid(program)}
        for function_and_place in sorted(places):
            steps.setdefault(function_and_place, []).extend(record.step for record in records)
    for (function, where), with_it in steps.items():
        if len(with_it) >= MIN_STEPS:
            return found_in(
                fit,
                steps=with_it,
                names=[function],
                explanation=(
                    f"The loss applies {function} to the output of a {function}, in "
                    f"{span(with_it)}{where}"
                ),
                advice=(
                    "cross_entropy and binary_cross_entropy_with_logits take logits: pass the "
                    "output of the last linear layer"
                ),
            )
    return None


def _softmaxes_of_softmax(program: Program) -> list[Site]:
    """Return each log-softmax whose input is a softmax."""
    return [
        site
        for _, site in outputs_of(program, "aten._log_softmax.")
        if site.phase == "forward"
        and program.sites[before_casts(program, site.inputs[-1])].op.startswith("aten._softmax.")
    ]


def _sigmoids_of_sigmoid(program: Program) -> list[Site]:
    """Return each binary cross-entropy with logits whose logits are a sigmoid.

    Only its backward pass distinguishes logits from targets: it applies sigmoid to the logits.
    """
    again = {
        at
        for _, site in outputs_of(program, _SIGMOIDS)
        if site.phase == "backward"
        for at in site.inputs
    }
    return [
        site
        for _, site in outputs_of(program, "aten.binary_cross_entropy_with_logits.")
        for at in site.inputs
        if at in again and program.sites[before_casts(program, at)].op.startswith(_SIGMOIDS)
    ]


_LOSSES = ("aten.mse_loss.", "aten.smooth_l1_loss.", "aten.huber_loss.", "aten.soft_margin_loss.")


@of_one_process("op")
def broadcast_loss(fit: FitSummary) -> Found | None:
    """A loss compares each prediction with each target, because predictions of shape [B, 1] meet
    targets of shape [B].

    Example:
        The loss compares predictions (float32 [8, 1]) with targets (float32 [8]) as [8, 8], in
        steps 0 to 7, at net.py:7 in crossed. Each prediction is compared with the targets of all
        samples: give both the same shape, such as predictions.squeeze(1).
    """
    steps: dict[tuple[str, str, str, int], list[int]] = {}
    for program, records in fit.programs:
        entries = fit.layout(records[0]).entries
        for at in _differences(program):
            pair = _crossed(program, entries, at)
            if pair is not None:
                shown = [describe_tensor(entry) for entry in pair]
                key = shown[0], shown[1], place(program.sites[at]), pair[1].shape[0]
                steps.setdefault(key, []).extend(record.step for record in records)
    for (predictions, targets, where, size), with_it in steps.items():
        if len(with_it) >= MIN_STEPS:
            return found_in(
                fit,
                steps=with_it,
                names=["loss"],
                explanation=(
                    f"The loss compares predictions ({predictions}) with targets ({targets}) as "
                    f"[{size}, {size}], in {span(with_it)}{where}"
                ),
                advice=(
                    "Each prediction is compared with the targets of all samples: give both the "
                    "same shape, such as predictions.squeeze(1)"
                ),
            )
    return None


def _differences(program: Program) -> list[int]:
    """Return the ops that compare two tensors for the loss: its own,
    or a subtraction of which it is the mean.
    """
    compared_at = [at for at, site in outputs_of(program, *_LOSSES) if site.phase == "forward"]
    for site in filter(is_loss, program.sites):
        at, read = -1, [*site.inputs]
        while len(read) == 1:
            (at,) = read
            read = [one for one in program.sites[at].inputs if program.sites[one].role != "input"]
        if at >= 0 and program.sites[at].op.startswith(("aten.sub.", "aten.rsub.")):
            compared_at.append(at)
    return compared_at


def _crossed(
    program: Program, entries: Sequence[TensorLayout | None], at: int
) -> tuple[TensorLayout, TensorLayout] | None:
    """Return predictions [B, 1] and targets [B] of the batch, if an op reads both as [B, B]."""
    made = entries[at]
    read = sorted(
        program.sites[at].inputs,
        key=lambda one: -len(entry.shape) if (entry := entries[one]) else 0,
    )
    if made is None or len(read) != 2:
        return None
    predictions, targets = (entries[one] for one in read)
    if predictions is None or targets is None or len(targets.shape) != 1 or targets.shape[0] < 2:
        return None
    (size,) = targets.shape
    is_crossed = made.shape == (size, size) or (not made.shape and reads_expanded(made))
    if predictions.shape != (size, 1) or not is_crossed:
        return None
    of_predictions, of_targets = (ancestors(program, [one], phase="forward") for one in read)
    is_of_model = any(held_name(program.sites[one]) for one in of_predictions)
    sources = [
        site
        for one in of_targets
        if not (site := program.sites[one]).inputs and site.role != "argument"
    ]
    is_of_batch = bool(sources) and all(site.phase == "data" for site in sources)
    return (predictions, targets) if is_of_model and is_of_batch else None


_PRODUCTS = ("aten.addmm.", "aten.mm.", "aten.bmm.", "aten.baddbmm.", "aten.convolution.")
_MIXED = ("bf16-mixed", "16-mixed")


@of_one_process("op")
def unused_precision(fit: FitSummary) -> Found | None:
    """The Trainer's mixed precision has no effect: all matrix products and
    convolutions are in float32.

    Example:
        The precision is bf16-mixed, but the forward pass computes its 2 matrix products and
        convolutions in float32, in steps 0 to 7. Check what disables autocast, or bypasses it: a
        nested torch.autocast, a custom autograd function, or a compiler.
    """
    precision = str(fit.choice("trainer.precision"))
    num_products, steps = 0, list[int]()
    for program, records in fit.programs:
        products = [at for at, site in outputs_of(program, *_PRODUCTS) if site.phase == "forward"]
        entries = fit.layout(records[0]).entries
        dtypes = {entry.dtype for at in products if (entry := entries[at]) is not None}
        is_compiled = any(row.site.is_region for row in program.rows)
        if program.leaves_out_ops or program.opaque_regions or is_compiled or dtypes - {"float32"}:
            return None
        num_products = max(num_products, len(products))
        steps += [record.step for record in records] if products else []
    if precision not in _MIXED or len(steps) < MIN_STEPS:
        return None
    return found_in(
        fit,
        steps=steps,
        names=["trainer.precision"],
        explanation=(
            f"The precision is {precision}, but the forward pass computes its {num_products} "
            f"matrix products and convolutions in float32, in {span(steps)}"
        ),
        advice=(
            "Check what disables autocast, or bypasses it: a nested torch.autocast, a custom "
            "autograd function, or a compiler"
        ),
    )
