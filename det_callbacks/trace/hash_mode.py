"""HashMode: records what one step computed, as digests."""

import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from det_callbacks.digest.components import digest_tensors
from det_callbacks.digest.unobserved import hidden
from det_callbacks.errors import CoverageWarning, TraceError
from det_callbacks.internals.torch import BUFFERS, PARAMETERS
from det_callbacks.runs.program import scalar_bits
from det_callbacks.runs.selection import PHASES, Selection, as_names
from det_callbacks.runs.steps import Expectation, StepTrace
from det_callbacks.trace.batches import Samples, record_batch
from det_callbacks.trace.components import holds_data
from det_callbacks.trace.leaves import Entry, StateWalker, states_of_parameters
from det_callbacks.trace.listener import Listener
from det_callbacks.trace.optimizers import OptimizerPhases, in_phase, parameters_of
from det_callbacks.trace.places import has_address
from det_callbacks.trace.recorder import Recorder


class HashMode:
    """Record the digests of one step: of everything that runs inside the ``with`` block.

    The trace remains available after the block. You can enter a mode again for the next step, which
    replaces the trace; the mode is not reentrant. For cost and limits, see docs/explanation.

    Args:
        model: module that names are relative to; the mode records its parameters and buffers when
            the block ends. With None, names begin with the class of the outermost module, and the
            mode records no state.
        modules: fnmatch patterns for qualified module names; "*" matches everything,
            including ops outside any module.
        level: "op", "module" or "state"; each includes the levels after it.
        phases: any of "forward", "backward" and "optimizer".
        compiled: "run" records the inputs and outputs of regions that torch.compile compiled, and
            the ops visible inside. "eager" runs their original code and records every op: slower,
            and with other kernels.

    Attributes:
        trace: the last step, or None before the first.
        is_open: whether a step is under way.
        is_off: whether the mode has turned itself off for good.
        optimizers: the optimizers whose state is recorded; the mode adds those
            that step inside the block.

    Raises:
        SelectionError: an argument has a value that is not allowed.
        TraceError: the mode is already entered.

    Examples:
        >>> with HashMode() as mode:
        ...     _ = torch.ones(2, 2) @ torch.ones(2, 2)
        >>> [site.op for site in mode.trace.program.sites if site.role == "output"]
        ['aten.ones.default', 'aten.ones.default', 'aten.mm.default']
    """

    def __init__(
        self,
        model: nn.Module | None = None,
        *,
        modules: Sequence[str] = ("*",),
        level: str = "op",
        phases: Sequence[str] = PHASES,
        compiled: str = "run",
    ) -> None:
        names = as_names("modules", modules), as_names("phases", phases)
        selection = Selection(level=level, modules=names[0], phases=names[1], compiled=compiled)
        self._initialise(model, selection, base_phase="forward")

    @classmethod
    def for_training(
        cls, model: nn.Module, selection: Selection, *, base_phase: str = "other"
    ) -> "HashMode":
        """Return a mode for a training loop that begins and finishes the steps,
        and sets the phases.
        """
        mode = cls.__new__(cls)
        cls._initialise(mode, model, selection, base_phase=base_phase)
        return mode

    def _initialise(
        self, model: nn.Module | None, selection: Selection, *, base_phase: str
    ) -> None:
        self.selection = selection
        self.trace: StepTrace | None = None
        self.is_off = False
        self._walker = None if model is None else StateWalker(model)
        self._base_phase = base_phase
        self.recorder = Recorder(selection, model)
        self._phases = OptimizerPhases(
            self.recorder,
            base_phase,
            on_new=hidden(self.recorder.places.names.refresh),
            on_update=self._record_gradients,
            on_end=lambda: self.on_updated(),
        )
        self._listener = Listener(self.recorder, self._phases)
        self.recorder.places.names.list_state = self._state
        self.recorder.places.names.list_parameters = self._parameters_of
        self._by_shape: dict[torch.Size, list[tuple[str, Tensor]]] = {}
        self.is_open = False
        self._samples: list[Samples] = []
        self._num_batches = 0  # of the step under way
        # state outside model and optimizers
        self.list_further: Callable[[], Iterable[Entry]] = tuple
        self.on_updated: Callable[[], None] = lambda: None  # called after an optimizer's update

    @property
    def optimizers(self) -> list[Optimizer]:
        """Optimizers whose state is recorded."""
        return self._phases.seen

    @optimizers.setter
    def optimizers(self, optimizers: Sequence[Optimizer]) -> None:
        self._phases.seen = list(optimizers)

    @property
    def sketch(self) -> tuple[int, ...]:
        """The sketch of the largest samples in the last finished step's batch."""
        largest = max(
            self._samples,
            key=lambda samples: (samples.sketch != (), samples.num_bytes),
            default=None,
        )
        return () if largest is None else largest.sketch

    def __enter__(self) -> Self:
        self.begin()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.finish()
        else:
            self.abandon()

    @hidden
    def begin(
        self, *, batch: Any = None, is_first: bool = False, expected: Expectation | None = None
    ) -> None:
        """Start a step on a batch; the first step of a run also records the initial state."""
        if self.is_open:
            raise TraceError(
                "HashMode is already open, and traces only one step at a time. Leave it before you "
                "enter it again."
            )
        if self.is_off:
            raise TraceError(
                "HashMode was turned off because another dispatch mode was left open above it."
            )
        recorder = self.recorder
        try:
            recorder.begin(expected)
            recorder.phase = self._base_phase
            self._name_parameters()
            if is_first:
                recorder.named.record_group("initial state", "state", self._state(), is_writer=True)
            if further := list(self.list_further()):
                recorder.named.record_group(
                    "further state", "state", further, owner="", is_writer=True
                )
            self._samples = []
            self._num_batches = 0 if batch is None else 1
            if batch is not None:
                record_batch(recorder.step, recorder.named, batch, self._samples)
            recorder.named.record_generators()
            self.is_open = True
            if self.selection.level != "state":
                recorder.places.modules.open()
            self._listener.open(sees_ops=self.selection.level == "op")
        except BaseException:  # including Ctrl-C: Python will not call __exit__
            self.abandon()
            raise

    @hidden
    def finish(self) -> StepTrace | None:
        """End the step and return its trace, or None if the mode has turned itself off."""
        if not self.is_open:
            return None
        self._leave()
        if self.is_off:
            self.recorder.abandon()
            return None
        try:
            with self.recorder.step.lock:  # a module may still run in another thread
                self.recorder.undigested.wait_for_copies()
                entries = self._state()
                names = self.recorder.named.record_group("state", "state", entries)
                self.recorder.named.record_generators(is_end=True)
                if self.selection.level == "op":
                    self.recorder.places.names.replace(
                        names, (value for _, value in entries if has_address(value))
                    )
                self.trace = self.recorder.finish()
        except BaseException:  # including Ctrl-C: leave no hooks behind
            self.recorder.abandon()
            raise
        return self.trace

    def abandon(self) -> None:
        """Drop the current step, if any; may be called at any time and more than once."""
        if self.is_open:
            self._leave()
        self.recorder.abandon()

    @hidden
    def add_batch(self, batch: Any) -> None:
        """Record a batch that is loaded within the step, such as the second of
        an accumulation: "batch 2".
        """
        if self.is_open:
            self._num_batches += 1
            with self.recorder.step.lock:
                step, named = self.recorder.step, self.recorder.named
                record_batch(step, named, batch, self._samples, f"batch {self._num_batches}")

    @hidden
    def record_values(self, phase: str, values: Any, name: str) -> None:
        """Record the tensors and numbers of a nested structure, such as the loss,
        at this point in the step.
        """
        if self.is_open:
            with self.recorder.step.lock:
                if phase == "state":
                    self.recorder.undigested.wait_for_copies()
                self.recorder.named.record_group(
                    name, phase, self.recorder.named.readable(values, name), owner=""
                )

    @hidden
    def digest_state(self) -> dict[str, int]:
        """Return the digest of each parameter, buffer and optimizer state by name;
        for a number, its 64 bits.
        """
        self._name_parameters()
        entries = [(name, value) for name, value in self._state() if holds_data(value)]
        digests = iter(digest_tensors([value for _, value in entries if isinstance(value, Tensor)]))
        return {
            name: next(digests) if isinstance(value, Tensor) else scalar_bits(value)[0]
            for name, value in entries
        }

    def marks_forward(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return the function, wrapped to run in phase forward."""
        return in_phase(self.recorder, "forward", function)

    def leaves_out(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return the function, wrapped so that its ops are not recorded:
        they belong to no training step.
        """

        def left_out(*args: Any, **kwargs: Any) -> Any:
            mode = self._listener.mode
            if mode is None or not mode.is_on:
                return function(*args, **kwargs)
            mode.turn_off()
            try:
                return function(*args, **kwargs)
            finally:
                if self._listener.mode is mode:
                    mode.turn_on()

        return left_out

    def pause(self) -> None:
        """Record no ops until ``unpause`` or the end of the step:
        they belong to no training step.
        """
        self._listener.pause()

    def unpause(self) -> None:
        self._listener.unpause()

    def _leave(self) -> None:
        self.is_open = False
        self.recorder.places.modules.close()
        if (above := self._listener.close()) is None:
            return
        self.is_off = True
        warnings.warn(
            f"Another dispatch mode ({above}) was opened inside the step and left open, so "
            "det_callbacks turned off its mode and records nothing from here on. Close the other "
            "mode before the step ends.",
            CoverageWarning,
            stacklevel=3,
        )

    def _state(self) -> list[Entry]:
        model: list[Entry] = (
            [] if self._walker is None else [*self._walker.walk(PARAMETERS, BUFFERS)]
        )
        states = states_of_parameters(self._phases.seen, self.recorder.places.parameter_names)
        return model + [entry for _, entry in states]

    def _parameters_of(self, shape: torch.Size) -> list[tuple[str, Tensor]]:
        if not self._by_shape and self._walker is not None:
            for name, parameter in self._walker.walk(PARAMETERS):
                self._by_shape.setdefault(parameter.shape, []).append((name, parameter))
        return self._by_shape.get(shape, [])

    @hidden
    def _record_gradients(self, optimizer: Optimizer) -> None:
        parameters = parameters_of(optimizer)
        names = self.recorder.places.parameter_names
        entries: list[Entry] = [
            (f"grad of {names.get(id(parameter)) or f'parameter {number}'}", parameter.grad)
            for number, parameter in enumerate(parameters)
            if parameter.grad is not None
        ]
        with self.recorder.step.lock:
            self.recorder.named.record_group("gradients", "gradient", entries)

    def _name_parameters(self) -> None:
        parameters = [] if self._walker is None else self._walker.walk(PARAMETERS)
        self._by_shape.clear()
        places = self.recorder.places
        places.name_parameters(parameters)
        if self.selection.level == "op" and (
            not places.names.known
            or any(
                places.names.of(value) != name for name, value in parameters if has_address(value)
            )
        ):
            places.names.refresh()
