"""The commands of recipes/compiled/README.md, with the output they promise; all in one process."""

import json
import os
import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch
from hydra import compose, initialize_config_dir
from readme_commands import commands_of, pattern_of

RECIPE = Path(__file__).parents[2] / "recipes" / "compiled"
_SET_BY_INDUCTOR = "_TORCHINDUCTOR_PYOBJECT_TENSOR_DATA_PTR"  # when it loads its first kernel


@pytest.fixture
def program(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[ModuleType]:
    """The recipe's compare.py, imported; its modules have names that others use too."""
    own = ("compare", "models")
    others = {name: sys.modules.pop(name) for name in own if name in sys.modules}
    monkeypatch.setattr(sys, "path", [str(RECIPE), *sys.path])
    monkeypatch.chdir(tmp_path)
    was_set = _SET_BY_INDUCTOR in os.environ
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)  # a second one only waits for its core where others work too
    yield __import__("compare")
    torch.set_num_threads(num_threads)
    for name in own:
        sys.modules.pop(name, None)
    sys.modules.update(others)
    torch._dynamo.reset()
    if not was_set:
        os.environ.pop(_SET_BY_INDUCTOR, None)


def run(program: ModuleType, overrides: list[str]) -> int:
    with initialize_config_dir(version_base="1.3", config_dir=str(RECIPE / "conf")):
        config = compose("config", overrides=overrides)
    try:
        program.main.__wrapped__(config)
    except SystemExit as end:
        return int(end.code or 0)
    return 0


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own, when it compiles
def test_the_readme_tells_the_truth(program: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status = 0
    asked = set()
    for command, promised in commands_of((RECIPE / "README.md").read_text()):
        if command == "echo $?":
            assert promised == [str(status)]
            continue
        if not command.startswith("python recipes/compiled/compare.py "):
            continue
        overrides = shlex.split(command)[2:]
        asked.add(overrides[0].removeprefix("question="))
        status = run(program, overrides)
        said = capsys.readouterr().out
        for line in promised:
            assert re.search(pattern_of(line), said), f"{command}\npromised: {line}\nsaid:\n{said}"
    assert asked == set(program.QUESTIONS)
    content = json.loads((tmp_path / "report.json").read_text())
    assert (content["close"], content["first"]["name"]) == (False, "blocks.1.project")
    assert run(program, ["question=planted", "plant=epsilon", "iterations=1"]) == 1
    assert "submodule output blocks.1.norm2 in iteration 0" in capsys.readouterr().out
