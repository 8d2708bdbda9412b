"""The rules in chronological order: what a run starts with, receives, samples and computes."""

from dataclasses import replace

from det_callbacks.causes import (
    another_epoch,
    another_length,
    another_order,
    batch,
    choice,
    collective_in_one_run,
    compiled_graph,
    compiled_in_one_run,
    dtype,
    external_write,
    first_difference,
    generator,
    generator_before_data,
    initial_state,
    optimizer_option,
    other_gradients,
    outside_input,
    recomputation,
    restored_state,
    scripted_module,
    structure,
    uninitialised_memory,
    unrecorded_steps,
)
from det_callbacks.causes.phrases.steps import explain_first
from det_callbacks.causes.rule import Answer, Rule
from det_callbacks.compare.facts import Facts

RULES: tuple[Rule, ...] = (
    dtype,
    restored_state,
    initial_state,
    another_epoch,
    another_length,
    generator_before_data,
    batch,
    recomputation,
    generator,
    unrecorded_steps,
    uninitialised_memory,
    other_gradients,
    external_write,
    outside_input,
    choice,
    optimizer_option,
    compiled_in_one_run,
    collective_in_one_run,
    compiled_graph,
    scripted_module,
    another_order,
    structure,
    first_difference,
)


def find_cause(facts: Facts) -> Answer:
    """Return the answer of the first rule that applies; the last one always does."""
    answers = (rule.find(facts) for rule in RULES)
    answer = next(one for one in answers if one is not None)
    return answer if answer.explanation else replace(answer, explanation=explain_first(facts))
