"""The example in each rule's docstring is the message of a real verdict,
and the docs' page is made of them.
"""

import re
import textwrap
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
from agents_page import require_fields_of_its_cause
from rule_pages import cause_rules, causes_of, example, is_current, name_of
from step_builder import FLOAT, StepBuilder, both, judge, training_step
from test_named_causes import FAULTS, Training
from test_named_causes import pytestmark as marks
from test_torchscript import fit as fit_scripted
from test_torchscript import pytestmark as scripted_marks

from det_callbacks import DeterminismCallback, DivergenceError
from det_callbacks.runs.program import UNWRITTEN, TensorLayout
from det_callbacks.runs.selection import Selection
from det_callbacks.verdict import EnvironmentDifference, Verdict

pytestmark = [*marks, *scripted_marks]


def planted(name: str, **more: Any) -> Callable[[Path], Verdict]:
    def verify(folder: Path) -> Verdict:
        _, _, base, change = FAULTS[name]
        reference = Training(**base, **more).record(folder / "reference")
        return Training(**{**base, **more, **change}).verify(reference, current=folder / "current")

    return verify


def built(fill: Callable[[StepBuilder, bool], object], **options: Any) -> Callable[[Path], Verdict]:
    return lambda folder: judge(folder, both(fill), **options)


def scripted(folder: Path) -> Verdict:
    reference, current = folder / "reference", folder / "current"
    fit_scripted(DeterminismCallback(reference, mode="record"), is_scripted=True)
    callback = DeterminismCallback(reference, current=current, on_divergence="collect")
    with pytest.raises(DivergenceError):
        fit_scripted(callback, is_scripted=True, num_before=3)
    # the model is in a test, whose lines move
    explanation = re.sub(
        r"[^\s(]+test_torchscript\.py:\d+", "train.py:12", callback.verdict.explanation
    )
    return replace(callback.verdict, explanation=explanation)


class LeavesDropoutInEval(pl.Callback):
    def on_train_batch_start(
        self, trainer: pl.Trainer, module: pl.LightningModule, *_: Any
    ) -> None:
        if trainer.global_step == 2:
            module.net[4].eval()


def of_a_mode(folder: Path) -> Verdict:
    reference = Training().record(folder / "reference")
    verdict = Training(callbacks=(LeavesDropoutInEval,)).verify(reference)
    explanation = re.sub(r"[^\s(]+test_named_causes\.py:\d+", "train.py:9", verdict.explanation)
    return replace(verdict, explanation=explanation)


def changed(
    base: Mapping[str, Any] | None = None, options: Mapping[str, Any] | None = None, **change: Any
) -> Any:
    steps = training_step(**(base or {})), training_step(**{**(base or {}), **change})
    return lambda folder: judge(folder, steps, **(options or {}))


def choice(name: str, reference: Any, current: Any) -> EnvironmentDifference:
    return EnvironmentDifference(
        name=name, reference=reference, current=current, changes_bits=True, is_machine=False
    )


def with_a_second_batch(step: StepBuilder, now: bool) -> None:
    step.named("batch[0]", 1, phase="data")
    if now:
        step.named("batch 2[0]", 2, phase="data")


def without_a_gradient(step: StepBuilder, now: bool) -> None:
    for name in ("net.weight", "head.weight", "head.bias")[: 3 - now]:
        step.named(f"grad of {name}", len(name), phase="gradient")


def of_a_graph(step: StepBuilder, now: bool) -> None:
    layout = TensorLayout(dtype="graph", shape=(), detail=f"{9 + now} ops")
    graph = step.row(9 + now, layout, op="compiled.Net_forward.graph", role="graph", module="net")
    step.row(3, op="compiled.Net_forward.outputs", role="output", module="net", inputs=(graph,))


def of_eager_ops(step: StepBuilder, now: bool) -> None:
    if now:
        value = step.op("aten.native_layer_norm.default", "?x", module="net.norm")
        step.op("aten.addmm.default", value, module="net.linear")
        return
    graph = step.row(
        9, TensorLayout(dtype="graph", shape=()), op="compiled.Net_forward.graph", role="graph"
    )
    step.row(3, op="compiled.Net_forward.outputs", role="output", inputs=(graph,))


def of_swapped_lines(step: StepBuilder, now: bool) -> None:
    value = step.batch("batch[0]", [1, 2])
    for name, number in [("sin", 5), ("cos", 4)] if now else [("cos", 4), ("sin", 5)]:
        step.op(f"aten.{name}.default", value, source=(f"train.py:{number} in forward",))


def of_a_shape(step: StepBuilder, now: bool) -> None:
    shape = TensorLayout(dtype="float32", shape=(8, 3), stride=(3, 1)) if now else FLOAT
    step.op("aten.slice_copy.Tensor", "?x", layout=shape, source=("train.py:12 in forward",))


def with_the_next_batch(step: StepBuilder, now: bool) -> None:
    gradient = step.op("aten.mul.Tensor", "?x", phase="backward")
    step.op("aten.add_.Tensor", gradient, "net.weight", phase="optimizer")
    if now:
        step.op(
            "aten.randn.default", generator=1, phase="gradient", source=("train.py:7 in <module>",)
        )


def from_outside(step: StepBuilder, now: bool) -> None:
    step.op("aten.mul.Tensor", "?noise", weights={"?noise": 1 + now}, module="net.noise")


def of_unwritten_memory(step: StepBuilder, now: bool) -> None:
    filled = step.op(
        "aten.fill_.Scalar", layout=TensorLayout(dtype="float32", shape=(4,), stride=(1,))
    )
    layout = TensorLayout(dtype="float32", shape=(8,), stride=(1,), detail=UNWRITTEN)
    memory = step.row(0, layout, phase="input", role="input", module="net", inputs=(filled,))
    step.op("aten.clone.default", filled, memory, source=("train.py:9 in forward",), noise=now)


def recomputed(step: StepBuilder, now: bool) -> None:
    dropout = {"module": "net.dropout", "source": ("train.py:9 in forward",)}
    mask = step.op("aten.bernoulli_.float", generator=1, **dropout)
    again = step.op(
        "aten.bernoulli_.float", generator=1 + now, phase="backward", recomputed=True, **dropout
    )
    step.op("aten.mul.Tensor", mask, again, phase="backward")


def of_an_exchange(step: StepBuilder, now: bool) -> None:
    gradient = step.op("aten.mul.Tensor", "?x", phase="backward", module="")
    if not now:
        source = ("train.py:9 in <module>",)
        step.op("c10d.allreduce_.default", gradient, phase="backward", module="", source=source)


def read_a_weight(step: StepBuilder, now: bool) -> None:
    step.op("aten.mm.default", "net.weight", weights={"net.weight": 1 + now}, module="net")


def a_draw(step: StepBuilder, now: bool) -> None:
    value = step.op("aten.mm.default", "?x", module="net.linear")
    if now:
        step.op("aten.native_dropout.default", value, generator=1, module="net.drop")


RULES = cause_rules()

EXAMPLES: Mapping[str, Callable[[Path], Verdict]] = {
    "setting": changed(options={"environment": [choice("optimizer.AdamW.lr", 0.1, 0.2)]}, lr=0.2),
    "optimizer option": planted("a callback changes the learning rate", level="state"),
    "initial state": planted("another seed"),
    "restored state": changed(options={"is_resumed": True}, weight=3),
    "unrecorded steps": built(read_a_weight, selection=Selection(only_steps=(7,))),
    "uninitialised memory": built(of_unwritten_memory, step=0),
    "external write": planted("a weight between steps"),
    "another epoch": planted("epochs of another length"),
    "drawn before data": planted("callback draws at the epoch's end"),
    "batch": planted("unsorted listing"),
    "generator": planted("validation draws"),
    "drawn in one run": built(a_draw),
    "another length": built(with_the_next_batch),
    "module mode": of_a_mode,
    "recomputation": built(recomputed),
    "compiled in one run": built(of_eager_ops, step=0),
    "collective in one run": built(of_an_exchange),
    "compiled graph": built(of_a_graph, step=12),
    "scripted module": scripted,
    "another order": built(of_swapped_lines),
    "other gradients": built(without_a_gradient),
    "other number of batches": built(with_a_second_batch),
    "outside input": built(from_outside),
    "structure": built(of_a_shape),
    "first difference": changed(noise_at=5),
}


TRAILS = """
    setting: setting? op | optimizer option: option? state | initial state: setting? state
    restored state: checkpoint? state | unrecorded steps: outside state | uninitialised memory: unwritten op
    external write: outside state | another epoch: boundary batch
    drawn before data: boundary generator? indices loaded batch | batch: outside? loaded? batch
    generator: boundary generator generator | drawn in one run: op | another length: op | module mode: option? op | recomputation: generator
    compiled in one run: region | collective in one run: collective | compiled graph: region | scripted module: op
    another order: op | other gradients: gradient | other number of batches: outside? batch | outside input: outside
    structure: op | first difference: op
"""  # noqa: E501  # a text
"""The kinds of each example's trail, the root first; those that may have been
read with a question mark.
"""


def test_every_rule_has_an_example():
    assert [*EXAMPLES] == [*map(name_of, RULES)]


@pytest.mark.parametrize("rule", RULES, ids=name_of)
def test_the_example_of_a_rule_is_what_a_verdict_says(rule, tmp_path):
    verdict = EXAMPLES[name_of(rule)](tmp_path)
    assert "\n".join(textwrap.wrap(verdict.explanation, 92, break_on_hyphens=False)) == example(
        rule
    )
    assert verdict.cause in causes_of(rule)
    trails = dict(
        part.strip().split(": ")
        for line in TRAILS.strip().splitlines()
        for part in line.split(" | ")
    )
    assert " ".join(
        f"{one.kind}{'' if one.proven else '?'}" for one in verdict.trail
    ) == trails.pop(name_of(rule))
    require_fields_of_its_cause(verdict)


def test_the_page_of_the_causes_is_made_of_their_files():
    assert is_current("causes"), "run make causes"
