"""What the process was started with, and the command that would start it otherwise."""

import os
import shlex
import sys
from collections.abc import Mapping
from functools import cache
from pathlib import Path


@cache
def start_environment() -> Mapping[str, str]:
    """Return the environment variables as they were when this process started.

    On Linux they are read from /proc/self/environ, which later changes do not reach. Elsewhere they are those of the
    first call: what was set before it cannot be told from what was there at start.
    """
    try:
        content = Path("/proc/self/environ").read_bytes()
    except OSError:
        return dict(os.environ)
    entries = (os.fsdecode(entry).partition("=") for entry in content.split(b"\0") if entry)
    return {name: value for name, _, value in entries}


def restart_command(variables: Mapping[str, str]) -> str:
    """Return the command line that starts this program again with variables set."""
    words = [f"{name}={value}" for name, value in variables.items()]
    return " ".join([*(shlex.quote(word) for word in words), shlex.join(sys.orig_argv)])
