"""Comparing runs: their lengths and selections; rank by rank, from the first difference on, and
what is then proven.
"""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from step_builder import StepBuilder, manifest_of, record, steps_of, training_step

from det_callbacks.compare.ranks import compare_steps
from det_callbacks.errors import (
    NothingComparedError,
    ReferenceFormatError,
    ReferenceNotFoundError,
    SelectionError,
)
from det_callbacks.findings.fit_summary import MAX_PROGRAMS
from det_callbacks.runs import store, tables
from det_callbacks.runs.files import stream_path
from det_callbacks.runs.selection import Selection
from det_callbacks.runs.steps import StreamFile
from det_callbacks.runs.store import Run
from det_callbacks.runs.writer import RunWriter
from det_callbacks.verdict import Verdict
from det_callbacks.verify import judge
from det_callbacks.verify.judge import CHAINS_NOTE, compare_runs
from det_callbacks.verify.verification import write_step


@pytest.fixture
def reference(tmp_path):
    return record(tmp_path / "reference", steps_of(range(10)))


@pytest.mark.parametrize(
    ("ours", "theirs", "kind"), [((0, 10), (0, 6), "missing"), ((0, 6), (0, 10), "extra")]
)
def test_run_of_other_length_diverges(tmp_path, ours, theirs, kind):
    reference = record(tmp_path / "reference", steps_of(range(*ours)))
    current = record(tmp_path / "current", steps_of(range(*theirs)))
    verdict = compare_runs(reference, current)
    assert (verdict.verdict, verdict.cause) == ("diverged", "structure")
    assert (verdict.first_divergence.kind, verdict.first_divergence.step) == (kind, 6)
    assert (verdict.counts.steps_compared, verdict.counts.sites_differing) == (6, 4)
    side = "reference" if kind == "missing" else "current run"
    assert (
        f"Steps 6 to 9 (4 of them) are only in the {side}; the 6 common steps match"
        in verdict.explanation
    )
    assert "Train both runs for the same number of steps" in verdict.explanation
    assert "--steps common" in verdict.explanation
    common = compare_runs(reference, current, steps="common")
    assert (common.verdict, common.coverage.steps) == ("match", (0, 5))
    assert "Only the steps that both runs have" in common.explanation


def test_an_incomplete_run_is_refused_as_the_reference_and_misses_steps_as_the_current_one(
    tmp_path, reference
):
    part = record(tmp_path / "part", steps_of(range(4)), complete=False)
    with pytest.raises(ReferenceFormatError, match=r"incomplete.*steps=\"common\"") as caught:
        compare_runs(part, reference)
    assert (caught.value.exit_code, caught.value.path) == (2, str(part))
    verdict = compare_runs(part, reference, steps="common")
    assert (verdict.verdict, verdict.counts.steps_compared) == ("match", 4)
    assert "The reference is incomplete" in verdict.explanation
    verdict = compare_runs(reference, part)
    assert (verdict.verdict, verdict.first_divergence.kind, verdict.first_divergence.step) == (
        "diverged",
        "missing",
        4,
    )
    assert "The current run is incomplete" in verdict.explanation


def test_what_has_nothing_in_common_is_no_match(tmp_path, reference):
    other = record(tmp_path / "other", steps_of(range(20, 25)))
    empty = [record(tmp_path / name, {step: StepBuilder() for step in range(3)}) for name in "ab"]
    with pytest.raises(NothingComparedError, match="have no step with recorded sites in common"):
        compare_runs(reference, other)
    with pytest.raises(NothingComparedError, match="no step with recorded sites in common"):
        compare_runs(*empty)
    for selected in ({"level": "state"}, {"modules": ("net.*",)}, {"phases": ("forward",)}):
        (name,) = selected
        with pytest.raises(SelectionError, match=name):
            compare_runs(
                reference,
                record(tmp_path / name, steps_of(range(10)), selection=Selection(**selected)),
            )
    for pair in ((tmp_path / "nowhere", reference), (reference, tmp_path / "nowhere")):
        with pytest.raises(ReferenceNotFoundError):
            compare_runs(*pair)
    with pytest.raises(ValueError, match='"all" or "common"'):
        compare_runs(reference, reference, steps="some")


@pytest.mark.parametrize("changes", [{}, {"noise_at": 0}])
def test_programs_and_layouts_that_both_runs_have_are_parsed_once(tmp_path, monkeypatch, changes):
    num_steps = 24
    monkeypatch.setattr(store, "_CACHED", 8)  # fewer than the runs have
    runs = []
    for name, others in (("reference", {}), ("current", changes)):
        steps = {
            step: training_step(muls=2 + step, **(others if step == 3 else {}))
            for step in range(num_steps)
        }
        runs.append(record(tmp_path / name, steps))
    parsed = []
    table_of = tables._table_of
    monkeypatch.setattr(
        tables,
        "_table_of",
        lambda content, schema: (parsed.append(schema), table_of(content, schema))[1],
    )
    verdict = compare_runs(*runs)
    assert (verdict.verdict, verdict.counts.steps_compared) == (
        "diverged" if changes else "match",
        num_steps,
    )
    num_again = MAX_PROGRAMS + 3  # for findings, and to explain the first difference
    for schema in (tables.PROGRAM_SCHEMA, tables.LAYOUT_SCHEMA):
        assert num_steps <= parsed.count(schema) <= num_steps + num_again


# of many ranks

OPTIONS = ({"lr_varies": True}, {"lr_varies": True, "dtype": "float64"}, {"is_first": False})
SITES = training_step(muls=2, **OPTIONS[0]).sites
ARGUMENT = next(place for place, site in enumerate(SITES) if site.role == "argument")
ORIGIN = next(place for place, site in enumerate(SITES) if site.op == "aten.mul.Tensor")
CHANGES = st.sampled_from([None] * 20 + [0, ORIGIN, ARGUMENT, -1])

# a step: how much its number is larger, the kind of its program,
# and the place of a digest that is changed
STEPS = st.lists(
    st.tuples(st.integers(1, 2), st.sampled_from([0, 0, 0, 1, 2]), CHANGES), max_size=5
)
RANKS = st.lists(st.lists(STEPS, min_size=1, max_size=2), min_size=1, max_size=3)


def write(path: Path, ranks, *, redone=0) -> Path:
    num_fits = max(map(len, ranks))
    made = [
        [*map(partial(fit_of, rank), fits)] + [{}] * (num_fits - len(fits))
        for rank, fits in enumerate(ranks)
    ]
    record(path, made[0], others=made[1:])
    if redone and len(ranks) == 1:
        writer = RunWriter.resume(path, manifest=manifest_of())
        for number, step in [*made[0][-1].items()][-redone:]:
            write_step(writer, step.view(step=number))
        writer.close(complete=True)
    return path


def fit_of(rank: int, steps) -> dict[int, StepBuilder]:
    number, fit = -1, {}
    for increase, kind, change in steps:
        number += increase
        fit[number] = built(rank, number, kind)
        if change is not None:
            fit[number].digests[change] ^= 1
    return fit


def built(rank: int, number: int, kind: int = 0) -> StepBuilder:
    return training_step(muls=2, rows=(rank, number), **OPTIONS[kind])


def counts_of_every_step(reference: Path, current: Path, *, is_common: bool):
    ours, theirs = Run.open(reference), Run.open(current)
    num_steps = num_sites = num_differing = 0
    first = {}
    for rank in ours.ranks:
        for segment in sorted({*ours.rank(rank).segments, *theirs.rank(rank).segments}):
            left, right = (set(run.rank(rank).steps(segment).tolist()) for run in (ours, theirs))
            num_differing += 0 if is_common else len(left ^ right)
            for step in sorted(left & right):
                views = ours.view(rank, segment, step), theirs.view(rank, segment, step)
                difference = compare_steps(*views)
                num_steps, num_sites = num_steps + 1, num_sites + difference.num_compared
                num_differing += difference.num_differing
                if difference.num_differing:
                    first.setdefault(rank, difference)
    return num_steps, num_sites, num_differing, first


def compare_by_chains(reference: Path, current: Path, **options: Any) -> Verdict:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(judge, "SMALL_BYTES", 0)
        return compare_runs(reference, current, **options)


@settings(max_examples=20, deadline=None)
@given(
    ours=RANKS,
    theirs=RANKS,
    is_same=st.booleans(),
    redone=st.integers(0, 2),
    is_common=st.booleans(),
    data=st.data(),
)
def test_the_verdict_is_that_of_reading_every_step(
    tmp_path_factory, ours, theirs, is_same, redone, is_common, data
):
    folder = tmp_path_factory.mktemp("runs")
    if is_same:  # but for what is changed
        theirs = [
            [[(*step[:2], data.draw(CHANGES)) for step in fit] for fit in fits] for fits in ours
        ]
    else:
        theirs = (theirs * 3)[: len(ours)]
    reference, current = (
        write(folder / "reference", ours),
        write(folder / "current", theirs, redone=redone),
    )
    options = {"steps": "common" if is_common else "all"}
    num_steps, num_sites, num_differing, first = counts_of_every_step(
        reference, current, is_common=is_common
    )
    try:
        found = compare_runs(reference, current, **options).to_dict()
    except NothingComparedError:
        assert num_steps == 0
        return
    assert [*found["counts"].values()] == [num_steps, num_sites, num_differing]
    assert {origin["rank"] for origin in found["origins"]} <= first.keys()
    told = found["first_divergence"]
    if told is not None and told["op"]:
        assert told["current_digest"] == first[told["rank"]].divergences[0].current_digest
    chains = compare_by_chains(reference, current, **options).to_dict()
    chains["explanation"] = chains["explanation"].replace(f" {CHAINS_NOTE}.", "")
    assert chains == found


def many(path: Path, *, num_ranks=3, num_steps=20, changed=()) -> Path:
    changes = [
        [ORIGIN if (rank, step) in changed else None for step in range(num_steps)]
        for rank in range(num_ranks)
    ]
    return write(path, [[[(1, 0, change) for change in of_rank]] for of_rank in changes])


def damage(path: Path, rank: int, step: int) -> None:
    file = stream_path(path, rank, 0, 0)
    content = bytearray(file.read_bytes())
    place = content.find(built(rank, step).digests[2].to_bytes(8, "little"))
    assert place > 0
    content[place] ^= 1
    file.write_bytes(content)


@pytest.mark.parametrize(("changed", "at_most"), [((), 12), (((2, 19),), 16), (((1, 10),), 34)])
def test_chains_spare_reading(tmp_path, monkeypatch, changed, at_most):
    reference, current = many(tmp_path / "a"), many(tmp_path / "b", changed=changed)
    read = []
    read_one = StreamFile._read
    monkeypatch.setattr(
        "det_callbacks.verify.judge.find_findings", lambda run: ()
    )  # which read some steps, see fit_summary.py
    monkeypatch.setattr(
        StreamFile, "_read", lambda *arguments: read.append(arguments) or read_one(*arguments)
    )
    with_chains = compare_by_chains(reference, current)
    assert 0 < len(read) <= at_most + 6  # and the first step of each file, as it is opened
    read.clear()
    whole = compare_runs(reference, current)
    assert (whole.counts, len(read) >= 120) == (with_chains.counts, True)
    assert [CHAINS_NOTE in one.explanation for one in (whole, with_chains)] == [False, True]


@pytest.mark.parametrize("side", [0, 1])
def test_damage_that_chains_do_not_see_makes_no_match_of_a_difference(tmp_path, side):
    pair = many(tmp_path / "a"), many(tmp_path / "b")
    damage(pair[side], 2, 5)
    assert compare_by_chains(*pair).verdict == "match"  # of what was recorded
    with pytest.raises(ReferenceFormatError, match="step 5 does not match its chain"):
        compare_runs(*pair)


@pytest.mark.parametrize("step", [0, 9, 10, 15])
def test_what_is_read_is_checked(tmp_path, step):
    reference, current = many(tmp_path / "a"), many(tmp_path / "b", changed=[(1, 10)])
    # the first, the last equal one, the one that differs, and one after it
    damage(current, 1, step)
    with pytest.raises(ReferenceFormatError, match=f"step {step} does not match its chain"):
        compare_by_chains(reference, current)


def test_a_step_that_a_later_attempt_repeated_is_checked_and_a_missing_program_is_no_match(
    tmp_path,
):
    fits = [[[(1, 0, None)] * 6]]
    reference, current = write(tmp_path / "a", fits), write(tmp_path / "b", fits, redone=2)
    assert compare_runs(reference, current).verdict == "match"
    damage(current, 0, 5)
    with pytest.raises(ReferenceFormatError, match=r"attempt-000.*step 5"):
        compare_runs(reference, current)
    next((reference / "programs").iterdir()).unlink()
    with pytest.raises(ReferenceFormatError, match="No such file"):
        compare_by_chains(reference, current)


def test_origins_of_many_ranks_are_the_earliest(tmp_path):
    changed = [(rank, (rank * 7) % 3) for rank in range(120)]
    runs = [
        many(tmp_path / str(len(known)), num_ranks=120, num_steps=3, changed=known)
        for known in ((), changed)
    ]
    verdict = compare_runs(*runs)
    wanted = sorted((step, rank) for rank, step in changed)[:100]
    assert [(origin.step, origin.rank) for origin in verdict.origins] == wanted
    assert (verdict.counts.sites_differing, verdict.coverage.ranks) == (120, 120)
