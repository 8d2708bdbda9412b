"""The commands of the recipes' READMEs, with the output they promise, and what their tables say."""

import json
import os
import re
import shlex
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from hydra import compose, initialize_config_dir
from omegaconf import DictConfig
from processes import Ended, run_ranks
from readme_commands import commands_of, pattern_of, run_readme
from safetensors import safe_open

from det_callbacks import enforce_determinism
from det_callbacks.runs.store import Run

RECIPES = Path(__file__).parents[2] / "recipes"
_SET_BY_INDUCTOR = "_TORCHINDUCTOR_PYOBJECT_TENSOR_DATA_PTR"  # when it loads its first kernel


@pytest.mark.slow
@pytest.mark.parametrize(
    ("recipe", "num_commands"), [("digits", 10), ("resume", 8), pytest.param("ddp_audit", 5, marks=pytest.mark.ddp)]
)
def test_the_readme_tells_the_truth(recipe: str, num_commands: int, tmp_path: Path) -> None:
    assert run_readme(recipe, tmp_path) == num_commands


@pytest.mark.slow
def test_the_readme_of_replay_tells_the_truth(tmp_path: Path) -> None:
    assert run_readme("replay", tmp_path, added="model.is_forced=true") == 6  # the race is forced
    run = Run.open(tmp_path / "refs" / "replayed")
    assert list(run.manifest.replay) == ["forward/pool:recipe.racing_sum.default"]
    files = sorted(run.path.rglob("*.safetensors"))
    assert len(files) == 30
    with safe_open(files[-1], framework="pt") as file:
        (name,) = file.keys()
        assert file.get_tensor(name).shape == (16, 64)


def test_a_promise_can_be_broken() -> None:
    readme = "```console\n$ do it\nrecorded ... steps\n```\n\n```console\n$ echo $?\n1\n```\n"
    assert commands_of(readme) == [("do it", ["recorded ... steps"]), ("echo $?", ["1"])]
    assert re.search(pattern_of("recorded ... steps"), "recorded 48 steps")
    assert not re.search(pattern_of("recorded ... steps"), "recorded nothing")


@pytest.fixture
def program(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., ModuleType]]:
    """Import a recipe's module; its modules have names that other recipes use too."""
    others: dict[str, ModuleType] = {}
    own: list[str] = []

    def load(recipe: str, *names: str) -> ModuleType:
        monkeypatch.setattr(sys, "path", [str(RECIPES / recipe), *sys.path])
        own.extend(names)
        others.update({name: sys.modules.pop(name) for name in names if name in sys.modules})
        return __import__(names[0])

    yield load
    for name in own:
        sys.modules.pop(name, None)
    sys.modules.update(others)


def config_of(recipe: str, overrides: list[str]) -> DictConfig:
    with initialize_config_dir(version_base="1.3", config_dir=str(RECIPES / recipe / "conf")):
        return compose("config", overrides=overrides)


# compiled


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own, when it compiles
def test_the_readme_of_compiled_tells_the_truth(
    program: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    compare = program("compiled", "compare", "models")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(_SET_BY_INDUCTOR, os.environ.get(_SET_BY_INDUCTOR, "0"))

    def run(overrides: list[str]) -> tuple[int, str]:
        config, status = config_of("compiled", overrides), 0
        try:
            compare.main.__wrapped__(config)
        except SystemExit as end:
            status = int(end.code or 0)
        return status, capsys.readouterr().out

    status, asked = 0, set()
    for command, promised in commands_of((RECIPES / "compiled" / "README.md").read_text()):
        if command == "echo $?":
            assert promised == [str(status)]
        elif command.startswith("python recipes/compiled/compare.py "):
            overrides = shlex.split(command)[2:]
            asked.add(overrides[0].removeprefix("question="))
            status, printed = run(overrides)
            for line in promised:
                assert re.search(pattern_of(line), printed), f"{command}\npromised: {line}\nprinted:\n{printed}"
    assert asked == set(compare.QUESTIONS)
    content = json.loads((tmp_path / "report.json").read_text())
    assert (content["close"], content["first"]["name"]) == (False, "blocks.1.project")
    status, printed = run(["question=planted", "plant=epsilon", "iterations=1"])
    assert (status, "submodule output blocks.1.norm2 in iteration 0" in printed) == (1, True)
    torch._dynamo.reset()


# ddp_audit


Train = Callable[..., list[Ended]]


@pytest.fixture
def train(program: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Train:
    """Train the recipe's model on processes that are forked from this one."""
    for name, value in (("KMP_DUPLICATE_LIB_OK", "True"), ("KMP_INIT_AT_FORK", "FALSE")):
        monkeypatch.setenv(name, value)  # as scikit-learn does when it is imported
    module = program("ddp_audit", "train", "planted")

    def run(name: str, *overrides: str, world_size: int = 3) -> list[Ended]:
        config = config_of("ddp_audit", [*overrides, f"trainer.devices={world_size}"])

        def body(rank: int) -> None:
            os.chdir(tmp_path)
            enforce_determinism(config.determinism.settings)  # as Hydra's job callback does
            module.train(config)

        return run_ranks(body, tmp_path / name, world_size=world_size)

    return run


@pytest.mark.ddp
def test_a_bit_that_flips_on_one_of_two_ranks(train: Train) -> None:
    options = ["+determinism=replicas", "determinism.audit_replicas_every_n_steps=1", "fault=weights"]
    ended = train("audit", *options, "trainer.max_steps=8", world_size=2)
    assert [one.exit_code for one in ended] == [1, 1], ended
    for one in ended:
        assert "differ after step 5: 1 tensor on 2 ranks. They last agreed after step 4." in one.output
        assert re.search(r"net\.head\.weight: \w{16} on rank 0, \w{16} on rank 1; neither is a majority", one.output)


@pytest.mark.ddp
@pytest.mark.slow
def test_the_table_of_ddp_audit_tells_the_truth(train: Train, tmp_path: Path) -> None:
    readme = (RECIPES / "ddp_audit" / "README.md").read_text()
    rows = re.findall(r"^\| `fault=(\w+)` \|.*\| `(\w+)`: (.*) \|$", readme, re.MULTILINE)
    assert {fault for fault, _, _ in rows} == set(sys.modules["train"].FAULTS) - {None}
    reference = "determinism.reference=refs/ddp"
    ended = train("record", "+determinism=record", reference)
    assert [one.exit_code for one in ended] == [0] * 3, ended
    for fault, cause, sentence in rows:
        current = tmp_path / f"current-{fault}"
        options = (reference, f"fault={fault}", f"determinism.current={current}")
        ended = train(fault, "+determinism=verify", *options)
        assert [one.exit_code for one in ended] == [1] * 3, (fault, ended)
        verdict: dict[str, Any] = json.loads((current / "verdict.json").read_text())
        assert (verdict["cause"], verdict["first_divergence"]["step"]) == (cause, 5)
        assert sentence in verdict["explanation"]
        if fault != "order":  # in which no rank did anything else than before
            assert verdict["first_divergence"]["rank"] == 1
            assert not [origin for origin in verdict["origins"] if origin["rank"] != 1]
            assert "it started on rank 1; rank" in verdict["explanation"]
            assert "received the difference" in verdict["explanation"]
