"""The versions that run here, as tuples of numbers, for what differs between
those that are supported.
"""

from importlib.metadata import version

from packaging.version import Version

TORCH = Version(version("torch")).release
LIGHTNING = Version(version("lightning")).release
