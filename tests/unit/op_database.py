"""Sweeps the samples of torch's own operator database, and prints what it found as one line of JSON.

op_database.py                  what ops write without saying so, all of them
op_database.py equivalence N    what each N-th op gives otherwise when it is run again
"""

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

    from det_callbacks import BitwiseEquivalenceMode

    torch.set_num_threads(1)
    is_equivalence, stride = len(sys.argv) > 1, int(sys.argv[2]) if len(sys.argv) > 2 else 1
    mode = BitwiseEquivalenceMode() if is_equivalence else SweepMode()
    failures = []
    num_samples = 0
    for op in op_db[::stride]:
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
    report = {"num_samples": num_samples, "num_failed": len(failures), "failures": failures[:50]}
    if isinstance(mode, BitwiseEquivalenceMode):
        report["found"] = sorted({(found.op, found.output, found.dtype) for found in mode.get_mismatches()})
        report |= {"num_ops": mode.num_ops, "num_compared": mode.num_compared, "skipped": dict(mode.skipped)}
    else:
        report |= {"faults": sorted(map(list, mode.faults), key=str), "num_checked": len(mode.checked)}
    print(json.dumps(report))
