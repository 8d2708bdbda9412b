"""What is known of the first step that differs, and the questions that the rules of a cause ask of it."""

from collections.abc import Sequence
from dataclasses import dataclass

from det_callbacks.compare.evidence import BatchChange, Evidence, GeneratorChange
from det_callbacks.compare.proof import initial_sources, show_change, what_ran
from det_callbacks.compare.step import Finding, StepDifference
from det_callbacks.verdict import Cause, Divergence, EnvironmentDifference

_COLLECTIVES = ("c10d.", "_c10d_functional.", "c10d_functional.")
_PHASE_CAUSES: dict[str, Cause] = {
    "forward": "forward",
    "backward": "backward",
    "gradient": "backward",
    "optimizer": "optimizer",
}
_DRAWING = (("before the loader starts",), ("before a batch is drawn",))
"""What begins when the data draws for itself."""
_NO_BATCH = BatchChange(settings={})


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What is known of the first step that differs.

    Attributes:
        difference: of its sites.
        environment: how the environments differ.
        is_first: whether it is the first step of its fit, where a parameter that differs was initialised differently.
        is_resumed: whether one of the runs had just been resumed from a checkpoint.
        unrestored: restored state that is not what the reference ended the step before with.
        batch_of: the step at which the reference had the batch that differs here; None where it never had it.
        evidence: of generators and data; None where one of the runs has none.
    """

    difference: StepDifference
    environment: Sequence[EnvironmentDifference] = ()
    is_first: bool = False
    is_resumed: bool = False
    unrestored: Sequence[str] = ()
    batch_of: int | None = None
    evidence: Evidence | None = None

    @property
    def sources(self) -> list[Finding]:
        """What entered the step with other bits."""
        return [finding for finding in self.difference.findings if finding.is_source]

    @property
    def source_phases(self) -> set[str]:
        """Phases of the sources: state, data, rng, input."""
        return {finding.divergence.phase for finding in self.sources}

    @property
    def batch(self) -> BatchChange:
        """What is known of how the batch came to differ."""
        return _NO_BATCH if self.evidence is None else self.evidence.batch

    @property
    def generators(self) -> Sequence[GeneratorChange]:
        """The generators that differ when the step begins, in the order in which they came to."""
        return () if self.evidence is None else self.evidence.generators

    @property
    def origin(self) -> Finding | None:
        """The first finding that is proven to start the difference."""
        return next((finding for finding in self.difference.findings if finding.divergence.is_origin), None)


# the state that a run starts with


def is_seeded_otherwise(facts: Facts) -> bool:
    """Return whether the initial state differs, and so does the seed that it follows from."""
    return "state" in facts.source_phases and _other_seed(facts) is not None and not is_few(facts)


def _num_random(facts: Facts) -> int:
    """Return how many initial tensors follow from the seed: the others hold one value, whatever it is."""
    return facts.difference.num_initial - (0 if facts.evidence is None else facts.evidence.num_constant)


def is_few(facts: Facts) -> bool:
    """Return whether at most half of the initial tensors that follow from the seed differ."""
    return 2 * len(initial_sources(facts.difference)) <= _num_random(facts) or _num_random(facts) < 2


def _other_seed(facts: Facts) -> GeneratorChange | None:
    """Return the generator that the two runs began the fit with in other states, and seeded otherwise."""
    for change in facts.generators:
        if change.equal_at is None and change.seeds is not None and change.seeds[0] != change.seeds[1]:
            return change
    return None


def advise_other_seed(facts: Facts) -> str:
    """Name both seeds."""
    change = _other_seed(facts)
    assert change is not None, "the rule applies"
    assert change.seeds is not None, "likewise"
    return (
        f"Set the same seed before the model is built: {_share(facts)}, and {change.name} was seeded with "
        f"{change.seeds[0]} in the reference and with {change.seeds[1]} now"
    )


def advise_unseeded(facts: Facts) -> str:
    """Say what the initial state differs together with."""
    also = [name for phase, name in (("data", "data"), ("rng", "generators")) if phase in facts.source_phases]
    rest = f"and so do {' and '.join(also)}" if also else "while data and generators agree"
    return f"Set the seed before the model is built, and load the same weights: {_share(facts)}, {rest}"


def advise_few_weights(facts: Facts) -> str:
    """Name the first weight that differs."""
    first = initial_sources(facts.difference)[0]
    return (
        f"Look at how {first} is initialised or loaded: {_share(facts)}, so the seed was the same and the code, "
        "or the weights that were loaded, are not"
    )


def _share(facts: Facts) -> str:
    num, total = len(initial_sources(facts.difference)), facts.difference.num_initial
    if num >= total:
        return "the only initial tensor differs" if total == 1 else f"all {total} initial tensors differ"
    if num == _num_random(facts):
        if num == 1:
            return "the only initial tensor that holds more than one value differs"
        return f"all {num} initial tensors that hold more than one value differ"
    return f"{num} of {total} initial tensors differ"


# the data


def generator_consumed(facts: Facts) -> GeneratorChange | None:
    """Return the generator that something drew from in one run only, before the batch that differs was drawn."""
    for change in facts.generators:
        is_reseeded = change.seeds is not None and change.seeds[0] != change.seeds[1]
        if change.equal_at is not None and not is_reseeded and change.points[:1] not in _DRAWING:
            return change
    return None


def consumed_before_data(facts: Facts) -> GeneratorChange | None:
    """Return what ``generator_consumed`` does, where it happened before the step began, and so before its batch."""
    change = generator_consumed(facts)
    return change if change is not None and _is_before_step(change, facts) else None


def _is_before_step(change: GeneratorChange, facts: Facts) -> bool:
    step, point = change.differs_at
    return step < facts.difference.step or point not in ("after forward", "after backward", "batch end")


def has_other_epochs(facts: Facts) -> bool:
    """Return whether an epoch ended, on the way to the step, in one run only."""
    return any(
        {"epoch end", "epoch start"} & {*change.only_reference, *change.only_current}
        for change in facts.generators
        if _is_before_step(change, facts)
    )


def has_named_generator(facts: Facts) -> bool:
    """Return whether a generator that an object holds was another before an op that got other arguments."""
    first = facts.difference.findings[0].divergence
    own = ("python", "numpy", "torch.")
    named = [change for change in facts.generators if not change.name.startswith(own)]
    return first.kind == "argument" and any(_is_before_step(change, facts) for change in named)


def advise_sampler(facts: Facts) -> str:
    """Say why the sampler drew others: its settings, its generator, or neither."""
    settings = [name for name in facts.batch.settings if name.startswith(("batch_size", "num_workers", "sampler"))]
    found = facts.batch.found_at
    if facts.batch.indices != "other":
        return (
            f"Look at the order in which the data come: samples of this batch are in the reference at step {found}"
            f"{show_settings(facts)}"
        )
    if settings:
        return f"The loader is set otherwise{show_settings(facts)}, so the sampler drew other samples"
    changes = [change for change in facts.generators if _is_before_step(change, facts)]
    if not changes:
        return (
            "Look at the sampler itself (its weights, what it sorts by): it drew other samples, and no generator that "
            f"is known differs{show_settings(facts)}"
        )
    return (
        f"Give the shuffle the same seed: the sampler drew other samples; {show_change(changes[0], facts.evidence)}"
        f"{show_settings(facts)}"
    )


def has_other_data(facts: Facts) -> bool:
    """Return whether the batch differs."""
    return "data" in facts.source_phases


def advise_consumed(facts: Facts) -> str:
    """Name who drew from the generator."""
    change = generator_consumed(facts)
    assert change is not None, "the rule applies"
    assert facts.evidence is not None, "likewise"
    ran = what_ran(change, facts.evidence)
    for points, side in ((change.only_reference, "the reference"), (change.only_current, "the current run")):
        if any(point in ("before validation", "epoch end", "epoch start") for point in points):
            return (
                f"{', '.join(points)}: only in {side}, and something there drew from {change.name}. Look at "
                "val_check_interval, limit_train_batches, drop_last and the length of the data"
            )
    return f"Keep {ran} from drawing from {change.name}: give it a generator of its own, or put the state back after it"


def advise_generator(facts: Facts) -> str:
    """Name the generator that came to differ first; one that was never seeded is to be."""
    if not facts.generators:
        return ""
    change = facts.generators[0]
    text = show_change(change, facts.evidence)
    if change.equal_at is None and change.seeds is None:
        text += ": seed Python, NumPy and torch alike before the model is built (DeterminismSettings(seed=...))"
    return text


def has_equal_samples(facts: Facts) -> bool:
    """Return whether every tensor of the batch that differs holds the same samples in another order."""
    tensors = [item for item in facts.sources if item.divergence.phase == "data" and item.role != "samples"]
    return bool(tensors) and all(finding.has_equal_samples for finding in tensors)


def has_other_data_set(facts: Facts) -> bool:
    """Return whether the data set has another length."""
    return any(name.startswith("length of the data set") for name in facts.batch.settings)


def show_settings(facts: Facts) -> str:
    """Return which settings of the loaders differ, in brackets; "" when none."""
    shown = [f"{name}: {ours} in the reference, {theirs} now" for name, (ours, theirs) in facts.batch.settings.items()]
    return f" ({'; '.join(shown[:3])})" if shown else ""


# what is computed


def cause_of_input(facts: Facts) -> Cause:
    """Return what a tensor from outside the trace leads to."""
    return "initial_weights" if facts.is_first and _is_model_state(facts.sources[0].divergence) else "unknown"


def _is_model_state(divergence: Divergence) -> bool:
    return divergence.name is not None and " of " not in divergence.name


def cause_of_origin(facts: Facts) -> Cause:
    """Return the cause that the first origin leads to."""
    assert facts.origin is not None, "the rule applies"
    return _cause_of(facts.origin)


def cause_of_first(facts: Facts) -> Cause:
    """Return the cause that the first difference leads to."""
    return _cause_of(facts.difference.findings[0])


def is_outside_passes(facts: Facts) -> bool:
    """Return whether what differs first was done by the loop, which another choice explains."""
    first = facts.difference.findings[0].divergence
    choices = [entry.name for entry in facts.environment if not entry.is_machine and entry.changes_bits]
    # accumulation divides the loss between the passes, by an op that is recorded at level op only
    is_scaled = "trainer.accumulate_grad_batches" in choices and first.name == "loss"
    is_other = first.phase == "other" and not facts.difference.findings[0].starts_backward
    return bool(choices) and (is_other or is_scaled)


def _cause_of(finding: Finding) -> Cause:
    if finding.divergence.op.startswith(_COLLECTIVES):
        return "collective"
    return "backward" if finding.starts_backward else _PHASE_CAUSES.get(finding.divergence.phase, "unknown")


def advise_lost_value(facts: Facts) -> str:
    """Say what a resume may have lost where all that a checkpoint restores agrees; "" where another choice explains it.

    The rule of restored state comes before all others, so that what is asked here knows of none.
    """
    if not facts.is_resumed or any(not entry.is_machine and entry.changes_bits for entry in facts.environment):
        return ""
    first = facts.origin or facts.difference.findings[0]
    is_outside = bool(facts.sources) and all(
        found.role == "input" and found.divergence.name is None for found in facts.sources
    )
    if not is_outside and (facts.sources or first.divergence.kind not in ("argument", "missing", "extra")):
        return ""
    return (
        "All that a checkpoint restores agrees: look for a Python value that the checkpoint does not hold (an "
        "attribute, a counter, the state of an environment), and keep it there with on_save_checkpoint and "
        "on_load_checkpoint, or in a buffer"
    )


def is_drawn_within(facts: Facts) -> bool:
    """Return whether a generator came to differ within the step, where ops are not recorded, and so not blamed."""
    first = facts.difference.findings[0].divergence
    within = [change for change in facts.generators if change.equal_at == (first.step, "batch start")]
    return not first.op and first.phase == "forward" and bool(within)


def first_is_state(facts: Facts) -> bool:
    """Return whether all that was recorded agrees up to the state after the step."""
    first = facts.difference.findings[0]
    return first.role == "named" and first.divergence.phase == "state"
