"""What a fit is to a callback, by its mode: a recording, a verification or an audit."""

from pathlib import Path
from typing import Any, Literal, Protocol

from det_callbacks.callback.auditing import Auditing
from det_callbacks.callback.recording import Recording
from det_callbacks.callback.verifying import Verifying
from det_callbacks.runs.peers import Peers
from det_callbacks.runs.selection import Selection


class RunArguments(Protocol):
    """The arguments of a callback that decide its run."""

    reference: Path | None
    mode: Literal["record", "verify", "audit", "disabled"]
    current: Path | None
    steps: Literal["all", "common"]
    on_divergence: Literal["raise", "collect", "warn"]
    overwrite: bool
    replay: tuple[str, ...]
    keep_tensors: tuple[str, ...]
    tensor_budget_mib: float
    selection: Selection
    asked: dict[str, Any]


def new_run(arguments: RunArguments, peers: Peers) -> Recording | Verifying | Auditing:
    """Return a run that has not begun; not for mode "disabled"."""
    if arguments.mode == "audit":
        steps = arguments.selection.only_steps
        return Auditing(arguments.current, steps=steps, on_divergence=arguments.on_divergence)
    assert arguments.reference is not None
    if arguments.mode == "record":
        return Recording(
            arguments.reference,
            peers=peers,
            overwrite=arguments.overwrite,
            replay=arguments.replay,
            keep=arguments.keep_tensors,
            budget_mib=arguments.tensor_budget_mib,
        )
    return Verifying(
        arguments.reference,
        arguments.current,
        peers=peers,
        steps=arguments.steps,
        on_divergence=arguments.on_divergence,
        asked=arguments.asked,
        budget_mib=arguments.tensor_budget_mib,
    )
