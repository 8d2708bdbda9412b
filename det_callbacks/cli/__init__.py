"""The command line: ``det-callbacks`` and ``python -m det_callbacks``."""

from det_callbacks.cli.commands import main

__all__ = ["main"]
