import enum
import json
import os
import socket
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from det_callbacks.digest.device import Choice
from det_callbacks.environment import capture_environment
from det_callbacks.runs.environment import (
    NOT_RECORDED,
    Environment,
    EnvironmentEntry,
    compare_environments,
    digested_on,
)
from det_callbacks.settings import enforce_determinism
from det_callbacks.verdict import EnvironmentDifference


class Colour(enum.Enum):
    RED = "red"


def environment(**entries: EnvironmentEntry) -> Environment:
    return Environment(entries=entries)


def entry(value: Any, *, is_machine: bool = True, changes_bits: bool = True) -> EnvironmentEntry:
    return EnvironmentEntry(value=value, is_machine=is_machine, changes_bits=changes_bits)


def test_two_captures_in_one_process_are_equal_and_survive_json() -> None:
    choices = {"precision": "32-true", "hparams": {"lr": 0.1, "betas": (0.9, 0.999)}}
    first, second = capture_environment(choices=choices), capture_environment(choices=choices)
    assert compare_environments(first, second) == ()
    read = Environment.from_dict(json.loads(json.dumps(first.to_dict(), allow_nan=False)))
    assert compare_environments(first, read) == ()
    assert read.to_dict() == first.to_dict()
    assert len(first.entries) > 50


def test_entries_say_what_torch_and_the_process_say() -> None:
    entries = {name: entry.value for name, entry in capture_environment().entries.items()}
    expected = {
        "torch.version": str(torch.__version__),
        "torch.num_threads": torch.get_num_threads(),
        "torch.cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "numpy.version": np.__version__,
        "python.version": ".".join(str(part) for part in sys.version_info[:3]),
        "torch.default_dtype": "float32",
        "gpu.count": torch.cuda.device_count() if torch.cuda.is_initialized() else 0,
    }
    assert entries == {**entries, **expected}
    if "MKL-DNN" in torch.__config__.show():
        assert entries["torch.mkldnn"].startswith("v")
    if "Math Kernel Library" in torch.__config__.show():
        assert entries["torch.mkl"][:4].isdigit()
    if Path("/proc/cpuinfo").is_file():
        assert entries["cpu.model"] in Path("/proc/cpuinfo").read_text()


def differences_of(change: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> dict[str, EnvironmentDifference]:
    monkeypatch.setenv("MKL_NUM_THREADS", "2")
    with enforce_determinism({"deterministic_algorithms": "disabled", "num_threads": 2, "seed": 1}):
        before = capture_environment()
        for name, value in change.get("variables", {}).items():
            monkeypatch.setenv(name, value)
        with enforce_determinism(change.get("settings", {"deterministic_algorithms": "disabled"})):
            return {difference.name: difference for difference in compare_environments(before, capture_environment())}


@pytest.mark.parametrize(
    ("change", "name", "is_machine", "changes_bits"),
    [
        ({"settings": {"num_threads": 1, "deterministic_algorithms": "disabled"}}, "torch.num_threads", True, True),
        ({"settings": {"deterministic_algorithms": "warn"}}, "settings.deterministic_algorithms", False, True),
        ({"settings": {"seed": 2, "deterministic_algorithms": "disabled"}}, "settings.seed", False, True),
        ({"variables": {"MKL_CBWR": "COMPATIBLE"}}, "env.MKL_CBWR", True, True),
        ({"variables": {"NCCL_ALGO": "Ring"}}, "env.NCCL_ALGO", True, True),
        ({"variables": {"FLASH_ATTENTION_DETERMINISTIC": "1"}}, "env.FLASH_ATTENTION_DETERMINISTIC", False, True),
        ({"variables": {"MKL_NUM_THREADS": "1"}}, "env.MKL_NUM_THREADS", True, False),
    ],
)
def test_one_change_is_one_difference_of_its_kind(
    change: dict[str, Any], name: str, is_machine: bool, changes_bits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    differences = differences_of(change, monkeypatch)
    assert list(differences) == [name]
    assert differences[name].is_machine is is_machine
    assert differences[name].changes_bits is changes_bits


# hyperparameter -> what is given, and what is written
WRITTEN: dict[str, tuple[Any, Any]] = {
    "lr": (0.1, 0.1),
    "betas": ((0.9, np.float32(0.5)), [0.9, 0.5]),
    "num_tokens": (512, 512),
    "pad_token": ("<pad>", "<pad>"),
    "dtype": (torch.bfloat16, "bfloat16"),
    "device": (torch.device("cpu"), "cpu"),
    "colour": (Colour.RED, "red"),
    "limit": (float("inf"), "inf"),
    "data": (Path("/home/alice/data"), "<place>"),
    "relative": (Path("data/train"), "data/train"),
    "command": (
        "train --data /home/alice/x --url https://alice:pw@example.org/x, twice",
        "train --data <place> --url <place>, twice",
    ),
    "layers": ([torch.nn.Linear(1, 1)], ["<torch.nn.modules.linear.Linear>"]),
    "kinds": ({"b", "a"}, ["a", "b"]),
    "hf_token": ("abc", "<withheld>"),
    "login": ([{"password": "abc"}], [{"password": "<withheld>"}]),
    "empty": ({}, {}),
}


def test_choices_are_flat_and_written_so_that_anyone_may_read_them() -> None:
    given = {name: value for name, (value, _) in WRITTEN.items()}
    environment = capture_environment(choices={"hparams": {"all": given}, "strategy": None})
    entries = {name: entry for name, entry in environment.entries.items() if name.startswith(("hparams", "strategy"))}
    written = {f"hparams.all.{name}": value for name, (_, value) in WRITTEN.items()}
    assert {name: entry.value for name, entry in entries.items()} == {**written, "strategy": None}
    assert not any(entry.is_machine for entry in entries.values())


def test_a_choice_must_not_hide_what_is_captured() -> None:
    with pytest.raises(ValueError, match=r"'torch\.num_threads' has the name"):
        capture_environment(choices={"torch": {"num_threads": 4}})


def test_nothing_of_who_and_where() -> None:
    text = json.dumps(capture_environment().to_dict())
    for private in (socket.gethostname(), str(Path.home()), str(Path.cwd()), os.environ.get("USER") or "no user"):
        if len(private) > 4:
            assert private not in text


@pytest.mark.parametrize(("one", "other"), [(1, True), (1, 1.0), (0.0, -0.0), (None, ""), ([1], [1, 1])])
def test_values_differ_by_type_too(one: Any, other: Any) -> None:
    (difference,) = compare_environments(environment(x=entry(one)), environment(x=entry(other)))
    assert (difference.reference, difference.current) == (one, other)


def test_what_one_side_lacks_differs_even_from_none() -> None:
    (missing,) = compare_environments(environment(x=entry(None)), environment())
    assert (missing.reference, missing.current, missing.changes_bits) == (None, NOT_RECORDED, True)
    assert compare_environments(environment(x=entry(NOT_RECORDED)), environment()) != ()
    (extra,) = compare_environments(environment(), environment(x=entry(1, is_machine=False)))
    assert (extra.reference, extra.current, extra.is_machine) == (NOT_RECORDED, 1, False)
    # it is a choice when either side says so
    one, other = entry(1, changes_bits=False), entry(2, is_machine=False)
    (difference,) = compare_environments(environment(x=one), environment(x=other))
    assert (difference.is_machine, difference.changes_bits) == (False, True)
    one, other = environment(x=entry({"a": 1, "b": 2})), environment(x=entry({"b": 2, "a": 1}))
    assert compare_environments(one, other) == (), "the order of a mapping is no difference"


def test_a_foreign_structure_is_refused() -> None:
    for data in ([], {"x": 1}, {"x": {"value": 1, "is_machine": True}}, {"x": {"value": 1, "is_machine": 1}}):
        with pytest.raises(ValueError, match=r"Expected|missing required field"):
            Environment.from_dict(data)


def test_a_gpu_that_nothing_used_is_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise AssertionError("this would create a CUDA context")

    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    for name in ("device_count", "get_device_properties", "get_device_name", "_lazy_init"):
        monkeypatch.setattr(torch.cuda, name, refuse)
    assert capture_environment().entries["gpu.names"].value == []


def test_how_a_device_that_is_used_has_its_digests_computed_is_a_fact(monkeypatch: pytest.MonkeyPatch) -> None:
    assert digested_on(capture_environment()) == {}
    monkeypatch.setattr(torch.xpu, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.xpu, "current_device", lambda: 3)
    asked = []

    def choice(device: torch.device) -> Choice:
        asked.append(device)
        return Choice(method=None, reason="no Triton: it is slow")

    monkeypatch.setattr("det_callbacks.environment.device_choice", choice)
    found = capture_environment()
    assert asked == [torch.device("xpu", 3)]
    assert digested_on(found) == {"xpu": "a copy to the host; no Triton: it is slow"}
    other = replace(found, entries={**found.entries, "digest.xpu": entry("Triton 3.7.1", changes_bits=False)})
    (difference,) = compare_environments(found, other)
    assert (difference.name, difference.is_machine, difference.changes_bits) == ("digest.xpu", True, False)
