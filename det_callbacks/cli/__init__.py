"""The command line: ``det-callbacks`` and ``python -m det_callbacks``."""

from det_callbacks.cli.parser import main

__all__ = ["main"]
