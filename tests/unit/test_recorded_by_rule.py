"""What a run records of its environment by rule: options, flags, packages,
and how torch was built.
"""

import importlib
import subprocess
import sys
from importlib.machinery import EXTENSION_SUFFIXES
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec
import pytest
import torch

from det_callbacks.environment import capture
from det_callbacks.environment.capture import capture_environment
from det_callbacks.runs.manifest import DEFAULT, EnvironmentEntry, compare_environments
from det_callbacks.settings import enforce_determinism


def entry(value: Any, *, is_machine: bool = True, changes_bits: bool = True) -> EnvironmentEntry:
    return EnvironmentEntry(value=value, is_machine=is_machine, changes_bits=changes_bits)


def test_options_of_the_compiler_that_the_program_changed_are_choices():
    inductor = pytest.importorskip("torch._inductor.config")
    functorch = pytest.importorskip("torch._functorch.config")
    dynamo = pytest.importorskip("torch._dynamo.config")
    before = capture_environment()
    changed = {
        "epilogue_fusion": not inductor.epilogue_fusion,
        "triton.max_tiles": 3,
        "debug": True,
    }
    others = functorch.patch(functionalize_rng_ops=True), dynamo.patch(capture_scalar_outputs=True)
    with inductor.patch(changed), others[0], others[1]:
        found = compare_environments(before, capture_environment())
    assert {one.name: (one.reference, one.changes_bits, one.is_machine) for one in found} == {
        "option.torch._dynamo.config.capture_scalar_outputs": (DEFAULT, True, False),
        "option.torch._functorch.config.functionalize_rng_ops": (DEFAULT, True, False),
        "option.torch._inductor.config.debug": (DEFAULT, False, False),
        "option.torch._inductor.config.epilogue_fusion": (DEFAULT, True, False),
        "option.torch._inductor.config.triton.max_tiles": (DEFAULT, True, False),
    }
    with enforce_determinism(
        {"deterministic_algorithms": "disabled", "inductor_max_autotune": True}
    ):
        # recorded as a setting
        assert not any(name.startswith("option.") for name in capture_environment())


def test_no_option_is_read_by_importing_the_compiler_and_what_only_we_import_does_not_act(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "import sys, det_callbacks.runs.store\n"
        "from det_callbacks.environment.capture import capture_environment\n"
        "before = {*sys.modules}\n"
        "found = capture_environment()\n"
        "assert not found['package.pyarrow'].changes_bits\n"
        "assert not [name for name in {*sys.modules} - before if 'inductor' in name or 'dynamo' in "
        "name]\n"
    )
    subprocess.run([sys.executable, script], check=True, timeout=200)


def switch(owner: Any, name: str, value: Any) -> Any:
    """Return a function that sets a flag of torch.backends, and returns what restores it."""

    def change() -> Any:
        had, before = name in vars(owner), getattr(owner, name)
        setattr(owner, name, value)
        is_descriptor = not had and name not in vars(owner)
        return lambda: (
            setattr(owner, name, before) if had or is_descriptor else delattr(owner, name)
        )

    return change


def call(setter: Any, value: Any, before: Any) -> Any:
    def change() -> Any:
        setter(value)
        return lambda: setter(before)

    return change


BACKENDS = torch.backends
# flag -> how a program changes it, the value before and after, whether it acts without CUDA
FLAGS: dict[str, tuple[Any, Any, Any, bool]] = {
    "mkldnn.enabled": (switch(BACKENDS.mkldnn, "enabled", False), True, False, True),
    "mkldnn.deterministic": (switch(BACKENDS.mkldnn, "deterministic", True), False, True, True),
    "mkldnn.matmul.fp32_precision": (
        switch(BACKENDS.mkldnn.matmul, "fp32_precision", "ieee"),
        "none",
        "ieee",
        True,
    ),
    "mha.get_fastpath_enabled": (
        call(BACKENDS.mha.set_fastpath_enabled, False, True),
        True,
        False,
        True,
    ),
    "cuda.flash_sdp_enabled": (
        call(BACKENDS.cuda.enable_flash_sdp, False, True),
        True,
        False,
        True,
    ),
    "cuda.matmul.allow_fp16_accumulation": (
        *(switch(BACKENDS.cuda.matmul, "allow_fp16_accumulation", True), False, True, False),
    ),
    "cuda.preferred_linalg_library": (
        *(
            call(BACKENDS.cuda.preferred_linalg_library, "magma", "default"),
            "Default",
            "Magma",
            False,
        ),
    ),
    "opt_einsum.strategy": (
        switch(BACKENDS.opt_einsum, "strategy", "greedy"),
        DEFAULT,
        "greedy",
        True,
    ),
}


@pytest.mark.parametrize("name", FLAGS)
def test_each_flag_of_torch_backends_is_a_choice(name, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    change, before, after, acts = FLAGS[name]
    reference = capture_environment()
    back = change()
    try:
        current = capture_environment()
    finally:
        back()
    found = {one.name: one for one in compare_environments(reference, current)}
    difference = found.pop(f"torch.backends.{name}")
    assert found == {}
    assert (difference.reference, difference.current) == (before, after)
    assert (difference.is_machine, difference.changes_bits) == (False, acts)


def package(folder: Path, name: str, source: str, *files: str) -> None:
    """Write an installed package, with metadata, whose name differs from
    that of its import by a dash.
    """
    (folder / name).mkdir(parents=True)
    (folder / name / "__init__.py").write_text(source)
    for file in files:
        (folder / name / file).write_bytes(b"")
    about = folder / f"{name}-1.2.dist-info"
    about.mkdir()
    (about / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {name.replace('_', '-')}\nVersion: 1.2\n"
    )


def test_packages_with_kernels_and_those_that_the_program_imports_are_recorded(
    tmp_path, monkeypatch
):
    installed = tmp_path / "site-packages"
    package(installed, "some_kernels", "import torch")
    package(installed, "by_name", "")
    package(installed, "pure_and_unused", "")
    (installed / "versioned").mkdir()
    (installed / "versioned" / "__init__.py").write_text(
        "import pure_and_unused\n__version__ = '3'\n"
    )
    program = tmp_path / "project" / "model_of_mine.py"
    program.parent.mkdir()
    imports = "import some_kernels\nfrom by_name import __name__\n"
    program.write_text(f"{imports}def late():\n    import json, versioned\nlate()\n")
    for folder in (installed, program.parent):
        monkeypatch.syspath_prepend(folder)
    before = capture_environment()
    importlib.import_module("model_of_mine")
    after = capture_environment()
    for name in ("model_of_mine", "some_kernels", "by_name", "pure_and_unused", "versioned"):
        monkeypatch.delitem(sys.modules, name)
    new = {name: entry for name, entry in after.items() if name not in before}
    assert {name: one.value for name, one in new.items()} == {
        "package.by_name": "1.2",
        "package.some_kernels": "1.2",
        "package.versioned": "3",
    }
    assert all(one.is_machine and one.changes_bits for one in new.values())
    assert compare_environments(before, after) == (), "the code says what it imports"
    other = {**after, "package.some_kernels": entry("1.3")}
    (difference,) = compare_environments(after, other)
    assert (difference.name, difference.reference, difference.current) == (
        "package.some_kernels",
        "1.2",
        "1.3",
    )
    # native code that uses neither torch nor NumPy
    for name, file in (
        ("only_native", "__init__.py"),
        ("only_native.core", f"core{EXTENSION_SUFFIXES[0]}"),
    ):
        module = ModuleType(name)
        version = torch.torch_version.TorchVersion("4")
        module.__dict__.update(__file__=str(installed / "only_native" / file), __version__=version)
        monkeypatch.setitem(sys.modules, name, module)
    found = capture_environment()
    msgspec.json.encode(found)
    assert found["package.only_native"] == entry("4", changes_bits=False)


def test_a_package_that_pip_does_not_know_stops_no_capture(monkeypatch):
    def unknown(package: str) -> Any:
        raise PackageNotFoundError(package)

    monkeypatch.setattr(capture, "_version", lambda package: None)
    monkeypatch.setattr(capture, "requires", unknown)
    capture._needed.cache_clear()
    assert capture_environment()["det_callbacks.version"].value is None
    capture._needed.cache_clear()


def test_how_torch_was_built_differs_by_its_parts_if_the_version_is_the_same():
    here = capture_environment()
    assert here["torch.build.BLAS_INFO"].value
    assert here["torch.build.USE_MKLDNN"].is_machine
    other = {**here, "torch.build.BLAS_INFO": entry("open")}
    (difference,) = compare_environments(here, other)
    assert (difference.name, difference.current) == ("torch.build.BLAS_INFO", "open")
    newer = {**other, "torch.version": entry("9.0")}
    assert [one.name for one in compare_environments(here, newer)] == ["torch.version"]
    older = {
        name: one
        for name, one in here.items()
        if not name.startswith(("torch.build.", "torch.backends."))
    }
    assert compare_environments(older, here) == (), (
        "an earlier version of det_callbacks recorded none"
    )
