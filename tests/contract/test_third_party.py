"""What is copied into every report is what its list says, byte for byte."""

import hashlib
import re
from pathlib import Path

VENDOR = Path(__file__).parents[2] / "det_callbacks" / "report" / "html" / "vendor"


def listed() -> dict[str, str]:
    """Return the digests in the table of third-party files."""
    text = (VENDOR / "THIRD_PARTY.md").read_text()
    return dict(re.findall(r"^\| `([^`]+)` \|.*\| `([0-9a-f]{64})` \|$", text, re.MULTILINE))


def test_third_party_files_are_those_that_are_listed() -> None:
    found = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in VENDOR.iterdir()}
    del found["THIRD_PARTY.md"]
    assert found == listed()
    assert len(found) == 2


def test_versions_are_those_that_the_files_say() -> None:
    text = (VENDOR / "THIRD_PARTY.md").read_text()
    for name, pattern in (("d3.min.js", r"// https://d3js\.org v(\S+) "), ("plot.umd.min.js", r"plot v(\S+) ")):
        known = re.search(pattern, (VENDOR / name).read_text()[:200])
        assert known is not None
        assert re.search(rf"^\| `{re.escape(name)}` \| .* \| {re.escape(known[1])} \|", text, re.MULTILINE)
