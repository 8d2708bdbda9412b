"""recipes/overhead: it measures what it says, on a device too, with stand-ins for a GPU where there is none."""

import json
import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch

RECIPE = Path(__file__).parents[2] / "recipes" / "overhead"
MODULES = ("bandwidth", "device", "measure", "models", "ours", "run", "tables")


@pytest.fixture
def recipe(monkeypatch: pytest.MonkeyPatch) -> Iterator[SimpleNamespace]:
    """The recipe's modules, imported; others may have their names."""
    others: dict[str, ModuleType] = {name: sys.modules.pop(name) for name in MODULES if name in sys.modules}
    monkeypatch.setattr(sys, "path", [str(RECIPE), *sys.path])
    yield SimpleNamespace(**{name: __import__(name) for name in MODULES})
    for name in MODULES:
        sys.modules.pop(name, None)
    sys.modules.update(others)


def test_the_networks_have_the_sizes_that_the_readme_says_and_train_in_bfloat16(recipe: SimpleNamespace) -> None:
    with torch.device("meta"):
        models = recipe.models.GPT2(), recipe.models.ResNet50()
    assert [sum(parameter.numel() for parameter in model.parameters()) for model in models] == [124_439_808, 25_557_032]
    for name in recipe.models.MIXED_NETWORKS:
        workload = recipe.models.make_workload(name, is_tiny=True)
        found: set[torch.dtype] = set()
        workload.model.head.register_forward_hook(lambda _m, _i, output, found=found: found.add(output.dtype))
        loss = workload.loss(workload.batch(0))
        assert (found, loss.dtype) == ({torch.bfloat16}, torch.float32)
    assert workload.batch(0)[0].is_contiguous(memory_format=torch.channels_last)


def test_the_commands_of_the_readme_are_taken(
    recipe: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    commands = re.findall(r"^\$ python recipes/overhead/run\.py(.*)$", (RECIPE / "README.md").read_text(), re.MULTILINE)
    assert len(commands) >= 3
    for command in commands:
        recipe.run.make_parser().parse_args(shlex.split(command))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for options, message in (
        (["--networks", "mlp", "--rounds", "0"], "0 is not a number from 1 on"),
        (["--device", "cuda"], "finds no CUDA device here, so nothing was measured"),
    ):
        with pytest.raises(SystemExit) as ended:
            recipe.run.main(options)
        assert ended.value.code == 2
        printed = capsys.readouterr()
        assert (printed.out, message in printed.err) == ("", True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    cpu, cuda = recipe.run.parse([]), recipe.run.parse(["--device", "cuda"])
    assert (cpu.optimizers, cpu.sizes, cpu.networks[0]) == (["plain"], [], "mlp")
    assert (cuda.networks, cuda.optimizers) == (["gpt2", "resnet50"], ["foreach"])
    assert (cuda.sizes[0], cuda.sizes[-1], len(cuda.sizes)) == (1, 1024 * 1024, 11)


@pytest.mark.skipif(sys.platform != "linux", reason="peak memory is read from /proc")
@pytest.mark.slow
def test_a_short_run_measures_time_memory_and_disk(
    recipe: SimpleNamespace, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "figures.json"
    options = "--networks mlp --variants op --rounds 3 --steps 2 --memory-steps 3 --json"
    recipe.run.main([*options.split(), str(file)])
    (case,) = json.loads(file.read_text())["cases"]
    assert (case["network"], case["optimizer"]) == ("mlp", "plain")
    plain, op = case["variants"]["plain"], case["variants"]["op"]
    assert plain["ratio"] == 1
    assert len(plain["seconds"]) == len(op["seconds"]) == 3
    assert op["plain"] == plain["seconds"]
    assert op["ratio"] == sorted(one / other for one, other in zip(op["seconds"], plain["seconds"], strict=True))[1]
    assert op["peak_growth_mib"] > 0
    assert op["ops"] == 113
    assert 8 * op["sites"] < op["bytes_a_step"] <= 8 * op["sites"] + 512
    assert 1 <= op["num_layouts"] <= 3
    assert re.search(r"^op +\d+\.\d\d +\d+\.\d\d .* 113 ", capsys.readouterr().out, re.MULTILINE)


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
