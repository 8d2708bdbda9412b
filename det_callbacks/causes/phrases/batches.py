"""Why a batch differs: the sampler, the loader and its settings."""

from det_callbacks.causes.phrases.sites import source_name
from det_callbacks.compare.facts import Facts
from det_callbacks.text import capitalised, listed

_DREW = {
    "same": "the same indices in the same order",
    "reordered": "the same indices in a different order",
    "cut": "the same indices, for batches of a different size",
    "other": "different indices",
}


def batch_lines(facts: Facts) -> list[str]:
    tensors = [item for item in facts.sources if item.divergence.phase == "data"]
    if not tensors:
        return []
    names = [source_name(item) for item in tensors if item.role != "samples"]
    known = [f"different bits in {listed(names) or 'its samples'}", *_of_batch(facts)]
    return [*(f"batch: {one}" for one in known), *(f"loader: {one}" for one in _of_loader(facts))]


def because(facts: Facts, todo: str) -> str:
    """Return the settings of the loader that differ, or the first fact on the batch, and then what to do."""
    of_batch = _of_batch(facts) if facts.has_other_data else []
    reasons = _of_loader(facts) or [capitalised(one) for one in of_batch[:1]]
    if not reasons:
        return todo
    return f"{listed(reasons, '; ')}, so {todo[:1].lower()}{todo[1:]}"


def _of_loader(facts: Facts) -> list[str]:
    settings = facts.evidence.batch.settings
    return [
        f"{name} is {reference} in the reference and {current} in the current run"
        for name, (reference, current) in settings.items()
    ]


def _of_batch(facts: Facts) -> list[str]:
    batch, found = facts.evidence.batch, list[str]()
    if batch.indices is not None:
        found.append(f"the sampler drew {_DREW[batch.indices]}")
    if batch.is_loaded_alike is not None:
        found.append("the loader's output matches" if batch.is_loaded_alike else "the loader's output differs")
    if batch.found_at is not None:
        which = "all of its samples are" if batch.is_whole else "one of its samples is"
        found.append(f"{which} at step {batch.found_at} of the reference")
    elif batch.was_searched and batch.indices != "cut":
        same = f"{batch.num_same} of {batch.num_samples} recorded samples match this step of the reference"
        found.append(same if batch.num_same else "the reference recorded none of its samples")
    if batch.first_index is not None and batch.indices != "cut":
        loader, position, reference, current = batch.first_index
        both = f"{reference} in the reference, {current} in the current run"
        found.append(f"first different sample: the sampler of {loader} drew at [{position}] {both}")
    return found
