import pytest
from step_builder import StepBuilder, training_step

from det_callbacks.compare.cause import judge as judge_facts
from det_callbacks.compare.facts import Facts
from det_callbacks.compare.verdict_builder import VerdictBuilder
from det_callbacks.errors import NothingComparedError
from det_callbacks.verdict import EnvironmentDifference

SEED = EnvironmentDifference(name="settings.seed", reference=1, current=2, changes_bits=True, is_machine=False)
THREADS = EnvironmentDifference(name="torch.num_threads", reference=2, current=1, changes_bits=True, is_machine=True)
CPUS = EnvironmentDifference(name="cpu.count", reference=2, current=4, changes_bits=False, is_machine=True)


def judge(reference, current, *environment, step=7):
    builder = VerdictBuilder("refs/run1", "runs/today")
    builder.set_environment(environment)
    builder.add_step(reference.view(step=step), current.view(step=step))
    return builder.finish()


@pytest.mark.parametrize(
    ("change", "cause", "parts"),
    [
        (
            {"noise_at": 5},
            "forward",
            ["Step 7, forward: aten.mul.Tensor", "number 6", "net.chain", "train.py:45", "other bits", "starts here"],
        ),
        ({"backward_noise": 1}, "backward", ["Step 7, backward: aten.mm.default in net.linear", "inputs agree"]),
        ({"lr": 0.2}, "optimizer", ["optimizer: aten.addcdiv_.default in net", "value: -0.1 -> -0.2", "starts here"]),
        ({"insert_at": 10, "factor": 3.0}, "forward", ["only in the current run", "train.py:50", "starts here"]),
        ({"dtype": "float64"}, "forward", ["float32 [8, 4] in the reference, float64 [8, 4] now"]),
        ({"rows": (2, 1, 3, 4)}, "data_order", ["the batch batch[0] holds the same samples in another order"]),
        ({"rows": (1, 2, 3, 9)}, "data_content", ["the batch batch[0] differs"]),
        ({"seed": 3}, "rng", ["the state of the generator torch.cpu differs"]),
        ({"weight": 3}, "initial_weights", ["the initial state net.weight differs", "no op is to blame"]),
        ({"weight": 3, "rows": (2, 1, 3, 4), "seed": 1}, "initial_weights", ["net.weight"]),
        ({"rows": (2, 1, 3, 4), "seed": 1}, "data_order", ["batch[0]"]),
    ],
)
def test_planted_difference_has_its_cause_and_says_so(change, cause, parts):
    verdict = judge(training_step(), training_step(**change))
    assert verdict.verdict == "diverged"
    assert verdict.cause == cause
    for part in parts:
        assert part in verdict.explanation


def test_removed_op_is_named_from_the_reference():
    verdict = judge(training_step(insert_at=10, factor=3.0), training_step())
    assert verdict.first_divergence.kind == "missing"
    assert "only in the reference" in verdict.explanation


def test_why_an_origin_is_not_proven_is_said():
    assert (
        "did not see wrote what it reads" in judge(training_step(), training_step(noise_at=3, unseen_at=3)).explanation
    )
    reference, current = StepBuilder(), StepBuilder()
    reference.op("aten.f.default", varying={"a": 1, "b": 2}, arguments={"c": 3})
    current.op("aten.f.default", varying={"b": 2, "c": 3}, arguments={"a": 1}, noise="other bits")
    assert "digests of other arguments" in judge(reference, current).explanation


def test_batch_of_other_size_is_other_content():
    reference, current = StepBuilder(), StepBuilder()
    reference.batch("batch[0]", [1, 2])
    current.named("batch[0]", 3, phase="data")
    assert judge(reference, current).cause == "data_content"


def test_one_reordered_and_one_changed_batch_tensor_is_other_content():
    reference, current = StepBuilder(), StepBuilder()
    for step, labels in ((reference, [0, 1]), (current, [0, 2])):
        step.batch("batch[0]", [1, 2] if step is reference else [2, 1])
        step.batch("batch[1]", labels)
    assert judge(reference, current).cause == "data_content"


def test_collective():
    reference, current = StepBuilder(), StepBuilder()
    for step in (reference, current):
        step.op("c10d.allreduce_.default", phase="backward", noise=step is current)
    assert judge(reference, current).cause == "collective"


def test_nothing_but_layouts():
    reference, current = training_step(), training_step()
    reference.entries[-1], current.entries[-1] = None, current.entries[0]
    verdict = judge(reference, current)
    assert verdict.cause == "structure"
    assert verdict.first_divergence.kind == "structure"


def reading_other_weights() -> tuple[StepBuilder, StepBuilder]:
    reference, current = StepBuilder(), StepBuilder()
    for step, bits in ((reference, 1), (current, 2)):
        step.op("aten.mm.default", "net.weight", weights={"net.weight": bits})
    return reference, current


@pytest.mark.parametrize(("is_first", "cause"), [(True, "initial_weights"), (False, "unknown")])
def test_parameter_read_from_outside(is_first, cause):
    reference, current = reading_other_weights()
    builder = VerdictBuilder("a", "b")
    difference = builder.add_step(reference.view(), current.view(), is_first=is_first)
    verdict = builder.finish()
    assert verdict.cause == cause
    assert judge_facts(Facts(difference=difference, is_first=is_first)).cause == cause
    assert "an input from outside the trace, net.weight differs" in verdict.explanation


def test_parameter_is_initial_only_in_the_first_step_added():
    reference, current = reading_other_weights()
    builder = VerdictBuilder("a", "b")
    builder.add_equal_step(training_step().view(step=0))
    builder.add_step(reference.view(step=1), current.view(step=1))
    assert builder.finish().cause == "unknown"


@pytest.mark.parametrize(("place", "cause"), [(1, "forward"), (2, "backward"), (3, "optimizer")])
def test_earliest_tensor_that_differs_names_the_phase_where_no_op_was_recorded(place, cause):
    reference, current = StepBuilder(), StepBuilder()
    for step in (reference, current):
        differs = [step is current and row >= place for row in range(4)]
        step.named("net.weight", 5)
        step.named("loss", 1 + differs[1], phase="forward")
        step.named("grad of net.weight", 1 + differs[2], phase="gradient")
        step.named("net.weight", 1 + differs[3])
    verdict = judge(reference, current)
    assert verdict.cause == cause
    assert verdict.first_divergence.is_origin is None
    assert "cannot be proven" in verdict.explanation
    assert judge(reference, current, SEED).cause == "settings"


def test_differing_choices_are_named_and_never_excuse():
    verdict = judge(training_step(), training_step(weight=3), SEED)
    assert verdict.verdict == "diverged"
    assert verdict.cause == "initial_weights"
    assert "settings.seed: 1 in the reference, 2 now" in verdict.explanation


def test_differing_machine_makes_it_not_comparable():
    verdict = judge(training_step(), training_step(noise_at=3), THREADS, SEED)
    assert verdict.verdict == "not_comparable"
    assert verdict.exit_code == 3
    assert verdict.first_divergence.op == "aten.mul.Tensor"
    assert verdict.cause == "forward"
    assert len(verdict.origins) == 1
    assert "torch.num_threads: 2 in the reference, 1 now" in verdict.explanation
    assert verdict.environment == (THREADS, SEED)


def test_machine_difference_that_changes_no_bits_excuses_nothing():
    assert judge(training_step(), training_step(noise_at=3), CPUS).verdict == "diverged"


def test_equal_bits_on_another_machine_match():
    verdict = judge(training_step(), training_step(), THREADS)
    assert verdict.verdict == "match"
    assert "torch.num_threads" in verdict.explanation


def test_match_counts():
    builder = VerdictBuilder("a", "b")
    step = training_step()
    for number in range(3, 6):
        assert (
            builder.add_step(step.view(step=number, ops_seen=50), step.view(step=number, ops_seen=50)).num_differing
            == 0
        )
    builder.add_equal_step(step.view(step=6, ops_seen=50, rank=1))
    assert not builder.has_divergence
    verdict = builder.finish()
    assert (verdict.verdict, verdict.cause, verdict.first_divergence) == ("match", None, None)
    assert (verdict.counts.steps_compared, verdict.counts.sites_compared) == (4, 4 * len(step.sites))
    assert verdict.counts.sites_differing == 0
    assert (verdict.coverage.ranks, verdict.coverage.steps) == (2, (3, 6))
    assert (verdict.coverage.ops_seen, verdict.coverage.ops_skipped) == (200, {"view": 4})
    assert f"{4 * len(step.sites)} sites of 4 steps of 2 ranks agree" in verdict.explanation


def test_first_divergence_is_the_least_by_step_position_and_rank():
    builder = VerdictBuilder("a", "b")
    for rank, step, place in ((0, 9, 2), (1, 5, 8), (2, 5, 3), (3, 5, 3)):
        builder.add_step(
            training_step().view(rank=rank, step=step), training_step(noise_at=place).view(rank=rank, step=step)
        )
    verdict = builder.finish()
    first = verdict.first_divergence
    assert (first.step, first.rank, first.occurrence) == (5, 2, 3)
    assert "Step 5 of rank 2" in verdict.explanation
    assert [(item.rank, item.step) for item in verdict.origins] == [(2, 5), (3, 5), (1, 5), (0, 9)]


def test_earlier_fit_comes_before_an_earlier_step_of_a_later_one():
    builder = VerdictBuilder("a", "b")
    for rank, segment, step in ((0, 1, 2), (1, 0, 9)):
        view = training_step(noise_at=2).view(rank=rank, step=step, segment=segment)
        builder.add_step(training_step().view(rank=rank, step=step, segment=segment), view)
    assert builder.finish().first_divergence.step == 9


def test_origins_are_those_of_the_first_diverging_step():
    builder = VerdictBuilder("a", "b", max_divergences=30)
    for step in range(4):
        difference = builder.add_step(training_step().view(step=step), training_step(noise_at=2).view(step=step))
        assert difference.num_differing == 28
    verdict = builder.finish()
    assert [item.step for item in verdict.origins] == [0]
    assert verdict.counts.sites_differing == 4 * 28


@pytest.mark.parametrize("kind", ["missing", "extra"])
def test_whole_steps(kind):
    builder = VerdictBuilder("a", "b")
    for step in range(3):
        builder.add_equal_step(training_step().view(step=step))
    for step in range(3, 10):
        getattr(builder, f"add_{kind}_step")(0, step, 0)
    assert builder.has_divergence
    verdict = builder.finish()
    assert (verdict.verdict, verdict.cause) == ("diverged", "structure")
    first = verdict.first_divergence
    assert (first.kind, first.step, first.phase, first.op, first.name) == (kind, 3, "other", "", None)
    side = "reference" if kind == "missing" else "current run"
    assert f"Steps 3 to 9 (7 of them) are only in the {side}; the 3 steps that both have agree" in verdict.explanation
    assert verdict.counts.sites_differing == 7


def test_whole_steps_beside_differing_bits():
    builder = VerdictBuilder("a", "b")
    builder.add_step(training_step().view(), training_step(noise_at=1).view())
    builder.add_missing_step(0, 1)
    verdict = builder.finish()
    assert verdict.first_divergence.op == "aten.mul.Tensor"
    assert "besides, step 1 is only in the reference" in verdict.explanation


def test_missing_steps_alone_are_no_matter_of_the_machine():
    builder = VerdictBuilder("a", "b")
    builder.set_environment((THREADS,))
    builder.add_equal_step(training_step().view())
    builder.add_missing_step(0, 1)
    assert builder.finish().verdict == "diverged"


def test_nothing_compared_is_never_a_match():
    with pytest.raises(NothingComparedError, match="refs/run1"):
        VerdictBuilder("refs/run1", "b").finish()
    builder = VerdictBuilder("a", "b")
    builder.add_step(StepBuilder().view(), StepBuilder().view())
    with pytest.raises(NothingComparedError, match="1 step held no site"):
        builder.finish()


def test_copy_goes_on_alone():
    builder = VerdictBuilder("a", "b")
    builder.add_equal_step(training_step().view(ops_seen=3))
    other = builder.copy()
    other.add_missing_step(0, 1)
    other.add_equal_step(training_step().view(step=2, ops_seen=3))
    other.note("Only common steps were compared")
    assert builder.finish().verdict == "match"
    assert builder.finish().coverage.ops_skipped == {"view": 1}
    assert other.finish().verdict == "diverged"
    assert "Only common steps" in other.finish().explanation


def test_refused_is_not_comparable():
    builder = VerdictBuilder("a", "b")
    builder.refuse("The runs had another number of processes")
    verdict = builder.finish()
    assert verdict.verdict == "not_comparable"
    assert verdict.explanation.startswith("The runs had another number of processes.")


def test_verdict_is_plain_json():
    form = judge(training_step(), training_step(lr=0.2), SEED).to_dict()
    assert form["first_divergence"]["kind"] == "argument"
    assert form["origins"] == [form["first_divergence"]]


def test_op_that_reads_other_tensors_is_said_to():
    reference, current = StepBuilder(), StepBuilder()
    for step in (reference, current):
        one, other = step.op("aten.relu.default", "?a"), step.op("aten.sin.default", "?b")
        step.op("aten.neg.default", one if step is reference else other)
    verdict = judge(reference, current)
    assert "reads other tensors than in the reference" in verdict.explanation


@pytest.mark.parametrize(
    ("change", "cause", "parts"),
    [
        ({"weight": 3}, "checkpoint", ["net.weight came out of the checkpoint with other bits", "no op is to blame"]),
        ({"weight": 3, "rows": (2, 1, 3, 4)}, "checkpoint", ["net.weight", "(the batch differs too)"]),
        ({"rows": (2, 1, 3, 4), "seed": 1}, "data_order", ["the batch batch[0]"]),
        ({"seed": 3}, "rng", ["the state of the generator torch.cpu differs"]),
        ({"noise_at": 5}, "forward", ["starts here"]),
    ],
)
def test_after_a_resume_the_state_came_from_the_checkpoint(change, cause, parts):
    builder = VerdictBuilder("refs/run1", "runs/today")
    builder.add_step(training_step().view(step=7), training_step(**change).view(step=7), is_resumed=True)
    verdict = builder.finish()
    assert verdict.cause == cause
    for part in ["Step 7, the first after resuming", *parts]:
        assert part in verdict.explanation


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
def test_arguments_after_a_resume_in_which_all_that_is_restored_agrees(change, is_resumed, environment, expected):
    builder = VerdictBuilder("refs/run1", "runs/today")
    builder.set_environment(environment)
    steps = training_step(insert_at=3), training_step(**{"insert_at": 3, **change})
    builder.add_step(*(step.view(step=7) for step in steps), is_resumed=is_resumed)
    assert (LOST in builder.finish().explanation) == expected


def test_a_tensor_made_of_a_lost_number_is_one():
    reference, current = StepBuilder(), StepBuilder()
    for step, number in ((reference, 1), (current, 2)):
        step.op("aten.mul.Tensor", "?number", weights={"?number": number})
    builder = VerdictBuilder("refs/run1", "runs/today")
    builder.add_step(reference.view(step=7), current.view(step=7), is_resumed=True)
    assert LOST in builder.finish().explanation


@pytest.mark.parametrize("phase", ["other", "forward"])
@pytest.mark.parametrize(("reader", "cause"), [("backward", "backward"), ("forward", None)])
def test_the_gradient_that_starts_a_backward_pass_is_of_it(phase, reader, cause):
    def step(noise):
        made = StepBuilder()
        loss = made.op("aten.mean.default", "?x")
        start = made.op("aten.ones_like.default", loss, phase=phase, module="", noise=noise)
        made.op("aten.mul.Tensor", start, phase=reader)
        return made

    verdict = judge(step(False), step(True))
    assert [origin.op for origin in verdict.origins] == ["aten.ones_like.default"]
    assert verdict.cause == (cause or {"other": "unknown"}.get(phase, phase))


def test_only_the_step_after_a_resume_accuses_the_checkpoint():
    builder = VerdictBuilder("refs/run1", "runs/today")
    builder.set_unrestored(("exp_avg of net.weight",))
    builder.add_step(training_step().view(step=7), training_step(noise_at=2).view(step=7))
    assert builder.finish().cause == "forward"
    builder = VerdictBuilder("refs/run1", "runs/today")
    builder.set_unrestored(("exp_avg of net.weight",))
    builder.add_step(training_step().view(step=7), training_step(noise_at=2).view(step=7), is_resumed=True)
    verdict = builder.finish()
    assert verdict.cause == "checkpoint"
    assert "exp_avg of net.weight is not what the reference ended step 6 with" in verdict.explanation


def initial(**weights):
    step = StepBuilder()
    for name, bits in weights.items():
        step.named(f"net.{name}", bits, phase="state")
    step.op("aten.f.default")
    return step


@pytest.mark.parametrize(
    ("current", "part"),
    [
        ({"a": 9, "b": 2, "c": 3}, "the initial state net.a differs (1 of 3 tensors)"),
        ({"a": 8, "b": 9, "c": 7}, "the initial state net.a, net.b, net.c differs (all 3 tensors)"),
    ],
)
def test_how_much_of_the_initial_state_differs_is_said(current, part):
    verdict = judge(initial(a=1, b=2, c=3), initial(**current), step=0)
    assert verdict.cause == "initial_weights"
    assert part in verdict.explanation
