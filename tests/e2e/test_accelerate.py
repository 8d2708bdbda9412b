"""A script of Accelerate, started by ``accelerate launch`` in two processes;
needs accelerate and MPI (nox -s hf).
"""

import os
import shutil
import subprocess
import sys

import pytest

from det_callbacks.runs.store import Run

pytest.importorskip(
    "accelerate", reason="accelerate is not installed: pip install 'det_callbacks[hf]'"
)

SCRIPT = """\
import sys

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

set_seed(0)
accelerator = Accelerator(cpu=True)
model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 2))
optimizer = torch.optim.AdamW(model.parameters(), lr=float(sys.argv[1]))
data = TensorDataset(torch.randn(64, 8), torch.randint(0, 2, (64,)))
model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(data, batch_size=8, shuffle=True))
for batch, labels in loader:
    optimizer.zero_grad()
    accelerator.backward(nn.functional.cross_entropy(model(batch), labels))
    optimizer.step()
accelerator.end_training()
"""  # noqa: E501  # a text


@pytest.mark.ddp
@pytest.mark.skipif(
    not shutil.which("mpirun"),
    reason="accelerate launch starts several processes on a CPU by mpirun",
)
def test_two_processes_of_accelerate_launch_are_two_ranks(tmp_path):
    (tmp_path / "train.py").write_text(SCRIPT)
    (tmp_path / "hosts").write_text("localhost slots=2\n")
    launcher = ["accelerate", "launch", "--cpu", "--num_processes", "2", "--num_machines", "1"]
    launcher += ["--mpirun_hostfile", "hosts", "--mixed_precision", "no", "--dynamo_backend", "no"]
    # Open MPI refuses root, which containers run as
    root = {
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "OMP_NUM_THREADS": "1",
    }

    def run(verb: str, rate: str) -> subprocess.CompletedProcess[str]:
        command = [
            sys.executable,
            "-m",
            "det_callbacks",
            verb,
            "run",
            "--",
            *launcher,
            "train.py",
            rate,
        ]
        return subprocess.run(
            command, cwd=tmp_path, env={**os.environ, **root}, capture_output=True, text=True
        )

    done = run("record", "0.001")
    assert done.returncode == 0, done.stdout + done.stderr
    recorded = Run.open(tmp_path / "run")
    assert (recorded.ranks, len(recorded.rank(0).steps(0))) == ([0, 1], 4)
    done = run("verify", "0.001")
    assert done.returncode == 0, done.stdout + done.stderr
    done = run("verify", "0.002")
    assert done.returncode == 1, done.stdout + done.stderr
    assert (
        "optimizer.AdamW.lr is 0.001 in the reference and 0.002 in the current run" in done.stdout
    )
