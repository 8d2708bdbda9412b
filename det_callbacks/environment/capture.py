"""Captures everything that can change the bits of a run: machine, settings, code and command.

An entry is a *choice* or a *machine* fact. It changes bits only if it acts by itself: a
configuration value acts through the option that it sets.
"""

import enum
import functools
import json
import math
import os
import platform
import re
import subprocess
import sys
import sysconfig
from collections.abc import Iterator, Mapping, Sequence
from importlib.machinery import EXTENSION_SUFFIXES
from importlib.metadata import requires
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch

from det_callbacks.digest.host import digest_bytes, format_digest
from det_callbacks.digest.triton_digest import device_choice
from det_callbacks.internals.dynamo import changed_options
from det_callbacks.internals.versions import installed_version
from det_callbacks.runs.manifest import (
    ARGUMENTS,
    BACKENDS,
    BUILD,
    CHANGED_FILE,
    COMMIT,
    CONFIGURATION,
    DIGEST,
    OPTION,
    PACKAGE,
    PLACE,
    VARIABLE,
    Environment,
    EnvironmentEntry,
)
from det_callbacks.runs.program import without_surrogates
from det_callbacks.settings import SETTINGS, settings_in_force
from det_callbacks.settings.catalogue import start_environment
from det_callbacks.settings.enforce import enforced_names

WITHHELD = "<withheld>"

_KERNEL_VARIABLES = (  # which kernels a machine has
    *(
        "ATEN_CPU_CAPABILITY",
        "DNNL_DEFAULT_FPMATH_MODE",
        "DNNL_MAX_CPU_ISA",
        "ONEDNN_DEFAULT_FPMATH_MODE",
    ),
    *(
        "ONEDNN_MAX_CPU_ISA",
        "MKL_CBWR",
        "MKL_DYNAMIC",
        "MKL_ENABLE_INSTRUCTIONS",
        "NVIDIA_TF32_OVERRIDE",
    ),
    *("NCCL_ALGO", "NCCL_MAX_NCHANNELS", "NCCL_MIN_NCHANNELS", "NCCL_NVLS_ENABLE", "NCCL_PROTO"),
    *("CUBLASLT_WORKSPACE_SIZE", "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE", "TORCH_BLAS_PREFER_CUBLASLT"),
)
_THREAD_VARIABLES = ("MKL_NUM_THREADS", "OMP_NUM_THREADS")
_RECORDED_OTHERWISE = {
    *_KERNEL_VARIABLES,
    *_THREAD_VARIABLES,
    *(one.variable for one in SETTINGS.values()),
}
_IDLE_FACTS = (  # change no bits by themselves
    *("gpu.count", f"{DIGEST}cuda", *(f"{VARIABLE}{name}" for name in _THREAD_VARIABLES)),
    "cpu.count",  # acts through the number of threads
    "torch.num_interop_threads",  # runs complete ops in parallel
    "det_callbacks.version",  # a trace changes no bits (tested)
)
# Other variables are choices: those named here, and all with these prefixes.
_CHOSEN_VARIABLES = (
    *("FLASH_ATTENTION_DETERMINISTIC", "NVTE_ALLOW_NONDETERMINISTIC_ALGO", "PYTHONHASHSEED"),
    "MALLOC_PERTURB_",  # content of fresh memory
)
# of torch and its compiler, the libraries of kernels, Hugging Face,
# and packages of attention and quantisation
_CHOICE = re.compile(
    r"(?:ACCELERATE|AOTINDUCTOR|ATEN|BITSANDBYTES|BNB|CAUSAL_CONV1D|CUDA|CUDNN|DEEPSPEED|DNNL|"
    r"FLASH|FLA|FSDP|FUNCTORCH"
    r"|GLOO|GOMP|HF|HSA|KMP|MAMBA|MIOPEN|MKL|NCCL|NVTE|OMP|ONEDNN|OPENBLAS|PYTORCH|ROCBLAS|"
    r"TOKENIZERS|TORCHDYNAMO"
    r"|TORCHINDUCTOR|TORCH|TRANSFORMERS|TRITON|VLLM|XFORMERS|XLA)_|CUBLAS|HIPBLAS"
)
# words in names of variables, and of options of the compiler, that change no bits: logs,
# caches, memory, waiting
_IDLE_WORDS = re.compile(
    r"^(?!.*AUTOTUNE).*(?:^|[_.])(?:LOG\w*|DEBUG|VERBOSE|TRACE|DUMP\w*|PRINT\w*|DISPLAY|PROFIL\w*|"
    r"CACHE\w*|CACHING\w*|ALLOC_CONF"
    r"|COMPILE_THREADS|WORKER\w*|WATCHDOG\w*|HEARTBEAT|ERROR_HANDLING|TIMEOUT\w*|VISIBLE_DEVICES|"
    r"LAUNCH_BLOCKING"
    r"|MODULE_LOADING|(?:CUDA|NCCL)_VERSION|AFFINITY|PROC_BIND|PLACES|BLOCKTIME|WAIT_POLICY|"
    r"STACKSIZE|SOCKET_IFNAME"
    r"|TELEMETRY|VERBOSITY|OFFLINE|ENDPOINT|HUB|TOKENIZERS_PARALLELISM)(?:[_.]|$)"
)
# left out: folders and names of this machine and its user, and what may be a secret
_PRIVATE_VARIABLE = re.compile(
    r"_(?:DIR|HOME|USER(?:NAME)?|HOST(?:NAME|ID)?|ADDR(?:ESS)?|IP)$|CACHE_PATH$"
    r"|(?:KEY|TOKEN|SECRET|PASSWORD|PASSWD|PASSPHRASE|CREDENTIAL|AUTH)S?(?:_|$)"
)
_BUILD_SETTING = re.compile(r"(?<=[:,] )(\w+)=((?:(?!, \w+=).)*)")
_GETTER = re.compile(r"preferred_\w+|(?!_|set_)\w+_(?:enabled|allowed)")  # of torch.backends
_CUDA_FLAG = re.compile(r"torch\.backends\.cud(?!\w+\.\w+_sdp_enabled)")
_INSTALLED = re.compile(rf"^$|/(?:site|dist)-packages/|^{re.escape(sysconfig.get_path('stdlib'))}/")
_IMPORT = re.compile(r"^[ \t]*(?:from[ \t]+(\w+)|import[ \t]+([\w., \t]+))", re.MULTILINE)
_SECRET_VALUE = re.compile(
    r"(?<!\w)(?:hf_|gh[opsru]_|github_pat_|glpat-|sk-|xox[abprs]-|AKIA|eyJ)\w|"
    r"(?=\w*\d)(?=\w*[A-Za-z])[\w+/=-]{32,}"
)

# whole words: "num_tokens" and "pad_token" are hyperparameters
_SECRET = re.compile(
    r"(?:^|[_.-])(?:secret|password|passwd|passphrase|credentials?|(?:api|access|secret|private|"
    r"auth)_?key)$"
    r"|^token$|(?:api|access|auth|bearer|hub|hf|github|gitlab|wandb|comet|neptune)_?token$",
    re.IGNORECASE,
)
# absolute paths and addresses, which identify users and machines
_PLACE = re.compile(r"(?<![\w.])(?:[A-Za-z][\w+.-]*://|~?/(?=\w)|[A-Za-z]:[\\/])[^\s'\",;)\]}]*")


_version = functools.cache(installed_version)  # takes 4 ms


def capture_environment(
    *, choices: Mapping[str, Any] | None = None, lightning: str = "lightning"
) -> Environment:
    """Return the environment of this process, and the ``choices`` by dotted name.

    ``lightning`` is the distribution that trains. The capture creates no CUDA context, and omits
    paths, addresses and values whose names look like secrets.
    """
    enforced = {f"torch.{name}" for name in enforced_names()}
    facts = [
        (name, value, name not in enforced, name not in _IDLE_FACTS)
        for name, value in _machine_facts(lightning)
    ]
    facts += [(name, value, False, not _is_idle(name)) for name, value in _own_choices()]
    facts += [(name, value, False, False) for name, value in code_state().items()]
    flat = dict(_flatten("", choices or {}))
    became = {
        _last_part(name, value)
        for name, value in flat.items()
        if not name.startswith(CONFIGURATION)
    }
    became |= {_last_part(name, value) for name, value, *_ in facts}
    for name, value in flat.items():
        acts = name != ARGUMENTS and not (
            name.startswith(CONFIGURATION) and _last_part(name, value) in became
        )
        facts.append((name, value, False, acts))
    entries = {
        without_surrogates(name): EnvironmentEntry(
            value=_as_text(value), is_machine=is_machine, changes_bits=changes_bits
        )
        for name, value, is_machine, changes_bits in facts
    }
    return dict(sorted({**entries, **packages_since(entries)}.items()))


def packages_since(environment: Environment) -> Environment:
    """Return the entries of the imported packages that an environment lacks: a program may import
    some of them in the middle of its run.
    """
    return {
        f"{PACKAGE}{name}": EnvironmentEntry(value=version, is_machine=True, changes_bits=acts)
        for name, version, acts in _packages()
        if environment.keys().isdisjoint((f"{PACKAGE}{name}", f"{name}.version"))
    }


def _as_text(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return [_as_text(one) for one in value]
    return without_surrogates(value) if isinstance(value, str) else value


def _last_part(name: str, value: Any) -> tuple[str, str]:
    """Return a key that is equal for a configuration value and for the option that it sets."""
    return name.rpartition(".")[2], json.dumps(value, sort_keys=True)


def _machine_facts(lightning: str) -> Iterator[tuple[str, Any]]:
    build, backends = torch.__config__.show(), torch.backends
    yield "python.version", platform.python_version()
    yield "python.implementation", platform.python_implementation()
    yield "platform.system", platform.system()
    yield "platform.libc", " ".join(platform.libc_ver()).strip() or None
    yield "cpu.architecture", platform.machine()
    yield "cpu.count", os.cpu_count()
    # platform.processor() is empty on Linux
    yield (
        "cpu.model",
        _first(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo")) or platform.processor() or None,
    )
    yield "numpy.version", np.__version__
    for name in ("det_callbacks", lightning, "triton"):
        yield f"{name}.version", _version(name)
    yield "torch.version", str(torch.__version__)  # a TorchVersion
    yield "torch.git_version", torch.version.git_version
    yield "torch.cuda", torch.version.cuda
    yield "torch.hip", torch.version.hip
    yield "torch.cudnn", backends.cudnn.version() if backends.cudnn.is_available() else None
    yield "torch.mkl", _first(r"Math Kernel Library Version (.+?)(?: for |$)", build)
    yield "torch.mkldnn", _first(r"MKL-DNN (.+)", build)
    yield "torch.lapack", _first(r"LAPACK_INFO=(\w+)", build)
    yield "torch.cpu_capability", backends.cpu.get_cpu_capability()
    yield "torch.num_threads", torch.get_num_threads()
    yield "torch.num_interop_threads", torch.get_num_interop_threads()
    for name, value in _BUILD_SETTING.findall(build):
        yield f"{BUILD}{name}", _PLACE.sub(_digest_of_place, value.strip(" ,"))
    for name in _KERNEL_VARIABLES + _THREAD_VARIABLES:
        if name in os.environ:
            yield f"{VARIABLE}{name}", os.environ[name]
    # reading properties of GPUs takes a CUDA context
    initialized = bool(torch.cuda.is_initialized())
    count = torch.cuda.device_count() if initialized else 0
    devices = [torch.cuda.get_device_properties(index) for index in range(count)]
    yield "gpu.count", count
    yield "gpu.names", sorted({device.name for device in devices})
    yield "gpu.capabilities", sorted({f"{device.major}.{device.minor}" for device in devices})
    yield "gpu.multiprocessors", sorted({device.multi_processor_count for device in devices})
    driver = Path("/proc/driver/nvidia/version")
    yield "gpu.driver", _first(r"Kernel Module\D*([\d.]+)", driver) if initialized else None
    yield "gpu.nccl", ".".join(map(str, torch.cuda.nccl.version())) if initialized else None
    if initialized:  # choosing may compile kernels on the device
        yield f"{DIGEST}cuda", str(device_choice(torch.device("cuda", torch.cuda.current_device())))


def _packages() -> Iterator[tuple[str, str, bool]]:
    """Yield the import name, the version, and whether it acts,
    of the imported packages that may compute.

    These have native code, use torch, or are imported by the program's own code. A package does not
    act if it uses neither torch nor NumPy, or if det_callbacks needs it; unless the program's own
    code imports it.
    """
    modules = {
        name: module
        for name, module in sys.modules.copy().items()
        if isinstance(module, ModuleType)
    }
    native, computing, own = set[str](), set[str](), set[str]()
    for name, module in modules.items():
        top, file = name.partition(".")[0], str(vars(module).get("__file__") or "")
        if top in ("det_callbacks", "torch"):  # recorded apart
            continue
        if file.endswith(tuple(EXTENSION_SUFFIXES)):
            native.add(top)
        held = vars(module)
        if held.get("torch") is torch or held.get("np") is np or held.get("numpy") is np:
            computing.add(top)
        if not _INSTALLED.search(file) and file.endswith(".py") and Path(file).is_file():
            own |= _imported_by(file, Path(file).stat().st_mtime_ns)
    for name in sorted((native | computing | own) & modules.keys()):
        version = _version(name) or vars(modules[name]).get("__version__")
        is_installed = "-packages" in str(vars(modules[name]).get("__file__"))
        if is_installed and isinstance(version, str) and not name.startswith("_"):
            # that of functorch is a TorchVersion
            yield name, str(version), name in (computing - _needed()) | own


@functools.lru_cache(maxsize=4096)
def _imported_by(file: str, _modified: int) -> frozenset[str]:
    """Return the packages that a file imports; it is read again only once it was modified."""
    text = Path(file).read_text(encoding="utf-8", errors="replace")
    return frozenset(
        re.split(r"[.\s]", part.strip())[0]
        for statement in _IMPORT.finditer(text)
        for part in (statement[1] or statement[2]).split(",")
    )


@functools.cache
def _needed() -> set[str]:
    """Return the names of the packages that det_callbacks needs; none if pip does not know it."""
    if _version("det_callbacks") is None:
        return set()
    return set(re.findall(r"^[\w-]+", "\n".join(requires("det_callbacks") or ()), re.MULTILINE))


def _own_choices() -> Iterator[tuple[str, Any]]:
    recorded = _KERNEL_VARIABLES + _CHOSEN_VARIABLES
    for name, value in settings_in_force().items():
        if (
            name == "inductor_deterministic"
            and value == torch.are_deterministic_algorithms_enabled()
        ):
            value = None  # use_deterministic_algorithms sets it
        # the others are already facts or variables
        if SETTINGS[name].variable not in recorded and name not in ("sdpa_backends", "num_threads"):
            yield f"settings.{name}", value
    yield "torch.default_dtype", str(torch.get_default_dtype()).removeprefix("torch.")
    yield "torch.anomaly_mode", torch.is_anomaly_enabled()
    for name, value in {
        **os.environ,
        "PYTHONHASHSEED": start_environment().get("PYTHONHASHSEED"),
    }.items():
        if value is not None and _is_choice(name, value):
            yield f"{VARIABLE}{name}", _PLACE.sub(_digest_of_place, value)
    settings = {one.attribute for one in SETTINGS.values()}
    for path, value in changed_options().items():
        if path not in settings:
            yield f"{OPTION}{path}", _plain(path, value)
    for path, value in _backend_flags():
        if path not in settings:
            yield path, _plain(path, value)


def _backend_flags() -> Iterator[tuple[str, Any]]:
    """Yield what ``torch.backends`` has switched: its flags, those of objects in it,
    and what its getters return.
    """
    for path, module in sorted(sys.modules.copy().items()):
        if not path.startswith(BACKENDS):
            continue
        original = getattr(module, "m", module)  # which some modules replace
        members = {**vars(type(module)), **vars(original), **vars(module)}
        owners: dict[str, Any] = {
            f"{path}.{name}": one for name, one in members.items() if _is_switchboard(one)
        }
        for of, owner in ({path: module} | owners).items():
            for name in _flags_of(type(owner)):
                try:
                    yield f"{of}.{name}", getattr(owner, name)
                except AttributeError:  # an argument in __getattr__
                    continue
                except RuntimeError:  # torch raises if fp32_precision disagrees
                    yield f"{of}.{name}", "mixed"
        for name, member in members.items():
            if _GETTER.fullmatch(name) and callable(member):
                yield f"{path}.{name}", member()
            # set without a descriptor, such as opt_einsum.strategy
            is_set = original is not module and name in vars(module) and not name.startswith("_")
            if is_set and isinstance(member, bool | int | str):
                yield f"{path}.{name}", member


def _is_switchboard(member: Any) -> bool:
    """Return whether a member of ``torch.backends`` is an object that has flags,
    such as ``cuda.matmul``.
    """
    kind = type(member)
    return kind.__module__.startswith("torch.backends") and not isinstance(member, ModuleType)


def _flags_of(kind: type) -> list[str]:
    """Return the flags that a class of ``torch.backends`` has: descriptors,
    and names that its __getattr__ knows.
    """
    flags = [name for name, member in vars(kind).items() if hasattr(type(member), "__set__")]
    flags = [
        name for name in flags if type(vars(kind)[name]).__module__.startswith("torch.backends")
    ]
    getter = vars(kind).get("__getattr__")
    known = () if getter is None else getter.__code__.co_consts
    flags += [name for name in known if isinstance(name, str) and name.isidentifier()]
    return [name for name in flags if not name.startswith("_")]


def _is_choice(name: str, value: str) -> bool:
    """Return whether a variable is a choice that is not recorded as a setting or a
    machine fact, and is no secret.
    """
    if name in _CHOSEN_VARIABLES:
        return True
    if name in _RECORDED_OTHERWISE or _CHOICE.match(name) is None:
        return False
    return _PRIVATE_VARIABLE.search(name) is None and _SECRET_VALUE.search(value) is None


def _digest_of_place(found: re.Match[str]) -> str:
    return f"{PLACE} {format_digest(digest_bytes(found[0].encode(errors='surrogateescape')))}>"


def _is_idle(name: str) -> bool:
    if name.startswith((VARIABLE, OPTION)):
        return _IDLE_WORDS.search(name.partition(".")[2].upper()) is not None
    setting = SETTINGS.get(name.removeprefix("settings."))
    # the CPU's attention reads them too
    is_of_cuda = _CUDA_FLAG.match(name) is not None if setting is None else setting.is_cuda_only
    return is_of_cuda and not torch.cuda.is_available()


def _flatten(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping) and value:
        for key, inner in value.items():
            yield from _flatten(f"{name}.{key}" if name else str(key), inner)
    elif name:
        yield name, _plain(name.rpartition(".")[2], value)


def _plain(name: str, value: Any) -> Any:
    if isinstance(value, enum.Enum | np.generic):
        return _plain(name, value.value if isinstance(value, enum.Enum) else value.item())
    if value is None or isinstance(value, int | float):
        return value if value is None or math.isfinite(value) else str(value)  # JSON has no NaN
    if isinstance(value, str | bytes) and _SECRET.search(name):
        return WITHHELD
    if isinstance(value, str | os.PathLike):
        return _PLACE.sub(f"{PLACE}>", str(os.fspath(value)))
    if isinstance(value, torch.dtype | torch.device):  # without the index
        return str(value).removeprefix("torch.").partition(":")[0]
    if isinstance(value, Mapping):
        return {str(key): _plain(str(key), inner) for key, inner in value.items()}
    if isinstance(value, set | frozenset):
        return sorted((_plain(name, inner) for inner in value), key=str)
    if isinstance(value, Sequence) and not isinstance(value, bytes | bytearray | memoryview):
        return [_plain(name, inner) for inner in value]
    if hasattr(type(value), "__members__"):  # an enum of torch
        return str(value.name)
    # repr(value) may hold addresses or whole tensors
    return f"<{type(value).__module__}.{type(value).__qualname__}>"


def _first(pattern: str, text: str | Path) -> str | None:
    if isinstance(text, Path):
        text = text.read_text(encoding="utf-8", errors="replace") if text.is_file() else ""
    found = re.search(pattern, text, re.MULTILINE)
    return found.group(1).strip() if found else None


def code_state() -> dict[str, Any]:
    """Return the state of the script's repository; if it is installed, as pytest is,
    that of the current folder.
    """
    script = getattr(sys.modules.get("__main__"), "__file__", None)
    folder = Path.cwd()
    if script is not None and not Path(script).absolute().is_relative_to(sys.prefix):
        folder = Path(script).absolute().parent
    where = _ask_git(folder, "rev-parse", "HEAD", "--show-toplevel")
    if where is None:
        return {COMMIT: None, "code.is_dirty": None}
    commit, root = where.splitlines()
    changed = _ask_git(
        Path(root), "status", "--porcelain", "-z", "--untracked-files=no", "--no-renames"
    )
    state: dict[str, Any] = {
        COMMIT: commit,
        "code.is_dirty": None if changed is None else bool(changed),
    }
    for entry in filter(None, (changed or "").split("\0")):
        path = Path(root, name := entry[3:])  # after two letters of status and a space
        state[f"{CHANGED_FILE}{name}"] = (
            format_digest(digest_bytes(path.read_bytes())) if path.is_file() else None
        )
    return state


def _ask_git(folder: Path, *arguments: str) -> str | None:
    command = ["git", "--no-optional-locks", "-C", str(folder), *arguments]  # writes nothing
    try:
        done = subprocess.run(
            command, capture_output=True, check=False, stdin=subprocess.DEVNULL, timeout=5
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.decode(errors="backslashreplace") if done.returncode == 0 else None


# our overrides, except settings, which are part of the training
_OURS = re.compile(r"[+~]*(callbacks[./])?determinism(?!\.settings\.)([.=]|$)")
# names of values, even in {nested: {mappings: 1}}
_NAME = re.compile(r"([\w.\-/@]+)[\"']?\s*[=:]")


def script_words(start: str | Path | None = None) -> list[str]:
    """Return the script as given to ``python`` in the folder ``start``; [] in an interpreter."""
    spec = getattr(sys.modules.get("__main__"), "__spec__", None)
    if spec is not None:
        return ["-m", str(spec.name).removesuffix(".__main__")]
    script = sys.argv[0] if sys.argv else ""
    if script in ("", "-", "-c"):
        return []
    start = Path.cwd() if start is None else Path(start)
    path = start / script  # ``script`` itself if absolute
    is_below = path.is_relative_to(start) and ".." not in path.parts
    return [path.relative_to(start).as_posix() if is_below else path.name]


def command_choice(
    overrides: Sequence[str] | None = None, *, start: str | Path | None = None
) -> dict[str, Any]:
    """Return script and arguments of this process as a choice, without secrets.

    For a Hydra application the arguments are the overrides, except ours.
    """
    script = script_words(start)
    words = (
        _arguments(script)
        if overrides is None
        else [word for word in overrides if not _OURS.match(word)]
    )
    return {"process": {"argv": [*script, *_shown(words)]}}


def _arguments(script: Sequence[str]) -> list[str]:
    """Return the original arguments, even if the script changed ``sys.argv``."""
    if not script:
        return []
    name = script[1] if script[0] == "-m" else sys.argv[0]
    given = sys.orig_argv
    # coverage and other launchers replace the script's command line
    return given[given.index(name) + 1 :] if name in given else sys.argv[1:]


def _shown(words: Sequence[str]) -> Iterator[str]:
    """Yield the words without secrets: ``name=secret``, or the word after ``--name``."""
    is_secret = False
    for word in words:
        name, equals, _ = word.partition("=")
        if is_secret or any(map(_names_secret, _NAME.findall(word))):
            yield f"{name}{equals}{WITHHELD}" if equals and not is_secret else WITHHELD
            is_secret = False
        else:
            yield word
            is_secret = word.startswith("-") and _names_secret(word)


def _names_secret(name: str) -> bool:
    last = re.split(r"[./@]", name)[-1]
    return _SECRET.search(last.lstrip("-").replace("-", "_")) is not None
