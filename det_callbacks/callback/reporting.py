"""The HTML report of a verification that diverged. Nothing that goes wrong with it may hide what the verdict says."""

from pathlib import Path

from det_callbacks.compare.record import REPORT_FILE
from det_callbacks.report.fits import no_report_line, print_closing_line
from det_callbacks.report.html import write_report
from det_callbacks.verdict import Verdict
from det_callbacks.verification import Verification


def report_divergence(verification: Verification, verdict: Verdict) -> Path | None:
    """Write ``report.html`` beside the verdict, by rank 0; return where it is, None where it could not be written.

    Args:
        verification: that found the divergence.
        verdict: on it.
    """
    if verification.rank:
        return None
    try:
        path = verification.current / REPORT_FILE
        return write_report(path, verdict, reference=verification.reference.path, current=verification.current)
    except Exception as error:  # the divergence is raised next: no fault of a page may come before it
        print_closing_line(no_report_line(error))
        return None
