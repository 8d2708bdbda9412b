"""torch.compile compiled a different graph.

Example:
    Step 12, forward: compiled.Net_forward.graph in net differs, because of a recompilation, a
    graph break or different code; the inputs of the compiled region match, so the difference
    starts inside it. Run both in fresh processes, because earlier compilations affect the
    graph; drop_last or dynamic=True avoids recompilation. TORCH_LOGS=recompiles,graph_breaks
    shows the reason. To find the op, record step 12 of both runs with compiled="eager" and
    only_steps=[12] (on the command line: --compiled=eager --only-steps=12).
"""

from det_callbacks.causes.rule import Answer, Causes
from det_callbacks.compare.facts import Facts

CAUSES: Causes = ("structure",)


def find(facts: Facts) -> Answer | None:
    if facts.origin is None or facts.origin.role != "graph":
        return None
    step = facts.difference.step
    return Answer(
        cause="structure",
        advice="Run both in fresh processes, because earlier compilations affect the graph; drop_last or dynamic=True "
        "avoids recompilation. "
        "TORCH_LOGS=recompiles,graph_breaks shows the reason. "
        f'To find the op, record step {step} of both runs with compiled="eager" and only_steps=[{step}] '
        f"(on the command line: --compiled=eager --only-steps={step})",
    )
