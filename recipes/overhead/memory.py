"""How much memory this process has, and had at most; for recipes that measure."""

from pathlib import Path


def resident_mib(name: str) -> float:
    """Read VmRSS (now) or VmHWM (peak) of this process: MiB.

    Not ``getrusage``: the peak it gives begins with that of the process that started this one.
    """
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) / 1024
    raise OSError(f"/proc/self/status has no {name}; memory is measured on Linux")
