"""Why a step differs: the rules that lead from the evidence to one cause, and to what can be done.

``RULES`` are asked in order, and the first that applies decides. The order is that of time: what a run starts with,
what it is given, what it draws, what it computes. The README lists them by name, with an example each.
"""

from collections.abc import Callable
from dataclasses import dataclass

from det_callbacks.compare.facts import (
    Facts,
    advise_consumed,
    advise_few_weights,
    advise_generator,
    advise_lost_value,
    advise_other_seed,
    advise_sampler,
    advise_unseeded,
    cause_of_first,
    cause_of_input,
    cause_of_origin,
    consumed_before_data,
    first_is_state,
    generator_consumed,
    has_equal_samples,
    has_named_generator,
    has_other_data,
    has_other_data_set,
    has_other_epochs,
    is_drawn_within,
    is_few,
    is_outside_passes,
    is_seeded_otherwise,
    show_settings,
)
from det_callbacks.compare.wording import is_setting
from det_callbacks.verdict import Cause


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """One way to a cause.

    Attributes:
        name: by which the README lists it.
        cause: that it leads to, or what finds it.
        applies: whether it does.
        advice: a sentence that a person can act on, without its final stop; "" where there is nothing to add.
    """

    name: str
    cause: Cause | Callable[[Facts], Cause]
    applies: Callable[[Facts], bool]
    advice: Callable[[Facts], str] = lambda facts: ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Judgement:
    """What the rules came to.

    Attributes:
        rule: its name.
        cause: of the difference.
        advice: what can be done, "" where there is nothing to add.
    """

    rule: str
    cause: Cause
    advice: str


def judge(facts: Facts) -> Judgement:
    """Return the cause of a differing step, from the earliest evidence there is."""
    rule = next(rule for rule in RULES if rule.applies(facts))
    cause = rule.cause(facts) if callable(rule.cause) else rule.cause
    return Judgement(rule=rule.name, cause=cause, advice=rule.advice(facts))


RULES: tuple[Rule, ...] = (
    Rule(
        name="restored state",
        cause="checkpoint",
        applies=lambda facts: facts.is_resumed and bool(facts.difference.restored or facts.unrestored),
    ),
    Rule(
        name="another seed",
        cause="initial_weights",
        applies=is_seeded_otherwise,
        advice=advise_other_seed,
    ),
    Rule(
        name="unseeded model",
        cause="initial_weights",
        applies=lambda facts: "state" in facts.source_phases and not is_few(facts),
        advice=advise_unseeded,
    ),
    Rule(
        name="few weights",
        cause="initial_weights",
        applies=lambda facts: "state" in facts.source_phases,
        advice=advise_few_weights,
    ),
    Rule(
        name="another epoch",
        cause="data_order",
        applies=lambda facts: has_other_data(facts) and has_other_epochs(facts),
        advice=lambda facts: (
            "Look at limit_train_batches, overfit_batches, drop_last and the length of the data: an epoch ended in one "
            f"run only{show_settings(facts)}"
        ),
    ),
    Rule(
        name="generator consumed before the data",
        cause="rng",
        applies=lambda facts: has_other_data(facts) and consumed_before_data(facts) is not None,
        advice=advise_consumed,
    ),
    Rule(
        name="generators not restored",
        cause="rng",
        # a generator that the checkpoint did not bring back draws other samples, and augments them otherwise
        applies=lambda facts: (
            facts.is_resumed
            and has_other_data(facts)
            and "rng" in facts.source_phases
            and not (has_equal_samples(facts) or facts.batch_of is not None)
        ),
    ),
    Rule(
        name="transformed after loading",
        cause="data_content",
        applies=lambda facts: has_other_data(facts) and facts.batch.is_loaded_alike is True,
        advice=lambda facts: (
            "Look at on_before_batch_transfer and on_after_batch_transfer: what left the loader agrees, and what they "
            "made of it does not"
        ),
    ),
    Rule(
        name="samples in another order",
        cause="data_order",
        applies=lambda facts: (
            has_other_data(facts) and (has_equal_samples(facts) or facts.batch.indices == "reordered")
        ),
        advice=lambda facts: (
            f"Look at the sampler, the shuffle's seed and the sorting of files: the batch has the same samples in "
            f"another order{show_settings(facts)}"
        ),
    ),
    Rule(
        name="another data set",
        cause="data_content",
        applies=lambda facts: has_other_data(facts) and has_other_data_set(facts),
        advice=lambda facts: f"The data set is another one{show_settings(facts)}",
    ),
    Rule(
        name="batch of another step",
        cause="data_order",
        # a few labels are soon the same: where the indices are known, they tell
        applies=lambda facts: (
            has_other_data(facts) and facts.batch_of is not None and facts.batch.indices in (None, "other")
        ),
    ),
    Rule(
        name="files listed in another order",
        cause="data_order",
        applies=lambda facts: (
            has_other_data(facts) and facts.batch.indices == "same" and facts.batch.found_at is not None
        ),
        advice=lambda facts: (
            f"Sort what the data set lists: the sampler drew the same indices, and the samples behind them are others, "
            f"which the reference had at step {facts.batch.found_at}{show_settings(facts)}"
        ),
    ),
    Rule(
        name="samples made otherwise",
        cause="data_content",
        applies=lambda facts: has_other_data(facts) and facts.batch.indices == "same",
        advice=lambda facts: (
            "Look at transforms, augmentation, worker seeds and decoding: the sampler drew the same samples, and their "
            f"content differs{show_settings(facts)}"
        ),
    ),
    Rule(
        name="sampler drew others",
        cause="data_order",
        applies=lambda facts: (
            has_other_data(facts) and (facts.batch.indices == "other" or facts.batch.found_at is not None)
        ),
        advice=advise_sampler,
    ),
    Rule(
        name="other data",
        cause="data_content",
        applies=has_other_data,
        advice=lambda facts: (
            (
                "None of its samples is in what the reference recorded: they are others, or were made otherwise"
                if facts.batch.was_searched
                else ""
            )
            + show_settings(facts)
        ),
    ),
    Rule(
        name="generator consumed",
        cause="rng",
        applies=lambda facts: "rng" in facts.source_phases and generator_consumed(facts) is not None,
        advice=advise_consumed,
    ),
    Rule(
        name="generator state",
        cause="rng",
        applies=lambda facts: "rng" in facts.source_phases,
        advice=advise_generator,
    ),
    Rule(
        name="named generator",
        cause="rng",
        applies=lambda facts: not facts.sources and has_named_generator(facts),
        advice=advise_generator,
    ),
    Rule(
        name="generator drawn from in the forward pass",
        cause="rng",
        applies=lambda facts: not facts.sources and is_drawn_within(facts),
        # one that was seeded anew was not consumed
        advice=lambda facts: advise_consumed(facts) if generator_consumed(facts) else advise_generator(facts),
    ),
    Rule(
        name="input from outside",
        cause=cause_of_input,
        applies=lambda facts: bool(facts.sources),
        advice=advise_lost_value,
    ),
    Rule(
        name="another compiled graph",
        cause="structure",
        applies=lambda facts: facts.origin is not None and facts.origin.role == "graph",
        advice=lambda facts: (
            "torch.compile compiled another graph here. Start both runs in fresh processes, since what was compiled "
            "before decides as well (a resumed run knows no earlier batch sizes: drop_last or dynamic=True keep to one "
            f"graph); see why with TORCH_LOGS=recompiles,graph_breaks; or record step "
            f'{facts.difference.step} of both with compiled="eager" (only_steps=[{facts.difference.step}]) to see '
            "which op is another"
        ),
    ),
    Rule(
        name="structure",
        cause="structure",
        applies=lambda facts: not facts.difference.kinds & {"content", "argument"},
        advice=advise_lost_value,
    ),
    Rule(
        name="done by the loop",
        cause="settings",
        applies=is_outside_passes,
    ),
    Rule(
        name="origin",
        cause=cause_of_origin,
        applies=lambda facts: facts.origin is not None,
        advice=advise_lost_value,
    ),
    Rule(
        name="determinism setting",
        cause="settings",
        applies=lambda facts: any(is_setting(entry) for entry in facts.environment),
    ),
    Rule(
        name="delivered by a collective",
        cause="unknown",  # the other ranks know more: see det_callbacks.compare.collectives
        applies=lambda facts: facts.difference.findings[0].role == "delivered",
    ),
    Rule(
        name="left by a captured graph",
        cause="unknown",
        applies=lambda facts: any(finding.role == "left" for finding in facts.difference.findings),
        advice=lambda facts: (
            "An op inside a CUDA graph runs where nobody sees it: record step "
            f"{facts.difference.step} of both without CUDA graphs (call the function itself instead of its replay, or "
            "compile without reduce-overhead) to see which op it is"
        ),
    ),
    Rule(
        name="state after the step",
        cause="optimizer",  # everything recorded before it agrees, the gradients among it
        applies=first_is_state,
    ),
    Rule(name="first difference", cause=cause_of_first, applies=lambda facts: True),
)
