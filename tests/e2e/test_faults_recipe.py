"""The benchmark of planted faults: a small run finds them all,
and says what torch's DebugMode makes of the same.
"""

import importlib
import json
from pathlib import Path

import pytest
from recipe_modules import find_recipe
from versions import TORCH

RECIPE = Path(__file__).parents[2] / "recipes" / "faults"


@pytest.mark.slow
@pytest.mark.skipif(TORCH < (2, 14), reason="DebugMode's comparison of logs is that of torch 2.14")
def test_a_run_of_each_change_finds_them_all(tmp_path, monkeypatch, capsys):
    find_recipe(RECIPE, monkeypatch)
    summary = importlib.import_module("run").main(
        ["--faults", "25", "--json", str(tmp_path / "faults.json")]
    )
    written = json.loads((tmp_path / "faults.json").read_text())
    assert written == json.loads(json.dumps(summary))
    assert (written["false_alarms"], written["bits_changed"]) == ([], [])
    assert 20 <= len(written["faults"]) == 25 - written["without_effect"]
    for one in written["faults"]:
        ours = one["ours"]
        assert (ours["detected"], ours["located"], ours["is_cause_right"]) == (True, True, True), (
            one
        )
    swapped = [one for one in written["faults"] if one["fault"]["change"] == "all elements moved"]
    assert not all(one["debug_mode"]["hash_tensor"]["located"] for one in swapped)
    assert "all " in capsys.readouterr().out
