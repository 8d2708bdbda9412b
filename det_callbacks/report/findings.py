"""The findings of a run as JSON, in a report, and in the closing line of a recording."""

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from det_callbacks.errors import ReferenceFormatError
from det_callbacks.findings.table import find_findings
from det_callbacks.report.console import Section, Table
from det_callbacks.runs.store import Run
from det_callbacks.text import count, listed
from det_callbacks.verdict import Finding, as_json

FINDINGS_SCHEMA = 1


def findings_to_dict(path: Path, findings: Sequence[Finding]) -> dict[str, Any]:
    return {"schema": FINDINGS_SCHEMA, "run": str(path), "findings": [as_json(finding) for finding in findings]}


def findings_report(findings: Sequence[Finding]) -> list[Section]:
    if not findings:
        return []
    columns = ("finding", "ranks", "steps", "what, and what to do")
    rows = [(one.finding, _shown(one.ranks), _shown(one.steps), one.explanation) for one in findings]
    return [Section(title=count(len(findings), "finding"), table=Table(columns=columns, rows=rows))]


def findings_in_dict(run: Run) -> dict[str, Any]:
    """Return the findings in the JSON of ``show``; null if the evidence cannot be read."""
    try:
        return {"findings": [as_json(finding) for finding in find_findings(run)]}
    except ReferenceFormatError:
        return {"findings": None}


def findings_of(run: Run) -> list[Section]:
    """Return the findings of a run, or why its evidence cannot be read."""
    try:
        return findings_report(find_findings(run))
    except ReferenceFormatError as error:
        return [Section(title="Findings", lines=[f"They cannot be read: {error}"])]


def findings_line(path: Path, *, shown: Path) -> str:
    """Return the line on findings at the end of a recording, or ""; ``shown`` is where the run will be."""
    command = f"det-callbacks findings {shlex.quote(str(shown))}"
    try:
        findings = find_findings(Run.open(path, check_steps=False))
    except ReferenceFormatError as error:  # the recording itself is complete
        return f"det_callbacks: findings cannot be read: {error} See {command}"
    words = listed((one.finding for one in findings), limit=len(findings))
    return f"det_callbacks: {count(len(findings), 'finding')}: {words}; see {command}" if findings else ""


def _shown(numbers: Sequence[int]) -> str:
    return " to ".join(map(str, dict.fromkeys(numbers))) or "-"
