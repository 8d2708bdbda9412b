"""The HTML report of a verification that diverged. Nothing that goes wrong with it may hide what the verdict says."""

from pathlib import Path

from det_callbacks.compare.live import REPORT_FILE, Verification
from det_callbacks.report.fits import no_report_line, print_closing_line
from det_callbacks.report.html import write_report
from det_callbacks.runs.peers import ALONE, Peers
from det_callbacks.verdict import Verdict


def report_divergence(verification: Verification, verdict: Verdict, *, peers: Peers = ALONE) -> Path | None:
    """Write ``report.html`` beside the verdict, by rank 0; return where it is, None where it could not be written.

    All ranks come here, after their files are closed, so that what each compared is there when rank 0 reads it.

    Args:
        verification: that found the divergence.
        verdict: on it.
        peers: the processes that verified together and are still there.
    """
    try:
        peers.do(verification.note_compared, task="noting which steps were compared")
        if verification.rank:
            return None
        path = verification.current / REPORT_FILE
        return write_report(path, verdict, reference=verification.reference.path, current=verification.current)
    except Exception as error:  # the divergence is raised next: no fault of a page may come before it
        if not verification.rank:
            print_closing_line(no_report_line(error))
        return None
