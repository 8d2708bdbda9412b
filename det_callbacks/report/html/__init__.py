"""The report as an HTML file: what it shows, and how it becomes a page."""

from det_callbacks.report.html.render import write_report

__all__ = ["write_report"]
