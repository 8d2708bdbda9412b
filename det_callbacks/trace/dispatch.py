"""What every dispatch mode of this package has in common."""

from torch._C._dynamo.eval_frame import (  # looked at in torch 2.13
    _FrameAction,
    _FrameExecStrategy,
    set_code_exec_strategy,
)
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode  # looked at in torch 2.13


class DispatchMode(TorchDispatchMode):
    """A dispatch mode that lets torch.compile compile under it, and costs 4 instead of 7 microseconds an op."""

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch leaves its modes unannotated
        set_code_exec_strategy(
            type(self).__torch_dispatch__.__code__, _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.SKIP)
        )

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Let torch.compile compile under this mode."""
        return True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # The wrapper that torch would put around __torch_dispatch__ costs 3 microseconds per op. What it does, keeping
        # Dynamo out of this code when it runs between the parts of a compiled function, __init__ does once.
        return False

    @property
    def is_on_top(self) -> bool:
        """Whether this is the mode that was entered last: leaving it pops whatever that is."""
        return _get_current_dispatch_mode() is self

    def describe_top(self) -> str:
        """Return the class of the mode that was entered last."""
        return type(_get_current_dispatch_mode()).__name__
