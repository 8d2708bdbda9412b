import os
import re
import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from stored_runs import (
    OneOf,
    append,
    create,
    digests_of,
    everything_in,
    join,
    record,
    resume,
    whole_steps,
)

from det_callbacks.errors import (
    RankError,
    ReferenceFormatError,
    ReferenceNotFoundError,
    RunExistsError,
    SelectionError,
    WriteError,
)
from det_callbacks.ranks.group import RankGroup
from det_callbacks.runs import files
from det_callbacks.runs import writer as writer_module
from det_callbacks.runs.files import stream_path
from det_callbacks.runs.metrics import Reading, read_metrics
from det_callbacks.runs.program import chain_digest
from det_callbacks.runs.store import Run
from det_callbacks.runs.writer import RunWriter


def seeds_of(path: Path, segment: int = 0) -> dict[int, int]:
    return {
        record.step: next(
            seed
            for seed in range(9)
            if (record.digests == digests_of(record.step, seed=seed)).all()
        )
        for record in Run.open(path).rank(0).iterate()
        if record.segment == segment
    }


@settings(max_examples=10, deadline=None)
@given(
    fits=st.lists(st.lists(whole_steps(), max_size=4), min_size=1, max_size=3),
    gap=st.integers(1, 5),
)
def test_a_run_is_read_as_it_was_written(tmp_path_factory, fits, gap):
    path = tmp_path_factory.mktemp("runs") / "run"
    writer = create(path)
    written, kept = [], {}
    for segment, fit in enumerate(fits):
        if segment:
            writer.start_segment()
        chain = 0
        for index, (program, layout, values) in enumerate(fit):
            step, digests = index * gap, np.array(values, dtype=np.uint64)
            writer.put_program(program)
            writer.put_layout(layout)
            chain = chain_digest(chain, step, index, program.id, layout.id, digests)
            assert writer.append(step, index, program.id, layout.id, digests) == chain
            # what an id leaves out is that of the first program that has it
            first = kept.setdefault(program.id, program)
            lines = [site.source for site in first.sites]
            written.append((segment, step, index, first, lines, layout, values, chain))
    writer.close(complete=True)

    run = Run.open(path)
    rank = run.rank(0)
    found = []
    for one in rank.iterate():
        view = run.view(0, one.segment, one.step)
        content = (
            view.program,
            [site.source for site in view.program.sites],
            view.layout,
            one.digests.tolist(),
        )
        found.append((one.segment, one.step, one.epoch, *content, one.chain))
    assert found == written
    assert (run.is_complete, run.incomplete_reason, run.ranks, run.keeps) == (
        True,
        None,
        [0],
        "all",
    )
    assert (rank.segments, rank.num_steps) == (list(range(len(fits))), len(written))
    for segment, step, *_, chain in written:
        assert rank.chain(segment, step) == chain == rank.chain_before(segment, step + 1)
    for segment, step in ((0, 10**6), (9, 0)):
        with pytest.raises(KeyError):
            rank.read(segment, step)


def test_half_a_write_is_the_last_one(tmp_path):
    writer = append(create(tmp_path / "run"), [0])
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (writer.bytes_written + 100, limits[1]))
    try:
        with pytest.raises(
            WriteError, match="only 100 of 504 bytes had room; free some space, or pass another"
        ) as caught:
            append(writer, [1])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert (caught.value.exit_code, caught.value.path) == (2, str(writer.stream))
    with pytest.raises(WriteError, match="an earlier write failed"):
        append(writer, [2])
    writer.close(complete=False)
    run = Run.open(tmp_path / "run")
    assert list(run.rank(0).steps(0)) == [0]
    assert re.search(
        r"attempt-000\.arrows: its tail is torn.*; 0 is the last whole step",
        str(run.incomplete_reason),
    )


def test_a_run_is_complete_only_when_every_fit_has_its_end(tmp_path):
    path = tmp_path / "run"

    def reason() -> str:
        return str(Run.open(path).incomplete_reason)

    writer = create(path)
    assert "it holds no whole step" in reason()
    append(writer, [0, 1])
    first = stream_path(path, 0, 0, 0)
    assert reason().startswith(
        f"{first}: its end-of-stream marker is missing, the process did not end"
    )
    assert "1 is the last whole step" in reason()
    writer.start_segment()
    assert "segment-001" in reason()
    append(writer, [0], complete=False)
    resume(path).close(complete=False)
    assert not Run.open(path).is_complete
    append(resume(path), [2], complete=True)
    assert Run.open(path).is_complete
    for _ in range(2):
        resume(path).close(complete=False)
    assert Run.open(path).is_complete, (
        "attempts that ended before their first step left it as it was"
    )
    first.write_bytes(first.read_bytes()[:-8])
    assert str(first) in reason(), "a fit in the middle has to have its end too"
    writers = create(tmp_path / "two", peers=OneOf(0, 2)), join(tmp_path / "two", 1)
    for writer, is_complete in zip(writers, (True, False), strict=True):
        append(writer, [0], complete=is_complete)
    assert "rank-00001" in str(Run.open(tmp_path / "two").incomplete_reason)


def test_a_torn_tail_is_no_obstacle_and_what_an_attempt_went_on_from_cannot_get_lost(tmp_path):
    straight = Run.open(record(tmp_path / "straight", range(6))).rank(0)
    path = record(tmp_path / "run", range(5), complete=False)
    file = stream_path(path, 0, 0, 0)
    file.write_bytes(file.read_bytes()[:-200])
    append(resume(path), [4, 5], complete=True)
    rank = Run.open(path).rank(0)
    assert [rank.chain(0, step) for step in range(6)] == [
        straight.chain(0, step) for step in range(6)
    ]
    file.write_bytes(file.read_bytes()[:-700])
    with pytest.raises(
        ReferenceFormatError,
        match=r"attempt-001\.arrows is damaged: step 4 does not match its chain",
    ):
        Run.open(path)


def test_a_resumed_run_continues_its_fit_the_later_attempt_counts_and_nothing_is_deleted(tmp_path):
    path = record(tmp_path / "run", range(3), range(6), complete=False)
    before = {file: file.read_bytes() for file in (path / "rank-00000").iterdir()}
    append(resume(path), [3, 4], seed=1, complete=False)
    writer = resume(path)
    append(writer, [4, 5, 6], seed=2)
    writer.start_segment()
    append(writer, [0], seed=3, complete=True)
    run = Run.open(path)
    second = dict(enumerate((0, 0, 0, 1, 2, 2, 2)))
    assert [seeds_of(path, segment) for segment in run.segments] == [
        {0: 0, 1: 0, 2: 0},
        second,
        {0: 3},
    ]
    assert {file: file.read_bytes() for file in before} == before
    assert (run.is_complete, len(run.manifest.attempts), run.rank(0).num_steps) == (True, 3, 11)


@pytest.mark.parametrize("is_complete", [True, False])
def test_an_attempt_of_another_selection_is_refused_and_any_other_can_be_taken_back(
    tmp_path, is_complete
):
    path = record(tmp_path / "run", range(4), complete=is_complete)
    before = everything_in(path), sorted(path.rglob("*"))
    for other in (
        {"selection": {"level": "state"}},
        {"selection": {}, "keep_tensors": ["aten.mm.default"]},
    ):
        with pytest.raises(SelectionError, match="Resume with the same arguments"):
            RunWriter.resume(path, manifest=other)
    with pytest.raises(ReferenceNotFoundError):
        resume(tmp_path / "nowhere")
    writer = resume(path)
    writer.note_resumed(2)
    append(writer, [2, 3, 4], num_sites=4)
    assert Run.open(path).resumed_steps == {(0, 2)}
    writer.discard()
    assert (everything_in(path), sorted(path.rglob("*"))) == before
    append(resume(path), [4], complete=True)
    assert Run.open(path).rank(0).steps(0).tolist() == [0, 1, 2, 3, 4]


def test_the_old_run_stays_until_the_new_one_is_whole(tmp_path):
    path = record(tmp_path / "run", range(4))
    before = everything_in(path)
    for complete in (False, None):  # None: a kill
        writer = append(create(path, overwrite=True), [0, 1], seed=1, complete=complete)
        writer.release()  # as a kill does
        assert everything_in(path) == before
        assert seeds_of(writer.path) == {0: 1, 1: 1}
        with pytest.raises(RunExistsError):
            create(path)
    writer.close(complete=False)
    create(path, overwrite=True).close(complete=True)  # one of no step
    create(path, overwrite=True).discard()
    assert (everything_in(path), (path / ".replacement").exists()) == (before, False)
    writers = [create(path, peers=OneOf(0, 2), overwrite=True)]
    writers.append(join(writers[0].path, 1))
    for writer in reversed(writers):  # rank 0 looks at the files of all
        append(writer, [0, 1], seed=2, complete=True)
    assert (seeds_of(path), Run.open(path).ranks, writers[0].path) == ({0: 2, 1: 2}, [0, 1], path)
    writers[0].start_segment()
    append(writers[0], [0])
    assert (path / "rank-00000/attempt-000.segment-001.arrows").exists()
    writers[0].close(complete=True)
    lead, other = create(tmp_path / "other", peers=OneOf(0, 2)), join(tmp_path / "other", 1)
    lead.discard()
    other.put_nondeterministic_ops([])
    other.stream.parent.mkdir()  # of what it wrote while rank 0 removed the run
    other.discard()
    assert list(lead.path.iterdir()) == []


# of files that a kill leaves open
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_kill_before_run_json_leaves_what_was_there(tmp_path, monkeypatch):
    def kill_in(act: Callable[[], object]) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(writer_module, "write_manifest", Mock(side_effect=KeyboardInterrupt))
            with pytest.raises(KeyboardInterrupt):
                act()

    path = tmp_path / "new"
    kill_in(lambda: create(path))
    with pytest.raises(ReferenceNotFoundError):
        Run.open(path)
    append(create(path), [0, 1], complete=True)
    assert seeds_of(path) == {0: 0, 1: 0}
    for path in (tmp_path / "segment", tmp_path / "resume"):
        writer = append(create(path), [0, 1], complete=None if path.name == "segment" else False)
        kill_in(writer.start_segment if path.name == "segment" else lambda path=path: resume(path))
        writer.release()
        assert (seeds_of(path), Run.open(path).is_complete) == ({0: 0, 1: 0}, False)
        append(resume(path), [1, 2], seed=1, complete=True)
        assert (seeds_of(path), Run.open(path).is_complete) == ({0: 0, 1: 1, 2: 1}, True)


class Follower(OneOf, RankGroup):
    """Is told what rank 0 made elsewhere."""

    def gather(self, action: Callable[[], object], *, task: str) -> list[object]:
        self.told = getattr(self, "told", [["ab12", "."], ".run.json.7.tmp", (True, "node-0")])
        return [self.told.pop(0), action()]


def test_a_node_that_does_not_share_the_folder_is_refused(tmp_path):
    with pytest.raises(
        RankError, match=r"does not see the folder .* which rank 0 made on node-0"
    ) as caught:
        create(tmp_path / "run", peers=Follower(1, 2))
    assert caught.value.rank == 1
    assert not (tmp_path / "run").exists()


def test_metrics_open_one_file_and_sync_nothing_until_the_fit_ends(tmp_path, monkeypatch):
    writer = append(create(tmp_path / "run"), range(2))
    opened, synced = list[Path](), list[int]()
    open_to_write = files.open_to_write

    def count(path: Path, *rest: Any, **options: Any) -> Any:
        opened.append(path)
        return open_to_write(path, *rest, **options)

    monkeypatch.setattr(files, "open_to_write", count)
    monkeypatch.setattr(os, "fsync", synced.append)
    for step in range(20):
        writer.put_reading(Reading(where="log", number=step, step=step, epoch=0, metrics={}))
    assert (len(opened), synced) == (1, [])
    writer.close(complete=True)
    run = Run.open(tmp_path / "run")
    assert run.manifest.attempts[-1].readings == (20,)
    assert len(read_metrics(run, 0).by_key) == 20
    opened[0].write_bytes(opened[0].read_bytes().rpartition(b"{")[0])
    with pytest.raises(ReferenceFormatError, match="has 20 readings, but the file has 19"):
        read_metrics(run, 0)
