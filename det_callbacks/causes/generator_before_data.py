"""The batch differs because something drew from a generator before the sampler did, or a resume did not restore it.

Example:
    Step 6: the batch differs (batch[0] and batch[1]), and the generator state also differs; the
    step started with this difference, so no op caused it. DrawsAtEpochEnd.on_train_epoch_end
    draws from the generator torch.cpu: give it a separate generator, or restore the state of
    torch.cpu afterwards.
"""

from det_callbacks.causes import generator
from det_callbacks.causes.phrases.generators import RESUME_EXACTLY
from det_callbacks.causes.rule import Answer, Causes
from det_callbacks.compare.facts import Facts

CAUSES: Causes = ("rng", "settings", "data_order")


def find(facts: Facts) -> Answer | None:
    if not facts.has_other_data:
        return None
    if facts.consumed is not None and facts.is_before_step(facts.consumed):
        return generator.of_validation(facts) or Answer(cause="rng", advice=generator.advise(facts))
    if not facts.is_resumed or "rng" not in facts.source_phases:
        return None
    # a generator that was not restored shuffles differently, or draws and augments different samples
    advice = RESUME_EXACTLY if facts.consumed is None else generator.advise(facts)
    if not (facts.has_equal_samples or facts.evidence.batch.is_whole):
        return Answer(cause="rng", advice=advice)
    return Answer(cause="data_order", advice=advice) if facts.is_shuffle_unrestored else None
