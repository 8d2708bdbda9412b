"""What the findings read of a run: bounded, whatever its length,
and later attempts over earlier ones.
"""

from typing import Any

from stored_runs import append, create, record, resume

from det_callbacks.findings import fit_summary
from det_callbacks.findings.fit_summary import MIN_STEPS, fits_of
from det_callbacks.findings.table import find_findings
from det_callbacks.runs.evidence import EvidenceRow
from det_callbacks.runs.steps import StreamFile
from det_callbacks.runs.store import Run


def test_of_a_long_run_the_first_and_the_last_steps_are_read(tmp_path, monkeypatch):
    run = Run.open(record(tmp_path / "run", range(100), range(30)), check_steps=False)
    monkeypatch.setattr(fit_summary, "MAX_STEPS", 40)
    read: list[Any] = []
    read_one = StreamFile._read
    monkeypatch.setattr(
        StreamFile, "_read", lambda *arguments: read.append(arguments) or read_one(*arguments)
    )
    find_findings(run, ignored=())
    assert len(read) == 40
    first, second = ([record.step for record in fit.records] for (fit,) in fits_of(run))
    assert (first, second) == ([*range(10), *range(90, 100)], [*range(10), *range(20, 30)])


def test_few_large_steps_are_read_and_few_programs(tmp_path, monkeypatch):
    writer = create(tmp_path / "run")
    for number in range(20):
        append(writer, range(5 * number, 5 * number + 5), num_sites=3 + number)
    writer.close(complete=True)
    ((fit,),) = fits_of(Run.open(tmp_path / "run"))
    assert [record.step for record in fit.records] == [*range(5 * fit_summary.MAX_PROGRAMS)]
    monkeypatch.setattr(fit_summary, "MAX_BYTES", 1)
    ((fit,),) = fits_of(Run.open(tmp_path / "run"))
    assert len(fit.records) == 2 * MIN_STEPS


def test_the_evidence_of_the_first_steps_is_read(tmp_path, monkeypatch):
    monkeypatch.setattr(fit_summary, "MAX_NOTED", 7)
    writer = create(tmp_path / "run")
    for step in range(20):
        writer.put_evidence(
            [
                EvidenceRow(step, "batch start", "generator", "python", value=step),
                EvidenceRow(step, "after backward", "generator", "python", value=step),
            ]
        )
    append(writer, range(20), complete=True)
    ((fit,),) = fits_of(Run.open(tmp_path / "run"))
    assert [*fit.generator_states("batch start")["python"]] == [*range(7)]
    assert fit.generator_states("after backward") == {}


def test_a_later_attempt_counts_where_it_ran_steps_again(tmp_path):
    append(create(tmp_path / "run"), range(8), complete=False)
    append(resume(tmp_path / "run"), range(5, 12), seed=1, complete=True)
    run = Run.open(tmp_path / "run")
    ((fit,),) = fits_of(run)
    assert [record.step for record in fit.records] == [*range(12)]
    assert find_findings(run, ignored=()) == ()
