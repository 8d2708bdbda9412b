"""Whether the native recorder records; builds it for the installed torch, once, and loads it.

A library that was built for another torch would load without an error and corrupt memory. So its
key (what it was built from and for) is read from the file before the file is loaded.
"""

import ctypes
import os
import platform
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import warnings
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import torch

from det_callbacks.digest.host import digest_bytes, digest_memory, format_digest
from det_callbacks.environment.variables import RECORDER
from det_callbacks.errors import CoverageWarning, SettingsError, WriteError
from det_callbacks.runs.files import make_folder, writing

CHOICES = ("auto", "python", "native")

_SOURCES = Path(__file__).parent
_MARK = "det_callbacks native recorder: "
_INSTEAD = "set XDG_CACHE_HOME to a folder that can be written, or DET_CALLBACKS_RECORDER=python"
# bytes; of the self-check
_SIZES = (0, 1, 1023, 1024, 1025, 5000, 256 * 1024, 256 * 1024 + 4, 1_000_000)


@dataclass(frozen=True, slots=True, kw_only=True)
class Build:
    """A built library, or why there is none."""

    path: Path | None
    problem: str = ""


def choice() -> str:
    """Return which recorder the environment asks for."""
    chosen = os.environ.get(RECORDER, "auto")
    if chosen not in CHOICES:
        raise SettingsError(f"{RECORDER} must be one of {', '.join(CHOICES)}; got {chosen!r}.")
    return chosen


def load() -> ctypes.PyDLL | None:
    """Return the library if it is to record, or None for Python.

    If the environment asks for it, build it; where that fails, warn once, and Python records the
    same run, slower. By default, it records if it has been built.
    """
    chosen = choice()
    is_wanted = chosen == "native" or (chosen == "auto" and _is_built())
    return _loaded() if is_wanted else None


def built() -> Path | None:
    """Return the library built for this torch, or None."""
    path = _path()
    return (
        path
        if path.is_file() and _MARK.encode() + _key().encode() + b"\0" in path.read_bytes()
        else None
    )


def build() -> Build:
    """Build the library for this torch, unless it is built; takes about 20 seconds."""
    if (path := built()) is not None:
        return Build(path=path)
    if (problem := _obstacle()) is not None:
        return Build(path=None, problem=problem)
    try:
        return _build(_compiler(), _path())
    except WriteError as error:
        return Build(path=None, problem=str(error).rstrip("."))


def _build(compiler: str, path: Path) -> Build:
    make_folder(path.parent, instead=_INSTEAD)
    with writing(path, instead=_INSTEAD), tempfile.TemporaryDirectory(dir=path.parent) as folder:
        made = Path(folder) / path.name
        try:
            subprocess.run(_command(compiler, made), check=True, capture_output=True, text=True)
        except (OSError, subprocess.CalledProcessError) as error:
            text = error.stderr if isinstance(error, subprocess.CalledProcessError) else str(error)
            lines = [line for line in text.splitlines() if "error" in line] or [text.strip()]
            return Build(path=None, problem=f"{compiler} could not build it: {lines[0][:300]}")
        os.replace(made, path)
    return Build(path=path)


def state() -> str:
    """Return which recorder this process would use at level op; builds nothing."""
    chosen = choice()
    if chosen == "python":
        return f"Python ({RECORDER} is python)"
    if built() is not None:
        return "native code, which is built"
    if chosen == "auto":
        return "Python (python -m det_callbacks native build makes recordings at level op faster)"
    if (problem := _obstacle()) is not None:
        return f"Python, because {problem}"
    return "native code, which the next run builds (python -m det_callbacks native build)"


def _compiler() -> str:
    return os.environ.get("CXX") or shutil.which("g++") or ""


def _obstacle() -> str | None:
    """Return why the library cannot be built here, or None."""
    if sys.platform != "linux":
        return "the native recorder is for Linux"
    if sysconfig.get_config_var("Py_GIL_DISABLED"):
        return "this Python has no GIL, which the native recorder needs"
    return None if _compiler() else "there is no C++ compiler: install g++, or set CXX"


@cache
def _is_built() -> bool:
    return built() is not None


@cache
def _loaded() -> ctypes.PyDLL | None:
    if built() is None:
        print("det_callbacks: building the native recorder, once for this torch", file=sys.stderr)  # noqa: T201
    found = build()
    library, problem = (None, found.problem) if found.path is None else _open(found.path)
    if library is None:
        text = (
            f"Python records this run, which takes longer: {problem}. "
            "DET_CALLBACKS_RECORDER=python asks for that."
        )
        warnings.warn(text, CoverageWarning, stacklevel=2)
    return library


def _open(path: Path) -> tuple[ctypes.PyDLL | None, str]:
    """Return the library of a file whose key was checked, or None and what is wrong with it."""
    try:
        library = ctypes.PyDLL(str(path))
    except OSError as error:
        return None, f"{path} cannot be loaded ({error})"
    address, number, thing = ctypes.c_void_p, ctypes.c_int64, ctypes.py_object
    for name, result, arguments in (
        ("det_key", ctypes.c_char_p, ()),
        ("det_digest", ctypes.c_uint64, (address, ctypes.c_uint64)),
        ("det_new", address, ()),
        ("det_delete", None, (address,)),
        ("det_open", ctypes.c_int, (address, thing, thing, number, number)),
        ("det_close", None, (address,)),
        ("det_num_native", number, (address,)),
        ("det_num_python", number, (address,)),
        ("det_teach_op", None, (thing,)),
        ("det_teach", None, (thing,)),
    ):
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    if library.det_key().decode() != _MARK + _key():
        return None, f"{path} was built for another torch"
    memory = torch.arange(max(_SIZES) // 4, dtype=torch.int32)
    for size in _SIZES:
        if library.det_digest(memory.data_ptr(), size) != digest_memory(memory.data_ptr(), size):
            return None, f"{path} has other digests than det_callbacks"
    return library, ""


@cache
def _key() -> str:
    """Return what a library is built from and for."""
    names = sorted(path.name for kind in ("*.cpp", "*.h") for path in _SOURCES.glob(kind))
    sources = digest_bytes(b"\0".join((_SOURCES / name).read_bytes() for name in names))
    abi = int(torch.compiled_with_cxx11_abi())
    facts = torch.__version__, torch.version.git_version, f"abi{abi}", format_digest(sources)
    return " ".join((*facts, platform.machine(), sysconfig.get_config_var("SOABI") or ""))


def _path() -> Path:
    cache_folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return (
        cache_folder
        / "det_callbacks"
        / f"recorder-{format_digest(digest_bytes(_key().encode()))}.so"
    )


def _command(compiler: str, target: Path) -> list[str]:
    root = Path(str(torch.__file__)).parent
    arrow = find_spec("pyarrow")
    headers = (
        "" if arrow is None or arrow.origin is None else str(Path(arrow.origin).parent / "include")
    )
    return [
        *(compiler, "-O2", "-std=c++20", "-fPIC", "-fvisibility=hidden", "-shared", "-w"),
        f'-DDET_KEY="{_MARK}{_key()}"',
        f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}",
        *(f"-I{root / 'include'}", f"-I{root / 'include/torch/csrc/api/include'}"),
        f"-I{headers}/arrow/vendored/xxhash",
        *(str(path) for path in sorted(_SOURCES.glob("*.cpp"))),
        *("-o", str(target), f"-L{root / 'lib'}", "-ltorch_cpu", "-lc10"),
    ]
