"""Windows of evidence as a fit gathers them: what two of them tell."""

import pytest

from det_callbacks.causes.generators import keep_from_drawing, show_change
from det_callbacks.compare.evidence import Evidence, compare_windows, gather_window
from det_callbacks.runs.evidence import EvidenceRow

POINTS = ("before a batch is drawn", "batch start", "after forward", "after backward", "batch end")


def fit(steps: int, *, drawn_at: tuple[int, str] | None = None) -> list[EvidenceRow]:
    state = 100
    rows = [EvidenceRow(0, "fit start", "generator", "torch.cpu", value=state)]
    rows.append(EvidenceRow(0, "fit start", "seed", "torch.cpu", value=5))
    rows.append(
        EvidenceRow(0, "fit start", "hook", "on_train_batch_end", "after", text="EMA, Plot")
    )
    for step in range(steps):
        for point in ("before validation", "after validation") if step == 2 else ():
            rows.append(EvidenceRow(step, point, "generator", "torch.cpu", value=state))
            state += 1000 * ((step, point) == drawn_at)
        for point in POINTS:
            rows.append(EvidenceRow(step, point, "generator", "torch.cpu", value=state))
            if point == "batch start":
                rows.append(EvidenceRow(step, point, "seed", "torch.cpu", value=5))
            state += (point == "batch start") + 1000 * ((step, point) == drawn_at)
    return rows


def compare(ours: list[EvidenceRow], theirs: list[EvidenceRow], step: int) -> Evidence:
    since = step - 1 if step else None
    found = [
        gather_window((row for row in rows if row.step <= step), since=since)
        for rows in (ours, theirs)
    ]
    return compare_windows(*found, step)


def test_a_draw_after_the_backward_pass_is_not_put_down_to_the_optimizer():
    evidence = compare(fit(4), fit(4, drawn_at=(2, "after backward")), 2)
    (change,) = evidence.generators
    assert keep_from_drawing(change, evidence).startswith(
        "Code after the backward pass draws from the generator "
    )
    assert "what ran in between: code after the backward pass" in show_change(change, evidence)


@pytest.mark.parametrize(
    ("theirs", "text", "indices", "first"),
    [
        ((1, 1), "[7, 5, 9]", "same", None),
        ((2, 1), "[5, 7, 9]", "reordered", (0, "7", "5")),
        ((2, 2), "[7, 3, 9]", "other", (1, "5", "3")),
        ((2, 2), "[7, 5, 9, 4]", "cut", (3, "none", "4")),
        ((2, 2), "[7, 5]", "cut", (2, "9", "none")),
        ((2, 2), "[7, 5, 9]", "other", None),  # further on
        (None, "", None, None),
    ],
)
def test_indices_tell_order_from_content_and_the_first_other_one_is_named(
    theirs, text, indices, first
):
    def batch(values, text):
        pairs = zip(("indices", "sorted_indices"), values or (), strict=False)
        return [
            EvidenceRow(0, "", kind, "train_dataloader", value=value, text=text)
            for kind, value in pairs
        ]

    ours, others = fit(1) + batch((1, 1), "[7, 5, 9]"), fit(1) + batch(theirs, text)
    evidence = compare(ours, others, 0)
    assert (evidence.batch.indices, evidence.generators) == (indices, ())
    assert evidence.batch.first_index == (first and ("train_dataloader", *first))


@pytest.mark.parametrize(("state", "changes"), [(0, []), (7, [(2, "batch start")])])
def test_a_run_that_begins_with_a_step_is_compared_with_that_step_of_the_reference(state, changes):
    """It lacks the moments before, so the moments of its step do not stand
    for those of an earlier one.
    """
    recorded = fit(4)
    began = [row._replace(value=row.value + state * (row.kind == "generator")) for row in recorded]
    begins = began.index(next(row for row in began if row[:2] == (2, "batch start")))
    started = EvidenceRow(2, "fit start", "generator", "torch.cpu", value=5)
    evidence = compare(recorded, [started, *began[begins:]], 2)
    assert [change.differs_at for change in evidence.generators] == changes
