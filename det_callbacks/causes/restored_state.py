"""In the first step after a resume, state that the checkpoint should have restored differs.

Example:
    Step 7, the first after resuming: the restored state differs (net.weight); no op caused it.
    Compare the checkpoint with the one originally saved (det-callbacks check-checkpoint), and
    check what changes this state before the step. Checkpoints omit buffers with
    persistent=False: save them with on_save_checkpoint.
"""

from det_callbacks.causes.phrases.steps import SUBJECT, also_differ, how_it_entered, place, show_exchanged
from det_callbacks.causes.rule import Answer, Causes
from det_callbacks.compare.facts import Facts
from det_callbacks.text import listed

CAUSES: Causes = ("checkpoint",)


def find(facts: Facts) -> Answer | None:
    if not facts.is_resumed:
        return None
    if not (facts.restored or facts.unrestored):
        return _of_lost_inputs(facts)
    if facts.restored:
        what = how_it_entered("restored", facts.restored, facts)
    else:
        before = facts.difference.step - 1
        names = listed(facts.unrestored)
        what = f"{SUBJECT['restored']} differs from the reference's state at the end of step {before} ({names})"
    advice = (
        "Compare the checkpoint with the one originally saved (det-callbacks check-checkpoint), and check "
        "what changes this state before the step"
    )
    if facts.exchanged:
        advice = (
            f"{show_exchanged(facts.exchanged)}: state was restored by its place in a list, and the order of the list "
            "differs. Give the optimizer its parameters in the reference's order"
        )
    found = [str(one.divergence.name) for one in facts.restored] or facts.unrestored
    if not all(" of " in name for name in found):  # not "exp_avg of net.weight", "state of StepLR: last_epoch"
        advice += ". Checkpoints omit buffers with persistent=False: save them with on_save_checkpoint"
    others = [phase for phase in facts.source_phases if phase not in ("state", "input")]
    return Answer(
        cause="checkpoint",
        explanation=f"{place(facts)}: {what}{also_differ(others)}; no op caused it",
        advice=advice,
    )


def _of_lost_inputs(facts: Facts) -> Answer | None:
    """Return the answer if the reference adds to tensors from before the step that the resumed run lacks."""
    if not facts.lost_inputs:
        return None
    return Answer(
        cause="checkpoint",
        explanation=f"{place(facts)}: the reference adds to {listed(facts.lost_inputs)} from before this step, and the "
        "resumed run does not: gradients accumulated before the checkpoint were not restored",
        advice="Save checkpoints after an update, when no gradients are accumulated, or save and restore them",
    )
