"""What is kept of a run's environment, code and command, what is not,
and how two environments differ.
"""

import enum
import json
import os
import shutil
import socket
import subprocess
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from hydra.core.utils import setup_globals
from omegaconf import OmegaConf

from det_callbacks.digest.host import digest_bytes, format_digest
from det_callbacks.environment.capture import (
    capture_environment,
    code_state,
    command_choice,
    script_words,
)
from det_callbacks.environment.hydra import configuration_of
from det_callbacks.runs.manifest import (
    AS_COMMITTED,
    DEFAULT,
    NOT_RECORDED,
    EnvironmentEntry,
    compare_environments,
)
from det_callbacks.settings import enforce_determinism
from det_callbacks.training.arguments import optimizer_choices


def entry(value: Any, *, is_machine: bool = True, changes_bits: bool = True) -> EnvironmentEntry:
    return EnvironmentEntry(value=value, is_machine=is_machine, changes_bits=changes_bits)


def chosen(reference: dict[str, Any], current: dict[str, Any]) -> dict[str, tuple[Any, Any, bool]]:
    found = compare_environments(
        capture_environment(choices=reference), capture_environment(choices=current)
    )
    assert not any(one.is_machine for one in found)
    return {one.name: (one.reference, one.current, one.changes_bits) for one in found}


def test_what_is_no_text_in_the_locale_becomes_json():
    argv = {
        "process": {"argv": ["tr\udcc3\udca4in.py", "\udce4", "\ud800", "ä"]},
        "x\udcff": "\udcc3\udca4",
    }
    entries = capture_environment(choices=argv)
    assert entries["process.argv"].value == ["träin.py", r"\xe4", r"\ud800", "ä"]
    assert entries[r"x\xff"].value == "ä"
    msgspec.json.encode(entries)


def test_another_optimizer_and_the_option_of_a_group_are_named():
    def options(kind: Any, *rates: float) -> dict[str, Any]:
        return optimizer_choices([kind([{"params": torch.ones(1), "lr": rate} for rate in rates])])

    sgd, adam = torch.optim.SGD, torch.optim.Adam
    assert chosen(options(sgd, 0.1, 0.1), options(sgd, 0.1, 0.2)) == {
        "optimizer.SGD.group 1.lr": (0.1, 0.2, True)
    }
    assert chosen(options(adam, 0.1), options(sgd, 0.1)) == {"optimizer": ("Adam", "SGD", True)}


def test_the_learning_rate_is_the_one_that_was_chosen_also_where_a_scheduler_has_changed_it():
    """A resumed training begins with another one than the training that it goes on with,
    and nobody chose that.
    """
    optimizer = torch.optim.SGD([torch.ones(1)], lr=0.1)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    before = optimizer_choices([optimizer])
    optimizer.step()
    scheduler.step()
    assert optimizer.param_groups[0]["lr"] == 0.05
    assert optimizer_choices([optimizer]) == before
    assert before["optimizer.SGD"]["lr"] == 0.1


def test_two_captures_in_one_process_are_equal_and_survive_json():
    choices = {"precision": "32-true", "hparams": {"lr": 0.1, "betas": (0.9, 0.999)}}
    first, second = capture_environment(choices=choices), capture_environment(choices=choices)
    assert compare_environments(first, second) == ()
    assert (
        compare_environments({"x": entry({"a": 1, "b": 2})}, {"x": entry({"b": 2, "a": 1})}) == ()
    )
    text = json.dumps(msgspec.to_builtins(first), allow_nan=False)
    assert list(msgspec.json.decode(text, type=dict[str, EnvironmentEntry]).items()) == list(
        first.items()
    )
    for private in (
        socket.gethostname(),
        str(Path.home()),
        str(Path.cwd()),
        os.environ.get("USER") or "no user",
    ):
        assert len(private) <= 4 or private not in text
    assert first["torch.version"].value == str(torch.__version__)
    assert first["torch.num_threads"].value == torch.get_num_threads()
    assert first["python.version"].value == ".".join(str(part) for part in sys.version_info[:3])
    if Path("/proc/cpuinfo").is_file():
        assert first["cpu.model"].value in Path("/proc/cpuinfo").read_text()


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("num_threads", 1, ("torch.num_threads", False, True)),
        ("seed", 2, ("settings.seed", False, True)),
        ("NCCL_ALGO", "Ring", ("env.NCCL_ALGO", True, True)),
        ("FLASH_ATTENTION_DETERMINISTIC", "1", ("env.FLASH_ATTENTION_DETERMINISTIC", False, True)),
        ("MKL_NUM_THREADS", "1", ("env.MKL_NUM_THREADS", True, False)),
    ],
)
def test_one_change_is_one_difference_of_its_kind(name, value, expected, monkeypatch):
    monkeypatch.setenv("MKL_NUM_THREADS", "2")
    others: dict[str, Any] = {"deterministic_algorithms": "disabled"}
    with enforce_determinism({**others, "seed": 1}):
        torch.set_num_threads(2)
        before = capture_environment()
        if name.isupper():
            monkeypatch.setenv(name, value)
        with enforce_determinism(others if name.isupper() else {**others, name: value}):
            (difference,) = compare_environments(before, capture_environment())
        assert (difference.name, difference.is_machine, difference.changes_bits) == expected
        torch.set_num_threads(1)  # by nobody's settings
        found = compare_environments(before, capture_environment())
        assert any(one.name == "torch.num_threads" and one.is_machine for one in found)


# variable -> its value, what is recorded, and whether it can change bits
VARIABLES: dict[str, tuple[str, str | None, bool]] = {
    "TORCHINDUCTOR_NUMERICS": ("strict", "strict", True),
    "CAUSAL_CONV1D_SPLIT": ("1", "1", True),
    "NCCL_SOMETHING_NEW": ("2", "2", True),
    "NCCL_TOPO_FILE": (
        "/home/alice/topo.xml",
        f"<place {format_digest(digest_bytes(b'/home/alice/topo.xml'))}>",
        True,
    ),
    "TORCHINDUCTOR_MAX_AUTOTUNE_CACHE": ("1", "1", True),
    "TORCHINDUCTOR_EMULATE_PRECISION_CASTS": ("1", "1", True),
    "TORCHDYNAMO_INLINE_INBUILT_NN_MODULES": ("1", "1", True),
    "KMP_DETERMINISTIC_REDUCTION": ("1", "1", True),
    "TRANSFORMERS_SOMETHING": ("1", "1", True),
    "TORCHINDUCTOR_B2B_GEMM_PASS": ("1", "1", True),
    "HF_TOKEN": ("abc", None, False),
    "HF_APIKEYS": ("abc", None, False),
    "HF_USER": ("alice", None, False),
    "FSDP_MASTER_ADDR": ("node7", None, False),
    "HF_HUB_OFFLINE": ("1", "1", False),
    "CUDA_VISIBLE_DEVICES": ("1", "1", False),
    "KMP_BLOCKTIME": ("1", "1", False),
    "TORCH_LOGS": ("recompiles", "recompiles", False),
    "NCCL_DEBUG_SUBSYS": ("ALL", "ALL", False),
    "PYTORCH_CUDA_ALLOC_CONF": ("roundup_power2_divisions:4", "roundup_power2_divisions:4", False),
    "TORCHINDUCTOR_COMPILE_THREADS": ("1", "1", False),
    "TRITON_CACHE_DIR": ("/home/alice/triton", None, False),
    "TORCH_HOME": ("torch", None, False),
    "TORCH_HUB_TOKEN": ("abc", None, False),
    "NVTE_LOGIN": ("hf_abcdefgh", None, False),
    "MAMBA_LICENCE": ("0a1b2c3d4e5f60718293a4b5c6d7e8f9", None, False),
    "TORCHELASTIC_RUN_ID": ("none", None, False),
    "EDITOR": ("vi", None, False),
}


@pytest.mark.parametrize("name", VARIABLES)
def test_a_variable_is_a_choice_by_its_prefix_and_no_secret(name, monkeypatch):
    value, recorded, changes_bits = VARIABLES[name]
    before = capture_environment()
    monkeypatch.setenv(name, value)
    found = {one.name: one for one in compare_environments(before, capture_environment())}
    if recorded is None:
        assert found == {}
        return
    (difference,) = found.values()
    assert (difference.name, difference.reference, difference.current) == (
        f"env.{name}",
        None,
        recorded,
    )
    assert (difference.is_machine, difference.changes_bits) == (False, changes_bits)


def test_a_run_of_the_first_version_does_not_say_that_a_variable_was_not_set():
    unset = entry(None)
    first = {"env.MKL_CBWR": unset, "env.NCCL_ALGO": entry("Ring")}
    now = {"env.NCCL_ALGO": entry("Ring"), "env.TORCH_X": entry("1"), "option.torch.x": entry(1)}
    found = {one.name: one.reference for one in compare_environments(first, now)}
    assert found == {"env.TORCH_X": NOT_RECORDED, "option.torch.x": NOT_RECORDED}
    assert {one.name: one.reference for one in compare_environments({}, now)} == {
        "env.NCCL_ALGO": None,
        "env.TORCH_X": None,
        "option.torch.x": DEFAULT,
    }


# hyperparameter -> what is given, and what is written
WRITTEN: dict[str, tuple[Any, Any]] = {
    "betas": ((0.9, np.float32(0.5)), [0.9, 0.5]),
    "num_tokens": (512, 512),
    "dtype": (torch.bfloat16, "bfloat16"),
    "device": (torch.device("cpu"), "cpu"),
    "colour": (enum.Enum("Colour", {"RED": "red"}).RED, "red"),
    "limit": (float("inf"), "inf"),
    "relative": (Path("data/train"), "data/train"),
    "command": (
        "--data /home/alice/x --url https://alice:pw@example.org/x, b",
        "--data <place> --url <place>, b",
    ),
    "layers": ([torch.nn.Linear(1, 1)], ["<torch.nn.modules.linear.Linear>"]),
    "kinds": ({"b", "a"}, ["a", "b"]),
    "hf_token": ("abc", "<withheld>"),
    "login": ([{"password": "abc"}], [{"password": "<withheld>"}]),
    "empty": ({}, {}),
}


def test_choices_are_flat_and_written_so_that_anyone_may_read_them():
    given = {name: value for name, (value, _) in WRITTEN.items()}
    environment = capture_environment(choices={"hparams": {"all": given}, "strategy": None})
    entries = {
        name: entry
        for name, entry in environment.items()
        if name.startswith(("hparams", "strategy"))
    }
    written = {f"hparams.all.{name}": value for name, (_, value) in WRITTEN.items()}
    assert {name: entry.value for name, entry in entries.items()} == {**written, "strategy": None}
    assert not any(entry.is_machine for entry in entries.values())


def test_a_configuration_differs_by_its_keys_and_acts_through_what_they_became():
    def choices(lr: float, flip: float) -> dict[str, Any]:
        return {
            "hparams": {"lr": lr},
            "config": {"model": {"lr": lr}, "data": {"flip": flip, "api_key": str(flip)}},
        }

    assert chosen(choices(0.1, 0.5), choices(0.2, 0.3)) == {
        "hparams.lr": (0.1, 0.2, True),
        "config.model.lr": (0.1, 0.2, False),
        "config.data.flip": (0.5, 0.3, True),
    }
    alone = {"config": choices(0.1, 0.5)["config"]}
    assert chosen(alone, {}) == {"config": ("3 keys", NOT_RECORDED, False)}


def test_a_group_of_an_optimizer_that_one_run_lacks_is_one_entry():
    first, second = {"lr": 0.1, "betas": [0.9, 0.99]}, {"lr": 0.2, "betas": [0.9, 0.99]}
    both, one = {"AdamW": {**first, "group 1": second}}, {"AdamW": first}
    assert chosen({"optimizer": both}, {"optimizer": one}) == {
        "optimizer.AdamW.group 1": ("2 options", "absent", True)
    }
    other = {"AdamW": {**first, "group 1": {**second, "lr": 0.3}}}
    assert chosen({"optimizer": both}, {"optimizer": other}) == {
        "optimizer.AdamW.group 1.lr": (0.2, 0.3, True)
    }


def test_a_configuration_is_kept_without_our_part_and_what_each_run_has_of_its_own():
    setup_globals()
    config = {
        **{"lr": 0.1, "steps": "${lr}", "name": "net_${now:%Y-%m-%d_%H-%M-%S}", "missing": "???"},
        **{"logger": [{"dir": "logs/${name}", "version": 1}], "hydra": {"run": {"dir": "outputs"}}},
        **{
            "determinism": {"mode": "record"},
            "callbacks": {"determinism": {}, "stopping": {"patience": 3}},
        },
    }
    kept = {
        **{"lr": 0.1, "steps": 0.1, "name": "net_<run>", "missing": "???"},
        **{
            "logger": [{"dir": "logs/net_<run>", "version": 1}],
            "callbacks": {"stopping": {"patience": 3}},
        },
    }
    assert configuration_of(OmegaConf.create(config)) == kept
    assert configuration_of(OmegaConf.create({"a": "${nowhere}", "b": 1})) == {
        "a": "${nowhere}",
        "b": 1,
    }


@pytest.mark.parametrize(
    ("reference", "current", "is_machine", "changes_bits"),
    [
        *(
            (entry(one), entry(other), True, True)
            for one, other in ((1, True), (1, 1.0), (0.0, -0.0), ([1], [1, 1]))
        ),
        (entry(None), None, True, True),
        (entry(NOT_RECORDED), None, True, True),
        (None, entry(1, is_machine=False), False, True),
        # a choice when either side says so
        (entry(1, changes_bits=False), entry(2, is_machine=False), False, True),
    ],
)
def test_values_differ_by_type_and_what_one_side_lacks_differs_even_from_none(
    reference, current, is_machine, changes_bits
):
    sides = [{} if side is None else {"x": side} for side in (reference, current)]
    (found,) = compare_environments(*sides)
    values = [NOT_RECORDED if side is None else side.value for side in (reference, current)]
    assert [found.reference, found.current, found.is_machine, found.changes_bits] == [
        *values,
        is_machine,
        changes_bits,
    ]


def test_the_script_goes_by_its_name_in_the_project(monkeypatch, tmp_path):
    main = ModuleType("__main__")  # whatever runs the tests
    monkeypatch.setitem(sys.modules, "__main__", main)
    scripts = {
        "src/train.py": "src/train.py",
        f"{tmp_path}/src/a.py": "src/a.py",
        "/home/somebody/a.py": "a.py",
    }
    for script, shown in (*scripts.items(), ("-c", None)):
        monkeypatch.setattr(sys, "argv", [script, "--password", "hunter2"])
        words = [] if shown is None else [shown, "--password", "<withheld>"]
        assert command_choice(start=tmp_path) == {"process": {"argv": words}}
    main.__spec__ = ModuleSpec("project.__main__", None)
    assert script_words() == ["-m", "project"]


def test_words_are_kept_as_the_process_was_started_without_secrets(monkeypatch):
    monkeypatch.setitem(sys.modules, "__main__", ModuleType("__main__"))
    monkeypatch.setattr(sys, "argv", ["train.py"])  # a script took its own words out
    monkeypatch.setattr(sys, "orig_argv", ["python", "-u", "train.py", *COMMAND_LINE])
    found = capture_environment(choices=command_choice())["process.argv"]
    assert found.value == ["train.py", *COMMAND_LINE.values()]
    monkeypatch.setattr(sys, "argv", ["run.py", "a=1"])  # by a launcher
    assert command_choice() == {"process": {"argv": ["run.py", "a=1"]}}
    spec = ModuleType("__main__")
    spec.__spec__ = ModuleSpec("project.__main__", None)
    monkeypatch.setitem(sys.modules, "__main__", spec)
    monkeypatch.setattr(sys, "orig_argv", ["python", "-m", "project", "--lr=1"])
    assert command_choice() == {"process": {"argv": ["-m", "project", "--lr=1"]}}


COMMAND_LINE = {
    "fit": "fit",
    "--lr": "--lr",
    "0.1": "0.1",
    "--api-key": "--api-key",
    "hunter2": "<withheld>",
    "--wandb-token=abc": "--wandb-token=<withheld>",
    "--pad_token=3": "--pad_token=3",
    "--data=/home/somebody/data": "--data=<place>",
    '{"hub_token": "abc"}': "<withheld>",
    "determinism=1": "determinism=1",
}
KEPT = (
    "+model/net=large",
    "~callbacks.stopping",
    "determinism.settings.seed=0",
    "determinism_of_mine=1",
)
OURS = ("determinism.reference=refs/a", "+determinism=record", "callbacks.determinism.level=op")
WITHHELD = {
    "logger.api_key=abc": "logger.api_key=<withheld>",
    "+hub@store.token='a=b'": "+hub@store.token=<withheld>",
    "logger={name: x, nested: {wandb_token: abc}}": "logger=<withheld>",
    "data.dir=/home/somebody/data": "data.dir=<place>",
}


def test_overrides_are_kept_but_for_secrets_places_and_ours():
    found = capture_environment(choices=command_choice([*KEPT, *OURS, *WITHHELD]))["process.argv"]
    assert found.value == [*script_words(), *KEPT, *WITHHELD.values()]
    assert (found.is_machine, found.changes_bits) == (False, False)
    first, second = (command_choice(words.split()) for words in ("a=1 b=2", "a=2 b=2"))
    both = [*script_words(), "a=1", "b=2"], [*script_words(), "a=2", "b=2"]
    assert chosen(first, second) == {"process.argv": (*both, False)}


def git(folder: Path, *arguments: str) -> str:
    who = ("-c", "user.name=A", "-c", "user.email=a@example.org", "-c", "commit.gpgsign=false")
    return subprocess.check_output(["git", *who, *arguments], cwd=folder, text=True).strip()


@pytest.mark.skipif(shutil.which("git") is None, reason="needs git")
def test_the_commit_of_the_program_and_the_files_that_differ(tmp_path, monkeypatch):
    folder, nothing = tmp_path / "repository", {"code.git_commit": None, "code.is_dirty": None}
    program, other = folder / "tools" / "train.py", folder / "größe.py"
    monkeypatch.setitem(sys.modules, "__main__", SimpleNamespace(__file__=str(program)))
    monkeypatch.chdir(tmp_path)

    def changes(**files: str | None) -> bool:
        found = code_state()
        assert found.pop("code.git_commit") == git(folder, "rev-parse", "HEAD")
        return found == {
            "code.is_dirty": bool(files),
            **{f"code.file.{name}": files[name] for name in files},
        }

    program.parent.mkdir(parents=True)
    for file in (program, other):
        file.write_text("")
    assert code_state() == nothing
    git(folder, "init", "--quiet")
    assert code_state() == nothing, "a repository without a commit"
    git(folder, "add", ".")
    git(folder, "commit", "--quiet", "--message", "first")
    (folder / "notes.txt").write_text("untracked")
    assert changes()
    program.write_text("print(1)\n")
    other.unlink()
    changed = {"tools/train.py": format_digest(digest_bytes(b"print(1)\n")), "größe.py": None}
    assert changes(**changed)
    git(folder, "add", ".")
    changed["notes.txt"] = format_digest(digest_bytes(b"untracked"))
    assert changes(**changed), "staged is not committed"
    here = capture_environment()
    git(folder, "commit", "--quiet", "--message", "second")
    assert changes()
    found = {
        one.name: (one.reference, one.current)
        for one in compare_environments(capture_environment(), here)
    }
    assert found.pop("code.git_commit")
    files = {f"code.file.{name}": (AS_COMMITTED, value) for name, value in changed.items()}
    assert found == {"code.is_dirty": (False, True), **files}
    monkeypatch.setitem(sys.modules, "__main__", ModuleType("__main__"))
    assert code_state() == nothing, "without a script it is the working directory"
    monkeypatch.chdir(folder)
    assert changes()
    installed = Path(sys.prefix) / "lib" / "pytest" / "__main__.py"
    monkeypatch.setitem(sys.modules, "__main__", SimpleNamespace(__file__=str(installed)))
    assert changes(), "nor with one that the environment holds"
    monkeypatch.setenv("PATH", "")
    assert code_state() == nothing, "no git"
