"""The batch differs, and the loaders have different batch sizes.

Example:
    Step 0: the batch has a different structure (batch[0], batch[1]): float32 [16, 1, 8, 8] in the reference,
    float32 [32, 1, 8, 8] now; it entered the step that way, so no op is to blame. Give the loader the same batch
    size: batch_size of train_dataloader is 16 in the reference, 32 now.

    Evidence
      initial state: 9 tensors, all equal
      batch: different bits in batch[0], batch[1]
      batch: the sampler drew the same indices, and they are cut into batches of a different size
      batch: one of its samples is at step 1 of the reference
      loader: batch_size of train_dataloader is 16 in the reference, 32 now
      torch.cpu: equal at the batch start of step 0, different after forward of step 0, by a different number of
        draws from the same seed; what ran in between: the forward pass
"""

from typing import Literal

from det_callbacks.causes.phrases.batches import because
from det_callbacks.causes.phrases.steps import explain_first as explain
from det_callbacks.compare.facts import Facts

__all__ = ["NAME", "advise", "cause", "explain"]

NAME = "batch size"


def cause(facts: Facts) -> Literal["settings"] | None:
    has_other_size = any(name.startswith("batch_size") for name in facts.evidence.batch.settings)
    return "settings" if facts.has_other_data and has_other_size else None


def advise(facts: Facts) -> str:
    return because("Give the loader the same batch size", facts)
