import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules import module as nn_module

from det_callbacks.internals.torch import modules_in
from det_callbacks.trace.hash_mode import HashMode


def modules_of(mode: HashMode, op: str) -> list[str]:
    return [site.module for site in mode.trace.program.sites if site.op == op]


class Raises(nn.Module):
    def __init__(self, error: type[BaseException]) -> None:
        super().__init__()
        self.inner, self.error = nn.Tanh(), error

    def forward(self, x: Tensor) -> Tensor:
        self.inner(x)
        raise self.error("planted")


class Catches(nn.Module):
    def __init__(self, error: type[BaseException]) -> None:
        super().__init__()
        self.raises, self.error = Raises(error), error

    def forward(self, x: Tensor) -> Tensor:
        try:
            return self.raises(x)
        except self.error:
            return x.sin()


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_an_exception_caught_in_forward_leaves_the_right_module_running(error):
    model = nn.Sequential(Catches(error), nn.ReLU())
    mode = HashMode(model)
    with mode:
        model(torch.ones(2)).cos()
    assert modules_of(mode, "aten.tanh.default") == ["0.raises.inner"]
    # Python runs no hook when an exception is not an Exception: until the next hook,
    # its module seems to run
    assert modules_of(mode, "aten.sin.default") == ["0" if error is ValueError else "0.raises"]
    assert modules_of(mode, "aten.relu.default") == ["1"]
    assert modules_of(mode, "aten.cos.default") == [""]


@pytest.mark.parametrize("level", ["op", "module", "state"])
# which the fixture in conftest.py asks of every test
def test_no_hook_is_left_when_the_step_raises(level):
    model = Raises(KeyboardInterrupt)
    mode = HashMode(model, level=level)
    during: list[int] = []
    model.inner.register_forward_hook(
        lambda *_: during.append(len(nn_module._global_forward_hooks))
    )
    with pytest.raises(KeyboardInterrupt, match="planted"), mode:
        model(torch.ones(2))
    assert during == [level != "state"]
    assert mode.recorder.places.modules.current.module == ""


def test_modules_added_within_a_step_and_strangers_that_count_as_their_callers():
    class Calling(nn.Sequential):
        outside = (nn.SiLU(),)

        def forward(self, x: Tensor) -> Tensor:
            return self.outside[0](super().forward(x))

    model = nn.Sequential(Calling(nn.Tanh()))
    mode = HashMode(model)
    for added in ("0.1", "0.2"):
        with mode:
            model[0].append(nn.Sigmoid())
            model(torch.ones(2))
        assert modules_of(mode, "aten.sigmoid.default")[-1] == added
        assert modules_of(mode, "aten.silu.default") == ["0"]


def test_modules_are_listed_as_torch_lists_them():
    shared, root = nn.Linear(1, 1), nn.Module()
    root.first, root.none, root.second = (
        nn.Sequential(shared, nn.Sequential(nn.ReLU())),
        None,
        shared,
    )
    root.register_module("absent", None)
    root.last = nn.ModuleDict({"a": root.first, "b": nn.Tanh()})
    assert [*modules_in(root)] == [*root.named_modules()]
    assert [*modules_in(root, "net")] == [*root.named_modules(prefix="net")]
