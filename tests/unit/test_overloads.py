import json
import subprocess
import sys
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import op_programs
import pytest
import torch
from op_sweep import SweepMode
from torch import Tensor
from torch.distributed import fsdp  # defines ops of its own
from tracing import traced, with_role
from versions import TORCH

from det_callbacks.trace.overloads import (
    AUTOCASTS_INSIDE,
    HIDDEN_STATES,
    HIDDEN_WRITES,
    OPAQUE_OUTPUTS,
    OPAQUE_WRITES,
    OVERWRITES,
    REDUCING,
    RELAYOUTS,
    UNDECLARED_VIEWS,
    UNINITIALISED,
    WRITTEN_IF,
    OpKind,
    make_plan,
    written_arguments,
)

aten = torch.ops.aten
assert fsdp.fully_shard
ELSEWHERE = {
    "fsdp.all_gather_copy_in",  # in a tensor that it is handed: tests/unit/test_collective_ranks.py
    # CUDA's kernel leaves it unwritten without a reduction; the CPU's does not
    "aten.nll_loss2d_forward",
    # the reserved buffer is empty on the CPU
    *("aten._batch_norm_with_update", "aten.batch_norm_backward"),
}
"""Entries of the tables that only other devices can confirm,
besides those of ops without a kernel on the CPU.
"""
FIRST = {"aten.shallow_copy_data_": (2, 14)}
"""Entry of the tables -> the first version of torch that has this op,
where the oldest supported one does not.
"""


def op_named(base: str) -> object:
    namespace, _, name = base.partition(".")
    return getattr(getattr(torch.ops, namespace), name)


def on_cpu(table: Mapping[str, Collection[Any]]) -> set[tuple[str, Any]]:
    there = {
        base: parts
        for base, parts in table.items()
        if base not in ELSEWHERE
        and torch._C._dispatch_has_kernel_for_dispatch_key(base.replace(".", "::"), "CPU")
    }
    assert there
    return {(base, part) for base, parts in there.items() for part in parts}


# of ops that torch calls beta or deprecated, which are swept all the same
@pytest.mark.filterwarnings("ignore")
@pytest.mark.slow
def test_what_the_tables_tell_is_what_happens():
    """Each op of the programs is run twice; that nothing is kept silent is asked
    of all ops, below.
    """
    torch.manual_seed(0)
    sweep = SweepMode()
    with sweep:
        for program in op_programs.PROGRAMS.values():
            program()
    assert len(sweep.checked) >= 190
    assert sweep.faults == set()
    assert sweep.differing == on_cpu(OPAQUE_OUTPUTS)
    assert on_cpu(HIDDEN_WRITES) | on_cpu(OPAQUE_WRITES) <= sweep.written
    assert {
        "aten.rrelu_with_noise",
        "aten.normal_",
        "aten.bernoulli_",
        "aten.multinomial",
    } <= sweep.drawing
    views = {base for base in UNDECLARED_VIEWS if base.startswith("aten.")}
    assert sweep.checked >= views - {"aten.unsafe_split_with_sizes"}


def test_the_sweep_sees_what_the_tables_do_not_tell(monkeypatch, request):
    monkeypatch.delitem(OPAQUE_OUTPUTS, "aten._ctc_loss")
    monkeypatch.delitem(HIDDEN_WRITES, "aten.native_batch_norm")
    make_plan.cache_clear()
    request.addfinalizer(make_plan.cache_clear)
    mode = SweepMode()
    with mode:
        torch.nn.BatchNorm1d(3)(torch.randn(4, 3))
        aten._ctc_loss(torch.randn(8, 1, 5).log_softmax(-1), torch.tensor([[1, 2]]), [5], [2])
    assert mode.faults == {
        ("aten._ctc_loss", 1),
        ("aten.native_batch_norm", "running_mean"),
        ("aten.native_batch_norm", "running_var"),
    }


def test_every_entry_names_an_op_and_its_arguments():
    states = {base: [name] for base, name in HIDDEN_STATES.items()}
    for table in (HIDDEN_WRITES, OPAQUE_WRITES, WRITTEN_IF, states):
        for base, names in table.items():
            declared = {
                argument.name: argument.alias_info
                for argument in op_named(base).default._schema.arguments
            }
            assert set(names) <= declared.keys(), base
            if table is HIDDEN_WRITES:
                assert not any(declared[name] for name in names), (
                    f"{base} declares its writes by now"
                )
    for base, indices in OPAQUE_OUTPUTS.items():
        assert max(indices) < len(op_named(base).default._schema.returns), base
    for base in UNINITIALISED | UNDECLARED_VIEWS | OVERWRITES | RELAYOUTS | AUTOCASTS_INSIDE:
        if FIRST.get(base, TORCH) <= TORCH:
            assert op_named(base).overloads(), base
        else:
            assert not hasattr(aten, base.removeprefix("aten.")), (
                f"{base} is older than it says here"
            )
    for name, gradient in REDUCING.items():
        base, _, overload = name.rpartition(".")
        assert gradient in (None, *make_plan(getattr(op_named(base), overload)).argument_names), (
            name
        )


def test_every_overload_of_torch_has_a_plan():
    names = {
        name.split(".")[0]
        for name in torch._C._dispatch_get_all_op_names()
        if name.startswith("aten::")
    }
    packets = [getattr(aten, name.removeprefix("aten::")) for name in names]
    overloads = [getattr(packet, overload) for packet in packets for overload in packet.overloads()]
    assert len(overloads) > 3000
    for func in overloads:
        plan = make_plan(func)
        declared = [
            a.name
            for a in func._schema.arguments
            if a.alias_info is not None and a.alias_info.is_write
        ]
        undeclared = HIDDEN_WRITES.get(plan.base, ())
        assert [write.name for write in plan.writes if write.name not in undeclared] == declared, (
            func
        )
        assert plan.is_functional <= (not plan.writes), func
        assert plan.base not in UNDECLARED_VIEWS or (plan.kind is OpKind.VIEW) == (not declared), (
            func
        )


def test_batch_norm_and_noise_are_written_in_training_only_and_an_out_variant_writes_its_out():
    x, mean, var = torch.randn(4, 3), torch.zeros(3), torch.ones(3)
    plan = make_plan(aten.native_batch_norm.default)
    training = (x, None, None, mean, var, True, 0.1, 1e-5)
    assert [id(tensor) for tensor in written_arguments(plan, training, {})] == [id(mean), id(var)]
    assert written_arguments(plan, (x, None, None, mean, var, False, 0.1, 1e-5), {}) == []
    noise = torch.full((6,), 7.0)
    plan = make_plan(aten.rrelu_with_noise.default)
    for is_training in (False, True):
        args = (torch.linspace(-1, 1, 6), noise, 0.1, 0.3, is_training)
        assert written_arguments(plan, args, {}) == ([noise] if is_training else [])
        plan.call(*args)
        assert bool((noise == 7).all()) is not is_training
    outs = {name: torch.empty(0) for name in ("out", "save_mean", "save_invstd")}
    written = written_arguments(
        make_plan(aten.native_batch_norm.out), (*training[:5], False, 0.1, 1e-5), outs
    )
    assert [id(tensor) for tensor in written] == [id(tensor) for tensor in outs.values()]


@pytest.mark.parametrize(
    "kind", [torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.Adagrad]
)
def test_fused_updates_write_gradients_only_when_they_unscale_them(kind):
    num_written = []
    for is_scaled in (False, True):
        weight = torch.nn.Parameter(torch.ones(3))
        weight.grad = torch.full((3,), 4.0)
        optimizer = kind([weight], lr=0.1, fused=True)
        if is_scaled:  # as GradScaler does
            optimizer.grad_scale, optimizer.found_inf = torch.tensor(2.0), torch.zeros(())
        trace = traced(optimizer.step)
        written = [
            site for site in with_role(trace, "output") if site.op.startswith("aten._fused_")
        ]
        assert {site.op.removesuffix(".default") for site in written} <= WRITTEN_IF.keys()
        num_written.append(len(written))
        assert weight.grad.tolist() == [2.0 if is_scaled else 4.0] * 3
    assert num_written[1] == num_written[0] + 1 > 1


def overwrite(base: str, target: Tensor) -> None:
    op, ones = op_named(base), torch.ones(8)
    if base == "fsdp.split_with_sizes_copy":
        op(torch.ones(2, 4), [4], 1, out=[target.view(2, 4)])
    elif base.startswith("fsdp.chunk_cat"):
        op([torch.ones(3)], 0, 2, out=target.view(2, 4)[:, :2])
        target[2:4] = target[6:] = 0.0
    elif base.startswith("aten._foreach_"):
        op([target], *[[ones]] * ("copy" in base))
    else:
        op(
            target,
            *{"aten.copy_": (ones,), "aten.fill_": (2.0,), "aten.geometric_": (0.5,)}.get(base, ()),
        )


# All that FSDP2 has: torch 2.15 gathers gradients by another one than before.
INTO_BUFFERS = sorted(
    name.replace("::", ".")
    for name in torch._C._dispatch_get_all_op_names()
    if name.startswith("fsdp::")
    and any(one.name == "out" for one in torch._C._get_schema(name, "").arguments)
)
assert len(INTO_BUFFERS) >= 2


@pytest.mark.parametrize("base", [*sorted(OVERWRITES), *INTO_BUFFERS])
def test_overwriting_ops_do_not_read_what_they_write(base):
    op = op_named(base)
    assert make_plan(getattr(op, op.overloads()[0])).is_overwrite
    targets = [torch.full((8,), before) for before in (0.25, float("nan"))]
    for target in targets:
        torch.manual_seed(0)
        overwrite(base, target)
    assert torch.equal(*targets)


@pytest.mark.soak
def test_nothing_is_kept_silent_by_any_op_that_torch_tests():
    """Runs the samples of torch's own operator database, in a process of its own: importing it
    changes global flags.
    """
    script = Path(__file__).with_name("op_sweep.py")
    done = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, timeout=1500, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["faults"] == []
    assert found["num_checked"] > 500
    assert found["num_failed"] < 0.02 * found["num_samples"], found["failures"]
