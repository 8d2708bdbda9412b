"""The batch differs: the loaders have different batch sizes, or the samples are others or come in another order.

Example:
    Step 0: the batch differs (batch[0], batch[1]); it entered the step that way, so no op is to
    blame. Sort what the data set lists: the sampler drew the same indices in the same order.
"""

from collections.abc import Mapping

from det_callbacks.causes.phrases.batches import because
from det_callbacks.causes.phrases.generators import show_change
from det_callbacks.causes.rule import Answer, Causes
from det_callbacks.compare.facts import DataChange, Facts

CAUSES: Causes = ("settings", "data_order", "data_content")

_OTHER_CONTENT = ("transformed", "other data set", "made otherwise", "other")
_TODO: Mapping[DataChange, str] = {
    "transformed": "Look at on_before_batch_transfer and on_after_batch_transfer",
    "reordered": "Look at the sampler, the shuffle's seed and the sorting of files",
    "drawn": "Look at the sampler (its weights, what it sorts by) and at the loader's settings",
    "other data set": "The data set has another length",
    "listed otherwise": "Sort what the data set lists",
    "made otherwise": "Look at transforms, augmentation, worker seeds, decoding, generators of the data set's own "
    "(numpy.random.default_rng()), and the data itself (files, labels)",
    "other": "Look at what the data set holds, and at its transforms",
}


def find(facts: Facts) -> Answer | None:
    if not facts.has_other_data:
        return None
    if any(name.startswith("batch_size") for name in facts.evidence.batch.settings):
        return Answer(cause="settings", advice=because("Give the loader the same batch size", facts))
    is_other_content = facts.data_change in _OTHER_CONTENT
    return Answer(cause="data_content" if is_other_content else "data_order", advice=_advise(facts))


def _advise(facts: Facts) -> str:
    batch = facts.evidence.batch
    is_other_shuffle = facts.data_change == "drawn" and batch.indices == "other" and not batch.settings
    change = next(filter(facts.is_before_step, facts.evidence.generators), None)
    if change is None or not is_other_shuffle:
        return because(_TODO[facts.data_change], facts)
    return f"Give the shuffle the same seed, and draw the same before it: {show_change(change, facts.evidence)}"
