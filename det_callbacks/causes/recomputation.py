"""Activation checkpointing ran an op again in one run only, or with other bits than in its forward pass.

Example:
    Step 7, backward: activation checkpointing ran aten.bernoulli_.float in net.dropout
    (train.py:9, forward) again in the current run, and it gave other bits than in the forward
    pass. Do not pass preserve_rng_state=False to torch.utils.checkpoint.
"""

from det_callbacks.causes.phrases.sites import side_of, site_text
from det_callbacks.causes.phrases.steps import place
from det_callbacks.causes.rule import Answer, Causes
from det_callbacks.compare.facts import Facts

CAUSES: Causes = ("rng", "backward", "structure")

_CHANGED_INPUT = (
    "Check what the checkpointed function reads that changed since its forward pass: a cache, a buffer, or a tensor "
    "that was changed in place"
)


def find(facts: Facts) -> Answer | None:
    """Apply if the first difference is an op that only one run ran again, or the state that such an op drew from."""
    first = facts.first.divergence
    if not facts.starts_recomputed or (first.op and first.kind not in ("missing", "extra")):
        return None
    if len(facts.recomputed_otherwise) == 1:
        ((row, side),) = facts.recomputed_otherwise
        op, draws = facts.difference.describe(row), facts.draws(row)
        return Answer(
            cause="rng" if draws else "backward",
            explanation=f"{place(facts)}, {op.phase}: activation checkpointing ran {site_text(op)} again in the "
            f"{side}, and it gave other bits than in the forward pass",
            advice="Do not pass preserve_rng_state=False to torch.utils.checkpoint" if draws else _CHANGED_INPUT,
        )
    if not facts.has_only_recomputation or facts.recomputed_otherwise:
        return None
    return Answer(
        cause="structure",
        explanation=f"{place(facts)}, {first.phase}: only the {side_of(first)} recomputes activations, from "
        f"{site_text(first)} on, with the bits of the forward pass; everything that both runs have matches",
        advice="Use activation checkpointing in both runs, or in neither",
    )
