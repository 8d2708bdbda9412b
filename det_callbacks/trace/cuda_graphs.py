"""CUDA graphs in a step: ops that are captured are not recorded, and a replay is seen from outside.

While a stream is captured its ops are noted by the driver and do not run: there is nothing to digest, and a launch, an
allocation or a wait of ours would become part of the graph or break it. A replay runs all of them past every mode, in
memory of the graph's own and in whatever else it was given. So each replay is a row that says so, and what the step
knew of memory until then counts no more: what is read next gets a row of role "left", which follows from the replay and
from who had written it before. Only the whole can be told to be where a difference starts, and that never for certain.

A graph is named by its number among those that a step replays, in order: whatever ran before the step, in this process
or another, it has the same name.
"""

from threading import get_ident
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch

from det_callbacks.device_generators import is_capturing
from det_callbacks.errors import TraceError
from det_callbacks.trace.building import source_of
from det_callbacks.trace.dispatch import open_modes
from det_callbacks.trace.graph_watch import meet_managed, unwatch, watch
from det_callbacks.trace.left import GRAPH, LeftName, Replay
from det_callbacks.trace.program import Site
from det_callbacks.trace.tree import Context, Event, module_of

if TYPE_CHECKING:
    from det_callbacks.trace.recorder import Recorder

_graph_task_id = torch._C._current_graph_task_id  # torch 2.13: -1 outside a backward pass
_REPLAY = object()
"""Stands for the row of a replay where an op's overload stands for those of an op."""


class CudaGraphs:
    """Follows the CUDA graphs of one step after the other.

    Args:
        recorder: whose step it is.

    Attributes:
        busy: empty as long as no op can be one that is not to be recorded; the same set for good.
        num_managed: how often inductor ran code that it captures or replays.
    """

    def __init__(self, recorder: "Recorder") -> None:
        self._recorder = recorder
        self.busy: set[object] = set()
        self.num_managed = 0
        self._numbers: WeakKeyDictionary[Any, int] = WeakKeyDictionary()
        self._last: Replay | None = None

    def begin(self) -> None:
        """Start a step.

        Raises:
            TraceError: the current stream is being captured.
        """
        self.end()
        self.require_no_capture()
        self._numbers = WeakKeyDictionary()
        self._last = None
        watch(self)

    def end(self) -> None:
        """End a step; may be called more than once."""
        unwatch(self)
        self.busy.clear()

    def require_no_capture(self) -> None:
        """Raise TraceError where the current stream is being captured: at a step's end the device is waited for."""
        if is_capturing():
            raise TraceError(
                "A step cannot begin or end while a CUDA graph is being captured: its digests are launched and waited "
                "for, which a capture forbids. Nothing of the step was recorded, and the capture was not touched. Open "
                "and close the step outside the capture."
            )

    def is_aside(self) -> bool:
        """Return whether what runs here is captured, or is inductor's to capture and replay, so makes no row."""
        if not self.busy:
            return False
        return get_ident() in self.busy or torch.cuda.is_current_stream_capturing()

    def follow_managed(self) -> None:
        """Take note of inductor's graphs, if there are any by now."""
        meet_managed()

    def name_left(self, tensor_name: str | None) -> str | None:
        """Return the name of the row of memory that a replay may have written."""
        return tensor_name if self._last is None else LeftName.of(self._last, tensor_name)

    # what the watch calls

    def before_capture(self, graph: Any) -> None:
        """Have the device read what waits: within the capture it could not."""
        self._recorder.late.flush()
        self.busy.add(("capture", id(graph)))

    def after_capture(self, graph: Any) -> None:
        """Let ops be recorded again."""
        self.busy.discard(("capture", id(graph)))

    def before_managed(self) -> None:
        """Let the ops of this thread pass: they run once or twice, and never again."""
        self._recorder.late.flush()
        self.num_managed += 1
        self.busy.add(get_ident())

    def after_managed(self) -> None:
        """Let ops be recorded again."""
        self.busy.discard(get_ident())

    def before_replay(self, graph: Any) -> None:
        """Record that a graph runs, which may write whatever it was given."""
        recorder = self._recorder
        recorder.late.before_any_write()
        if recorder.selection.level == "state" or self.is_aside():
            return  # inductor's own graphs write nothing but what their region has rows for
        phase, context = self._place()
        number = self._numbers.setdefault(graph, len(self._numbers) + 1)
        last = Replay(name=f"{GRAPH}{number}", phase=phase, module=module_of(context))
        position = None
        if get_ident() in recorder.compiled.inside:
            pass  # a region of a compiler that makes graphs itself; it is named in the coverage
        elif not recorder.selects(phase, context):
            recorder.passing.skipped["unselected"] += 1
        else:
            recorder.passing.opaque.add(last.name)
            if self._can_have_row():
                position = recorder.num_sites
                last = self._record(last, context)
        self._last = last
        recorder.ledger.lose(position)

    def _record(self, replay: Replay, context: Context) -> Replay:
        """Make the row of a replay; return it with the lines behind it."""
        recorder = self._recorder
        parent = recorder.at
        like: tuple[Any, ...] = (_REPLAY, replay.phase, context, [], [], [replay.name], 1)
        event = parent.likely
        if event is None or not event.fits(*like):
            event = next((child for child in parent.children if child.fits(*like)), None)
            if event is None:
                event = Event(parent, *like)
                event.source = source_of(context)
                event.rows = (
                    Site(
                        phase=replay.phase,
                        module=replay.module,
                        op=f"{replay.name}.replay",
                        occurrence=0,
                        output=0,
                        role="launch",
                        source=event.source,
                    ),
                )
                recorder.tree.add(event)
            parent.likely = event
        recorder.at = event
        recorder.append_bits(0, recorder.layouts.none)
        return Replay(name=replay.name, phase=replay.phase, module=replay.module, source=event.source)

    def _can_have_row(self) -> bool:
        """Return whether ops are recorded here: not in an op that replays a graph itself, nor between two regions."""
        recorder = self._recorder
        if not recorder.compiled.is_open:
            return False
        return recorder.selection.level != "op" or any(
            getattr(mode, "recorder", None) is recorder for mode in open_modes()
        )

    def _place(self) -> tuple[str, Context]:
        recorder = self._recorder
        if _graph_task_id() == -1:
            return recorder.phase, recorder.modules.current
        return "backward", recorder.backward.context()
