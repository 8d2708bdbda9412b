"""What a run's writers do where nothing can be written, on a disk whose errors are played."""

import json
import pickle
from pathlib import Path
from unittest.mock import Mock

import pytest
from stored_runs import create, record

from det_callbacks.cli import main
from det_callbacks.cli.check import new_folder
from det_callbacks.errors import WriteError
from det_callbacks.runs.evidence import EvidenceRow, EvidenceWriter, read_evidence
from det_callbacks.runs.files import make_folder, writing


@pytest.mark.parametrize(
    ("place", "says"),
    [
        ("file/below/run", "{tmp}/file is a file"),
        ("file", "it is a file"),
        ("link", "it is a link to {tmp}/nowhere, which does not exist"),
        ("link/run", "{tmp}/link is a link to {tmp}/nowhere, which does not exist"),
        ("n" * 300, "File name too long"),
        ("/proc/run", "No such file or directory"),
    ],
)
def test_where_no_folder_can_be_made_the_reason_and_the_way_out_are_one_sentence(
    place, says, tmp_path
):
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    path = tmp_path / place
    for act, way in (
        (lambda: make_folder(path, instead="name another one"), "; name another one."),
        (lambda: new_folder(path, "determinism-check", option="--to"), "(--to)."),
        (lambda: create(path), "RUN of det-callbacks record)."),
        (lambda: create(path, overwrite=True), "RUN of det-callbacks record)."),
        (lambda: create(path, purpose="verify"), "--to of det-callbacks check)."),
    ):
        with pytest.raises(WriteError) as caught:
            act()
        text = str(caught.value)
        assert text.startswith(f"Cannot write {path}: {says.format(tmp=tmp_path)}; "), text
        assert text.count(". ") == 0
        assert text.endswith(way)
        assert (caught.value.exit_code, str(pickle.loads(pickle.dumps(caught.value)))) == (2, text)


def test_what_is_no_error_of_the_disk_passes_as_it_is(tmp_path):
    with pytest.raises(ZeroDivisionError), writing(tmp_path):
        raise ZeroDivisionError


def test_evidence_after_a_full_disk_is_a_torn_tail_and_no_damage(tmp_path, monkeypatch):
    path = tmp_path / "a.evidence.arrows"
    writer = EvidenceWriter(path, run_id="run")
    writer.append([EvidenceRow(0, "batch start", "generator", "torch.cpu", value=1)])
    writer.flush()
    real = writer._file._file
    half = Mock(side_effect=lambda content: real.write(bytes(content)[: len(content) // 2]))
    writer.append([EvidenceRow(1, "batch start", "generator", "torch.cpu", value=2)])
    with monkeypatch.context() as patch:
        patch.setattr(writer._file, "_file", Mock(write=half))
        with pytest.raises(WriteError, match="bytes had room"):
            writer.flush()
    writer.append([EvidenceRow(2, "batch start", "generator", "torch.cpu", value=3)])
    writer.close()
    assert [row.step for row in read_evidence(path, run_id="run")] == [0]


@pytest.mark.parametrize("json_option", [[], ["--json"]])
def test_show_and_diff_have_a_status_where_nothing_can_be_printed_or_read(
    json_option, tmp_path, monkeypatch, capsys
):
    run = str(record(tmp_path / "run", range(2)))
    for words in (["show", run], ["diff", run, run]):
        # closing it fails unless it is silenced
        with open("/dev/full", "w") as full, monkeypatch.context() as patch:
            patch.setattr("sys.stdout", full)
            assert main([*words, *json_option]) == 2
        assert (
            "det-callbacks: standard output cannot be used: No space left"
            in capsys.readouterr().err
        )
    for words in (
        ["show", "n" * 300],
        ["diff", run, "n" * 300],
        ["verify", "n" * 300, "--", "true"],
    ):
        assert main(words) == 2
        assert "There is no run in n" in capsys.readouterr().err.replace(f"{Path.cwd()}/", "")
    (tmp_path / "file").touch()
    for place, says in (("file/report.html", "is a file"), ("n" * 300, "too long")):
        assert main(["diff", run, run, "--html", str(tmp_path / place), *json_option]) == 2
        shown = capsys.readouterr()
        assert "the verdict is still valid" in shown.err
        assert says in shown.err
        assert json.loads(shown.out)["verdict"] == "match" if json_option else "MATCH" in shown.out
        assert main(["export", run, "--to", str(tmp_path / place)]) == 2
        assert "another folder (--to of det-callbacks export)" in capsys.readouterr().err
