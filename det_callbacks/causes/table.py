"""The rules in their order, which is that of time: what a run starts with, is given, draws, and computes."""

from det_callbacks.causes import (
    another_epoch,
    another_order,
    batch,
    batch_size,
    choice,
    compiled_graph,
    dtype,
    external_write,
    first_difference,
    generator,
    generator_before_data,
    initial_state,
    optimizer_option,
    origin,
    other_gradients,
    outside_input,
    restored_state,
    scripted_module,
    structure,
    uninitialised_memory,
    unrecorded_steps,
)
from det_callbacks.causes.rule import Rule
from det_callbacks.compare.facts import Facts
from det_callbacks.verdict import Cause

RULES: tuple[Rule, ...] = (
    dtype,
    restored_state,
    initial_state,
    another_epoch,
    generator_before_data,
    batch_size,
    batch,
    generator,
    unrecorded_steps,
    uninitialised_memory,
    external_write,
    outside_input,
    choice,
    optimizer_option,
    other_gradients,
    compiled_graph,
    scripted_module,
    another_order,
    structure,
    origin,
    first_difference,
)


def find_cause(facts: Facts) -> tuple[Rule, Cause]:
    """Return the first rule that applies to a step that differs, and the cause that it names."""
    found = ((rule, rule.cause(facts)) for rule in RULES)
    return next((rule, cause) for rule, cause in found if cause is not None)
