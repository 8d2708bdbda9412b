"""By how much runs differ, from what keep_tensors kept; where that is not known it is said, and no number is wrong."""

import json
import random
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from faults import Around
from processes import run_ranks
from processes import train as train_ranks
from styles import Classifier
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader, TensorDataset
from trainers import LIGHTNING_ADVICE, has_same_weights, quiet_trainer

from det_callbacks import CoverageWarning, DeterminismCallback, Verdict, compare_runs
from det_callbacks.cli import main
from det_callbacks.report.verdict import verdict_lines
from det_callbacks.tensors import files
from det_callbacks.verdict import Numbers, TensorNumbers

pytestmark = [
    LIGHTNING_ADVICE,
    pytest.mark.filterwarnings("ignore::det_callbacks.DivergenceWarning"),  # on_divergence="warn", which is tried
]

WIDTH, BATCH, STEPS = 6, 4, 4


class Small(pl.LightningModule):
    """Two linear layers, and what a test puts between them."""

    def __init__(self, *middle: nn.Module, optimizer: Callable[..., Any] = torch.optim.SGD, **options: Any) -> None:
        super().__init__()
        self.first = nn.Linear(3, WIDTH)
        self.middle = nn.Sequential(*middle)
        self.last = nn.Linear(WIDTH, 2)
        self.make_optimizer = lambda: optimizer(self.parameters(), lr=0.1, **options)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        inputs, labels = batch
        return cross_entropy(self.last(self.middle(self.first(inputs))), labels)

    def configure_optimizers(self) -> Any:
        return self.make_optimizer()


class Planted(TorchDispatchMode):
    """Changes what the first call of an op in one step wrote; open below the trace.

    Args:
        model: whose training it disturbs.
        op: overload, "aten.addmm.default".
        change: gets what the op returned and its arguments.
        step: at which it strikes.
    """

    def __init__(self, model: pl.LightningModule, op: str, change: Callable[[Any, Any], object], step: int) -> None:
        super().__init__()
        self.model, self.op, self.change, self.step = model, op, change, step
        self.has_struck = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        is_due = str(func) == self.op and self.model.trainer.fit_loop.epoch_loop.total_batch_idx == self.step
        if is_due and not self.has_struck:
            self.change(output, args)
            self.has_struck = True
        return output


def ulps_at(tensor: Tensor, place: tuple[int, ...], num: int = 1) -> None:
    """Make an element of float32 so many ULPs larger in size."""
    tensor.detach().view(torch.int32)[place] += num


def planted(op: str, change: Callable[[Any, Any], object], *, step: int = 2) -> Around:
    @contextmanager
    def around(model: pl.LightningModule) -> Iterator[None]:
        with Planted(model, op, change, step) as mode:
            yield
        assert mode.has_struck

    return around


def fit(
    callback: DeterminismCallback | None,
    model: Callable[[], pl.LightningModule] = Small,
    around: Around = lambda model: nullcontext(),
) -> pl.LightningModule:
    """Train four steps (an epoch) from one seed."""
    for seed in (random.seed, np.random.seed, torch.manual_seed):  # seed_everything leaves environment variables
        seed(5)
    trained = model()
    generator = torch.Generator().manual_seed(1)
    data = TensorDataset(
        torch.randn(BATCH * STEPS, 3, generator=generator), torch.randint(2, (BATCH * STEPS,), generator=generator)
    )
    with around(trained):
        quiet_trainer(*([] if callback is None else [callback])).fit(trained, DataLoader(data, batch_size=BATCH))
    return trained


def record(folder: Path, patterns: Sequence[str], model: Callable[[], Any] = Small, *, budget: float = 64.0) -> Path:
    fit(DeterminismCallback(folder, mode="record", keep_tensors=patterns, tensor_budget_mib=budget), model)
    return folder


def verify(folder: Path, model: Callable[[], Any] = Small, *, current: Path | None = None, **options: Any) -> Verdict:
    """Verify with ``on_divergence="warn"``, and return the verdict."""
    callback = DeterminismCallback(folder, current=current or folder.with_name("current"), on_divergence="warn")
    fit(callback, model, **options)
    assert callback.verdict is not None
    return callback.verdict


def numbers_of(verdict: Verdict) -> Numbers:
    assert verdict.first_divergence.numbers is not None, "no numbers"
    return verdict.first_divergence.numbers


def output_of(verdict: Verdict) -> TensorNumbers:
    numbers = numbers_of(verdict)
    assert not numbers.problem, numbers.problem
    (output,) = numbers.output
    return output


ADDMM = "aten.addmm.default"
FIRST = f"forward/first:{ADDMM}"
ONE_ULP = planted(ADDMM, lambda out, args: ulps_at(out, (1, 3)))


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return record(tmp_path_factory.mktemp("kept") / "ref", [FIRST])


def unwrapped(text: str) -> str:
    return " ".join(text.split())


def shown(reference: Path, current: Path, capsys: pytest.CaptureFixture[str]) -> tuple[dict[str, Any], str, str]:
    """Return what diff says: JSON, text and HTML."""
    paths, page = [str(reference), str(current)], current.with_name("report.html")
    capsys.readouterr()
    assert main(["diff", *paths, "--json"]) == 1
    verdict = json.loads(capsys.readouterr().out)
    assert main(["diff", *paths, "--html", str(page)]) == 1
    return verdict, capsys.readouterr().out, page.read_text()


def test_one_ulp_is_said_alike_live_by_diff_and_in_the_report(
    reference: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    verdict = verify(reference, around=ONE_ULP, current=tmp_path / "current")
    output = output_of(verdict)
    assert (output.tensor, output.shape, output.dtype) == ("output 0", (4, 6), "float32")
    assert (output.num_differing, output.num_elements, output.max_ulps, output.ulps) == (1, 24, 1, (23, 1))
    assert output.first == output.worst == (1, 3)
    one, other = (torch.tensor(float(text)) for text in output.first_values)
    assert int(other.view(torch.int32)) - int(one.view(torch.int32)) == 1
    assert output.max_absolute == float((one.double() - other.double()).abs())

    sentence = "1 of 24 elements differ, by 1 ULP (absolute "
    place = f"first at [1, 3]: {output.first_values[0]} in the reference, {output.first_values[1]} now"
    text = unwrapped(verdict_lines(verdict))
    assert sentence in text
    assert place in text
    assert "elements at each distance in ULPs: 0: 23, 1: 1 " in text
    offline, printed, page = shown(reference, tmp_path / "current", capsys)
    written = json.loads((tmp_path / "current" / "verdict.json").read_text())
    for found in (offline, written):
        for divergence in (found["first_divergence"], found["origins"][0]):
            assert divergence["numbers"] == verdict.to_dict()["first_divergence"]["numbers"]
    assert Verdict.from_dict(written).first_divergence == verdict.first_divergence
    for content in (printed, page, (tmp_path / "current" / "report.html").read_text()):
        assert sentence in unwrapped(content)
        assert place in unwrapped(content)
    assert "record step" not in text, "there is nothing left to record"


def test_a_nan_on_one_side_is_apart(reference: Path, tmp_path: Path) -> None:
    def change(out: Tensor, args: Any) -> None:
        out[2, 5] = torch.nan
        out[3, 0] = torch.inf
        ulps_at(out, (0, 1), num=6)

    verdict = verify(reference, around=planted(ADDMM, change), current=tmp_path / "current")
    output = output_of(verdict)
    assert (output.num_differing, output.num_nan, output.num_inf, output.max_ulps) == (3, 1, 1, 6)
    assert output.ulps == (21, 0, 0, 1)
    assert (output.first, output.worst) == ((0, 1), (2, 5))
    assert output.worst_values[1] == "nan"
    offline = compare_runs(reference, tmp_path / "current")
    json.dumps(offline.to_dict(), allow_nan=False)
    text = unwrapped(verdict_lines(offline))
    assert "by up to 6 ULPs" in text
    assert "1 with a NaN, 1 with an infinity" in text
    assert "4-7: 1, NaN: 1, Inf: 1" in text


def test_what_an_op_writes_in_place_is_kept_as_it_left_it(tmp_path: Path) -> None:
    model = partial(Small, nn.ReLU(inplace=True))
    reference = record(tmp_path / "ref", ["aten.relu_.default"], model)
    verdict = verify(reference, model, around=planted("aten.relu_.default", lambda out, args: args[0].fill_(-1.0)))
    assert output_of(verdict).num_differing == 24


def test_one_tensor_of_a_list_that_the_optimizer_changes(tmp_path: Path) -> None:
    model = partial(Small, optimizer=torch.optim.AdamW, foreach=True)
    op = "aten._foreach_addcdiv_.ScalarList"
    reference = record(tmp_path / "ref", [f"optimizer/{op}"], model)
    verdict = verify(reference, model, around=planted(op, lambda out, args: ulps_at(args[0][2], (1, 4), num=2)))
    first = verdict.first_divergence
    assert (first.phase, first.op, first.output, first.name) == ("optimizer", op, 2, "last.weight")
    output = output_of(verdict)
    assert (output.tensor, output.num_differing, output.max_ulps, output.first) == ("output 2", 1, 2, (1, 4))


@pytest.mark.slow
def test_each_step_and_fit_that_differs_is_kept(tmp_path: Path) -> None:
    reference, current = tmp_path / "ref", tmp_path / "current"
    recording = DeterminismCallback(reference, mode="record", keep_tensors=[FIRST])
    verifying = DeterminismCallback(reference, current=current, on_divergence="warn")
    for callback, around in ((recording, {}), (verifying, {"around": ONE_ULP})):
        fit(callback)
        fit(callback, **around)
    assert verifying.verdict is not None
    assert output_of(verifying.verdict).first == (1, 3)
    assert output_of(compare_runs(reference, current)).first == (1, 3)
    kept = sorted(path.relative_to(path.parents[1]).as_posix() for path in current.rglob("kept/*/*.safetensors"))
    assert kept == [f"attempt-000.segment-001/step-{step:09d}.safetensors" for step in (2, 3)]


def test_it_changes_no_bit_and_a_match_keeps_nothing(tmp_path: Path) -> None:
    model = partial(Small, nn.Dropout(0.5), optimizer=torch.optim.AdamW)
    plain = fit(None, model)
    state = torch.random.get_rng_state()
    kept = fit(DeterminismCallback(tmp_path / "ref", mode="record", keep_tensors=["*"]), model)
    assert torch.equal(torch.random.get_rng_state(), state)
    assert has_same_weights(plain, kept)
    fit(DeterminismCallback(tmp_path / "plain", mode="record"), model)
    assert compare_runs(tmp_path / "plain", tmp_path / "ref").verdict == "match"
    assert verify(tmp_path / "ref", model).verdict == "match"
    assert not list((tmp_path / "current").rglob("kept"))
    assert not list((tmp_path / "plain").rglob("kept"))


def test_a_pattern_that_meant_no_op_is_said(tmp_path: Path) -> None:
    with pytest.warns(CoverageWarning, match="Nothing was kept for the keep_tensors patterns 'aten.kthvalue.default'"):
        record(tmp_path / "ref", ["aten.mm.default", "aten.kthvalue.default"])


def test_what_a_budget_does_not_suffice_for_is_said_everywhere(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # the output of a call has 96 bytes
    reference = record(tmp_path / "ref", [FIRST], budget=0.00005)
    line = capsys.readouterr().out
    reason = f"This step would save 9.16e-05 MiB with {ADDMM}, and tensor_budget_mib is 5e-05."
    assert "NOT those of 4 calls from step 0 on: " in line
    assert f"from step 0 on: {reason}" in line
    assert "By how much these differ cannot be told later" in line
    assert main(["show", str(reference)]) == 0
    shown = capsys.readouterr().out
    assert f"tensors kept: {FIRST}" in shown
    assert f"NOT kept: 4 calls from step 0 on: {reason}" in shown
    verdict = verify(reference, around=ONE_ULP)
    problem = f"the reference did not keep it: {reason}"
    assert numbers_of(verdict).problem.startswith(problem)
    assert numbers_of(verdict).output == ()
    assert f"cannot be told: {problem}" in unwrapped(verdict_lines(verdict))
    assert f"cannot be told: {problem}" in (tmp_path / "current" / "report.html").read_text()
    assert "keep_tensors=" in verdict_lines(verdict)
    assert numbers_of(compare_runs(reference, tmp_path / "current")) == numbers_of(verdict)


def test_a_full_disk_stops_no_run_and_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: Any) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(files, "_write_tensors", fail)
    reference = record(tmp_path / "ref", [FIRST])
    line = capsys.readouterr().out
    assert "recorded 4 steps" in line
    assert "; kept 0 tensors of 0 steps (0 bytes), and NOT those of 4 calls from step 0 on: " in line
    assert "No space left on device" in line
    monkeypatch.undo()
    verdict = verify(reference, around=ONE_ULP)
    assert verdict.verdict == "diverged"
    assert numbers_of(verdict).problem.startswith("the reference did not keep it")


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-7] ^= 1  # of the last tensor
    path.write_bytes(content)


def forge(path: Path) -> None:
    content = path.read_bytes()
    assert b'\\"occurrence\\": 0' in content
    path.write_bytes(content.replace(b'\\"occurrence\\": 0', b'\\"occurrence\\": 1', 1))


@pytest.fixture(scope="module")
def whole(reference: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole")
    shutil.copytree(reference, folder / "ref")
    verdict = verify(folder / "ref", around=planted(ADDMM, lambda out, args: out.add_(1.0), step=1))
    assert output_of(verdict).num_differing == 24
    return folder


@pytest.mark.parametrize(
    ("damage", "side"), [(flip, "ref"), (forge, "current"), (Path.unlink, "ref"), (Path.unlink, "current")]
)
def test_damage_is_said_and_never_a_number(
    whole: Path, tmp_path: Path, damage: Callable[[Path], None], side: str
) -> None:
    shutil.copytree(whole, tmp_path, dirs_exist_ok=True)
    (path,) = (tmp_path / side).rglob("kept/*/step-000000001.safetensors")
    damage(path)
    verdict = compare_runs(tmp_path / "ref", tmp_path / "current")
    assert verdict.verdict == "diverged"
    numbers = numbers_of(verdict)
    assert numbers.output == ()
    name = "the reference" if side == "ref" else "the current run"
    if damage is Path.unlink:
        assert numbers.problem == f"{name} did not keep it"
    else:
        assert numbers.problem.startswith(f"what {name} kept could not be read: {path} is damaged: ")


def body(folder: Path, mode: Any, rank: int) -> None:
    """Rank 1 computes otherwise in step 1 of the verification."""
    options: Any = {"keep_tensors": [FIRST]} if mode == "record" else {"on_divergence": "warn"}
    callback = DeterminismCallback(folder / "ref", mode=mode, current=folder / "current", **options)
    model = Classifier()
    with (
        nullcontext()
        if mode == "record" or rank == 0
        else planted(ADDMM, lambda out, args: ulps_at(out, (1, 3)), step=1)(model)
    ):
        train_ranks(callback, model=lambda: model)
    if callback.verdict is not None:
        (folder / f"verdict-{rank}.json").write_text(json.dumps(callback.verdict.to_dict()))


@pytest.mark.slow
@pytest.mark.ddp
def test_the_numbers_of_the_rank_that_differs_are_told_to_all(tmp_path: Path) -> None:
    torch.manual_seed(0)
    for mode in ("record", "verify"):
        for ended in run_ranks(partial(body, tmp_path, mode), tmp_path / mode):
            assert ended.exit_code == 0, ended.output
    verdicts = [json.loads((tmp_path / f"verdict-{rank}.json").read_text()) for rank in range(2)]
    assert verdicts[0] == verdicts[1]
    first = verdicts[0]["first_divergence"]
    assert (first["rank"], first["step"]) == (1, 1)
    assert first["numbers"]["output"][0]["num_differing"] == 1
    assert first["numbers"]["output"][0]["first"] == [1, 3]
    offline = compare_runs(tmp_path / "ref", tmp_path / "current").to_dict()["first_divergence"]
    assert offline["numbers"] == first["numbers"]
