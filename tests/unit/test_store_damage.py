"""A run folder that is not as it was written: always an error that names the file, or the same content."""

import gc
import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from stored_runs import append, create, digests_of, everything_in, flipped, record, resume, small_layout, small_program

from det_callbacks.errors import ReferenceFormatError, ReferenceNotFoundError
from det_callbacks.runs.files import stream_path, write_layout, write_program
from det_callbacks.runs.manifest import Attempt, read_manifest, write_manifest
from det_callbacks.runs.store import Run


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run with two fits, the second of which was resumed."""
    path = record(tmp_path / "run", range(3), range(2), complete=False)
    writer = resume(path)
    append(writer, [1, 2], seed=1)
    writer.close(complete=True)
    return path


def files_of(run: Path) -> list[Path]:
    return sorted(path for path in run.rglob("*") if path.is_file())


def test_every_file_is_there_for_a_reason(run):
    right = everything_in(run)
    assert len(files_of(run)) == 6
    for file in files_of(run):
        content = file.read_bytes()
        for change in (file.unlink, lambda file=file: file.write_bytes(b"")):
            change()
            expected = ReferenceFormatError
            if file.name == "run.json" and not file.exists():
                expected = ReferenceNotFoundError
            with pytest.raises(expected) as caught:
                everything_in(run)
            assert (str(file) if expected is ReferenceFormatError else str(run)) in str(caught.value)
            assert caught.value.exit_code == 2
        file.write_bytes(content)
    assert everything_in(run) == right


def test_a_flipped_bit_anywhere_is_an_error_or_changes_nothing(run):
    right = everything_in(run)
    for file in files_of(run):
        content, num_errors = file.read_bytes(), 0
        for place, changed in flipped(content, every=17, bits=lambda place: [place % 8]):
            file.write_bytes(changed)
            try:
                found = everything_in(run)
            except ReferenceFormatError as error:
                num_errors += 1
                named = str(error)
            else:
                assert found == right, (file.name, place)
                continue
            assert str(run) in named
        file.write_bytes(content)
        assert num_errors > len(content) / 17 / 3, file.name


def test_damage_is_found_when_the_run_is_opened_not_when_it_is_read(run):
    file = stream_path(run, 0, 0, 0)
    content = file.read_bytes()
    place = content.index(digests_of(1).tobytes())
    file.write_bytes(content[:place] + bytes(8) + content[place + 8 :])
    with pytest.raises(ReferenceFormatError, match=re.escape(f"{file} is damaged: step 1 is not what its chain says")):
        Run.open(run)


def test_the_files_of_another_run_do_not_fit(tmp_path, run):
    other = record(tmp_path / "other", range(3))
    shutil.copy(stream_path(other, 0, 0, 0), stream_path(run, 0, 0, 0))
    with pytest.raises(ReferenceFormatError, match="belongs to another place"):
        Run.open(run)


def test_attempts_cannot_change_places(run):
    first, second = stream_path(run, 0, 0, 1), stream_path(run, 0, 1, 0)
    contents = first.read_bytes(), second.read_bytes()
    first.write_bytes(contents[1])
    second.write_bytes(contents[0])
    with pytest.raises(ReferenceFormatError, match="belongs to another place"):
        Run.open(run)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"world_size": 2}, "is missing, although run.json tells of it"),
        ({"world_size": 10**15}, "is missing, although run.json tells of it"),
        ({"run_id": "another"}, "belongs to another place"),
        ({"attempts": (Attempt(segments=10**15),)}, "is missing, although run.json tells of it"),
        ({"attempts": (Attempt(segments=2), Attempt(), Attempt())}, "is missing, although run.json tells of it"),
        ({"attempts": (Attempt(), Attempt())}, "belongs to another place"),
    ],
)
def test_a_manifest_that_is_not_that_of_the_files_is_refused(run, changes, says):
    write_manifest(run, replace(read_manifest(run), **changes))
    with pytest.raises(ReferenceFormatError, match=says) as caught:
        Run.open(run)
    assert str(run) in str(caught.value)


def test_a_step_whose_program_has_another_length_is_refused(tmp_path):
    path = tmp_path / "run"
    writer = create(path)
    program, layout = small_program(), small_layout(4)
    writer.put_program(program)
    writer.put_layout(layout)
    writer._layouts[layout.id] = 3
    writer.append(0, 0, program.id, layout.id, digests_of(0))
    writer.close(complete=True)
    with pytest.raises(ReferenceFormatError, match=r"has 3 sites, its layout .* has 4, and step 0 has 3 digests"):
        Run.open(path).view(0, 0, 0)


def resident_kib() -> int:
    gc.collect()
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("VmRSS")).split()[1])


def test_memory_does_not_grow_with_what_is_read_or_written(tmp_path):
    path = tmp_path / "run"
    num_sites, num_steps = 4_000, 1_500
    record(tmp_path / "small", range(3))
    everything_in(tmp_path / "small")
    writer = create(path)
    program, layout = small_program(num_sites), small_layout(num_sites)
    writer.put_program(program)
    writer.put_layout(layout)
    digests = digests_of(0, num_sites)
    before = resident_kib()
    for step in range(num_steps):
        writer.append(step, 0, program.id, layout.id, digests)
    writer.close(complete=True)
    assert writer.bytes_written > 45e6
    run = Run.open(path)
    assert sum(1 for _ in run.rank(0).iterate()) == num_steps
    assert resident_kib() - before < 10_000


def test_few_programs_and_layouts_are_kept_in_memory(tmp_path, monkeypatch):
    path = tmp_path / "run"
    create(path).close(complete=True)
    many = [small_program(op=f"aten.op{index}.default") for index in range(70)]
    layouts = [small_layout(index) for index in range(70)]
    for program, layout in zip(many, layouts, strict=True):
        write_program(path, program)
        write_layout(path, layout)
    run = Run.open(path)
    for program, layout in zip(many, layouts, strict=True):
        assert run.program(program.id) == program
        assert run.layout(layout.id) == layout
    assert run.program(many[-1].id) is run.program(many[-1].id)
    assert run._program.cache_info().currsize == run._layout.cache_info().currsize == 64
