"""Each setting as something that can be turned: how it is read, applied and put back, and until when."""

import importlib
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from operator import attrgetter
from typing import Any, Literal

import torch

from det_callbacks.settings.process import start_environment

Timing = Literal["any", "before_cuda", "before_nccl", "once", "start"]
"""Until when a setting can be made: at any time, before a CUDA context or an NCCL communicator exists, once before
the first use, or only when the process starts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Knob:
    """One setting of a running process.

    Attributes:
        name: field of ``DeterminismSettings``.
        read: returns what is in force, asked of torch or the process.
        apply: puts a value in force; None where only a restart can.
        when: until when that works.
        variable: the environment variable behind it, if any.
        as_text: value -> text of that variable.
        line: how to set it by hand, with {value!r}.
    """

    name: str
    read: Callable[[], Any]
    apply: Callable[[Any], object] | None
    when: Timing = "any"
    variable: str | None = None
    as_text: Callable[[Any], str] = str
    line: str = ""

    @property
    def is_restorable(self) -> bool:
        """Whether a running process can put it back."""
        return self.when in ("any", "before_cuda", "before_nccl")

    def how(self, value: Any) -> str:
        """Return the line of code, or the variable, that sets a value."""
        if self.variable is not None:
            return f"{self.variable}={self.as_text(value)}"
        return self.line.format(value=value)


def algorithms_in_force() -> str:
    """Return "error", "warn" or "disabled"."""
    if not torch.are_deterministic_algorithms_enabled():
        return "disabled"
    return "warn" if torch.is_deterministic_algorithms_warn_only_enabled() else "error"


def set_algorithms(value: str) -> None:
    """Call ``torch.use_deterministic_algorithms``."""
    torch.use_deterministic_algorithms(value != "disabled", warn_only=value == "warn")


def matmul_precision_in_force() -> str:
    """Return "highest", "high" or "medium"; "mixed" when torch's two interfaces contradict each other."""
    try:
        return torch.get_float32_matmul_precision()
    except RuntimeError:  # torch refuses to answer when the newer fp32_precision attributes say something else
        return "mixed"


def reduction_in_force(kind: str) -> bool:
    """Return whether a reduced-precision reduction is allowed (torch may give that and whether split-K is)."""
    value = getattr(torch.backends.cuda.matmul, f"allow_{kind}_reduced_precision_reduction")
    return bool(value[0] if isinstance(value, tuple) else value)


def sdpa_in_force() -> tuple[str, ...]:
    """Return the implementations of scaled_dot_product_attention that are enabled."""
    cuda = torch.backends.cuda
    enabled = {
        "math": cuda.math_sdp_enabled(),
        "flash": cuda.flash_sdp_enabled(),
        "mem_efficient": cuda.mem_efficient_sdp_enabled(),
        "cudnn": cuda.cudnn_sdp_enabled(),
    }
    return tuple(name for name, is_on in enabled.items() if is_on)


def set_sdpa(names: tuple[str, ...]) -> None:
    """Enable exactly these implementations of scaled_dot_product_attention."""
    cuda = torch.backends.cuda
    cuda.enable_math_sdp("math" in names)
    cuda.enable_flash_sdp("flash" in names)
    cuda.enable_mem_efficient_sdp("mem_efficient" in names)
    cuda.enable_cudnn_sdp("cudnn" in names)


def inductor_config() -> Any:
    """Return Inductor's configuration if something imported it, else None."""
    return sys.modules.get("torch._inductor.config")


def load_inductor_config() -> Any:
    """Return Inductor's configuration; importing it takes a second, so only those who set something pay for it."""
    return importlib.import_module("torch._inductor.config")


def _read_inductor(name: str) -> Callable[[], bool]:
    def read() -> bool:
        config = inductor_config()
        if config is None:  # what it will start with (torch/_inductor/config.py, torch 2.13)
            return os.environ.get(f"TORCHINDUCTOR_{name.upper()}") == "1"
        return bool(getattr(config, name))

    return read


def _set_inductor(name: str) -> Callable[[Any], None]:
    def apply(value: bool) -> None:
        setattr(load_inductor_config(), name, value)

    return apply


def _attribute(name: str, path: str) -> Knob:
    owner_path, _, attribute = path.rpartition(".")
    owner = attrgetter(owner_path.removeprefix("torch."))(torch)
    return Knob(
        name=name,
        read=partial(getattr, owner, attribute),
        apply=partial(setattr, owner, attribute),
        line=f"{path} = {{value!r}}",
    )


def _flag(value: bool) -> str:
    return "1" if value else "0"


def _variable(name: str, variable: str, *, when: Timing = "any", kind: type = str) -> Knob:
    def read() -> Any:
        text = start_environment().get(variable) if when == "start" else os.environ.get(variable)
        if text is None:
            return None
        if kind is bool:
            return text not in ("0", "")
        return int(text) if kind is int and text.isdecimal() else text

    as_text = _flag if kind is bool else str

    def apply(value: Any) -> None:
        os.environ[variable] = as_text(value)

    return Knob(
        name=name,
        read=read,
        apply=None if when == "start" else apply,
        when=when,
        variable=variable,
        as_text=as_text,
    )


def _hash_seed() -> int | str | None:
    text = start_environment().get("PYTHONHASHSEED")
    if text is None or sys.flags.ignore_environment or text == "random":
        return None
    return int(text) if text.isdecimal() else text


def _cpu_capability() -> str:
    return str(torch.backends.cpu.get_cpu_capability()).lower()


_ALL = (
    Knob(
        name="num_interop_threads",  # first: it can fail, and then nothing else was done
        read=torch.get_num_interop_threads,
        apply=torch.set_num_interop_threads,
        when="once",
        line="torch.set_num_interop_threads({value!r})  # before anything is computed",
    ),
    _variable("cublas_workspace_config", "CUBLAS_WORKSPACE_CONFIG", when="before_cuda"),
    Knob(
        name="deterministic_algorithms",
        read=algorithms_in_force,
        apply=set_algorithms,
        line="det_callbacks.enforce_determinism({{'deterministic_algorithms': {value!r}}})",
    ),
    _attribute("fill_uninitialized_memory", "torch.utils.deterministic.fill_uninitialized_memory"),
    _attribute("cudnn_benchmark", "torch.backends.cudnn.benchmark"),
    _attribute("cudnn_deterministic", "torch.backends.cudnn.deterministic"),
    _attribute("cudnn_allow_tf32", "torch.backends.cudnn.allow_tf32"),
    Knob(
        name="float32_matmul_precision",
        read=matmul_precision_in_force,
        apply=lambda value: torch.set_float32_matmul_precision(value),
        line="torch.set_float32_matmul_precision({value!r})",
    ),
    *(
        replace(
            _attribute(
                f"{kind}_reduced_precision_reduction",
                f"torch.backends.cuda.matmul.allow_{kind}_reduced_precision_reduction",
            ),
            read=partial(reduction_in_force, kind),
        )
        for kind in ("fp16", "bf16")
    ),
    Knob(
        name="sdpa_backends",
        read=sdpa_in_force,
        apply=set_sdpa,
        line="det_callbacks.enforce_determinism({{'sdpa_backends': {value!r}}})",
    ),
    *(
        Knob(
            name=f"inductor_{name}",
            read=_read_inductor(name),
            apply=_set_inductor(name),
            line=f"torch._inductor.config.{name} = {{value!r}}",
        )
        for name in ("deterministic", "max_autotune")
    ),
    _variable("nccl_algo", "NCCL_ALGO", when="before_nccl"),
    _variable("nccl_proto", "NCCL_PROTO", when="before_nccl"),
    _variable("nccl_min_nchannels", "NCCL_MIN_NCHANNELS", when="before_nccl", kind=int),
    _variable("nccl_max_nchannels", "NCCL_MAX_NCHANNELS", when="before_nccl", kind=int),
    Knob(
        name="num_threads",
        read=torch.get_num_threads,
        apply=torch.set_num_threads,
        line="torch.set_num_threads({value!r})",
    ),
    _variable("mkl_cbwr", "MKL_CBWR", when="start"),
    Knob(
        name="aten_cpu_capability",
        read=_cpu_capability,
        apply=None,
        when="start",
        variable="ATEN_CPU_CAPABILITY",
    ),
    Knob(name="python_hash_seed", read=_hash_seed, apply=None, when="start", variable="PYTHONHASHSEED"),
    _variable("flash_attention_deterministic", "FLASH_ATTENTION_DETERMINISTIC", kind=bool),
    _variable("nvte_allow_nondeterministic_algo", "NVTE_ALLOW_NONDETERMINISTIC_ALGO", kind=bool),
)

KNOBS: Mapping[str, Knob] = {knob.name: knob for knob in _ALL}
"""Every setting but ``seed`` and ``allow``, in the order in which they are applied."""
