"""A parameter, a buffer or a scheduler differs when the training starts: the seed, the weights or the model differ.

Example:
    Step 0: the initial state differs (net.0.weight, net.0.bias, net.5.weight and 1 more: 4 of 9
    tensors), and the generator state also differs; the step started with this difference, so no
    op caused it. Set the same seed before you build the model: the generator torch.cpu was
    seeded with 0 in the reference and 77 in the current run. Settings differ: settings.seed (0
    in the reference, 77 in the current run).
"""

from math import prod

from det_callbacks.causes.phrases.generators import show_start
from det_callbacks.causes.phrases.steps import show_exchanged
from det_callbacks.causes.rule import Answer, Causes
from det_callbacks.compare.facts import Facts
from det_callbacks.verdict import Divergence

CAUSES: Causes = ("initial_weights", "settings")


def find(facts: Facts) -> Answer | None:
    if "state" not in facts.source_phases:
        return None
    is_further = {*facts.initial_sources} <= {*facts.further}
    if is_further and (not facts.is_first_seen or facts.explaining_choice is not None):
        return None  # the setting may be a different scheduler
    # a Python number, such as T_max of a scheduler, is an argument
    is_setting = is_further and _first_state(facts).dtype in ("int", "float", "bool")
    return Answer(cause="settings" if is_setting else "initial_weights", advice=_advise(facts))


def _first_state(facts: Facts) -> Divergence:
    return next(one.divergence for one in facts.sources if one.divergence.phase == "state")


def _advise(facts: Facts) -> str:
    names = [name for name in facts.initial_sources if name not in facts.further]
    if not names:
        return (
            f"{facts.initial_sources[0]} differs before the first step, so give both runs the same schedulers, "
            "gradient scaler and averaged weights, with the same arguments"
        )
    state = [one.divergence for one in facts.sources if one.divergence.phase == "state"]
    if any(one.kind != "content" for one in state):
        return "Some tensors have a different name, shape or dtype, or exist in one run only, so build the same model"
    of_several = [name for name in names if name in {one.name for one in state if prod(one.shape or ()) != 1}]
    # one element is always equal to itself, so it says nothing beside others
    random = [name for name in of_several if name not in facts.evidence.constants] if of_several else names
    if not random:
        return (
            f"All elements of {names[0]} are equal when the fit starts, so check what changes it before the first "
            "step: a sanity check or a forward pass in training mode changes the statistics of a BatchNorm"
        )
    num_random = len(facts.random_initial)
    if not facts.exchanged and (num_random < 2 or 2 * len(random) <= num_random):
        return (
            "The code, the loaded weights or the random numbers drawn earlier differ, so set the seed first, and check "
            f"how {random[0]} is initialised or loaded"
        )
    change = next((one for one in facts.evidence.other_starts if one.is_reseeded), None)
    if facts.exchanged:
        return f"{show_exchanged(facts.exchanged)}: they were initialised, or loaded, in a different order"
    if change is None:
        return "Set the same seed before you build the model, or load the same weights"
    return f"Set the same seed before you build the model: {show_start(change)}"
