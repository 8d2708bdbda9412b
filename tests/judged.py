"""Whole verdicts compared: a callback's, the one on disk, and that of ``det-callbacks diff`` on the two folders."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from det_callbacks import Verdict, cli, compare_runs


def require_one_verdict(
    found: Verdict | Mapping[str, Any],
    reference: Path,
    current: Path,
    capsys: pytest.CaptureFixture[str] | None = None,
) -> None:
    """Fail unless what a verification found, its verdict.json and a comparison of the two folders are equal in all."""
    verdict = found if isinstance(found, Verdict) else Verdict.from_dict(found)
    form = json.loads(json.dumps(verdict.to_dict()))
    assert json.loads((current / "verdict.json").read_text()) == form
    assert json.loads(json.dumps(compare_runs(reference, current).to_dict())) == form
    if capsys is not None:
        capsys.readouterr()
        assert cli.main(["diff", str(reference), str(current), "--json"]) == verdict.exit_code
        assert json.loads(capsys.readouterr().out) == form
