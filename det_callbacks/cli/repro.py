"""Writes ``repro.py``, a file of plain torch that repeats one saved call, and runs it."""

import json
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from det_callbacks.runs.files import (
    READ_ERRORS,
    damaged,
    make_folder,
    open_file,
    replace_atomically,
    writing,
)

INPUTS = "inputs.safetensors"
REPRO = "repro.py"
NUM_RUNS = 20
_SECONDS = 900.0
_OF_TORCH = ("aten.", "prims.", "quantized.", "mkldnn.", "onednn.", "mkl.")
_DTYPES = {"BOOL": "bool", "U8": "uint8", "BF16": "bfloat16"}
_DTYPES |= {f"I{bits}": f"int{bits}" for bits in (8, 16, 32, 64)} | {
    f"F{bits}": f"float{bits}" for bits in (16, 32, 64)
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Repro:
    """What was written: ``path`` is None if nothing was, and ``text`` says why;
    else it is what the file printed.
    """

    path: Path | None
    text: str


def make_repro(saved: Path, folder: Path, *, settings: Mapping[str, Any], python: str) -> Repro:
    """Write ``repro.py`` and its inputs for a call that ``CallCapture`` saved, and run it.

    The call of a backward op is repeated through the forward op, if that was saved and the file
    runs; else by itself.
    """
    content = _read_call(saved)
    path, call = folder / REPRO, content["call"]
    op, problem = call["op"], call["problem"]
    make_folder(folder)
    with writing(folder):
        saved.replace(folder / INPUTS)
    for form in () if problem else (_through_forward(content), _by_itself(content)):
        if form is None:
            continue
        text = _rendered(title=form[0], body=form[1], call=call, content=content, settings=settings)
        replace_atomically(path, text.encode())
        if not op.startswith(_OF_TORCH):
            return Repro(
                path=path,
                text=f"{op} is not an op of torch: name the module that registers it in MODULES",
            )
        try:
            done = run_file(python, path)
        except (OSError, subprocess.TimeoutExpired) as error:
            return Repro(path=path, text=f"it was not tried: {error}")
        if done.returncode in (0, 1):
            return Repro(path=path, text=done.stdout.rstrip())
        problem = (done.stderr.strip().splitlines() or ["it failed"])[-1]
    with writing(folder):
        path.unlink(missing_ok=True)
    return Repro(path=None, text=f"the call cannot be repeated: {problem.rstrip('.')}")


def _rendered(
    *,
    title: str,
    body: str,
    call: Mapping[str, Any],
    content: Mapping[str, Any],
    settings: Mapping[str, Any],
) -> str:
    loader = FileSystemLoader(Path(__file__).parent)
    environment = Environment(loader=loader, undefined=StrictUndefined, keep_trailing_newline=True)
    tensors = call["tensors"].values()
    is_on_device = any(tensor["device"] != "cpu" for tensor in tensors)
    is_complex = any("complex" in tensor["dtype"] for tensor in tensors)
    return environment.get_template(f"{REPRO}.j2").render(
        title=title,
        op=call["op"],
        body=body,
        runs=NUM_RUNS,
        inputs=INPUTS,
        wide="torch.complex128" if is_complex else "torch.float64",
        dtypes=_dtypes_of(content),
        threads=settings.get("num_threads") or 1,
        deterministic=int(settings.get("deterministic_algorithms") != "disabled"),
        settings=_settings_text(settings, call["op"], is_on_device=is_on_device),
    )


def run_file(python: str, path: Path) -> "subprocess.CompletedProcess[str]":
    """Run a file that was written."""
    command = [python, str(path)]
    return subprocess.run(
        command,
        capture_output=True,
        text=True,
        check=False,
        stdin=subprocess.DEVNULL,
        timeout=_SECONDS,
    )


def _read_call(saved: Path) -> Any:
    try:
        with open_file(saved) as file:
            header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
        call = json.loads(header.pop("__metadata__")["call"])
        call["sections"] = {entry["dtype"] for entry in header.values()}
        call["saved"] = [*header]
    except READ_ERRORS as error:
        raise damaged(saved, error) from error
    return call


def _dtypes_of(content: Mapping[str, Any]) -> str:
    names = ", ".join(f'"{name}": torch.{_DTYPES[name]}' for name in sorted(content["sections"]))
    return f"{{{names}}}"


def _settings_text(settings: Mapping[str, Any], op: str, *, is_on_device: bool) -> str:
    lines = [
        'torch.set_float32_matmul_precision("'
        f'{settings.get("float32_matmul_precision") or "highest"}")'
    ]
    if is_on_device:
        names = ("benchmark", "deterministic", "allow_tf32")
        lines += [
            f"torch.backends.cudnn.{name} = {settings.get(f'cudnn_{name}')}" for name in names
        ]
        if workspace := settings.get("cublas_workspace_config"):
            lines.append(f'os.environ["CUBLAS_WORKSPACE_CONFIG"] = "{workspace}"')
    if not op.startswith(_OF_TORCH):
        lines += [
            'MODULES = []  # modules that register the op, such as ["my_ops"]',
            "[*map(__import__, MODULES)]",
        ]
    return "\n".join(lines)


def _by_itself(content: Mapping[str, Any]) -> tuple[str, str]:
    """Return a title, and the statements that call the op."""
    call = content["call"]
    lines = _lines_of(call, "", with_gradients=False)
    if "generator" in content["saved"]:
        lines.append('torch.set_rng_state(t["generator"])')
    lines.append(f"result = torch.ops.{call['op']}({', '.join(call['arguments'])})")
    computed = (
        "[result] if isinstance(result, torch.Tensor) else [r for r in result if isinstance(r, "
        "torch.Tensor)]"
    )
    if opaque := call["opaque"]:  # their bits mean nothing
        computed = (
            "[r for i, r in enumerate(result) if isinstance(r, torch.Tensor) and i not in "
            f"{opaque}]"
        )
    lines.append(
        f"return {'[' + ', '.join(call['written']) + ']' if call['written'] else computed}"
    )
    return f"Calls {call['op']} with saved inputs.", _indented(lines)


def _through_forward(content: Mapping[str, Any]) -> tuple[str, str] | None:
    """Return the same for the forward call whose gradient the op computes,
    or None if it cannot be called.
    """
    call, forward = content["call"], content.get("forward")
    if forward is None or forward["problem"]:
        return None
    leaves = [name for name, tensor in forward["tensors"].items() if tensor["requires_grad"]]
    if not leaves:
        return None
    name, number = content["gradient"]
    lines = _lines_of(forward, "forward.", with_gradients=True)
    if "forward.generator" in content["saved"]:
        lines.append('torch.set_rng_state(t["forward.generator"])')
    lines.append(f"result = torch.ops.{forward['op']}({', '.join(forward['arguments'])})")
    output = f"result[{number}]" if len(forward["outputs"]) > 1 else "result"
    gradient = _source_of(call["tensors"][name], name, "")
    lines.append(
        f"gradients = torch.autograd.grad({output}, [{', '.join(leaves)}], {gradient}, "
        "allow_unused=True)"
    )
    lines.append("return [gradient for gradient in gradients if gradient is not None]")
    return (
        f"Calls {forward['op']} with saved inputs, and {call['op']} in its backward pass.",
        _indented(lines),
    )


def _source_of(tensor: Mapping[str, Any], name: str, prefix: str) -> str:
    """Return the expression that makes a tensor from the saved ones."""
    source, kind, shape = f't["{prefix}{tensor["of"]}"]', tensor["dtype"], tuple(tensor["shape"])
    if kind.removeprefix("torch.") not in _DTYPES.values():
        source += f".view({kind})" + (f".reshape({shape})" if tensor["stride"] is None else "")
    if tensor["device"] != "cpu":
        source = tensor["of"] if tensor["of"] != name else f'{source}.to("{tensor["device"]}")'
    return source + (
        f".as_strided({shape}, {tuple(tensor['stride'])}, {tensor['offset']})"
        if tensor["stride"]
        else ""
    )


def _lines_of(call: Mapping[str, Any], prefix: str, *, with_gradients: bool) -> list[str]:
    """Return the statements that name the tensors of a call."""
    lines: list[str] = []
    for name, tensor in call["tensors"].items():
        leaf = ".requires_grad_()" if with_gradients and tensor["requires_grad"] else ""
        about = f"{tensor['dtype'].removeprefix('torch.')} {tensor['shape']}"
        lines.append(f"{name} = {_source_of(tensor, name, prefix)}{leaf}  # {about}")
    return lines


def _indented(lines: list[str]) -> str:
    return "\n".join(f"    {line}" for line in lines)
