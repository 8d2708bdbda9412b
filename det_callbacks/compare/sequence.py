"""Which entries of two sequences of numbers belong together: the sequence diff that alignment is built on.

Everything here keeps order (matches never cross) and places what is unmatched as early as it can: when one of twenty
equal entries was inserted, the first one after the matched prefix counts as the new one.
"""

from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Sequence

Pairs = list[tuple[int, int]]
Gap = tuple[int, int, int, int]
"""Half-open ranges that are still to be matched: start and stop in the reference, start and stop in the current."""

MAX_EDITS = 1500
"""Insertions and removals up to which one gap is matched exactly; its square bounds time and memory."""


class Budget:
    """Bounds the exact search over all gaps of one alignment, in elementary steps, not in time: results repeat."""

    def __init__(self, steps: int = 4_000_000) -> None:
        self.steps = steps


def trim(reference: Sequence[int], current: Sequence[int], gap: Gap, *, suffix_first: bool) -> tuple[Pairs, Gap]:
    """Match the common prefix and suffix of a gap; return the matches in order and the gap that is left.

    Args:
        reference: keys of the reference.
        current: keys of the current run.
        gap: what to look at.
        suffix_first: whether an entry that could belong to both ends counts as suffix, which places an insertion
            among equal entries at the earliest place.
    """
    r_start, r_stop, c_start, c_stop = gap
    prefix: Pairs = []
    suffix: Pairs = []
    for is_suffix in (suffix_first, not suffix_first):
        if is_suffix:
            while r_start < r_stop and c_start < c_stop and reference[r_stop - 1] == current[c_stop - 1]:
                r_stop -= 1
                c_stop -= 1
                suffix.append((r_stop, c_stop))
        else:
            while r_start < r_stop and c_start < c_stop and reference[r_start] == current[c_start]:
                prefix.append((r_start, c_start))
                r_start += 1
                c_start += 1
    return prefix + suffix[::-1], (r_start, r_stop, c_start, c_stop)


def match_unique(reference: Sequence[int], current: Sequence[int], gap: Gap) -> Pairs:
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


def match_longest(reference: Sequence[int], current: Sequence[int], gap: Gap, budget: Budget) -> Pairs:
    """Match a longest common subsequence of a gap.

    Exact (Myers' greedy algorithm, An O(ND) Difference Algorithm, 1986) while the gap needs at most ``MAX_EDITS``
    insertions and removals and the budget lasts; after that equal keys are matched in order of their occurrence.

    Args:
        reference: keys of the reference.
        current: keys of the current run.
        gap: what to look at.
        budget: shared by the gaps of one alignment; used up here.
    """
    r_start, r_stop, c_start, c_stop = gap
    if r_start == r_stop or c_start == c_stop:
        return []
    # Backwards, because the greedy search puts an edit as late as it can, and it has to come early.
    left = reference[r_start:r_stop][::-1]
    right = current[c_start:c_stop][::-1]
    common = set(left) & set(right)
    if not common:
        return []
    # A key that only one side has can match nothing; without it the search needs fewer edits.
    left_places = [place for place, key in enumerate(left) if key in common]
    right_places = [place for place, key in enumerate(right) if key in common]
    left_keys = [left[place] for place in left_places]
    right_keys = [right[place] for place in right_places]
    matches = _myers(left_keys, right_keys, budget)
    if matches is None:
        matches = _match_in_order(left_keys, right_keys)
    return [(r_stop - 1 - left_places[x], c_stop - 1 - right_places[y]) for x, y in reversed(matches)]


def gaps_between(pairs: Pairs, gap: Gap) -> list[Gap]:
    """Return what matches inside a gap leave over: the gaps before, between and after them."""
    r_start, r_stop, c_start, c_stop = gap
    gaps = []
    for r_next, c_next in (*pairs, (r_stop, c_stop)):
        if r_start < r_next or c_start < c_next:
            gaps.append((r_start, r_next, c_start, c_next))
        r_start, c_start = r_next + 1, c_next + 1
    return gaps


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


def _match_in_order(left: Sequence[int], right: Sequence[int]) -> Pairs:
    """Match the n-th occurrence of a key with the n-th on the other side, dropping what crosses; n log n."""
    places: defaultdict[int, list[int]] = defaultdict(list)
    for place, key in enumerate(right):
        places[key].append(place)
    seen: Counter[int] = Counter()
    candidates: Pairs = []
    for place, key in enumerate(left):
        if seen[key] < len(places[key]):
            candidates.append((place, places[key][seen[key]]))
            seen[key] += 1
    return _longest_increasing(candidates)


def _myers(left: Sequence[int], right: Sequence[int], budget: Budget) -> Pairs | None:
    """Return the matches of a shortest edit script, or None when it needs more edits than are allowed."""
    num_left, num_right = len(left), len(right)
    history: list[dict[int, int]] = [{1: 0}]  # diagonal (left minus right) -> how far on the left; one an edit
    for edits in range(min(num_left + num_right, MAX_EDITS) + 1):
        budget.steps -= edits + 1
        if budget.steps < 0:
            return None
        reached: dict[int, int] = {}
        for diagonal in range(-edits, edits + 1, 2):
            x = _enter(history[-1], diagonal, edits)
            y = x - diagonal
            if x < 0 or x > num_left or y > num_right:
                continue
            while x < num_left and y < num_right and left[x] == right[y]:
                x += 1
                y += 1
            reached[diagonal] = x
            if x == num_left and y == num_right:
                return _walk_back(history, x, y)
        history.append(reached)
    return None


def _enter(before: dict[int, int], diagonal: int, edits: int) -> int:
    """Return where the last edit enters a diagonal, on the left; negative where nothing leads there."""
    above, below = before.get(diagonal + 1, -1), before.get(diagonal - 1, -1)
    if diagonal == -edits or (diagonal != edits and below < above):
        return above
    return below + 1 if below >= 0 else -1


def _walk_back(history: list[dict[int, int]], x: int, y: int) -> Pairs:
    matches: Pairs = []
    for edits in range(len(history) - 1, -1, -1):
        diagonal = x - y
        before = history[edits]
        start = _enter(before, diagonal, edits)
        while x > start:
            x -= 1
            y -= 1
            matches.append((x, y))
        # the edit itself: an insertion came from the diagonal above, a removal from the one below
        if before.get(diagonal + 1, -1) == start and (diagonal == -edits or before.get(diagonal - 1, -1) < start):
            y -= 1
        else:
            x -= 1
    return matches[::-1]
