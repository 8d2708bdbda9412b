"""torch.compile made another graph of the same code.

Example:
    Step 12, forward: compiled.Net_forward.graph in net is a different graph: a recompilation, a
    graph break or different code; the inputs of the compiled region match, so the difference
    starts inside it. torch.compile compiled another graph here. Start both runs in fresh
    processes, since what was compiled earlier in a process also decides (drop_last or
    dynamic=True keep to one graph); see why with TORCH_LOGS=recompiles,graph_breaks; or record
    step 12 of both with compiled="eager" (only_steps=[12]).
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
        advice="torch.compile compiled another graph here. Start both runs in fresh processes, since what was "
        "compiled earlier in a process also decides (drop_last or dynamic=True keep to one graph); see why with "
        f'TORCH_LOGS=recompiles,graph_breaks; or record step {step} of both with compiled="eager" '
        f"(only_steps=[{step}])",
    )
