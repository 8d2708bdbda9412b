"""Which causes a trail can have, by its root and its last entry; tests/conftest.py checks every verdict with a trail.

The rules still name the cause. A root that contradicts them is a fault of one of the two.
"""

from collections.abc import Mapping

from det_callbacks.verdict import Verdict

_OF_OPS = {"forward", "backward", "optimizer", "collective", "structure", "rng", "unknown"}

CAUSES: Mapping[tuple[str, str], set[str]] = {
    ("setting", "state"): {"settings", "initial_weights"},
    ("setting", "generator"): {"settings", "rng"},
    ("setting", "batch"): {"settings", "data_order", "data_content", "rng"},
    ("option", "batch"): {"settings", "data_order", "data_content"},
    ("checkpoint", "state"): {"checkpoint"},
    ("checkpoint", "batch"): {"data_order", "data_content", "rng"},
    ("checkpoint", "generator"): {"rng"},
    ("boundary", "batch"): {"data_order", "data_content", "rng"},
    ("boundary", "generator"): {"rng"},
    ("outside", "batch"): {"data_order", "data_content"},
    ("unwritten", "op"): {"uninitialised_memory"},
    ("state", "state"): {"initial_weights", "settings"},
    ("generator", "generator"): {"rng"},
    ("op", "op"): _OF_OPS,
}
"""Other pairs have no set of their own."""


def require_consistent(verdict: Verdict) -> None:
    if not verdict.trail:
        return
    first = verdict.first_divergence
    assert first is not None, "a trail leads to a divergence"
    pair = verdict.trail[0].kind, verdict.trail[-1].kind
    expected = CAUSES.get(pair)
    assert expected is None or verdict.cause in expected, (pair, verdict.cause, verdict.explanation)
