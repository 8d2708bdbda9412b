"""Only one run ended an epoch before the step, so the batches or the generators differ.

Example:
    Step 5: the batch differs (batch[0] and batch[1]), and the generator state also differs; the
    step started with this difference, so no op caused it. Only one run ended an epoch before
    this step. The sampler drew different indices, so compare limit_train_batches,
    overfit_batches, drop_last and the length of the data set. Settings differ:
    trainer.limit_train_batches (1.0 in the reference, 5 in the current run).
"""

from det_callbacks.causes.phrases.batches import because
from det_callbacks.causes.rule import Answer, Causes
from det_callbacks.compare.facts import Facts

CAUSES: Causes = ("data_order",)

_BOUNDARIES = {"epoch end", "epoch start"}
_TODO = "Compare limit_train_batches, overfit_batches, drop_last and the length of the data set"


def find(facts: Facts) -> Answer | None:
    if {"data", "rng"}.isdisjoint(facts.source_phases):
        return None
    before = [change for change in facts.evidence.generators if facts.is_before_step(change)]
    in_one_run = {point for change in before for point in (*change.only_reference, *change.only_current)}
    if in_one_run.isdisjoint(_BOUNDARIES):
        return None
    return Answer(cause="data_order", advice=f"Only one run ended an epoch before this step. {because(facts, _TODO)}")
