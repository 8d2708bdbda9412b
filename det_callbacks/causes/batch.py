"""The batch differs: its samples come in another order, or they are other samples.

Example:
    Step 0: the batch differs (batch[0], batch[1]); it entered the step that way, so no op is to blame. Sort what
    the data set lists: the sampler drew the same indices in the same order.

    Evidence
      initial state: 9 tensors, all equal
      batch: different bits in batch[0], batch[1]
      batch: the sampler drew the same indices in the same order
      batch: one of its samples is at step 1 of the reference
"""

from collections.abc import Mapping
from typing import Literal

from det_callbacks.causes.phrases.batches import because
from det_callbacks.causes.phrases.generators import show_change
from det_callbacks.causes.phrases.steps import explain_first as explain
from det_callbacks.compare.facts import DataChange, Facts

__all__ = ["NAME", "advise", "cause", "explain"]

NAME = "batch"
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


def cause(facts: Facts) -> Literal["data_order", "data_content"] | None:
    if not facts.has_other_data:
        return None
    return "data_content" if facts.data_change in _OTHER_CONTENT else "data_order"


def advise(facts: Facts) -> str:
    batch = facts.evidence.batch
    change = next(filter(facts.is_before_step, facts.evidence.generators), None)
    is_other_shuffle = facts.data_change == "drawn" and batch.indices == "other" and not batch.settings
    if change is None or not is_other_shuffle:
        return because(_TODO[facts.data_change], facts)
    return f"Give the shuffle the same seed, and draw the same before it: {show_change(change, facts.evidence)}"
