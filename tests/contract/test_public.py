"""What users of version 1 rely on does not change by accident: names, arguments, commands,
keys, JSON, run folders.
"""

import json
import runpy
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import public
import pytest
import schemas
import torch
from jsonschema import Draft202012Validator
from verdicts import DIVERGED, MATCH, NOT_COMPARABLE

from det_callbacks.cli import main
from det_callbacks.digest.host import DIGEST_VERSION
from det_callbacks.runs.files import FORMAT_VERSION

UPDATE = (
    "docs/reference/stability.md says which change needs which version: a new line is a minor "
    "version, a line that goes or changes a major one. If the change is meant, run make public, "
    "and add it to CHANGELOG.md."
)


def test_what_is_public_is_what_is_written_down():
    written, now = public.FILE.read_text().splitlines(), public.text().splitlines()
    gone, new = (
        [one for one in written if one not in now],
        [one for one in now if one not in written],
    )
    assert (gone, new) == ([], []), UPDATE
    assert written == now, UPDATE


@pytest.mark.parametrize("name", ["verdict", "findings", "doctor"])
def test_the_schemas_that_are_shipped_are_those_of_the_data(name):
    shipped = json.loads((schemas.FOLDER / f"{name}.json").read_text())
    Draft202012Validator.check_schema(shipped)
    assert shipped == schemas.made()[name], UPDATE
    assert {path.stem for path in schemas.FOLDER.iterdir()} == {*schemas.made()}


def test_a_verdict_that_is_not_of_its_schema_fails_every_test():
    for verdict in (MATCH, DIVERGED, NOT_COMPARABLE):
        verdict.to_dict()
    with pytest.raises(AssertionError, match=r"\$\.explanation: 3 is not of type 'string'"):
        replace(MATCH, explanation=3).to_dict()
    with pytest.raises(AssertionError, match=r"\$: 'counts' is a required property"):
        schemas.require_schema(
            {name: one for name, one in MATCH.to_dict().items() if name != "counts"}, "verdict"
        )


FROZEN = Path(__file__).parents[1] / "frozen"
AGAIN = (
    "FORMAT_VERSION or DIGEST_VERSION has changed. Keep the folders that a release wrote, which "
    "later versions read; run tests/frozen/training.py as its docstring says, and add the new "
    "folder."
)


@pytest.fixture(params=sorted(path.name for path in FROZEN.glob("format-*")))
def frozen(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of runs that an earlier version recorded, in the working directory;
    version 1.0.0 made the first.
    """
    monkeypatch.chdir(tmp_path)
    shutil.copytree(FROZEN / request.param, tmp_path / request.param)
    return Path(request.param)


def holds(now: Any, earlier: Any) -> bool:
    """Whether JSON has all that it had in an earlier version, with the same values."""
    if isinstance(earlier, dict):
        return all(name in now and holds(now[name], value) for name, value in earlier.items())
    if isinstance(earlier, list):
        return len(now) == len(earlier) and all(map(holds, now, earlier))
    return bool(now == earlier)


def test_a_run_of_each_format_is_kept():
    folder = FROZEN / f"format-{FORMAT_VERSION}"
    assert folder.is_dir(), AGAIN
    content = json.loads((folder / "reference" / "run.json").read_text())
    assert (content["format_version"], content["digest_version"]) == (
        FORMAT_VERSION,
        DIGEST_VERSION,
    ), AGAIN
    assert sum(path.stat().st_size for path in FROZEN.rglob("*") if path.is_file()) < 100 * 1024


def test_every_later_version_shows_and_compares_the_frozen_runs(frozen, capsys):
    reference, current = str(frozen / "reference"), str(frozen / "current")
    assert main(["show", reference]) == 0
    assert "2 steps" in capsys.readouterr().out
    assert main(["show", reference, "--step", "1", "--json"]) == 0
    sites = json.loads(capsys.readouterr().out)["sites"]
    assert "aten.mul.Tensor" in {site["op"] for site in sites}
    assert main(["findings", reference, "--json"]) == 0
    schemas.require_schema(json.loads(capsys.readouterr().out), "findings")
    assert main(["diff", reference, current, "--json", "--html", "report.html"]) == 1
    verdict = json.loads(capsys.readouterr().out)
    stored = json.loads((frozen / "current" / "verdict.json").read_text())
    # a later version may add fields, which an earlier verdict does not have
    assert [
        one
        for one in schemas.validator("verdict").iter_errors(stored)
        if one.validator != "required"
    ] == []
    for name in ("verdict", "cause", "first_divergence", "origins", "counts", "coverage"):
        assert holds(verdict[name], stored[name]), name
    (numbers,) = verdict["first_divergence"]["numbers"]["output"]
    assert (verdict["cause"], numbers["max_relative"]) == ("forward", 0.5), (
        "of the tensors that both runs kept"
    )
    assert main(["export", reference, "--to", "exported"]) == 0


def test_every_later_version_verifies_against_the_frozen_run(frozen):
    """Its numbers are exact, so another machine has the same bits;
    another version of torch may call other ops.
    """
    shutil.rmtree(frozen / "current")
    verdict = runpy.run_path(str(FROZEN / "training.py"))["train"](frozen, mode="verify")
    recorded = json.loads((frozen / "reference" / "run.json").read_text())["environment"][
        "torch.version"
    ]["value"]
    is_same = torch.__version__.split("+")[0] == recorded.split("+")[0]
    assert verdict.verdict in (("match",) if is_same else ("match", "not_comparable")), (
        verdict.explanation
    )
