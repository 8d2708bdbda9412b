"""What an audit found, as a table."""

from collections.abc import Sequence
from pathlib import Path

from det_callbacks.audit import AuditFinding, AuditReport
from det_callbacks.report.closing import count
from det_callbacks.report.tables import print_table, to_text

MAX_ROWS = 30
_COLUMNS = ("judgement", "phase", "module", "op", "steps", "elements", "ULPs", "source")


def audit_line(report: AuditReport, *, folder: Path, missed: Sequence[int] = ()) -> str:
    """Return the closing line of an audit; ``missed`` are steps that were asked for and never came."""
    what = f"audited {count(len(report.steps), 'step')}, {count(report.num_compared, 'op')} run again"
    if missed:
        what += f"; {count(len(missed), 'step')} never came ({', '.join(map(str, missed[:5]))})"
    if not report.findings:
        return f"det_callbacks: nothing differed: {what} (in {folder})"
    return (
        f"det_callbacks: {count(len(report.findings), 'place')} differed: {what} (audit.json and replay.yaml: {folder})"
    )


def audit_lines(report: AuditReport, *, replay: Path) -> str:
    """Return the table of what differed, and what to do next."""
    rows = [_row(found) for found in report.findings[:MAX_ROWS]]
    table = to_text(lambda console: print_table(console, _COLUMNS, rows, numbers="elements ULPs"))
    more = len(report.findings) - MAX_ROWS
    advice = [f"And {more} more in audit.json."] if more > 0 else []
    if report.replay:
        advice.append(
            f"Make these ops deterministic (det-callbacks ops says what torch offers), or record and verify with "
            f"replay={str(replay)!r}, which saves their outputs and puts them back."
        )
    if any(found.judgement == "transient" for found in report.findings):
        advice.append(
            "Transient: a single call differed, and two of its three runs agreed; suspect the hardware first."
        )
    begin = f"Run again on the same inputs, {count(len(report.findings), 'op')} gave other bits."
    return "\n".join([begin, "", table, "", *advice])


def _row(found: AuditFinding) -> list[str]:
    return [
        found.judgement,
        found.phase,
        found.module,
        found.op,
        ", ".join(map(str, found.steps[:4])) + (" ..." if len(found.steps) > 4 else ""),
        f"{found.num_elements:,}",
        "" if found.max_ulps is None else f"{found.max_ulps:,}",
        found.source[0] if found.source else "",
    ]
