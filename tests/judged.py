"""Whole verdicts compared: a callback's, the one on disk, and that of
``compare_runs`` on the two folders.
"""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from det_callbacks import Verdict, compare_runs
from det_callbacks.runs.files import LOCK_FILE
from det_callbacks.verify.verification import Verification


def require_one_verdict(found: Verdict | Mapping[str, Any], reference: Path, current: Path) -> None:
    """Fail unless what a verification found, its verdict.json and a comparison of the two
    folders are equal in all.
    """
    verdict = found if isinstance(found, Verdict) else Verdict.from_dict(found)
    form = json.loads(json.dumps(verdict.to_dict()))
    assert json.loads((current / "verdict.json").read_text()) == form
    assert json.loads(json.dumps(compare_runs(reference, current).to_dict())) == form
    first, _, origin = verdict.explanation.partition("; an origin is ")
    assert not origin or origin.partition(" (so do")[0].rstrip(".") not in first, (
        "one thing is said twice"
    )


@pytest.fixture(autouse=True)
def one_verdict(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Put every verdict but a match that a verification writes in this process
    through the function above.

    It happens when the test ends, so that what a fit leaves after its verdict counts; folders that
    the test has changed itself, so that they are no verdict's any more, are its own matter.
    """
    written: dict[Path, tuple[Verdict, Path, list[tuple[str, int]]]] = {}
    write = Verification.write

    def write_and_note(self: Verification, verdict: Verdict) -> None:
        write(self, verdict)
        if verdict.verdict != "match" and self.rank == 0:
            written[self.current] = (
                verdict,
                self.reference.path,
                files_of(self.current, self.reference.path),
            )

    monkeypatch.setattr(Verification, "write", write_and_note)
    yield
    for current, (verdict, reference, files) in written.items():
        if files_of(current, reference) == files:
            require_one_verdict(verdict, reference, current)


def files_of(*folders: Path) -> list[tuple[str, int]]:
    """Return the files that a comparison reads, with when they were written;
    the lock goes after the verdict.
    """
    others = ("report.html", LOCK_FILE)
    paths = sorted(
        path for folder in folders for path in folder.rglob("*") if path.name not in others
    )
    return [(str(path), path.stat().st_mtime_ns) for path in paths if path.is_file()]
