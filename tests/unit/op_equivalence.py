"""Runs the samples of torch's own operator database under BitwiseEquivalenceMode; prints one line of JSON."""

import itertools
import json
import sys
import types
import unittest
import warnings
from collections import Counter

if __name__ == "__main__":
    # torch's test package imports it for assertions that are not used here
    stand_in = types.ModuleType("expecttest")
    stand_in.TestCase = unittest.TestCase
    stand_in.assert_expected_inline = None
    sys.modules["expecttest"] = stand_in
    warnings.simplefilter("ignore")  # of ops that torch calls beta or deprecated

    import torch
    from op_programs import total_of
    from torch.testing._internal.common_methods_invocations import op_db  # looked at in torch 2.13

    from det_callbacks import BitwiseEquivalenceMode

    torch.set_num_threads(1)
    mode = BitwiseEquivalenceMode()
    found: Counter[str] = Counter()
    failures = []
    generators = []
    num_samples = 0
    stride = int(sys.argv[1]) if len(sys.argv) > 1 else 1
    for op in op_db[::stride]:
        if op.name.startswith("jiterator"):
            continue  # for GPUs only
        for dtype in (torch.float32, torch.int64, torch.complex64, torch.bfloat16):
            if dtype not in op.dtypes:
                continue
            needs_grad = op.supports_autograd and dtype in (torch.float32, torch.complex64)
            for sample in itertools.islice(op.sample_inputs("cpu", dtype, requires_grad=needs_grad), 4):
                num_samples += 1
                mode.begin()
                try:
                    total = total_of(op(sample.input, *sample.args, **sample.kwargs))
                    if total is not None:
                        total.backward()
                except (RuntimeError, NotImplementedError) as error:
                    failures.append(f"{op.name} {dtype} {error}")
                finally:
                    found.update(f"{item.op} {item.output} in {op.name} {item.dtype}" for item in mode.finish())
    report = {
        "found": sorted(found),
        "num_ops": mode.num_ops,
        "num_compared": mode.num_compared,
        "skipped": dict(mode.skipped),
        "num_samples": num_samples,
        "num_failed": len(failures),
        "failures": failures[:50],
    }
    print(json.dumps(report))
