"""The tree of errors at the head of errors.py is the one that there is,
with the exit codes that programs end with.
"""

import re
from collections.abc import Iterator

import det_callbacks
from det_callbacks import DetCallbacksError, errors

# loads the errors beside their reports
PUBLIC = [getattr(det_callbacks, name) for name in det_callbacks.__all__]


def branches(error: type[DetCallbacksError], depth: int = 0) -> Iterator[tuple[int, str, int]]:
    """Yield the errors below one, itself first: depth, name, exit code;
    private ones are left out.
    """
    is_named = not error.__name__.startswith("_")
    if is_named:
        yield depth, error.__name__, error.exit_code
    for below in sorted(error.__subclasses__(), key=lambda known: known.__name__):
        if below.__module__.startswith("det_callbacks."):
            yield from branches(below, depth + is_named)


def written(text: str) -> set[tuple[int, str, int]]:
    """Return what a text says: each error with its depth,
    and the exit code in whose column it is.
    """
    lines = re.findall(r"^    ( *)(\w+) +(\d)", text, re.MULTILINE)
    return {(len(indent) // 2, name, int(code)) for indent, name, code in lines}


def test_the_tree_of_errors_is_the_one_that_there_is():
    assert len(PUBLIC) > 50
    assert written(errors.__doc__ or "") == {*branches(DetCallbacksError)}
