"""Differences planted in steps that are made by hand: the cause, and what is said of it."""

import dataclasses

import pytest
from pairs import judge, record, steps_of
from step_builder import StepBuilder, both, training_step

from det_callbacks.compare.cause import Facts, find_cause
from det_callbacks.compare.evidence import Evidence, GeneratorChange
from det_callbacks.compare.step import compare_steps
from det_callbacks.judge import compare_runs
from det_callbacks.runs.program import TensorLayout
from det_callbacks.runs.selection import Selection
from det_callbacks.verdict import EnvironmentDifference

SEED = EnvironmentDifference(name="settings.seed", reference=1, current=2, changes_bits=True, is_machine=False)
DETERMINISTIC = dataclasses.replace(SEED, name="settings.deterministic_algorithms")
THREADS = EnvironmentDifference(name="torch.num_threads", reference=2, current=1, changes_bits=True, is_machine=True)
CPUS = EnvironmentDifference(name="cpu.count", reference=2, current=4, changes_bits=False, is_machine=True)


@pytest.mark.parametrize(
    ("is_resumed", "change", "cause", "parts"),
    [
        (False, {"insert_at": 10, "factor": 3.0}, "forward", ["only in the current run", "train.py:50", "starts here"]),
        (False, {"weight": 3, "rows": (2, 1, 3, 4), "seed": 1}, "initial_weights", ["net.weight"]),
        (False, {"rows": (2, 1, 3, 4), "seed": 1}, "data_order", ["batch[0] holds the same samples in another order"]),
        (True, {"weight": 3}, "checkpoint", ["loaded, net.weight differs", "no op is to blame"]),
        (True, {"weight": 3, "rows": (2, 1, 3, 4)}, "checkpoint", ["net.weight", "(the batch differs too)"]),
        (True, {"rows": (2, 1, 3, 4), "seed": 1}, "data_order", ["the batch batch[0]"]),
        (True, {"seed": 3}, "rng", ["the state of the generator torch.cpu differs"]),
        (True, {"noise_at": 5}, "forward", ["starts here"]),
    ],
)
def test_planted_difference_has_its_cause_and_says_so(is_resumed, change, cause, parts, tmp_path):
    verdict = judge(tmp_path, (training_step(), training_step(**change)), is_resumed=is_resumed)
    assert (verdict.verdict, verdict.cause) == ("diverged", cause)
    assert ("Step 7, the first after resuming" in verdict.explanation) is is_resumed
    for part in parts:
        assert part in verdict.explanation


def test_why_an_origin_is_not_proven_is_said(tmp_path):
    reference, current = StepBuilder(), StepBuilder()
    reference.op("aten.f.default", varying={"a": 1, "b": 2}, arguments={"c": 3}, keeps_text=False)
    current.op("aten.f.default", varying={"b": 2, "c": 3}, arguments={"a": 1}, noise="other bits", keeps_text=False)
    verdict = judge(tmp_path, (reference, current))
    assert (verdict.first_divergence.kind, verdict.first_divergence.is_origin) == ("content", None)
    assert "digests of other arguments" in verdict.explanation


def test_nothing_but_layouts(tmp_path):
    reference, current = training_step(), training_step()
    reference.entries[-1], current.entries[-1] = None, current.entries[0]
    verdict = judge(tmp_path, (reference, current))
    assert (verdict.cause, verdict.first_divergence.kind) == ("structure", "structure")


def test_a_batch_of_another_size_or_of_samples_of_which_some_are_others_is_other_content(tmp_path):
    def of_another_size(step, now):
        step.named("batch[0]", 3, phase="data") if now else step.batch("batch[0]", [1, 2])

    def with_another_label(step, now):
        step.batch("batch[0]", [2, 1] if now else [1, 2])
        step.batch("batch[1]", [0, 1 + now])

    for fill in (of_another_size, with_another_label):
        assert judge(tmp_path, both(fill)).cause == "data_content"


@pytest.mark.parametrize(
    ("begins_before", "name", "phase", "cause"),
    [
        (False, "net.weight", "forward", "initial_weights"),
        (True, "net.weight", "forward", "forward"),
        (True, "net.weight", "backward", "backward"),
        (True, "net.weight", "optimizer", "optimizer"),
        (True, "exp_avg of net.weight", "forward", "optimizer"),
    ],
)
def test_a_state_read_from_outside_is_initial_or_names_who_read_it(begins_before, name, phase, cause, tmp_path):
    pair = both(lambda step, now: step.op("aten.mm.default", name, weights={name: 1 + now}, phase=phase))
    verdict = judge(tmp_path, pair, begins_before=begins_before)
    assert verdict.cause == cause
    assert verdict.first_divergence.is_origin is False
    assert f"an input from outside the trace, {name} differs" in verdict.explanation
    assert "no op is to blame" in verdict.explanation


def test_a_generator_without_a_name_of_its_own_is_said_once(tmp_path):
    row = {"phase": "rng", "name": "generator on cpu", "role": "generator"}
    verdict = judge(tmp_path, both(lambda step, now: step.row(1 + now, None, **row)))
    assert "the state of the generator on cpu differs" in verdict.explanation


def test_what_an_op_outside_the_selection_may_have_written_is_named_before_what_has_no_name(tmp_path):
    def fill(step, now):
        weights = dict.fromkeys(("?x", "?y", "net.weight"), 1 + now)
        step.skipped = {"unselected": 1}
        for name, module in (("?x", "net"), ("?y", ""), ("net.weight", "net")):
            step.op("aten.mm.default", name, weights=weights, module=module)

    text = judge(tmp_path, both(fill)).explanation
    assert "net.weight, a tensor read in net, a tensor read outside any module differs" in text
    assert "an op that is not recorded (modules, phases) may have written it" in text


LR = EnvironmentDifference(name="optimizer.SGD.lr", reference=0.1, current=0.2, changes_bits=True, is_machine=False)


@pytest.mark.parametrize(("choices", "cause", "said"), [((), "unknown", "record them"), ((LR,), "settings", LR.name)])
@pytest.mark.parametrize("chosen", [{"only_steps": (7,)}, {"every_n_steps": 7}])
def test_a_weight_that_steps_which_were_not_recorded_may_have_changed(choices, cause, said, chosen, tmp_path):
    pair = both(lambda step, now: step.op("aten.mm.default", "net.weight", weights={"net.weight": 1 + now}))
    options = {"begins_before": "every_n_steps" in chosen, "selection": Selection(**chosen)}
    verdict = judge(tmp_path, pair, environment=choices, **options)
    assert verdict.cause == cause
    assert "net.weight differs" in verdict.explanation
    assert "since before step 7, and steps before it were not recorded" in verdict.explanation
    assert said in verdict.explanation
    assert not any(line.startswith("initial state") for line in verdict.evidence)


@pytest.mark.parametrize(
    ("name", "cause"),
    [("net.bn.running_mean", "forward"), ("net.weight", "optimizer"), ("exp_avg of net.weight", "optimizer")],
)
def test_state_that_only_differs_after_the_step_is_an_optimizers_if_it_owns_it(name, cause, tmp_path):
    def fill(step, is_current):
        step.named("loss", 1, phase="forward")
        step.named("grad of net.weight", 2, phase="gradient")
        step.named(name, 3 + is_current)

    assert judge(tmp_path, both(fill), selection=Selection(level="state")).cause == cause


def test_an_op_that_only_the_current_run_has_and_that_draws_is_a_generators(tmp_path):
    def fill(step, is_current):
        batch = step.batch("batch[0]", [1, 2])
        state = step.generators(5)
        step.op("aten.relu.default", batch)
        if is_current:
            step.op("aten.bernoulli_.float", state, arguments={"p": 0.1})

    verdict = judge(tmp_path, both(fill))
    assert (verdict.cause, verdict.first_divergence.kind) == ("rng", "extra")


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("trainer.precision", {"dtype": "float64"}),
        ("trainer.precision", {"insert_at": 3, "factor": 2.0}),
        ("optimizer.SGD.lr", {"lr": 0.2}),
    ],
)
def test_a_choice_that_explains_it_is_the_head_and_the_cause(name, change, tmp_path):
    choice = EnvironmentDifference(name=name, reference="a", current="b", changes_bits=True, is_machine=False)
    verdict = judge(tmp_path, (training_step(), training_step(**change)), environment=[choice])
    assert verdict.cause == "settings"
    head = f"{name}: a in the reference, b now, and that is what differs first: step 7"
    assert verdict.explanation.startswith(head)
    assert judge(tmp_path, (training_step(), training_step(**change))).cause != "settings"
    noisy = judge(tmp_path, (training_step(), training_step(noise_at=3)), environment=[choice])
    assert noisy.cause == "forward", "other bits of an op that got the same follow from no such choice"


@pytest.mark.parametrize(("seed", "cause"), [(1, "settings"), (None, "forward")])
def test_a_seed_explains_what_nothing_else_does_where_both_runs_know_theirs(seed, cause, tmp_path):
    choice = EnvironmentDifference(name="settings.seed", reference=seed, current=0, changes_bits=True, is_machine=False)
    pair = both(lambda step, now: step.named("x", 1 + now, phase="forward"))
    verdict = judge(tmp_path, pair, environment=[choice], selection=Selection(level="state"))
    assert verdict.cause == cause
    assert f"settings.seed: {seed} in the reference, 0 now" in verdict.explanation


def of_dtype(step, now):
    dtype = "float64" if now else "float32"
    step.named("net.weight", 1 + now, entry=TensorLayout(dtype=dtype, shape=(2,), stride=(1,)))
    step.named("batch[0]", 1 + now, phase="data", entry=TensorLayout(dtype=dtype, shape=(4,), stride=(1,)))
    step.op("aten.mm.default", "net.weight")


def of_other_shape(step, now):
    step.named("net.weight", 1 + now, entry=TensorLayout(dtype="float32", shape=(2 + now,), stride=(1,)))
    step.generators(1)
    step.op("aten.mm.default", "net.weight")


@pytest.mark.parametrize(
    ("fill", "name", "cause"),
    [
        (of_dtype, "trainer.precision", "settings"),
        (of_dtype, "optimizer.SGD.lr", "initial_weights"),
        (of_other_shape, "trainer.precision", "initial_weights"),
    ],
)
def test_a_choice_explains_another_dtype_of_what_comes_in(fill, name, cause, tmp_path):
    choice = EnvironmentDifference(name=name, reference="a", current="b", changes_bits=True, is_machine=False)
    verdict = judge(tmp_path, both(fill), environment=[choice, DETERMINISTIC])
    assert verdict.cause == cause
    is_head = verdict.explanation.startswith(f"{name}: a in the reference, b now, and that is what differs first: ")
    assert is_head == (cause == "settings")


def test_an_epoch_that_ended_in_one_run_only_explains_a_generator():
    reference, current = both(lambda step, now: step.generators(1 + now))
    change = GeneratorChange(
        name="torch.cpu",
        equal_at=(6, "batch end"),
        differs_at=(7, "batch start"),
        points=("batch end", "epoch end"),
        only_reference=("epoch end",),
    )
    facts = Facts(
        difference=compare_steps(reference.view(step=7), current.view(step=7)),
        environment=(),
        is_first_seen=False,
        is_after_unrecorded=False,
        is_resumed=False,
        unrestored=(),
        evidence=Evidence(generators=(change,)),
    )
    assert find_cause(facts) == ("another epoch", "data_order")


@pytest.mark.parametrize(("place", "cause"), [(1, "forward"), (2, "backward"), (3, "optimizer")])
def test_earliest_tensor_that_differs_names_the_phase_where_no_op_was_recorded(place, cause, tmp_path):
    def fill(step, is_current):
        differs = [is_current and row >= place for row in range(4)]
        step.named("net.weight", 5)
        step.named("loss", 1 + differs[1], phase="forward")
        step.named("grad of net.weight", 1 + differs[2], phase="gradient")
        step.named("net.weight", 1 + differs[3])

    verdict = judge(tmp_path, both(fill))
    assert verdict.cause == cause
    assert verdict.first_divergence.is_origin is None
    assert "cannot be proven" in verdict.explanation
    assert judge(tmp_path, both(fill), environment=[SEED]).cause == "settings"


THREADS_SAID = "torch.num_threads: 2 in the reference, 1 now"


@pytest.mark.parametrize(
    ("change", "environment", "expected", "said"),
    [
        ({"weight": 3}, [SEED], ("diverged", "initial_weights"), "settings.seed: 1 in the reference, 2 now"),
        ({"noise_at": 3}, [dataclasses.replace(THREADS, is_machine=False)], ("diverged", "settings"), THREADS_SAID),
        ({"noise_at": 3}, [THREADS, SEED], ("not_comparable", "forward"), THREADS_SAID),
        ({"noise_at": 3}, [CPUS], ("diverged", "forward"), "aten.mul.Tensor"),
        ({}, [THREADS], ("match", None), THREADS_SAID),
    ],
)
def test_a_choice_never_excuses_and_a_machine_only_bits_that_it_can_change(
    change, environment, expected, said, tmp_path
):
    verdict = judge(tmp_path, (training_step(), training_step(**change)), environment=environment)
    assert (verdict.verdict, verdict.cause) == expected
    assert said in verdict.explanation
    assert {*verdict.environment} == {*environment}
    assert len(verdict.origins) == ("noise_at" in change)


def test_op_that_reads_other_tensors_is_said_to(tmp_path):
    def fill(step, is_current):
        places = step.op("aten.relu.default", "?a"), step.op("aten.sin.default", "?b")
        step.op("aten.neg.default", places[is_current])

    assert "reads other tensors than in the reference" in judge(tmp_path, both(fill)).explanation


@pytest.mark.parametrize("phase", ["other", "forward"])
@pytest.mark.parametrize(("reader", "cause"), [("backward", "backward"), ("forward", None)])
def test_the_gradient_that_starts_a_backward_pass_is_of_it(phase, reader, cause, tmp_path):
    def fill(step, is_current):
        loss = step.op("aten.mean.default", "?x")
        start = step.op("aten.ones_like.default", loss, phase=phase, module="", noise=is_current)
        step.op("aten.mul.Tensor", start, phase=reader)

    verdict = judge(tmp_path, both(fill))
    assert [origin.op for origin in verdict.origins] == ["aten.ones_like.default"]
    assert verdict.cause == (cause or {"other": "unknown"}.get(phase, phase))


# over several steps, fits and ranks


def test_the_least_by_step_position_and_rank_comes_first(tmp_path):
    ranks = [(training_step(), training_step(noise_at=place)) for place in (2, 8, 3, 3)]
    verdict = judge(tmp_path, *ranks, steps={0: 9}, step=5)
    first = verdict.first_divergence
    assert (first.step, first.rank, first.occurrence) == (5, 2, 3)
    assert "Step 5 of rank 2" in verdict.explanation
    assert [(item.rank, item.step) for item in verdict.origins] == [(2, 5), (3, 5), (1, 5), (0, 9)]


def test_an_earlier_fit_comes_before_an_earlier_step_of_a_later_one(tmp_path):
    fits = [{9: training_step()}, {2: training_step()}]
    other = [{9: training_step(noise_at=2)}, {2: training_step(noise_at=2)}]
    verdict = compare_runs(record(tmp_path / "a", fits), record(tmp_path / "b", other))
    assert (verdict.first_divergence.step, [item.step for item in verdict.origins]) == (9, [9])
    assert verdict.counts.sites_differing == 2 * 28


def test_whole_steps_beside_differing_bits(tmp_path):
    reference = record(tmp_path / "a", steps_of(range(2)))
    verdict = compare_runs(reference, record(tmp_path / "b", steps_of(range(1), s0={"noise_at": 1})))
    assert verdict.first_divergence.op == "aten.mul.Tensor"
    assert "besides, step 1 is only in the reference" in verdict.explanation


# after a resume


LOST = "look for a Python value that the checkpoint does not hold"


@pytest.mark.parametrize(
    ("change", "is_resumed", "environment", "expected"),
    [
        ({"factor": 3.0}, True, (), True),
        ({"factor": 3.0}, False, (), False),
        ({"factor": 3.0}, True, (SEED,), False),
        ({"noise_at": 5}, True, (), False),
        ({"factor": 3.0, "rows": (2, 1, 3, 4)}, True, (), False),
        ({"factor": 3.0, "weight": 3}, True, (), False),
    ],
)
def test_arguments_after_a_resume_in_which_all_that_is_restored_agrees(
    change, is_resumed, environment, expected, tmp_path
):
    steps = training_step(insert_at=3), training_step(**{"insert_at": 3, **change})
    verdict = judge(tmp_path, steps, environment=environment, is_resumed=is_resumed)
    assert (LOST in verdict.explanation) == expected


def test_a_tensor_made_of_a_lost_number_is_one(tmp_path):
    pair = both(lambda step, now: step.op("aten.mul.Tensor", "?number", weights={"?number": 1 + now}))
    assert LOST in judge(tmp_path, pair, is_resumed=True).explanation
