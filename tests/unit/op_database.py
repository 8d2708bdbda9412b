"""Sweeps the samples of torch's own operator database and prints what it found as one line of JSON."""

import itertools
import json
import sys
import types
import unittest
import warnings

if __name__ == "__main__":
    # torch's test package imports it for assertions that are not used here
    stand_in = types.ModuleType("expecttest")
    stand_in.TestCase = unittest.TestCase
    stand_in.assert_expected_inline = None
    sys.modules["expecttest"] = stand_in
    warnings.simplefilter("ignore")  # beta and deprecated ops are swept too

    import torch
    from op_programs import total_of
    from op_sweep import SweepMode
    from torch.testing._internal.common_methods_invocations import op_db  # looked at in torch 2.13

    torch.set_num_threads(1)
    mode = SweepMode()
    failures = []
    num_samples = 0
    for op in op_db:
        if op.name.startswith("jiterator"):
            continue  # for GPUs only
        for dtype in (torch.float32, torch.int64, torch.complex64, torch.bfloat16):
            if dtype not in op.dtypes:
                continue
            needs_grad = op.supports_autograd and dtype in (torch.float32, torch.complex64)
            for sample in itertools.islice(op.sample_inputs("cpu", dtype, requires_grad=needs_grad), 4):
                num_samples += 1
                try:
                    with mode:
                        total = total_of(op(sample.input, *sample.args, **sample.kwargs))
                        if total is not None:
                            total.backward()
                except (RuntimeError, NotImplementedError) as error:  # samples that this build cannot run
                    failures.append(f"{op.name} {dtype} {error}")
    report = {
        "silent": sorted(map(list, mode.silent), key=str),
        "untagged": sorted(mode.untagged),
        "copying": sorted(mode.copying),
        "aliasing": sorted(mode.aliasing),
        "num_checked": len(mode.checked),
        "num_samples": num_samples,
        "num_failed": len(failures),
        "failures": failures[:50],
    }
    print(json.dumps(report))
