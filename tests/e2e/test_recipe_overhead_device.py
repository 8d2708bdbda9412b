"""recipes/overhead on a device: what it measures there, with stand-ins for a GPU where there is none."""

import dataclasses
import json
import re
import sys
import time
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch

from det_callbacks.digest.device import Choice, DigestQueue
from det_callbacks.digest.device.copied import CopiedDigest

RECIPE = Path(__file__).parents[2] / "recipes" / "overhead"
MODULES = ("bandwidth", "device", "measure", "models", "ours", "run", "tables")
CUDA = torch.device("cuda", 0)
WAIT = "called a synchronizing CUDA operation (Triggered internally at CUDAFunctions.cpp:1.)"
NOTICE = "Synchronization debug mode is a prototype feature and does not yet detect all synchronizing operations"


@pytest.fixture
def recipe(monkeypatch: pytest.MonkeyPatch) -> Iterator[SimpleNamespace]:
    """The recipe's modules, imported; others may have their names."""
    others: dict[str, ModuleType] = {name: sys.modules.pop(name) for name in MODULES if name in sys.modules}
    monkeypatch.setattr(sys, "path", [str(RECIPE), *sys.path])
    yield SimpleNamespace(**{name: __import__(name) for name in MODULES})
    for name in MODULES:
        sys.modules.pop(name, None)
    sys.modules.update(others)


@pytest.fixture
def modes(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """Stands in for torch.cuda's synchronisation debug mode: what it was set to; begins as 0, as torch's does."""
    set_to: list[object] = [0]

    def set_mode(mode: object) -> None:
        if len(set_to) == 1:
            warnings.warn(NOTICE, stacklevel=2)
        set_to.append(mode)

    monkeypatch.setattr(torch.cuda, "get_sync_debug_mode", lambda: set_to[-1])
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", set_mode)
    return set_to


def wait() -> None:
    """Stands in for an op that waits for the device: warns as torch does, always from the same line."""
    if torch.cuda.get_sync_debug_mode() == "warn":
        warnings.warn(WAIT, stacklevel=1)


def test_the_networks_have_the_sizes_that_the_readme_says(recipe: SimpleNamespace) -> None:
    with torch.device("meta"):
        models = recipe.models.GPT2(), recipe.models.ResNet50()
    assert [sum(parameter.numel() for parameter in model.parameters()) for model in models] == [124_439_808, 25_557_032]


@pytest.mark.slow
def test_the_networks_of_a_gpu_are_measured_in_a_small_size_on_the_cpu(
    recipe: SimpleNamespace, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "figures.json"
    options = "--networks gpt2 resnet50 --tiny --variants op --rounds 2 --memory-steps 0 --sizes 1 64 --json"
    recipe.run.main([*options.split(), str(file)])
    content = json.loads(file.read_text())
    assert re.fullmatch(r"\d{4}-\d\d-\d\d", content["machine"]["date"])
    assert [case["network"] for case in content["cases"]] == ["gpt2", "resnet50"]
    for case in content["cases"]:
        assert (case["device"], case["is_tiny"], case["optimizer"]) == ("cpu", True, "plain")
        assert [len(case["variants"][name]["seconds"]) for name in ("plain", "op")] == [2, 2]
    assert [one["num_bytes"] for one in content["digests"]] == [1024, 65536]
    assert all(one["fetched_seconds"] == one["digest_seconds"] > 0 for one in content["digests"])
    said = capsys.readouterr().out
    assert re.search(r"^ +64 KiB( +\d+\.\d+){7}$", said, re.MULTILINE)
    assert len(re.findall(r"^op +\d+\.\d\d +\d+\.\d\d$", said, re.MULTILINE)) == 2


def test_the_training_is_in_bfloat16(recipe: SimpleNamespace) -> None:
    for name in recipe.models.MIXED_NETWORKS:
        workload = recipe.models.make_workload(name, is_tiny=True)
        found: set[torch.dtype] = set()
        workload.model.head.register_forward_hook(lambda _m, _i, output, found=found: found.add(output.dtype))
        loss = workload.loss(workload.batch(0))
        assert (found, loss.dtype) == ({torch.bfloat16}, torch.float32)
    assert workload.batch(0)[0].is_contiguous(memory_format=torch.channels_last)


def test_without_a_gpu_one_line_says_so(
    recipe: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit) as ended:
        recipe.run.main(["--device", "cuda"])
    assert ended.value.code == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert re.fullmatch(
        r".*: --device cuda: torch \S+ finds no CUDA device here, so nothing was measured\. .*\n", said.err
    )


def test_the_defaults_are_those_of_the_device(recipe: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    cpu, cuda = recipe.run.parse([]), recipe.run.parse(["--device", "cuda"])
    assert cpu.networks == ["mlp", "transformer", "resnet", "transformer-random-length"]
    assert (cpu.optimizers, cpu.sizes) == (["plain"], [])
    assert (cuda.networks, cuda.optimizers) == (["gpt2", "resnet50"], ["foreach"])
    assert (cuda.sizes[0], cuda.sizes[-1], len(cuda.sizes)) == (1, 1024 * 1024, 11)
    nothing = recipe.run.parse(["--device", "cuda", "--networks", "--sizes"])
    assert (nothing.networks, nothing.sizes) == ([], [])


# digests against copies


def test_a_copy_counts_twice_its_size_and_a_digest_once(recipe: SimpleNamespace) -> None:
    times = {"copy": 2e-3, "digest": 1e-3, "enqueue": None, "fetched": 4e-3}
    figures = recipe.bandwidth.Bandwidth(num_bytes=10**6, num_calls=1, **times).figures()
    assert figures["copy_bytes_moved_per_second"] == pytest.approx(1e9)
    assert figures["digest_bytes_moved_per_second"] == pytest.approx(1e9)
    assert figures["time_ratio"] == pytest.approx(0.5)
    assert figures["bandwidth_ratio"] == pytest.approx(1.0)


def test_a_device_with_a_queue_is_measured_by_it(recipe: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    choice = Choice(method=CopiedDigest(), reasons=())
    monkeypatch.setattr(recipe.bandwidth, "device_choice", lambda _device: choice)
    measured = recipe.bandwidth.measure_bandwidth(torch.device("cpu"), 4096, rounds=2, pool_bytes=3 * 4096)
    assert (measured.num_bytes, measured.num_calls) == (4096, 3)
    assert measured.enqueue == measured.digest != measured.fetched


def test_a_queue_of_other_bits_is_not_timed(recipe: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    class Liar(CopiedDigest):
        def collect(self, launched: Sequence[list[int | torch.Tensor]]) -> list[int]:
            first, *rest = super().collect(launched)
            return [first ^ 1, *rest]

    tensors = list(torch.arange(30, dtype=torch.uint8).view(3, 10))
    recipe.bandwidth.check_queue(DigestQueue(CopiedDigest()), tensors)
    with pytest.raises(RuntimeError, match="other digests than digest_tensors for 1 of 3 tensors of 10 bytes"):
        recipe.bandwidth.check_queue(DigestQueue(Liar()), tensors)


def test_tensors_are_taken_in_turn_from_the_whole_pool(recipe: SimpleNamespace) -> None:
    pool = recipe.bandwidth.Pool(torch.device("cpu"), 16, 16 * 5000)
    assert pool.num_calls == 256
    seen = [tensor.storage_offset() for _ in range(-(-5000 // 256)) for tensor in pool.take()]
    assert len(set(seen)) == 5000
    larger = recipe.bandwidth.Pool(torch.device("cpu"), 100, 10)
    assert [len(tensor) for tensor in larger.take()] == [100]


def test_a_gpus_time_lies_between_two_events_behind_work_that_keeps_it_busy(
    recipe: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    happened: list[object] = []

    class Event:
        """Stands in for torch.cuda.Event."""

        def __init__(self, *, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            happened.append("event")

        def elapsed_time(self, _end: object) -> float:
            return 250.0

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda _device: happened.append("wait"))
    monkeypatch.setattr(torch.cuda, "_sleep", lambda ticks: happened.append(ticks > 2 * 0.01 * 2e9))

    def work() -> None:
        happened.append("work")
        time.sleep(0.01)

    enqueue, busy = recipe.device.enqueue_and_busy_seconds(CUDA, work)
    assert happened == ["wait", "work", "wait", True, "event", "work", "event", "wait"]
    assert enqueue >= 0.01
    assert busy == 0.25


# waits for the device


def test_waits_are_counted_apart_inside_a_step_and_at_its_end(recipe: SimpleNamespace, modes: list[object]) -> None:
    def train(number: int) -> None:
        for _ in range(number):
            wait()

    step = recipe.measure.Step(train=train, end=wait)
    assert recipe.measure.count_synchronizations(step, 3) == {"inside": 3, "at_end": 1}
    assert recipe.measure.count_synchronizations(step, 0) == {"inside": 0, "at_end": 1}
    assert modes == [0, *["warn", 0] * 4]


def test_other_warnings_are_passed_on_and_the_mode_is_put_back(recipe: SimpleNamespace, modes: list[object]) -> None:
    def waits_and_warns() -> list[str]:
        with recipe.device.counted_synchronizations() as found:
            wait()
            warnings.warn("something else", RuntimeWarning, stacklevel=1)
        return found

    def fails() -> None:
        with recipe.device.counted_synchronizations():
            raise ValueError("of the step")

    with pytest.warns(RuntimeWarning, match="something else") as noted:
        found = waits_and_warns()
    assert len(noted) == len(found) == 1
    with pytest.raises(ValueError, match="of the step"):
        fails()
    assert modes == [0, "warn", 0, "warn", 0]


@pytest.mark.skipif(sys.platform != "linux", reason="peak memory is read from /proc")
def test_memory_and_waits_of_a_gpu_are_measured_and_shown(
    recipe: SimpleNamespace,
    modes: list[object],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    class OnStandIn(recipe.measure.Case):
        """Says that it trains on a GPU, and trains on the CPU."""

        def workload(self) -> object:
            made = super().workload()

            def loss(batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
                wait()
                return made.loss(batch)

            return dataclasses.replace(made, device=CUDA, loss=loss)

    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda _device: None)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda _device: 3 * 2**20)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda _device: 10 * 2**20)
    case = OnStandIn(network="gpt2", optimizer="foreach", is_tiny=True)
    figures = {}
    for variant in ("plain", "op"):
        figures[variant] = {"ratio": 1.0, "median_seconds": 1e-3, **recipe.measure.measure_memory(case, variant, 2)}
        assert figures[variant]["device_peak_growth_mib"] == 7
        assert figures[variant]["synchronizations"] == [{"inside": 1, "at_end": 0}] * 3
    assert modes[-1] == 0
    figures["op"]["device_peak_growth_mib"] = 9
    recipe.tables.print_case({"network": "gpt2", "compiler": None, "optimizer": "foreach", "variants": figures})
    said = capsys.readouterr().out
    assert re.search(r"device MiB +\+ plain +syncs +at end +ops", said)
    assert re.search(r"^op +1\.00 +1\.00 +-?\d+ +-?\d+ +9 +2 +1 +0 +\d+ +\d+ +[\d,]+$", said, re.MULTILINE)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.filterwarnings("default")  # of DebugMode and of the first use of the debug mode
def test_on_a_gpu_everything_is_measured(recipe: SimpleNamespace, tmp_path: Path) -> None:
    file = tmp_path / "figures.json"
    recipe.run.main(["--device", "cuda", "--tiny", "--rounds", "2", "--sizes", "1", "65536", "--json", str(file)])
    content = json.loads(file.read_text())
    assert content["machine"]["device"] == torch.cuda.get_device_name()
    assert all(one["enqueue_seconds"] > 0 for one in content["digests"])
    for case in content["cases"]:
        for variant, figures in case["variants"].items():
            assert figures["device_peak_growth_mib"] > 0
            steps = figures["synchronizations"]
            assert len(steps) == 3
            if variant.startswith("DebugMode"):
                assert min(step["inside"] for step in steps) > 100, "each tensor is waited for"
            else:
                assert [step["inside"] for step in steps] == [0, 0, 0], variant
