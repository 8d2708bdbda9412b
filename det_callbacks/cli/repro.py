"""Writes ``repro.py``, a file of plain torch that repeats one saved call, and runs it."""

import json
import os
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from det_callbacks.runs.disk import make_folder, replace_atomically, writing
from det_callbacks.runs.files import READ_ERRORS, damaged, open_file

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
    """What was written: ``path`` is None if nothing was, and ``text`` says why; else it is what the file printed."""

    path: Path | None
    text: str
    num_distinct: int | None = None


def make_repro(saved: Path, folder: Path, *, settings: Mapping[str, Any], python: str) -> Repro:
    """Write ``repro.py`` and its inputs for a call that ``CallCapture`` saved, and run it.

    The call of a backward op is repeated through the forward op, if that was saved and the file runs; else by itself.
    """
    content = _read_call(saved)
    path, problem = folder / REPRO, ""
    loader = FileSystemLoader(Path(__file__).parent)
    environment = Environment(loader=loader, undefined=StrictUndefined, keep_trailing_newline=True)
    template = environment.get_template("repro.py.j2")
    forms = [form for form in (_through_forward(content), _by_itself(content)) if form is not None]
    make_folder(folder)
    with writing(folder):
        os.replace(saved, folder / INPUTS)
    for title, op, body in forms:
        call = content["forward"] if "backward" not in content else content["backward"]
        if call["problem"]:
            problem = call["problem"]
            break
        is_complex = any("complex" in tensor["dtype"] for tensor in call["tensors"].values())
        text = template.render(
            title=title,
            op=op,
            body=body,
            runs=NUM_RUNS,
            inputs=INPUTS,
            wide="torch.complex128" if is_complex else "torch.float64",
            dtypes=_dtypes_of(content),
            threads=settings.get("num_threads") or 1,
            deterministic=int(settings.get("deterministic_algorithms") != "disabled"),
            settings=_settings_text(settings, op, is_on_device=_is_on_device(call)),
        )
        replace_atomically(path, text.encode())
        if not op.startswith(_OF_TORCH):
            return Repro(path=path, text=f"{op} is not an op of torch: name the module that registers it in MODULES")
        try:
            done = subprocess.run(
                [python, str(path)],
                capture_output=True,
                text=True,
                check=False,
                stdin=subprocess.DEVNULL,
                timeout=_SECONDS,
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            return Repro(path=path, text=f"it was not tried: {error}")
        if done.returncode in (0, 1):
            number = done.stdout.partition(" same inputs, ")[2].partition(" ")[0]
            return Repro(path=path, text=done.stdout.rstrip(), num_distinct=int(number))
        problem = (done.stderr.strip().splitlines() or ["it failed"])[-1]
    with writing(folder):
        path.unlink(missing_ok=True)
    return Repro(path=None, text=f"the call cannot be repeated: {problem}")


def saved_digests(saved: Path) -> list[str]:
    """Return the digests of the outputs that the saved call had."""
    return list(_read_call(saved)["digests"])


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


def _is_on_device(call: Mapping[str, Any]) -> bool:
    return any(tensor["device"] != "cpu" for tensor in call["tensors"].values())


def _settings_text(settings: Mapping[str, Any], op: str, *, is_on_device: bool) -> str:
    lines = [f'torch.set_float32_matmul_precision("{settings.get("float32_matmul_precision") or "highest"}")']
    if is_on_device:
        names = ("benchmark", "deterministic", "allow_tf32")
        lines += [f"torch.backends.cudnn.{name} = {settings.get(f'cudnn_{name}')}" for name in names]
        if workspace := settings.get("cublas_workspace_config"):
            lines.append(f'os.environ["CUBLAS_WORKSPACE_CONFIG"] = "{workspace}"')
    if not op.startswith(_OF_TORCH):
        lines += ['MODULES = []  # modules that register the op, such as ["my_ops"]', "[*map(__import__, MODULES)]"]
    return "\n".join(lines)


def _by_itself(content: Mapping[str, Any]) -> tuple[str, str, str]:
    is_backward = "backward" in content
    call = content["backward" if is_backward else "forward"]
    lines = _lines_of(call, "", with_gradients=False)
    if "generator" in content["saved"]:
        lines.append('torch.set_rng_state(t["generator"])')
    lines.append(f"result = torch.ops.{call['op']}({', '.join(call['arguments'])})")
    written = f"[{', '.join(call['written'])}]"
    computed = "([result] if isinstance(result, torch.Tensor) else [r for r in result if isinstance(r, torch.Tensor)])"
    if opaque := call["opaque"]:
        computed = f"[r for i, r in enumerate(result) if isinstance(r, torch.Tensor) and i not in {tuple(opaque)}]"
    lines.append(f"return {written if call['written'] else computed}")
    return f"Calls {call['op']} from saved inputs.", call["op"], _indented(lines)


def _through_forward(content: Mapping[str, Any]) -> tuple[str, str, str] | None:
    """Return the forward call and its gradients, or None if the forward call or its incoming gradient is unknown."""
    if "backward" not in content or content["forward"]["problem"] or content["forward"]["written"]:
        return None
    forward, backward = content["forward"], content["backward"]
    named = sorted(backward["tensors"].items(), key=lambda item: not item[0].startswith("grad"))
    pairs = [
        (name, index)
        for name, tensor in named
        for index, shape in enumerate(forward["outputs"])
        if tensor["shape"] == shape and tensor["of"] == name and tensor["stride"] is None
    ]
    leaves = [name for name, tensor in forward["tensors"].items() if tensor["requires_grad"]]
    if not pairs or not leaves:
        return None
    gradient, index = pairs[0]
    lines = _lines_of(forward, "forward.", with_gradients=True)
    if "forward.generator" in content["saved"]:
        lines.append('torch.set_rng_state(t["forward.generator"])')
    lines.append(f"result = torch.ops.{forward['op']}({', '.join(forward['arguments'])})")
    output = f"result[{index}]" if len(forward["outputs"]) > 1 else "result"
    moved = _moved(backward["tensors"][gradient])
    lines.append(
        f'gradients = torch.autograd.grad({output}, [{", ".join(leaves)}], t["{gradient}"]{moved}, allow_unused=True)'
    )
    lines.append("return [gradient for gradient in gradients if gradient is not None]")
    title = f"Calls {forward['op']} from saved inputs, and the backward op of its gradient, {backward['op']}."
    return title, backward["op"], _indented(lines)


def _lines_of(call: Mapping[str, Any], prefix: str, *, with_gradients: bool) -> list[str]:
    """Return the statements that make the tensors of a call."""
    lines: list[str] = []
    for name, tensor in call["tensors"].items():
        source = f't["{prefix}{tensor["of"]}"]'
        kind, shape = tensor["dtype"], tuple(tensor["shape"])
        if kind.removeprefix("torch.") not in _DTYPES.values():
            source += f".view({kind})" + (f".reshape({shape})" if tensor["stride"] is None else "")
        if tensor["of"] == name:
            source += _moved(tensor)
        elif tensor["device"] != "cpu":
            source = tensor["of"]  # a view of the memory that was moved
        if tensor["stride"] is not None:
            source += f".as_strided({shape}, {tuple(tensor['stride'])}, {tensor['offset']})"
        if with_gradients and tensor["requires_grad"]:
            source += ".requires_grad_()"
        lines.append(f"{name} = {source}  # {kind.removeprefix('torch.')} {list(shape)}")
    return lines


def _moved(tensor: Mapping[str, Any]) -> str:
    return "" if tensor["device"] == "cpu" else f'.to("{tensor["device"]}")'


def _indented(lines: list[str]) -> str:
    return "\n".join(f"    {line}" for line in lines)
