"""Names of two modules that are to be the same: without what wrappers put in front of them or into their middle."""

from collections.abc import Iterable, Sequence

_WRAPPERS = frozenset({"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"})
"""Attributes in which torch.compile, FSDP and checkpoint_wrapper keep the module that they wrap; torch 2.13."""

_MAX_PARTS = 4


def plain_name(name: str) -> str:
    """Return a qualified name without the attributes of known wrappers, wherever they stand in it."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def prefixes_between(base: Sequence[str], control: Sequence[str]) -> tuple[str, str]:
    """Return the prefixes that names of the base, and of the control, have to lose so that they meet.

    Both are empty where some name is on both sides already, and where no prefix of up to four parts makes any meet.

    Args:
        base: plain names.
        control: likewise.
    """
    ours, theirs = set(base), set(control)
    if not ours or not theirs or ours & theirs:
        return "", ""
    candidates = [("", prefix) for prefix in _prefixes(control)] + [(prefix, "") for prefix in _prefixes(base)]

    def num_common(pair: tuple[str, str]) -> int:
        return len({name.removeprefix(pair[0]) for name in ours} & {name.removeprefix(pair[1]) for name in theirs})

    best = max(candidates, key=num_common, default=("", ""))
    return best if num_common(best) else ("", "")


def _prefixes(names: Iterable[str]) -> list[str]:
    found: dict[str, None] = {}
    for name in names:
        parts = name.split(".")
        for length in range(1, min(len(parts), _MAX_PARTS + 1)):
            found[".".join(parts[:length]) + "."] = None
    return list(found)
