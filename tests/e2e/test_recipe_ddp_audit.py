"""recipes/ddp_audit: the commands of its README, and what its table says is found of each fault."""

import json
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from hydra import compose, initialize_config_dir
from processes import Ended, run_ranks
from readme_commands import run_readme

from det_callbacks import enforce_determinism

RECIPE = Path(__file__).parents[2] / "recipes" / "ddp_audit"

pytestmark = pytest.mark.ddp


@pytest.fixture
def program(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """The recipe's train.py, imported; its modules have names that other recipes use too."""
    monkeypatch.syspath_prepend(str(RECIPE))
    for name, value in (("KMP_DUPLICATE_LIB_OK", "True"), ("KMP_INIT_AT_FORK", "FALSE")):
        monkeypatch.setenv(name, value)  # as scikit-learn does when it is imported
    own = ("train", "planted")
    others = {name: sys.modules.pop(name) for name in own if name in sys.modules}
    yield __import__("train")
    for name in own:
        sys.modules.pop(name, None)
    sys.modules.update(others)


def train(program: ModuleType, folder: Path, name: str, *overrides: str, world_size: int = 3) -> list[Ended]:
    with initialize_config_dir(version_base="1.3", config_dir=str(RECIPE / "conf")):
        config = compose("config", overrides=[*overrides, f"trainer.devices={world_size}"])

    def body(rank: int) -> None:
        os.chdir(folder)
        enforce_determinism(config.determinism.settings)  # as Hydra's job callback does
        program.train(config)

    return run_ranks(body, folder / name, world_size=world_size)


def test_a_bit_that_flips_on_one_of_two_ranks(program: ModuleType, tmp_path: Path) -> None:
    options = ["+determinism=replicas", "determinism.audit_replicas_every_n_steps=1", "fault=weights"]
    ended = train(program, tmp_path, "audit", *options, "trainer.max_steps=8", world_size=2)
    assert [one.exit_code for one in ended] == [1, 1], ended
    for one in ended:
        assert "differ after step 5: 1 tensor on 2 ranks. They last agreed after step 4." in one.output
        assert re.search(r"net\.head\.weight: \w{16} on rank 0, \w{16} on rank 1; neither is a majority", one.output)


def rows() -> dict[str, tuple[str, str]]:
    """Return fault -> cause and sentence, from the table of the README."""
    table = re.findall(r"^\| `fault=(\w+)` \|.*\| `(\w+)`: (.*) \|$", (RECIPE / "README.md").read_text(), re.MULTILINE)
    return {fault: (cause, sentence) for fault, cause, sentence in table}


@pytest.mark.slow
def test_the_table_tells_the_truth(program: ModuleType, tmp_path: Path) -> None:
    assert rows().keys() == set(program.FAULTS) - {None}
    reference = "determinism.reference=refs/ddp"
    ended = train(program, tmp_path, "record", "+determinism=record", reference)
    assert [one.exit_code for one in ended] == [0] * 3, ended
    for fault, (cause, sentence) in rows().items():
        ended = train(
            program,
            tmp_path,
            fault,
            "+determinism=verify",
            reference,
            f"fault={fault}",
            f"determinism.current={tmp_path}/current-{fault}",
        )
        assert [one.exit_code for one in ended] == [1] * 3, (fault, ended)
        verdict: dict[str, Any] = json.loads((tmp_path / f"current-{fault}" / "verdict.json").read_text())
        assert verdict["cause"] == cause
        assert sentence in verdict["explanation"]
        assert verdict["first_divergence"]["step"] == 5
        if fault != "order":  # in which no rank did anything else than before
            assert verdict["first_divergence"]["rank"] == 1
            assert not [origin for origin in verdict["origins"] if origin["rank"] != 1]
            assert "it started on rank 1; rank" in verdict["explanation"]
            assert "received the difference" in verdict["explanation"]


@pytest.mark.slow
def test_the_readme_tells_the_truth(tmp_path: Path) -> None:
    assert run_readme("ddp_audit", tmp_path) == 5
