from pathlib import Path

import pytest

from det_callbacks.errors import ReferenceFormatError
from det_callbacks.runs.evidence import STEPS_PER_BATCH, EvidenceWriter, Row, evidence_path, read_evidence


def rows_of(step: int) -> list[Row]:
    return [Row(step, "batch start", "torch.cpu", 2**64 - 1 - step), Row(step, "batch", "paths", 7, '["a.png"]')]


def write(path: Path, steps: int, *, ends: bool = True) -> EvidenceWriter:
    writer = EvidenceWriter(path, run_id="this run")
    for step in range(steps):
        writer.append(rows_of(step))
    if ends:
        writer.close()
    return writer


def read_or_refuse(path: Path) -> tuple[list[Row], str]:
    try:
        return list(read_evidence(path, run_id="this run")), ""
    except ReferenceFormatError as error:
        return [], str(error)


@pytest.mark.parametrize("steps", [0, 1, STEPS_PER_BATCH, 3 * STEPS_PER_BATCH + 5])
def test_what_was_written_is_read_in_order(tmp_path: Path, steps: int) -> None:
    write(tmp_path / "evidence", steps)
    found = list(read_evidence(tmp_path / "evidence", run_id="this run"))
    assert found == [row for step in range(steps) for row in rows_of(step)]


def test_there_is_no_evidence_where_there_is_no_file(tmp_path: Path) -> None:
    assert list(read_evidence(tmp_path / "none", run_id="this run")) == []


def test_a_kill_loses_the_last_steps_only(tmp_path: Path) -> None:
    path = tmp_path / "evidence"
    writer = write(path, 2 * STEPS_PER_BATCH + 5, ends=False)
    assert len(list(read_evidence(path, run_id="this run"))) == 2 * len(rows_of(0)) * STEPS_PER_BATCH
    content = path.read_bytes()
    sizes = set()
    for size in range(len(content) // 2, len(content), 97):
        path.write_bytes(content[:size])
        sizes.add(len(list(read_evidence(path, run_id="this run"))))
    assert sizes <= {0, 2 * STEPS_PER_BATCH, 4 * STEPS_PER_BATCH}
    assert len(sizes) > 1
    writer.close()


def test_a_flipped_bit_is_an_error_that_names_the_file_or_changes_nothing(tmp_path: Path) -> None:
    path = tmp_path / "evidence"
    write(path, STEPS_PER_BATCH + 1)
    content = bytearray(path.read_bytes())
    known = list(read_evidence(path, run_id="this run"))
    errors = 0
    for position in range(0, len(content), 41):
        changed = bytearray(content)
        changed[position] ^= 4
        path.write_bytes(bytes(changed))
        found, message = read_or_refuse(path)
        assert found == known[: len(found)]
        assert str(path) in message or not message
        errors += bool(message)
    assert errors > 10


def test_the_file_of_another_run_is_refused(tmp_path: Path) -> None:
    write(tmp_path / "evidence", 1)
    with pytest.raises(ReferenceFormatError, match="another run"):
        list(read_evidence(tmp_path / "evidence", run_id="another"))
    (tmp_path / "evidence").write_bytes(b"nothing of ours")
    with pytest.raises(ReferenceFormatError, match="does not begin"):
        list(read_evidence(tmp_path / "evidence", run_id="this run"))


def test_it_lies_beside_the_steps() -> None:
    stream = Path("run/rank-00000/attempt-000.segment-001.arrows")
    assert evidence_path(stream) == Path("run/rank-00000/attempt-000.segment-001.evidence.arrows")
