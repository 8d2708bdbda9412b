"""The batch differs: the batch size, the samples or their order.

Example:
    Step 0: the batch differs (batch[0] and batch[1]); the step started with this difference, so
    no op caused it. The sampler drew the same indices in the same order, so sort the files or
    samples that the data set lists.
"""

from collections.abc import Mapping

from det_callbacks.causes.phrases.batches import because
from det_callbacks.causes.phrases.generators import show_change
from det_callbacks.causes.rule import Answer, Causes
from det_callbacks.compare.facts import DataChange, Facts
from det_callbacks.text import capitalised, listed

CAUSES: Causes = ("settings", "data_order", "data_content")

_OTHER_CONTENT = ("transformed", "other data set", "made otherwise", "other")
_TODO: Mapping[DataChange, str] = {
    "transformed": "Check what changes the batch between the loader and the model (on_before_batch_transfer and "
    "on_after_batch_transfer in Lightning)",
    "reordered": "Check the sampler, the shuffle's seed and the order of the files",
    "drawn": "Check the sampler (its weights, what it sorts by) and the loader's settings",
    "other data set": "Use the same data set, because its length differs",
    "listed otherwise": "Sort the files or samples that the data set lists",
    "made otherwise": "Check transforms, augmentation, worker seeds, decoding, the data set's generators "
    "(numpy.random.default_rng()), the data itself (files, labels), and code that changes the loaded batch in place",
    "other": "Check the samples of the data set, its transforms, and code that changes the loaded batch",
}


def find(facts: Facts) -> Answer | None:
    if not facts.has_other_data:
        return None
    if any(name.startswith("batch_size") for name in facts.evidence.batch.settings):
        return Answer(cause="settings", advice=because(facts, "Use the reference's batch size"))
    is_other_content = facts.data_change in _OTHER_CONTENT
    return Answer(cause="data_content" if is_other_content else "data_order", advice=_advise(facts))


_UNRECORDED = (
    "No DataLoader gave the batch, and the recorded generators match, so it comes from something that was not "
    "recorded: a separate generator (numpy.random.default_rng() without a seed), an environment, or a file"
)


def _advise(facts: Facts) -> str:
    batch = facts.evidence.batch
    changes = [*filter(facts.is_before_step, facts.evidence.generators)]
    if not (batch.has_loader or changes or batch.num_same) and facts.data_change == "other":
        return _UNRECORDED
    if facts.data_change in ("made otherwise", "other") and changes:
        shown = listed(f"the generator {change.name}" for change in changes)
        return f"{capitalised(show_change(changes[0], facts.evidence))}. Seed what the samples are made with: {shown}"
    is_other_shuffle = facts.data_change == "drawn" and batch.indices == "other" and not batch.settings
    change = next(iter(changes), None)
    if change is None or not is_other_shuffle:
        return because(facts, _TODO[facts.data_change])
    why = capitalised(show_change(change, facts.evidence))
    return f"{why}. Give the shuffle the same seed, and draw the same numbers before it"
