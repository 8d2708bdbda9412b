import re
import struct
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from stored_runs import append, create, digests_of

from det_callbacks.cli import main
from det_callbacks.errors import ReferenceFormatError
from det_callbacks.runs.evidence import (
    ROWS_PER_BATCH,
    EvidenceRow,
    EvidenceWriter,
    evidence_path,
    read_evidence,
)
from det_callbacks.runs.program import chain_digest
from det_callbacks.runs.steps import (
    END_OF_STREAM,
    STREAM_SCHEMA,
    StreamFile,
    encode_header,
    encode_step,
)

PLACE = {"run_id": "ab12", "rank": 3, "attempt": 1, "segment": 2}
HEADER = encode_header(**PLACE)


def messages(steps: Iterable[int], *, start: int = 0) -> list[bytes]:
    """Return the messages of steps whose chains follow each other."""
    found, chain = [], start
    for step in steps:
        digests = digests_of(step, 3)
        chain = chain_digest(chain, step, step // 4, 7, 8, digests)
        found.append(bytes(encode_step(step, step // 4, 7, 8, chain, digests)))
    return found


def open_stream(path: Path, content: bytes | None = None) -> StreamFile:
    if content is not None:
        path.write_bytes(content)
    file = StreamFile(path, **PLACE)
    file.check_steps()
    return file


def content_of(file: StreamFile) -> list[dict[str, object]]:
    records = [file.read(position) for position in range(len(file.rows))]
    return [{**asdict(one), "digests": one.digests.tobytes()} for one in records]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "attempt-001.arrows"


@pytest.mark.parametrize("num_sites", [0, 1, 300, 100_000])
def test_a_step_is_what_arrow_writes(num_sites):
    digests = digests_of(0, num_sites)
    batch = pa.record_batch([[value] for value in (5, 1, 7, 8, 9, digests)], schema=STREAM_SCHEMA)
    message = encode_step(5, 1, 7, 8, 9, digests)
    assert pa.ipc.read_record_batch(pa.ipc.read_message(message), STREAM_SCHEMA) == batch
    assert len(message) <= 8 * num_sites + 512


def test_cut_at_any_byte_it_holds_the_whole_steps_before(path):
    steps = [0, 1, 2]
    parts = [HEADER, *messages(steps), END_OF_STREAM]
    whole = b"".join(parts)
    complete = content_of(open_stream(path, whole))
    assert len(complete) == 3
    ends = np.cumsum([len(part) for part in parts])
    sizes = {*range(0, len(whole), 5), *(end + more for end in ends[:-1] for more in range(-9, 10))}
    for size in sorted(size for size in sizes if size < len(whole)):
        if size < len(HEADER):
            with pytest.raises(ReferenceFormatError, match=re.escape(str(path))):
                open_stream(path, whole[:size])
            continue
        file = open_stream(path, whole[:size])
        num_whole = int(np.searchsorted(ends, size, side="right")) - 1
        assert content_of(file) == complete[:num_whole], size
        last = f"{num_whole - 1} is the last whole step" if num_whole else "it holds no whole step"
        assert str(file.unfinished).startswith(f"{path}: "), size
        assert last in str(file.unfinished)
        assert ("torn" in str(file.unfinished)) == (size not in ends), size


def test_no_flipped_bit_gives_other_content(path):
    whole = HEADER + b"".join(messages([0, 1, 2])) + END_OF_STREAM
    right = content_of(open_stream(path, whole))
    errors = []
    for place in range(0, len(whole), 3):
        content = bytearray(whole)
        content[place] ^= 1 << place % 8
        try:
            file = open_stream(path, bytes(content))
        except ReferenceFormatError as error:
            errors.append(str(error))
        else:
            assert (content_of(file), file.unfinished) == (right, None), place
    assert len(errors) > len(whole) // 6
    assert all(error.startswith(str(path)) for error in errors)


def resized(message: bytes, more: int, *, at: int) -> bytes:
    (length,) = struct.unpack_from("<q", message, at)
    return message[:at] + struct.pack("<q", length + more) + message[at + 8 :]


def test_what_is_no_run_of_whole_steps_is_damage(path):
    first, second, third = messages([0, 1, 2])
    whole = HEADER + first + END_OF_STREAM
    record = pa.ipc.read_record_batch(pa.ipc.read_message(first), STREAM_SCHEMA)
    laid_out_otherwise = [
        pa.record_batch(
            [column.to_pylist() * 2 for column in record.columns], schema=STREAM_SCHEMA
        ),
        pa.record_batch([[None]] * len(STREAM_SCHEMA), schema=STREAM_SCHEMA),
        record.set_column(0, STREAM_SCHEMA.field("step"), pa.array([-1], pa.int64())),
        record.set_column(1, STREAM_SCHEMA.field("epoch"), pa.array([-1], pa.int32())),
    ]
    cannot_be_read = r"is damaged: what comes at byte \d+ cannot be read"
    cases = {
        **{HEADER + batch.serialize().to_pybytes(): cannot_be_read for batch in laid_out_otherwise},
        **{
            HEADER + resized(first, more, at=40) + second: cannot_be_read for more in (8, 2**40, -8)
        },
        **{
            HEADER + first + resized(second, 504, at=at) + END_OF_STREAM: cannot_be_read
            for at in (40, 304, 416)
        },
        HEADER + b"garbage" * 9: cannot_be_read,
        HEADER + first + bytes(400): cannot_be_read,
        HEADER + b"".join(messages([3, 3])): "follows step 3",
        HEADER + b"".join(messages([3, 2])): "follows step 3",
        HEADER + first + third + END_OF_STREAM: "step 2 does not match its chain",
        **{whole + more: cannot_be_read for more in (b"\0", second, END_OF_STREAM)},
    }
    for content, says in cases.items():
        with pytest.raises(ReferenceFormatError, match=says):
            open_stream(path, content)


def test_a_file_of_another_place_version_or_kind_or_that_changes_after_it_was_opened_is_refused(
    path, tmp_path
):
    schema = pa.ipc.read_schema(pa.ipc.read_message(HEADER))
    cases = [schema.with_metadata({**schema.metadata, name: b"9"}) for name in schema.metadata]
    assert len(cases) == 6
    for other in (*cases, schema.remove(1)):
        header = other.serialize().to_pybytes()
        with pytest.raises(
            ReferenceFormatError, match="is from a different run, place, version or kind"
        ) as caught:
            open_stream(path, header + END_OF_STREAM)
        assert caught.value.path == str(path)
    with pytest.raises(ReferenceFormatError, match="cannot be read"):
        open_stream(tmp_path)
    content = HEADER + b"".join(messages([0, 1])) + END_OF_STREAM
    file = open_stream(path, content)
    for changed in (HEADER + b"".join(messages([0, 1], start=5)) + END_OF_STREAM, content[:-100]):
        path.write_bytes(changed)
        with pytest.raises(ReferenceFormatError, match=re.escape(str(path))):
            file.read(1)
    path.unlink()
    for read in (lambda: file.read(1), lambda: open_stream(path)):
        with pytest.raises(
            ReferenceFormatError, match="is missing or cannot be read, although run"
        ):
            read()


def test_what_was_written_is_read_in_order_and_a_kill_loses_the_last_steps_only(path):
    def read(run_id: str = "this run") -> list[EvidenceRow]:
        return list(read_evidence(path, run_id=run_id))

    writer, rows = EvidenceWriter(path, run_id="this run"), list[EvidenceRow]()
    for step in range(ROWS_PER_BATCH + 5):
        found = [
            EvidenceRow(step, "start", "generator", "torch.cpu", value=2**64 - 1 - step),
            EvidenceRow(step, "", "indices", "paths", value=7, text='["a.png"]'),
        ]
        writer.append(found)
        rows += found
    assert read() == rows[: 2 * ROWS_PER_BATCH], "what is not closed"
    content = path.read_bytes()
    sizes = set()
    for size in range(len(content) // 2, len(content), 97):
        path.write_bytes(content[:size])
        sizes.add(len(read()))
    assert {ROWS_PER_BATCH} < sizes <= {0, ROWS_PER_BATCH, 2 * ROWS_PER_BATCH}
    path.write_bytes(content)
    writer.close()
    assert read() == rows
    with pytest.raises(ReferenceFormatError, match="from a different run"):
        read("another")
    path.write_bytes(b"nothing of ours")
    with pytest.raises(ReferenceFormatError, match="does not begin"):
        read()


@pytest.mark.parametrize("size", [0, 1, 100])
def test_evidence_that_a_kill_cut_in_its_header_is_none_and_in_a_whole_run_damage(
    tmp_path, capsys, size
):
    for is_whole in (False, True):
        writer = create(tmp_path / f"whole {is_whole}")
        writer.put_evidence([EvidenceRow(0, "start", "generator", "torch.cpu", value=7)])
        append(writer, range(3), complete=is_whole)
        path = evidence_path(writer.stream)
        path.write_bytes(path.read_bytes()[:size])
        status, told = main(["findings", str(writer.path)]), "".join(capsys.readouterr())
        assert (status, "is damaged" in told, "may lack evidence" in told) == (
            2 * is_whole,
            is_whole,
            not is_whole,
        )


def test_evidence_without_its_end_is_damaged_if_its_fit_is_complete(tmp_path, capsys):
    writer = create(tmp_path / "run")
    for number in range(3 * ROWS_PER_BATCH):
        writer.put_evidence([EvidenceRow(number, "start", "generator", "torch.cpu", value=7)])
    append(writer, range(3), complete=True)
    path = evidence_path(writer.stream)
    content = path.read_bytes()
    for end in (len(content) - 8, len(content) - 100, len(content) // 2):
        path.write_bytes(content[:end])
        status, told = main(["findings", str(writer.path)]), "".join(capsys.readouterr())
        assert (status, f"{path} is damaged: its end is missing" in told) == (2, True), told
    path.write_bytes(content)
    assert main(["findings", str(writer.path)]) == 0
