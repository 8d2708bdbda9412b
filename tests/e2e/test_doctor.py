import json
import os
import re
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import schemas
import torch
from stored_runs import SELECTION

from det_callbacks.cli import main
from det_callbacks.environment import doctor, installation
from det_callbacks.environment.capture import capture_environment
from det_callbacks.environment.doctor import diagnose
from det_callbacks.environment.installation import look_at_installation
from det_callbacks.internals import versions
from det_callbacks.runs.store import Run
from det_callbacks.runs.writer import RunWriter
from det_callbacks.settings import DeterminismSettings, enforce_determinism, settings_in_force

Capture = Any


def recorded(path: Path, change: Callable[[dict], None] = lambda manifest: None) -> str:
    manifest = {"selection": SELECTION, "settings": settings_in_force()}
    manifest["environment"] = msgspec.to_builtins(capture_environment())
    change(manifest)
    RunWriter.create(path, manifest=manifest).close(complete=True)
    return str(path)


def test_what_the_defaults_ask_for_is_missing_until_it_is_enforced(capsys, monkeypatch):
    with enforce_determinism(
        {"deterministic_algorithms": "disabled", "cublas_workspace_config": None}
    ):
        assert main(["doctor"]) == 1
        text = capsys.readouterr().out
        line = "det_callbacks.enforce_determinism({'deterministic_algorithms': 'error'})"
        assert re.search(
            rf"^not in force +deterministic_algorithms +error +disabled +{re.escape(line)}$",
            text,
            re.M,
        )
        assert "1 setting not in force: deterministic_algorithms" in text
    with enforce_determinism(DeterminismSettings()):
        assert main(["doctor"]) == 0
        assert "all in force" in capsys.readouterr().out
    asked = DeterminismSettings(python_hash_seed=11, deterministic_algorithms=None)
    monkeypatch.setattr(doctor, "DeterminismSettings", lambda: asked)
    diagnosis = diagnose(look_at_installation())
    (finding,) = (finding for finding in diagnosis.settings if finding.name in diagnosis.missing)
    assert (finding.name, finding.state) == ("python_hash_seed", "too late")
    assert finding.to_do.startswith(
        "restart with PYTHONHASHSEED=11 (PYTHONHASHSEED is read when the process starts"
    )


@pytest.mark.parametrize(
    ("algorithms", "fills", "is_told"),
    [("error", True, True), ("warn", True, True), ("error", False, False)],
)
def test_what_filling_memory_costs_is_told_where_it_is_done(algorithms, fills, is_told, capsys):
    settings = {"deterministic_algorithms": algorithms, "fill_uninitialized_memory": fills}
    with enforce_determinism({**settings, "cublas_workspace_config": None}):
        main(["doctor"])
        text = " ".join(capsys.readouterr().out.split())
        assert ("enforce_determinism({'fill_uninitialized_memory': False})" in text) is is_told
    with enforce_determinism(
        {"deterministic_algorithms": "disabled", "cublas_workspace_config": None}
    ):
        main(["doctor"])
        assert "Filling memory" not in capsys.readouterr().out


def test_what_only_cuda_reads_is_no_fault_without_it_and_how_an_accelerator_digests_is_said(
    capsys, monkeypatch
):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(
        torch.accelerator, "current_accelerator", lambda check_available: torch.device("hpu")
    )
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 3)
    with enforce_determinism({"cublas_workspace_config": None, "cudnn_deterministic": False}):
        found = {
            finding.name: finding.state for finding in diagnose(look_at_installation()).settings
        }
        assert found["cublas_workspace_config"] == found["cudnn_deterministic"] == "no effect here"
        assert found["cudnn_benchmark"] == "in force"
        assert main(["doctor"]) == 0
    with enforce_determinism({"sdpa_backends": ["flash"]}):
        asked = DeterminismSettings(sdpa_backends=["math"], nvte_allow_nondeterministic_algo=False)
        monkeypatch.setattr(doctor, "DeterminismSettings", lambda: asked)
        found = {finding.name: finding for finding in diagnose(look_at_installation()).settings}
        assert found["sdpa_backends"].state == "not in force", "attention on a CPU reads them too"
        variable = found["nvte_allow_nondeterministic_algo"]
        assert variable.state == "no effect here"
        reads = "only transformer_engine reads NVTE_ALLOW_NONDETERMINISTIC_ALGO"
        assert variable.to_do == f"nothing: {reads}, and it is not installed"
    assert "Digests of tensors on hpu:3: a copy to the host\n" in capsys.readouterr().out


def test_another_thread_count_and_version_than_in_the_reference(tmp_path, capsys):
    threads = torch.get_num_threads() + 1

    def change(manifest):
        entries = manifest["environment"]
        manifest["settings"]["num_threads"] = entries["torch.num_threads"]["value"] = threads
        entries["numpy.version"]["value"] = "1.0.0"
        entries["cpu.count"]["value"] += 1
        entries["hparams.lr"] = {"value": 0.1, "is_machine": False, "changes_bits": True}

    with enforce_determinism(DeterminismSettings()):
        path = recorded(tmp_path / "run", change)
        assert main(["doctor", "--against", path, "--json"]) == 1
        form = json.loads(capsys.readouterr().out)
        assert (form["schema"], form["is_well"]) == (1, False)
        assert [
            (one["name"], one["changes_bits"], one["to_do"]) for one in form["differences"]
        ] == [
            ("numpy.version", True, "pip install numpy==1.0.0"),
            (
                "torch.num_threads",
                True,
                f"det_callbacks.enforce_determinism({{'num_threads': {threads}}})",
            ),
            ("cpu.count", False, ""),
        ]
        assert [one["name"] for one in form["settings"] if one["state"] == "not in force"] == [
            "num_threads"
        ]
        assert main(["doctor", "--against", path]) == 1
        assert f"Different from {path}" in capsys.readouterr().out
        assert main(["doctor", "--against", recorded(tmp_path / "same")]) == 0
        assert f"This machine does not differ from {tmp_path / 'same'}" in capsys.readouterr().out
        path = recorded(tmp_path / "without", lambda manifest: manifest.pop("settings"))
        assert main(["doctor", "--against", path]) == 2
        assert "does not say which settings were in force" in capsys.readouterr().err


def test_a_variable_of_the_reference_is_exported_or_unset_if_its_value_is_known(
    tmp_path, capsys, monkeypatch
):
    def change(manifest):
        values = {"env.TORCH_A": "1", "env.TORCH_PATH": "<place 0123>", "option.torch.x": True}
        manifest["environment"] |= {
            name: {"value": value, "is_machine": False, "changes_bits": True}
            for name, value in values.items()
        }

    with enforce_determinism(DeterminismSettings()):
        path = recorded(tmp_path / "run", change)
        monkeypatch.setenv("NCCL_B", "2")
        main(["doctor", "--against", path, "--json"])
    found = {
        one["name"]: one["to_do"] for one in json.loads(capsys.readouterr().out)["differences"]
    }
    assert found == {
        "env.NCCL_B": "unset NCCL_B",
        "env.TORCH_A": "export TORCH_A=1",
        "env.TORCH_PATH": "",
        "option.torch.x": "",
    }


@pytest.mark.parametrize(
    ("version", "is_bad"), [("2.6.2", True), ("2.6.3", True), ("2.6.1", False), ("2.6.6", False)]
)
def test_a_version_of_lightning_with_malware_is_not_imported(version, is_bad, capsys, monkeypatch):
    monkeypatch.setattr(
        versions, "version", lambda package: version if "lightning" in package else "2.15.0"
    )
    monkeypatch.setattr(installation, "_broken", lambda: pytest.fail("imports") if is_bad else ())
    assert (main(["doctor"]) == 2) is is_bad
    assert (
        f"pytorch_lightning {version}: it contains malware" in capsys.readouterr().out
    ) is is_bad


# Variables of the environment that settings are about, and that the advice names.
READ = {"PYTHONHASHSEED", "CUBLAS_WORKSPACE_CONFIG", "DET_CALLBACKS_RECORDER"}


def fail_with_paths(name: str) -> Any:
    """Stand for the package, of which every name fails as a broken installation does."""

    class Broken:
        __all__ = ("x", "y")

        def __getattr__(self, name: str) -> Any:
            raise ImportError(
                f"{Path.home()}/env/libtorch.so: not found (/opt/shared/envs/jane.doe/x.py)"
            )

    return Broken()


def test_a_variable_that_an_import_set_is_not_compared(tmp_path, monkeypatch):
    before = dict(os.environ)
    with enforce_determinism(DeterminismSettings()):
        run = Run.open(recorded(tmp_path / "run"))
        monkeypatch.setenv("PYTORCH_SET_BY_AN_IMPORT", "1")
        here = look_at_installation()
        compared, others = (
            diagnose(here, against=run, **options).differences
            for options in ({}, {"variables": before})
        )
    assert [difference.name for difference, _ in compared] == ["env.PYTORCH_SET_BY_AN_IMPORT"]
    assert others == ()


@pytest.mark.parametrize("is_broken", [False, True])
def test_a_bug_report_has_versions_and_devices_and_nothing_private(
    is_broken, tmp_path, monkeypatch, capsys
):
    home = tmp_path / "users" / "jane.doe"
    home.mkdir(parents=True)
    monkeypatch.chdir(home)
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("USER", "jane.doe")
    monkeypatch.setenv("SERVICE_TOKEN", "very-secret")
    if is_broken:
        monkeypatch.setattr(installation, "import_module", fail_with_paths)
    forms = []
    with enforce_determinism(DeterminismSettings(cublas_workspace_config=None)):
        for arguments in ([], ["--json"], ["--json", "--against", recorded(home / "run")]):
            assert main(["doctor", *arguments]) == (2 if is_broken else 0)
            forms.append(capsys.readouterr().out)
    for form in forms:
        for private in (
            "jane.doe",
            "very-secret",
            "SERVICE_TOKEN",
            socket.gethostname(),
            sys.prefix,
            str(tmp_path),
        ):
            assert private not in form
        assert not re.search(r"(?<![\w.~])/\w", form), "an absolute path"
        assert {name for name in os.environ if re.search(rf"\b{name}\b", form)} <= READ
    content = json.loads(forms[1])
    schemas.require_schema(content, "doctor")
    versions = content["installation"]["versions"]
    assert {
        "python",
        "det_callbacks",
        "torch",
        "lightning",
        "hydra-core",
        "numpy",
        "transformers",
    } <= {*versions}
    if is_broken:
        broken = "x, y: ImportError: libtorch.so: not found (x.py)"
        assert (content["installation"]["broken"], content["is_well"]) == ([broken], False)
        text = " ".join(forms[0].split())
        assert f"Cannot be imported: {broken}" in text
        assert "Install versions that det_callbacks was tested with: torch 2.11 to 2.15" in text
        return
    assert {"platform.system", "cpu.model", "torch.num_threads", "torch.cuda", "cuda"} <= {
        *content["facts"]
    }
    assert json.loads(forms[2])["against"] == "~/run"
