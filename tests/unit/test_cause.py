"""Differences planted in steps that are made by hand: the cause, and what is said of it."""

from dataclasses import replace

import pytest
from step_builder import FLOAT, both, judge, record, steps_of, training_step

from det_callbacks.runs.program import TensorLayout, after_step
from det_callbacks.runs.selection import Selection
from det_callbacks.verdict import EnvironmentDifference
from det_callbacks.verify.judge import compare_runs


def choice(name, reference="a", current="b"):
    return EnvironmentDifference(
        name=name, reference=reference, current=current, changes_bits=True, is_machine=False
    )


SEED, LR = choice("settings.seed", 1, 2), choice("optimizer.SGD.lr", 0.1, 0.2)
THREADS = replace(choice("torch.num_threads", 2, 1), is_machine=True)
CPUS = replace(choice("cpu.count", 2, 4), is_machine=True, changes_bits=False)
STATE = Selection(level="state")


def of_dtype(step, now):
    dtype = "float64" if now else "float32"
    step.named("net.weight", 1 + now, entry=TensorLayout(dtype=dtype, shape=(2,), stride=(1,)))
    step.named(
        "batch[0]", 1 + now, phase="data", entry=TensorLayout(dtype=dtype, shape=(4,), stride=(1,))
    )
    step.op("aten.mm.default", "net.weight")


def with_another_closure(step, now):
    for _ in range(2 + now):
        step.named("output", 1, phase="forward")
        step.named("grad of net.weight", 1, phase="gradient")


def with_another_layer(step, now):
    for _ in range(2 + now):
        step.op("aten.mm.default", "net.weight")
    step.named("grad of net.weight", 1, phase="gradient")


def of_other_shape(step, now):
    step.named(
        "net.weight", 1 + now, entry=TensorLayout(dtype="float32", shape=(2 + now,), stride=(1,))
    )
    step.generators(1)
    step.op("aten.mm.default", "net.weight")


def with_another_gradient(step, now):
    value = step.op("aten.relu.default", "?x", module="net.2")
    step.named("output", 1, phase="forward", module="net.2", inputs=(value,))
    step.op("aten.mul.Tensor", value, source=("train.py:6 in forward",))
    step.named("grad of output", 2 + now, phase="backward", module="net.2")


def with_own_generator(step, now):
    state = step.row(now, None, phase="rng", name="generator on cpu", role="generator")
    step.op("aten.randn.generator", state, source=("train.py:5 in forward",))


def of_gradients(ours, theirs):
    names = f"12{ours}", f"12{theirs}"
    return lambda step, now: [
        step.named(f"grad of {one}", ord(one), phase="gradient") for one in names[now]
    ]


def of_two_updates(step, now):
    """Two optimizers got their gradients, one after the other;
    their order within one says nothing.
    """
    for name in "ab"[:: -1 if now else 1]:
        step.named(f"grad of {name}", ord(name), phase="gradient")
        step.op("aten.add_.Tensor", name, phase="optimizer", weights={name: 1})


def skipping_the_update(run):
    def fill(step, now):
        step.named("loss", 1, phase="forward")
        if now != run:
            of_gradients("a", "a")(step, now)

    return fill


def with_schedulers(ours, theirs):
    """The optimizer's arguments differ as well, as they do with another learning rate."""

    def fill(step, now):
        for name, bits in (ours, theirs)[now].items():
            step.named(
                f"state of StepLR: {name}", bits, entry=TensorLayout(dtype="float", shape=())
            )
        value = step.op("aten.mul.Tensor", step.batch("batch[0]", [1, 2]))
        step.op(
            "aten.add_.Tensor", value, "net.weight", phase="optimizer", arguments={"alpha": now}
        )

    return fill


def compiled_in(run, instead):
    """The other run has something instead of the graph."""

    def fill(step, now):
        if now == run:
            step.row(
                9,
                TensorLayout(dtype="graph", shape=()),
                op="compiled.Net_forward.graph",
                role="graph",
            )
        elif instead:
            step.op("aten.addmm.default", "?x", module="net", phase=instead)
        step.op("aten.mm.out", "?x")

    return fill


def after_a_draw(step, now):
    step.batch("batch[0]", [1, 2])
    step.row(now, None, phase="rng", name=after_step("python"), role="named")


def with_another_label(step, now):
    step.batch("batch[0]", [2, 1] if now else [1, 2])
    step.batch("batch[1]", [0, 1 + now])


def with_an_op_that_draws(step, now):
    batch, state = step.batch("batch[0]", [1, 2]), step.generators(5)
    step.op("aten.relu.default", batch)
    if now:
        step.op("aten.bernoulli_.float", state, arguments={"p": 0.1})


def with_swapped_lines(step, now, noise=None):
    value = step.op("aten.relu.default", "?x")
    for name in ("sin", "cos") if now else ("cos", "sin"):
        step.op(f"aten.{name}.default", value, noise=noise if now else None)


def with_a_sum_in_another_order(step, now):
    value = step.op("aten.relu.default", "?x")
    terms = [
        step.op(f"aten.{name}.default", value)
        for name in (("sin", "cos") if now else ("cos", "sin"))
    ]
    step.op("aten.add.Tensor", *terms, noise=now)


def of_other_layout(step, now):
    step.op(
        "aten.relu.default",
        "?x",
        layout=TensorLayout(dtype="float32", shape=(8, 4), stride=(1 + 3 * now, 1)),
    )
    step.digests[-1] = 1


def of_other_tensors(step, now, shape=FLOAT.shape):
    places = step.op("aten.relu.default", "?a"), step.op("aten.sin.default", "?b")
    step.op("aten.neg.default", places[now], layout=replace(FLOAT, shape=shape) if now else FLOAT)


def of_other_arguments(step, now):
    varying, constants = ({"b": 2, "c": 3}, {"a": 1}) if now else ({"a": 1, "b": 2}, {"c": 3})
    step.op("aten.f.default", varying=varying, arguments=constants, keeps_text=False, noise=now)


def after_an_unselected_op(step, now):
    weights = dict.fromkeys(("?x", "?y", "net.weight"), 1 + now)
    step.skipped = {"unselected": 1}
    for name, module in (("?x", "net"), ("?y", ""), ("net.weight", "net")):
        step.op("aten.mm.default", name, weights=weights, module=module)


def reading(name, phase="forward"):
    return lambda step, now: step.op("aten.mm.default", name, weights={name: 1 + now}, phase=phase)


def finding(name, dtype="float32"):
    def fill(step, now):
        step.named(name, 3 + now, entry=TensorLayout(dtype=dtype, shape=()))
        batch = step.batch("batch[0]", [1, 2])
        step.op("aten.mul.Tensor", batch)

    return fill


def after_a_compiled_region(step, now):
    step.row(
        9,
        TensorLayout(dtype="graph", shape=()),
        op="compiled.Net_forward.graph",
        role="graph",
        module="net",
    )
    reading("net.weight")(step, now)


def found_and_left(name, *, reads=True):
    def fill(step, now):
        step.op("aten.mm.default", *[name][:reads])
        step.named(name, 3 + now, inputs=(0,) if reads else ())

    return fill


def left_behind(name):
    def fill(step, now):
        step.named("loss", 1, phase="forward")
        step.named("grad of net.weight", 2, phase="gradient")
        step.named(name, 3 + now)

    return fill


def from_row(place):
    def fill(step, now):
        differs = [now and row >= place for row in range(4)]
        step.named("net.weight", 5)
        step.named("loss", 1 + differs[1], phase="forward")
        step.named("grad of net.weight", 1 + differs[2], phase="gradient")
        step.named("net.weight", 1 + differs[3])

    return fill


def start_of_backward(phase, reader):
    def fill(step, now):
        loss = step.op("aten.mean.default", "?x")
        start = step.op("aten.ones_like.default", loss, phase=phase, module="", noise=now)
        step.op("aten.mul.Tensor", start, phase=reader)

    return fill


def between_passes(step, now):
    loss = step.op("aten.mean.default", "?x")
    scaled = step.op("aten.div.Tensor", loss, phase="other", module="", noise=now)
    step.named("loss", 1, phase="forward", inputs=(scaled,))
    start = step.op("aten.ones_like.default", scaled, phase="other", module="")
    step.op("aten.mul.Tensor", start, phase="backward")


def after_the_update(step, now):
    step.op("aten.mul.Tensor", step.op("aten.mean.default", "?x"), phase="backward")
    step.op("aten.add.Tensor", "?y", phase="optimizer")
    step.op("aten.clone.default", "?z", phase="other", module="", noise=now)


def with_more_ops(*, run, phase="gradient", noise=None):
    """Only the reference (0) or the current run (1) has an op that draws, after the update or
    (backward) before it.
    """

    def fill(step, now):
        gradient = step.op("aten.mul.Tensor", "?x", phase="backward", noise=noise if now else None)
        if phase == "backward" and now == run:
            step.op("aten.randn.default", generator=1, phase=phase)
        step.op("aten.add_.Tensor", gradient, "net.weight", phase="optimizer")
        if phase != "backward" and now == run:
            step.op("aten.randn.default", generator=1, phase=phase)

    return fill


def without_an_optimizer(step, now):
    step.named("loss", 1, phase="forward")
    step.named("net.weight", 3 + now)


def case(planted, cause, *said, **options):
    """A function that fills both steps, or what the current one has other than ``base``;
    what is said ("!": is not).
    """
    return pytest.param(planted, cause, said, options)


GIVEN = "net.weight differs; no recorded op produced it."
CHANGED = (
    "(NumPy, a raw kernel, a callback between steps) changed {} between the end of step 6 and the "
    "first read in step 7"
)
UNRECORDED = (
    "net.weight differs; no recorded op produced it",
    "first differed before step 7, in steps that were not recorded",
    "!initial state",
)
LOST = "so a Python value that it does not hold may differ"
PRECISION = choice("trainer.precision")
EXPLAINS = "in the current run, which explains the first difference"
PRECISION_FIRST = f"trainer.precision is a in the reference and b {EXPLAINS}. "
AFTER_RESUME = {"is_resumed": True, "base": {"insert_at": 3}}
CASES = [
    case(
        {"insert_at": 10, "factor": 3.0},
        "forward",
        "only in the current run",
        "train.py:50",
        "starts here",
    ),
    case(
        {"weight": 3, "rows": (2, 1, 3, 4), "seed": 1},
        "initial_weights",
        "and the batch and the generator state also differ",
    ),
    case(
        {"rows": (2, 1, 3, 4), "seed": 1},
        "data_order",
        "the batch holds the same samples in a different order (batch[0])",
    ),
    case(
        {"weight": 3, "rows": (2, 1, 3, 4)},
        "checkpoint",
        ", and the batch also differs; ",
        is_resumed=True,
    ),
    case(
        {"rows": (2, 1, 3, 4), "seed": 1},
        "data_order",
        "a different order (batch[0])",
        is_resumed=True,
    ),
    case({"seed": 3}, "rng", "the generator state differs (torch.cpu)", is_resumed=True),
    case({"noise_at": 5}, "forward", "starts here", f"!{LOST}", **AFTER_RESUME),
    case({"factor": 3.0}, "forward", LOST, **AFTER_RESUME),
    case({"factor": 3.0}, "forward", f"!{LOST}", base={"insert_at": 3}),
    case({"factor": 3.0}, "forward", f"!{LOST}", environment=[SEED], **AFTER_RESUME),
    case({"factor": 3.0, "rows": (2, 1, 3, 4)}, "data_order", f"!{LOST}", **AFTER_RESUME),
    case({"factor": 3.0, "weight": 3}, "checkpoint", f"!{LOST}", **AFTER_RESUME),
    case(lambda *both: with_swapped_lines(*both, "ulp"), "forward", "!a different order"),
    case(
        with_a_sum_in_another_order,
        "forward",
        "aten.cos.default in net ran in a different order from the reference, with the same bits",
        "sort a set",
    ),
    # a hyperparameter explains a call of the model, and one that became an option
    # of the optimizer does not
    case(
        with_an_op_that_draws,
        "settings",
        "hparams.dropout (0.0 in",
        environment=[choice("hparams.dropout", 0.0, 0.1)],
    ),
    case(with_an_op_that_draws, "rng", environment=[choice("hparams.rate", 0.1, 0.2), LR]),
    case(
        {"noise_at": 3}, "forward", "!explains", environment=[choice("hparams.dropout", 0.0, 0.1)]
    ),
    case(
        of_other_layout,
        "structure",
        "produced different strides: float32 [8, 4] with strides [1, 1] in the ref",
    ),
    case(
        lambda step, now: step.batch("x", [1]) if now else step.named("x", 3, phase="data"),
        "data_content",
    ),
    case(with_another_label, "data_content"),
    case(with_an_op_that_draws, "rng", "ran only in the current run"),
    case(of_other_tensors, "forward", "reads different tensors than in the reference"),
    case(
        lambda *both: of_other_tensors(*both, (9, 4)),
        "structure",
        "[9, 4] in the current run; it reads different",
    ),
    case(
        of_other_arguments,
        "forward",
        "digests of different arguments",
        "so the verdict cannot say where",
    ),
    case(reading("net.weight"), "initial_weights", GIVEN),
    case(reading("net.weight"), "external_write", CHANGED.format("net.weight"), begins_before=True),
    case(reading("net.weight"), "checkpoint", "!was changed", begins_before=True, is_resumed=True),
    case(
        reading("net.weight", "optimizer"),
        "external_write",
        CHANGED.format("net.weight"),
        begins_before=True,
    ),
    case(
        reading("exp_avg of net.weight"),
        "external_write",
        CHANGED.format("exp_avg of net.weight"),
        begins_before=True,
    ),
    case(reading("?number"), "unknown", "!was changed", begins_before=True),
    # state beside model and optimizers, which each step has
    case(
        finding("state of Ema: weights"),
        "external_write",
        "Ema: weights between the end of step 6 and step 7",
        begins_before=True,
    ),
    case(
        finding("state of Ema: weights"), "checkpoint", "(state of Ema: weights)", is_resumed=True
    ),
    case(
        finding("state of Ema: weights"), "initial_weights", "initial state differs", "!was changed"
    ),
    case(
        finding("state of StepLR: last_epoch", "int"),
        "external_write",
        "between the beginnings of step 6 and step 7, the script changed state of StepLR: last_",
        "how often the script updates StepLR",
        "!NumPy",
        begins_before=True,
    ),
    case(
        finding("state of StepLR: gamma", "float"), "settings", "give both runs the same schedulers"
    ),
    case(
        finding("state of StepLR: gamma"),
        "settings",
        "!was changed",
        environment=[choice("optimizer.lr_scheduler")],
    ),
    case(
        finding("state of Ema: weights"),
        "unknown",
        "in steps that were not recorded",
        selection=Selection(every_n_steps=7),
        begins_before=True,
    ),
    # what the trace may not have seen is no write from outside
    case(after_an_unselected_op, "unknown", "!was changed", begins_before=True),
    case(after_a_compiled_region, "forward", GIVEN, begins_before=True),
    # a tensor of the state that no op of the step wrote, and one that no op has read
    case(
        found_and_left("net.weight"),
        "external_write",
        "a raw kernel) changed net.weight during the step",
    ),
    case(found_and_left("net.weight", reads=False), "unknown", "so the verdict cannot say where"),
    case(reading("?number"), "unknown", LOST, is_resumed=True),
    case(reading("?number"), "unknown", "and seed it if it is random", f"!{LOST}"),
    case(
        with_another_gradient,
        "backward",
        "grad of output of net.2 (train.py:6, forward) has different bits",
    ),
    case(
        with_own_generator,
        "rng",
        "the generator state differs (generator on cpu at train.py:5 in forward)",
        "Seed this generator, and",
    ),
    case(
        after_an_unselected_op,
        "unknown",
        "net.weight, a tensor read in net and a tensor read",
        "other threads) may",
    ),
    *(
        case(reading("net.weight"), cause, *UNRECORDED, said, environment=known, **options)
        for known, cause, said in (
            ((), "unknown", "Record those steps"),
            ((LR,), "settings", LR.name),
        )
        for options in (
            {"selection": Selection(only_steps=(7,))},
            {"selection": Selection(every_n_steps=7), "begins_before": True},
        )
    ),
    case(left_behind("net.bn.running_mean"), "forward", selection=STATE),
    case(left_behind("net.weight"), "optimizer", selection=STATE),
    case(left_behind("exp_avg of net.weight"), "optimizer", selection=STATE),
    *(
        case(from_row(at), how, "so the verdict cannot say where")
        for at, how in enumerate(("forward", "backward", "optimizer"), 1)
    ),
    case(
        from_row(1),
        "settings",
        "settings.seed (1 in the reference, 2 in the current run)",
        environment=[SEED],
    ),
    # what nothing else explains is a seed's only where both runs know theirs
    case(
        from_row(1),
        "forward",
        "seed (None",
        environment=[choice("settings.seed", None, 0)],
        selection=STATE,
    ),
    case({"dtype": "float64"}, "settings", f"{PRECISION_FIRST}Step 7", environment=[PRECISION]),
    case(
        {"insert_at": 3, "factor": 2.0},
        "settings",
        f"{PRECISION_FIRST}Step 7",
        environment=[PRECISION],
    ),
    # other bits of an op that got the same follow from no such choice
    case(
        {"noise_at": 3},
        "forward",
        "!which explains the first difference",
        environment=[PRECISION, LR],
    ),
    case(
        of_dtype,
        "settings",
        PRECISION_FIRST,
        environment=[PRECISION, choice("settings.deterministic_algorithms")],
    ),
    case(of_dtype, "initial_weights", "!which explains the first difference", environment=[LR]),
    case(
        of_other_shape,
        "initial_weights",
        "!which explains the first difference",
        environment=[PRECISION],
    ),
    case(
        of_other_shape,
        "initial_weights",
        "so build the same model, and give the optimizer the same parameters",
    ),
    case(
        lambda step, now: step.named("ac"[now], 1),
        "initial_weights",
        "exists in one run only (a and c: 2 of 2 tensors)",
        "a different name",
    ),
    case(with_another_closure, "settings", environment=[LR]),
    case(with_another_layer, "structure", environment=[LR]),
    case(of_two_updates, "optimizer", "in a different order", "step several optimizers"),
    *(
        case(
            skipping_the_update(run),
            "optimizer",
            f"the optimizer updated nothing in the {idle}, and got 3 gradients in the {updated}. "
            "Check what calls",
            "!the same parameters",
        )
        for run, idle, updated in [(0, "reference", "current run"), (1, "current run", "reference")]
    ),
    case(
        after_a_draw,
        "rng",
        "(python after the step); everything before it in the step matches",
        "!started with",
    ),
    case(
        compiled_in(0, "forward"),
        "structure",
        "only the reference runs compiled code (compiled.Net_forward)",
    ),
    case(
        compiled_in(1, "forward"),
        "structure",
        "only the current run runs compiled code",
        "Compile both runs",
    ),
    # it may have compiled earlier, and have no sites
    case(
        compiled_in(0, ""), "structure", "Run both in fresh processes", "!only the reference runs"
    ),
    # a learning rate is a part of a scheduler's state, and explains neither another
    # scheduler nor its arguments
    case(
        with_schedulers({"gamma": 3, "base_lrs[0]": 1}, {}),
        "settings",
        f"optimizer.lr_scheduler is a in the reference and b {EXPLAINS}",
        "Settings differ: optimizer.SGD.lr",
        environment=[LR, choice("optimizer.lr_scheduler")],
    ),
    case(
        with_schedulers({"gamma": 3}, {"gamma": 4}),
        "settings",
        "same schedulers",
        "!explains",
        environment=[LR],
    ),
    case(
        with_schedulers({"base_lrs[0]": 3}, {"base_lrs[0]": 4}),
        "settings",
        "optimizer.SGD.lr is 0.1",
        environment=[LR],
    ),
    # the next batch of a longer run
    case(
        with_more_ops(run=0),
        "structure",
        "only the reference has ops after",
        "If the current run ends there",
    ),
    case(with_more_ops(run=1, noise="ulp"), "backward", "!has ops after"),
    case(with_more_ops(run=1, phase="backward"), "rng", "!has ops after"),
    case(start_of_backward("other", "backward"), "backward", "ones_like", "starts here"),
    case(start_of_backward("forward", "backward"), "backward"),
    case(start_of_backward("other", "forward"), "unknown"),
    case(start_of_backward("forward", "forward"), "forward"),
    case(between_passes, "backward", "aten.div.Tensor in no submodule", "starts here"),
    case(after_the_update, "unknown", "starts here"),
    case(without_an_optimizer, "unknown", "so the verdict cannot say where", selection=STATE),
]


@pytest.mark.parametrize(("planted", "cause", "said", "options"), CASES)
def test_cause_and_words_of_one_thing_that_differs(planted, cause, said, options, tmp_path):
    base = options.get("base", {})
    steps = (
        both(planted)
        if callable(planted)
        else (training_step(**base), training_step(**base, **planted))
    )
    verdict = judge(
        tmp_path, steps, **{name: value for name, value in options.items() if name != "base"}
    )
    assert (verdict.verdict, verdict.cause) == ("diverged", cause), verdict.explanation
    assert ("Step 7, the first after resuming" in verdict.explanation) is options.get(
        "is_resumed", False
    )
    told = "\n".join((verdict.explanation, *verdict.evidence))
    assert not [
        part for part in said if (part.removeprefix("!") in told) is part.startswith("!")
    ], told


@pytest.mark.parametrize(("run", "cause"), [(1, "rng"), (0, "structure")])
def test_ops_after_the_update_of_a_step_before_the_last_are_no_other_length(run, cause, tmp_path):
    steps = both(with_more_ops(run=run))
    runs = [
        record(tmp_path / name, {7: step, 8: training_step()})
        for name, step in zip("ab", steps, strict=True)
    ]
    verdict = compare_runs(*runs)
    assert verdict.cause == cause
    assert "number of steps" not in verdict.explanation


THREADS_SAID = "torch.num_threads (2 in the reference, 1 in the current run)"
SEED_SAID = "Settings differ: settings.seed (1 in the reference, 2 in the current run)."


@pytest.mark.parametrize(
    ("change", "environment", "expected", "said"),
    [
        ({"weight": 3}, [SEED], ("diverged", "initial_weights"), SEED_SAID),
        (
            {"noise_at": 3},
            [replace(THREADS, is_machine=False)],
            ("diverged", "settings"),
            "torch.num_threads is 2 in",
        ),
        ({"noise_at": 3}, [THREADS, SEED], ("not_comparable", "forward"), THREADS_SAID),
        ({"insert_at": 3}, [THREADS], ("not_comparable", "forward"), "ran only in the current run"),
        ({"noise_at": 3}, [CPUS], ("diverged", "forward"), "aten.mul.Tensor #3 in net"),
        ({}, [THREADS], ("match", None), THREADS_SAID),
    ],
)
def test_a_choice_never_excuses_and_a_machine_only_bits_it_can_change(
    change, environment, expected, said, tmp_path
):
    verdict = judge(tmp_path, (training_step(), training_step(**change)), environment=environment)
    assert (verdict.verdict, verdict.cause) == expected
    assert said in verdict.explanation
    assert {*verdict.environment} == {*environment}
    assert len(verdict.origins) == bool({"noise_at", "insert_at"} & change.keys())


def test_another_machine_does_not_excuse_another_number_of_steps(tmp_path):
    runs = []
    for threads in (1, 2):
        environment = {THREADS.name: {"value": threads, "is_machine": True, "changes_bits": True}}
        runs.append(
            record(tmp_path / str(threads), steps_of(range(threads)), environment=environment)
        )
    verdict = compare_runs(*runs)
    assert ([one.name for one in verdict.environment], verdict.verdict) == (
        [THREADS.name],
        "diverged",
    )


def test_steps_of_one_run_are_told_after_the_first_difference(tmp_path):
    runs = (
        record(tmp_path / "a", steps_of(range(2))),
        record(tmp_path / "b", steps_of(range(1), s0={"noise_at": 1})),
    )
    assert "in addition, step 1 is only in the reference" in compare_runs(*runs).explanation
