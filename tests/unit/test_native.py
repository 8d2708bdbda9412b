"""The native recorder writes what the Python recorder writes,
and changes nothing of a training either.
"""

import os
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from det_callbacks import TrainingRun
from det_callbacks.cli import main
from det_callbacks.environment.variables import RECORDER
from det_callbacks.errors import CoverageWarning, SettingsError
from det_callbacks.native import build as native
from det_callbacks.runs.store import Run
from det_callbacks.trace.hash_mode import HashMode

STEPS = 4
Step = Callable[[int], Any]
Made = tuple[nn.Module, list[torch.optim.Optimizer], Step]


@pytest.fixture(scope="module", autouse=True)
def _built() -> None:
    built = native.build()
    assert built.path is not None or " could not build it" not in built.problem, built.problem
    if built.path is None:
        pytest.skip(built.problem)  # there is no compiler


@pytest.fixture(autouse=True)
def _chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(RECORDER, "native")


def trained(
    make: Callable[[], Made], recorder: str | None, monkeypatch: pytest.MonkeyPatch
) -> tuple[list[Any], Any]:
    """Return what each step recorded, and the weights and generator state that it left;
    None records nothing.
    """
    monkeypatch.setenv(RECORDER, recorder or "python")
    torch.manual_seed(0)
    model, optimizers, step = make()
    mode = HashMode(model)
    mode.optimizers = optimizers
    rows = []
    for number in range(STEPS):
        if recorder is not None:
            mode.begin()
        step(number)
        if recorder is not None:
            trace = mode.finish()
            program = trace.program
            sites = [(site, site.inputs) for site in program.sites]
            counts = (
                program.ops_seen,
                program.ops_digested,
                dict(program.ops_skipped),
                program.opaque_regions,
            )
            rows.append(
                (
                    program.id,
                    trace.layout_id,
                    trace.digests.tolist(),
                    dict(trace.values),
                    sites,
                    counts,
                )
            )
    left = [value.tolist() for value in model.state_dict().values()], torch.get_rng_state().tolist()
    if recorder == "native":
        native = mode.recorder.native
        assert native is not None
        return rows, (left, native.num_native, native.num_python)
    return rows, (left, 0, 0)


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.LayerNorm(8), nn.Linear(8, 3))


def of_loss(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    loss: Callable[[Tensor], Tensor],
    *shape: int,
) -> Made:
    def step(number: int) -> None:
        optimizer.zero_grad()
        loss(torch.randn(*shape)).backward()
        optimizer.step()

    return model, [optimizer], step


def of_optimizer(kind: Any, **options: Any) -> Callable[[], Made]:
    def make() -> Made:
        model = net()
        return of_loss(
            model, kind(model.parameters(), **options), lambda x: model(x).square().mean(), 5, 6
        )

    return make


def of_model(
    model: Callable[[], nn.Module], *shape: int, first: bool = False
) -> Callable[[], Made]:
    def make() -> Made:
        made = model()
        optimizer = torch.optim.SGD(made.parameters(), lr=0.1, momentum=0.9)
        return of_loss(
            made, optimizer, lambda x: (made(x)[0] if first else made(x)).square().mean(), *shape
        )

    return make


def of_step(body: Callable[[nn.Module, int], Any]) -> Callable[[], Made]:
    """Return a training whose step is ``body``, followed by an update."""

    def make() -> Made:
        model = net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def step(number: int) -> None:
            optimizer.zero_grad()
            body(model, number)
            optimizer.step()

        return model, [optimizer], step

    return make


def closure() -> Made:
    model = net()
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=3)

    def step(number: int) -> None:
        x = torch.randn(5, 6)

        def evaluate() -> Tensor:
            optimizer.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            return loss

        optimizer.step(evaluate)

    return model, [optimizer], step


def accumulate(model: nn.Module, number: int) -> None:
    for _ in range(2):
        model(torch.randn(5, 6)).sum().backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.5)


def autocast(model: nn.Module, number: int) -> None:
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(torch.randn(5, 6)).sum()
    loss.backward()


def twice(model: nn.Module, number: int) -> None:
    x = torch.randn(5, 6, requires_grad=True)
    (gradient,) = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
    (gradient.square().mean() * 1e-3).backward()


def checkpointed(model: nn.Module, number: int) -> None:
    for reentrant in (False, True):
        checkpoint(
            model, torch.randn(5, 6, requires_grad=True), use_reentrant=reentrant
        ).sum().backward()


def views(model: nn.Module, number: int) -> None:
    x = torch.randn(5, 6)
    x[1:3] += 1
    x[:, 2].mul_(2)
    x.t()[0].zero_()
    x[0, 0] = float(number)
    halves = x.chunk(2, dim=1)
    y = torch.cat([halves[1], halves[0].clone()], dim=1) + x.flip(0)[:, ::2].sum()
    empty = x[:0] * 2
    model(y + empty.sum()).sum().backward()


def numbers(model: nn.Module, number: int) -> None:
    x = torch.randn(5, 6)
    x = x * (1 + number) + 0.0 * number - (-0.0 if number % 2 else 0.0)
    x = torch.add(x, x, alpha=1 if number == 1 else number)  # 1 is the default, which torch omits
    x = x.clamp(-1.0 - number, 1.0).roll(number).reshape(6, 5).t().contiguous()
    x = x * (True if number == 2 else 1.0)
    x = x.masked_fill(x > 2, float("nan")).nan_to_num(0.5, float("inf"), -float("inf"))
    if x.sum().item() > 1e9 or bool((x > 1e9).any()):
        raise AssertionError
    model(x).sum().backward()


def branches(model: nn.Module, number: int) -> None:
    x = torch.randn(5, 6)
    for _ in range(number % 3):
        x = x.sin() + 1
    if number % 2:
        x = x.cos()
    model(x).sum().backward()


def raising(model: nn.Module, number: int) -> None:
    x = torch.randn(5, 6)
    with pytest.raises(RuntimeError, match="must match"):
        x + torch.randn(4, 4)
    weight = torch.randn(6, 6)  # an input that only the failing call reads
    if number > 1:
        with pytest.raises(RuntimeError, match="shapes cannot be"):
            torch.mm(weight, torch.randn(5, 5))
    model(x @ weight).sum().backward()


def random_ops(model: nn.Module, number: int) -> None:
    x = (
        F.dropout(torch.randn(5, 6), 0.5)
        + torch.rand(5, 6).uniform_()
        + torch.bernoulli(torch.full((5, 6), 0.5))
    )
    model(x + torch.randperm(6)).sum().backward()


def hooks(model: nn.Module, number: int) -> None:
    x = torch.randn(5, 6, requires_grad=True)
    x.register_hook(lambda gradient: gradient * 2)
    y = model[0](x)
    y.register_hook(lambda gradient: gradient.clamp(-1, 1))
    with torch.autograd.graph.saved_tensors_hooks(lambda one: one * 1, lambda one: one + 0):
        z = y.exp()
    (z.sum() + y.sum()).backward()


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, value: Tensor) -> Tensor:
        context.save_for_backward(value)
        return value * 2 + value.sin()

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> Tensor:
        return gradient * 2 + gradient * context.saved_tensors[0].cos()


def function(model: nn.Module, number: int) -> None:
    Doubled.apply(model(torch.randn(5, 6, requires_grad=True))).sum().backward()


def transforms(model: nn.Module, number: int) -> None:
    x = torch.randn(5, 6)
    torch.func.vmap(lambda row: row * 2 + row.sum())(x)
    torch.func.grad(lambda one: one.square().sum())(x)
    torch.func.jvp(torch.sin, (x,), (x,))
    model(x).sum().backward()


class Passing(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def modes(model: nn.Module, number: int) -> None:
    x = torch.randn(5, 6)
    with Passing():
        x = x * 2
    with torch.no_grad():
        x = x + 1
    with torch.inference_mode():
        (x * 3).relu().sum()
    model(x).sum().backward()


def special(model: nn.Module, number: int) -> None:
    x = torch.randn(5, 6)
    z = torch.view_as_complex(x.reshape(5, 3, 2))
    w = (z.conj() * z).real + torch.fft.rfft(x)[:, :3].abs() + z.conj().imag.neg()
    sparse = torch.eye(5).to_sparse() @ x
    nested = torch.nested.nested_tensor([x[0], x[1, :3]]) * 2
    v, i = x.sort(dim=1)
    picked = (
        torch.where(x > 0, x, torch.zeros(()))[i[:, 0]]
        + x.double().half().float()
        + x.to(torch.int64)
    )
    picked = (
        picked.index_add(0, torch.tensor([0, 1]), x[:2]).scatter(1, i, v).masked_fill(x > 1, 0.5)
    )
    x[x > 1.5] = 0.0
    unused = (
        x.unique(),
        x.nonzero(),
        torch.topk(x, 2),
        torch.var_mean(x),
        nested.to_padded_tensor(0.0),
    )
    del unused
    model(picked + sparse + w.sum() + v).sum().backward()


def foreach(model: nn.Module, number: int) -> None:
    tensors = [torch.randn(3), torch.randn(4)]
    torch._foreach_mul_(tensors, 2.0)
    added = torch._foreach_add(tensors, [1.0 + number, 2.0])
    torch.add(added[0], 1, out=tensors[0])
    loss = model(torch.randn(5, 6)).sum() + torch._foreach_norm(tensors)[0]
    loss.backward()


def bags() -> Made:
    model = nn.EmbeddingBag(7, 4, sparse=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(number: int) -> None:
        optimizer.zero_grad()
        model(torch.randint(7, (3, 2))).sum().backward()
        optimizer.step()

    return model, [optimizer], step


def plain_models() -> Iterator[Any]:
    conv = lambda: nn.Sequential(  # noqa: E731
        nn.Conv2d(3, 4, 3),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(36, 2),
    )
    layer = lambda: nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)  # noqa: E731
    yield pytest.param(of_model(conv, 2, 3, 8, 8), id="convolutional")
    yield pytest.param(of_model(lambda: nn.LSTM(6, 4), 3, 2, 6, first=True), id="lstm")
    yield pytest.param(of_model(lambda: nn.GRU(6, 4, num_layers=2), 3, 2, 6, first=True), id="gru")
    yield pytest.param(of_model(layer, 2, 4, 8), id="encoder")
    optim = torch.optim
    for kind in (
        optim.SGD,
        optim.Adam,
        optim.AdamW,
        optim.Adagrad,
        optim.RMSprop,
        optim.NAdam,
        optim.RAdam,
    ):
        for options in ({"foreach": False}, {"foreach": True}):
            yield pytest.param(
                of_optimizer(kind, lr=0.01, **options), id=f"{kind.__name__}-{options['foreach']}"
            )
    yield pytest.param(of_optimizer(optim.AdamW, lr=0.01, fused=True), id="fused")
    yield pytest.param(closure, id="lbfgs")
    yield pytest.param(bags, id="bags")
    for body in (
        *(
            accumulate,
            autocast,
            twice,
            checkpointed,
            views,
            numbers,
            branches,
            raising,
            random_ops,
            hooks,
            function,
        ),
        *(transforms, modes, special, foreach),
    ):
        yield pytest.param(of_step(body), id=body.__name__)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("make", list(plain_models()))
def test_records_what_python_records(
    make: Callable[[], Made], monkeypatch: pytest.MonkeyPatch
) -> None:
    # from one line, which the sources of ops name
    all_three = [trained(make, recorder, monkeypatch) for recorder in (None, "python", "native")]
    (
        (plain, (left_plain, *_)),
        (expected, (left, *_)),
        (rows, (left_native, num_native, num_python)),
    ) = all_three
    assert plain == []
    for found, wanted in zip(rows, expected, strict=True):
        assert found == wanted
    assert left_plain == left == left_native
    assert num_native
    assert num_python


def test_a_training_in_another_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[Any] = []
    make = of_step(accumulate)

    def train() -> None:
        found.append([trained(make, recorder, monkeypatch)[0] for recorder in ("python", "native")])

    thread = Thread(target=train)
    thread.start()
    thread.join()
    expected, rows = found[0]
    assert rows == expected


def after_interruptions(
    recorder: str, error: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> list[Any]:
    """Return the rows of steps after each of which another one ends in the
    middle of its backward pass.
    """
    monkeypatch.setenv(RECORDER, recorder)
    torch.manual_seed(0)
    model, optimizers, step = of_optimizer(torch.optim.AdamW, foreach=False)()
    mode = HashMode(model)
    mode.optimizers = optimizers
    rows = []

    def stop(gradient: Tensor) -> None:
        raise error

    for number in range(STEPS):
        mode.begin()
        step(number)
        trace = mode.finish()
        rows.append(
            (trace.program.id, trace.layout_id, trace.digests.tolist(), list(trace.program.sites))
        )
        mode.begin()
        value = model[0](torch.randn(5, 6))
        value.register_hook(stop)
        with pytest.raises(error):
            model[1:](value).sum().backward()
        mode.abandon()
        assert torch.utils._python_dispatch._len_torch_dispatch_stack() == 0
        assert not mode.recorder.step.ledger.pins
    native = mode.recorder.native
    assert (native is None) == (recorder == "python")
    assert native is None or native.num_native
    return rows


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_steps_after_an_exception(
    error: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    expected, rows = [
        after_interruptions(recorder, error, monkeypatch) for recorder in ("python", "native")
    ]
    assert rows == expected


@pytest.mark.filterwarnings("ignore")  # of a fork with threads
def test_a_fork_within_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    statuses = []

    def forking(model: nn.Module, number: int) -> None:
        x = torch.ones(5, 6) + 1
        if (child := os.fork()) == 0:
            os._exit(0 if (x * 2).tolist() == [[4.0] * 6] * 5 else 1)
        statuses.append(os.waitpid(child, 0)[1])
        model(x).sum().backward()

    expected, rows = [
        trained(of_step(forking), recorder, monkeypatch)[0] for recorder in ("python", "native")
    ]
    assert rows == expected
    assert statuses == [0] * 2 * STEPS


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_no_tensor_outlives_its_step() -> None:
    model = net()
    mode = HashMode(model)
    sizes = []
    for _ in range(45):
        mode.begin()
        value = torch.zeros(1000, 1000) + 1  # 4 MB each
        model(value[:5, :6]).sum().backward()
        del value
        mode.finish()
        sizes.append(resident_bytes())
    assert mode.recorder.native.num_native
    assert sizes[-1] - sizes[4] < 40e6  # a tensor that stays in each step would add 160 MB


@pytest.mark.parametrize(
    ("make", "share"),  # of the ops of a later step: those that Python records
    [
        # one: the draw of the batch
        pytest.param(of_optimizer(torch.optim.AdamW, lr=0.01, foreach=False), 0.01, id="network"),
        # the gates are parts of a tensor, each written in place
        pytest.param(of_model(lambda: nn.GRU(6, 4), 3, 2, 6, first=True), 0.3, id="gru"),
    ],
)
def test_hardly_an_op_of_a_known_step_goes_to_python(
    make: Callable[[], Made], share: float
) -> None:
    model, optimizers, step = make()
    mode = HashMode(model)
    mode.optimizers = optimizers
    for number in range(STEPS):
        mode.begin()
        step(number)
        mode.finish()
        num_native, num_python = mode.recorder.native.take_counts()
    assert num_python <= share * (num_native + num_python), (num_native, num_python)


def recorded(
    path: Any, recorder: str, monkeypatch: pytest.MonkeyPatch, **options: Any
) -> TrainingRun:
    monkeypatch.setenv(RECORDER, recorder)
    torch.manual_seed(0)
    model = net()
    optimizer = torch.optim.AdamW(model.parameters())
    with TrainingRun(path, model=model, optimizers=optimizer, **options) as run:
        for number in range(STEPS):
            with run.step(number):
                optimizer.zero_grad()
                model(torch.randn(5, 6)).square().mean().backward()
                optimizer.step()
    return run


@pytest.mark.parametrize("first", ["python", "native"])
def test_each_verifies_what_the_other_recorded(first, tmp_path, monkeypatch, capsys):
    other = {"python": "native", "native": "python"}[first]
    recorded(tmp_path / "run", first, monkeypatch, mode="record")
    assert ("(native, " in capsys.readouterr().out) == (first == "native")
    assert ("recorder" in Run.open(tmp_path / "run").manifest.environment) == (first == "native")
    verdict = recorded(
        tmp_path / "run", other, monkeypatch, mode="verify", current=tmp_path / "now"
    ).verdict
    assert (verdict.verdict, verdict.counts.steps_compared) == ("match", STEPS)
    assert not verdict.environment


def test_other_words_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(RECORDER, "fast")
    with pytest.raises(SettingsError, match="must be one of auto, python, native; got 'fast'"):
        HashMode(net())


def test_native_by_default_once_it_is_built(tmp_path, monkeypatch):
    monkeypatch.delenv(RECORDER)
    with_auto = []
    for home in (None, tmp_path):  # where it is built, and where not
        if home is not None:
            monkeypatch.setenv("XDG_CACHE_HOME", str(home))
        native._is_built.cache_clear()
        with_auto.append((HashMode(net()).recorder.native is not None, native.state()))
    native._is_built.cache_clear()
    assert [is_native for is_native, _ in with_auto] == [True, False]
    assert with_auto[0][1] == "native code, which is built"
    assert "python -m det_callbacks native build" in with_auto[1][1]
    assert not [*tmp_path.rglob("*.so")], "nothing is built that nobody asked for"


def test_python_if_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(RECORDER, "python")
    assert HashMode(net()).recorder.native is None


def test_python_records_without_a_compiler(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    native._loaded.cache_clear()
    try:
        with pytest.warns(CoverageWarning, match="Python records this run.*no C\\+\\+ compiler"):
            assert HashMode(net()).recorder.native is None
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # said once
            assert HashMode(net()).recorder.native is None
        assert "no C++ compiler" in native.state()
        assert main(["native", "build"]) == 2
    finally:
        native._loaded.cache_clear()


def test_a_failed_build_says_why(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("CXX", "false")
    assert "false could not build it" in native.build().problem
    assert not [*tmp_path.rglob("*.so")]


def test_a_library_of_another_torch_is_not_loaded(tmp_path, monkeypatch):
    content = native.build().path.read_bytes()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    (path := native._path()).parent.mkdir()
    path.write_bytes(content.replace(torch.__version__.encode(), b"9" * len(torch.__version__)))
    assert native.built() is None
    path.write_bytes(content)
    assert native.built() == path
