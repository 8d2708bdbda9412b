"""torch.compile made another graph of the same code.

Example:
    Step 12, forward: compiled.Net_forward.graph in net is a different graph: a recompilation, a graph break or
    different code; the inputs of the compiled region match, so the difference starts inside it. torch.compile
    compiled another graph here. Start both runs in fresh processes, since what was compiled earlier in a process
    also decides (drop_last or dynamic=True keep to one graph); see why with TORCH_LOGS=recompiles,graph_breaks; or
    record step 12 of both with compiled="eager" (only_steps=[12]).
"""

from typing import Literal

from det_callbacks.causes.phrases.steps import explain_first as explain
from det_callbacks.compare.facts import Facts

__all__ = ["NAME", "advise", "cause", "explain"]

NAME = "compiled graph"


def cause(facts: Facts) -> Literal["structure"] | None:
    return "structure" if facts.origin is not None and facts.origin.role == "graph" else None


def advise(facts: Facts) -> str:
    step = facts.difference.step
    return (
        "torch.compile compiled another graph here. Start both runs in fresh processes, since what was compiled "
        "earlier in a process also decides (drop_last or dynamic=True keep to one graph); see why with "
        f'TORCH_LOGS=recompiles,graph_breaks; or record step {step} of both with compiled="eager" (only_steps=[{step}])'
    )
