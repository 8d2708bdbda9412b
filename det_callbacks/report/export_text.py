"""What an export wrote, in words."""

from rich.console import Console
from rich.text import Text

from det_callbacks.export import Export
from det_callbacks.report.closing import count


def render_export(export: Export, console: Console) -> None:
    """Print what was written and where."""
    lines = [
        f"{export.path}: {count(export.num_rows, 'row')} of {count(export.num_steps, 'step')} and "
        f"{count(export.num_ranks, 'rank')} in {count(export.num_files, 'file')}, {export.num_bytes / 1e6:.1f} MB"
    ]
    if export.incomplete_reason is not None:
        lines.append(f"The run is incomplete; its whole steps are there: {export.incomplete_reason}")
    for line in lines:
        console.print(Text(line), soft_wrap=True)
