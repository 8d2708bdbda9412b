"""The versions that run here, for what differs between those that are supported."""

from importlib.metadata import version


def _release_of(distribution: str) -> tuple[int, int]:
    major, minor = version(distribution).split(".")[:2]
    return int(major), int(minor)


TORCH = _release_of("torch")
LIGHTNING = _release_of("lightning")
