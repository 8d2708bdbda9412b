"""Which entries of two sequences of numbers belong together: the sequence diff that alignment is built on.

Everything here keeps order (matches never cross) and places what is unmatched as early as it can: when one of twenty
equal entries was inserted, the first one after the matched prefix counts as the new one.
"""

from bisect import bisect_left
from collections import Counter
from collections.abc import Hashable, Sequence
from difflib import SequenceMatcher

Pairs = list[tuple[int, int]]
Gap = tuple[int, int, int, int]
"""Half-open ranges that are still to be matched: start and stop in the reference, start and stop in the current."""

MAX_CELLS = 1_000_000
"""Product of the two lengths up to which a gap is searched for its longest common blocks; some 0.1 s."""


def trim(reference: Sequence[int], current: Sequence[int], gap: Gap, pairs: Pairs, *, suffix_first: bool) -> Gap:
    """Match the common prefix and suffix of a gap into ``pairs``; return the gap that is left.

    With ``suffix_first``, an entry that could belong to both ends counts as suffix, which places an insertion among
    equal entries at the earliest place.
    """
    r_start, r_stop, c_start, c_stop = gap
    for is_suffix in (suffix_first, not suffix_first):
        while r_start < r_stop and c_start < c_stop:
            pair = (r_stop - 1, c_stop - 1) if is_suffix else (r_start, c_start)
            if reference[pair[0]] != current[pair[1]]:
                break
            pairs.append(pair)
            if is_suffix:
                r_stop, c_stop = pair
            else:
                r_start, c_start = r_start + 1, c_start + 1
    return r_start, r_stop, c_start, c_stop


def match_unique(reference: Sequence[Hashable], current: Sequence[Hashable], gap: Gap) -> Pairs:
    """Match keys that occur once on either side of a gap: the longest run of them in the same order (patience diff)."""
    r_start, r_stop, c_start, c_stop = gap
    in_reference = Counter(reference[r_start:r_stop])
    in_current = Counter(current[c_start:c_stop])
    places = {key: place for place, key in enumerate(current[c_start:c_stop], start=c_start) if in_current[key] == 1}
    candidates = [
        (place, places[key])
        for place, key in enumerate(reference[r_start:r_stop], start=r_start)
        if in_reference[key] == 1 and key in places
    ]
    return _longest_increasing(candidates)


def match_repeated(reference: Sequence[int], current: Sequence[int], gap: Gap) -> Pairs:
    """Match what a gap has in common: its longest common block, then what is left of either side; in order.

    A gap of more than ``MAX_CELLS`` is matched in the order in which equal keys occur.
    """
    r_start, r_stop, c_start, c_stop = gap
    # backwards, because the search puts an insertion as late as it can, and it has to come early
    left, right = reference[r_start:r_stop][::-1], current[c_start:c_stop][::-1]
    if len(left) * len(right) > MAX_CELLS:
        matches = match_unique(_numbered(left), _numbered(right), (0, len(left), 0, len(right)))
    else:
        blocks = SequenceMatcher(None, left, right, autojunk=False).get_matching_blocks()
        matches = [(block.a + offset, block.b + offset) for block in blocks for offset in range(block.size)]
    return [(r_stop - 1 - x, c_stop - 1 - y) for x, y in reversed(matches)]


def gaps_between(pairs: Pairs, gap: Gap) -> list[Gap]:
    """Return what matches inside a gap leave over that can still be matched: before, between and after them."""
    r_start, r_stop, c_start, c_stop = gap
    gaps = []
    for r_next, c_next in (*pairs, (r_stop, c_stop)):
        if r_start < r_next and c_start < c_next:
            gaps.append((r_start, r_next, c_start, c_next))
        r_start, c_start = r_next + 1, c_next + 1
    return gaps


def _numbered(keys: Sequence[int]) -> Pairs:
    """Return each key with how often it occurred before."""
    seen: Counter[int] = Counter()
    numbered = []
    for key in keys:
        numbered.append((key, seen[key]))
        seen[key] += 1
    return numbered


def _longest_increasing(candidates: Pairs) -> Pairs:
    """Return the longest run of pairs, ascending on the left, that also ascends on the right."""
    tails: list[int] = []
    indices: list[int] = []
    before: list[int] = []
    for index, (_, place) in enumerate(candidates):
        length = bisect_left(tails, place)
        before.append(indices[length - 1] if length else -1)
        if length == len(tails):
            tails.append(place)
            indices.append(index)
        else:
            tails[length] = place
            indices[length] = index
    run: Pairs = []
    at = indices[-1] if indices else -1
    while at >= 0:
        run.append(candidates[at])
        at = before[at]
    return run[::-1]
