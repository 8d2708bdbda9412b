"""``det-callbacks record``, ``verify`` and ``check`` on loops without a Trainer,
which know nothing of them.
"""

import shutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import pytest
from checking import Ended
from forks import fork_process
from test_launch import TORCHRUN, start

from det_callbacks import compare_runs
from det_callbacks.cli import check as checks
from det_callbacks.cli import main
from det_callbacks.environment.variables import launch_request
from det_callbacks.integrations.torch_steps import follow_torch
from det_callbacks.runs.store import Run as StoredRun

APP = Path(__file__).with_name("loop_app.py")
Command = Callable[..., Ended]


def fork(
    words: Sequence[str], *, variables: Mapping[str, str], output: IO[bytes] | None = None
) -> int:
    @contextmanager
    def followed() -> Iterator[None]:
        asked = launch_request()
        if asked is not None:
            follow_torch(asked)
        yield

    number = None if output is None else output.fileno()
    return fork_process(words, variables=variables, output=number, during=followed())


@pytest.fixture
def command(tmp_path: Path, monkeypatch: Any, capfd: Any) -> Command:
    monkeypatch.chdir(tmp_path)
    shutil.copy(APP, "train.py")
    monkeypatch.setattr(checks, "run_process", fork)

    def run(name: str, *words: str) -> Ended:
        capfd.readouterr()
        at = words.index("--") if "--" in words else 1
        faults = [word for word in words[at:] if word != "--"]
        status = main([name, *words[:at], "--", sys.executable, "train.py", *faults])
        return Ended(status, *capfd.readouterr())

    return run


STYLES = {
    "plain": (12, "Net, AdamW, 1 DataLoader", 3),
    "accumulation": (3, "Net, AdamW, 1 DataLoader", None),
    "own_iterator": (12, "Net, AdamW, 2 DataLoaders", 3),
    "gan": (6, "Net and Critic, AdamW and SGD, 1 DataLoader", 3),
    "without_loader": (5, "Net, AdamW, no DataLoader", 3),
    "scaler": (6, "Net, AdamW, 1 DataLoader", 3),
    "closure": (4, "Net, LBFGS, no DataLoader", 3),
    "fabric": (6, "_FabricModule, AdamW, 1 DataLoader", 3),
    "compiled": (6, "Net, AdamW, 1 DataLoader", None),
    "parts": (6, "Net, AdamW, 1 DataLoader", 3),
}


def test_the_command_records_compiled_code_as_eager_code(command):
    done = command("record", "run", "--compiled=eager", "--only-steps=1", "--", "compiled")
    assert done.status == 0, done.text + done.errors
    assert "recorded 1 step" in done.text
    assert "compiled code ran as eager code, with different kernels" in done.text
    recorded = StoredRun.open(Path("run"))
    assert recorded.manifest.selection.compiled == "eager"
    assert not [
        site.op for site in recorded.view(0, 0, 1).program.sites if site.op.startswith("compiled.")
    ]
    assert command("verify", "run", "compiled").status == 0, "taken from the reference"


@pytest.mark.parametrize("style", STYLES)
def test_a_loop_is_recorded_and_verified_as_it_is(style, command):
    """It also computes what it computes without us."""
    num_steps, followed, planted_at = STYLES[style]
    done = command("record", "run", style)
    assert done.status == 0, done.text + done.errors
    assert "Warning" not in done.text + done.errors
    assert f"followed torch's optimizers: {num_steps} steps of {followed}" in done.text
    assert StoredRun.open(Path("run")).rank(0).steps(0).tolist() == [*range(num_steps)]
    printed = [
        line for line in done.text.splitlines() if line.startswith(("weights", "validation"))
    ]

    with open("alone.txt", "wb") as file:
        assert fork((sys.executable, "train.py", style), variables={}, output=file) == 0
    assert Path("alone.txt").read_text().splitlines() == printed

    done = command("verify", "run", style)
    assert (done.status, "\nMATCH\n" in done.text) == (0, True), done.text + done.errors
    assert (
        f"followed torch's optimizers: {followed.rpartition(', ')[0]}"
        in done.text.split("Compared")[1]
    )
    if style == "plain":
        done = command("verify", "run", style, "seed")
        assert (done.status, "\nDIVERGED\nStep 0: the initial state differs" in done.text) == (
            1,
            True,
        ), done.text
    if planted_at is not None:
        done = command("verify", "run", style, "planted")
        assert (done.status, f"\nDIVERGED\nStep {planted_at}, forward: aten.mul" in done.text) == (
            1,
            True,
        ), done.text


def test_the_batch_of_a_model_that_gets_a_view_of_it_is_what_the_loader_gave(command):
    assert command("record", "run", "views").status == 0
    names = {
        (site.phase, site.name) for site in StoredRun.open(Path("run")).view(0, 0, 1).program.sites
    }
    assert {("data", "batch[0]"), ("data", "batch[1]")} <= names


def test_what_is_recorded_of_a_step(command):
    """The phases and the names of a step, what the loader drew,
    and a learning rate that is another one.
    """
    assert command("record", "run", "plain").status == 0
    run = StoredRun.open(Path("run"))
    program = run.view(0, 0, 1).program
    names = {(site.phase, site.name) for site in program.sites}
    assert {("data", "batch[0]"), ("data", "batch[1]"), ("forward", "loss")} <= names
    assert {("gradient", "grad of first.weight"), ("state", "exp_avg of last.bias")} <= names
    assert {site.phase for site in program.sites} >= {
        "forward",
        "backward",
        "gradient",
        "optimizer",
        "state",
    }
    assert command("verify", "run", "--current", "other", "--", "plain", "lr").status == 1
    verdict = compare_runs("run", "other/run")
    assert (verdict.cause, verdict.first_divergence.phase) == ("settings", "optimizer")
    assert command("verify", "run", "--current", "drawn", "--", "plain", "draws").status == 1
    verdict = compare_runs("run", "drawn/run")  # a draw between two epochs, and not in the loader
    assert (verdict.cause, verdict.first_divergence.step) == ("rng", 6)
    assert "Code outside the steps draws from the generator torch.cpu: " in verdict.explanation
    assert verdict.coverage.followed == "Net, AdamW"


def ops_by_phase(folder: str, step: int) -> dict[str, set[str]]:
    found: dict[str, set[str]] = {}
    for site in StoredRun.open(Path(folder)).view(0, 0, step).program.sites:
        if site.op:
            found.setdefault(site.phase, set()).add(site.op.split(".")[1])
    return found


def test_in_an_accumulation_the_gradients_end_with_a_batch_and_with_the_update(command):
    """How a batch is loaded is in no step, whether workers load it or the
    process itself; the batch is.
    """
    assert command("record", "run", "uneven").status == 0
    ops = ops_by_phase("run", 1)
    ops_of_step = [
        site.op
        for site in StoredRun.open(Path("run")).view(0, 0, 1).program.sites
        if site.role == "output"
    ]
    assert ops_of_step.count("aten.stack.default") == 1  # of the clipping
    assert ops["other"] == {"mul", "lerp_"}
    assert "clamp" in ops["gradient"]
    assert command("verify", "run", "--current", "other", "--", "uneven", "average").status == 1
    verdict = compare_runs("run", "other/run")
    assert (verdict.cause, verdict.first_divergence.phase) == ("unknown", "other")
    assert verdict.first_divergence.op == "aten.lerp_.Scalar"
    assert command("verify", "run", "--current", "swapped", "--", "uneven", "swapped").status == 1
    verdict = compare_runs("run", "swapped/run")
    first = verdict.first_divergence
    assert (verdict.cause, first.step, first.name) == ("data_order", 0, "batch 2[0]")
    assert any(
        "drew at [6] 6 in the reference, 7 in the current run" in line for line in verdict.evidence
    )
    done = command("check", "--vary", "workers", "--", "uneven")
    assert (done.status, "2 instead of 0" in done.text) == (0, True), done.text


def test_an_update_that_is_left_out_and_gradients_that_are_not_cleared_are_told(command):
    assert command("record", "run", "plain").status == 0
    assert command("verify", "run", "--current", "skipped", "--", "plain", "skipped").status == 1
    verdict = compare_runs("run", "skipped/run")
    assert (verdict.cause, verdict.first_divergence.step) == ("optimizer", 2)
    assert (
        "after batch 1 of the step, and the current run only after batch 2" in verdict.explanation
    )
    assert command("verify", "run", "--current", "kept", "--", "plain", "uncleared").status == 1
    verdict = compare_runs("run", "kept/run")
    first = verdict.first_divergence
    assert (verdict.cause, first.step, first.op) == ("backward", 3, "aten.add_.Tensor")
    assert (
        "The current run adds to a gradient that the parameter already had" in verdict.explanation
    )


def test_a_model_that_is_left_in_eval_mode_diverges_and_its_mode_is_named(command):
    assert command("record", "run", "--level=module", "--", "plain").status == 0
    done = command("verify", "run", "--current", "eval", "--", "plain", "in_eval")
    assert done.status == 1, done.text + done.errors
    verdict = compare_runs("run", "eval/run")
    assert (verdict.first_divergence.step, verdict.first_divergence.module) == (6, "drop")
    assert verdict.trail[0].name == "the mode of the model"
    assert "the model is in eval mode in the current run" in verdict.explanation


def test_a_validation_with_gradients_is_no_step(command):
    done = command("record", "run", "--level=state", "--", "validates_with_gradients")
    assert (done.status, "recorded 6 steps" in done.text) == (0, True), done.text + done.errors
    assert "not in the run" not in done.text
    words = ("--current", "without", "--", "validates_with_gradients", "unvalidated")
    assert command("verify", "run", *words).status == 0


def test_an_update_that_is_left_out_of_a_loop_without_a_loader_is_told(command):
    assert command("record", "run", "without_loader").status == 0
    done = command("verify", "run", "--current", "skipped", "--", "without_loader", "skipped")
    assert done.status == 1
    verdict = compare_runs("run", "skipped/run")
    assert (verdict.cause, verdict.first_divergence.step) == ("optimizer", 2)
    assert (
        "the reference updates the parameters after backward pass 1 of the step, and the current "
        "run only after backward pass 2" in verdict.explanation
    )


def test_the_common_steps_of_a_loop_without_a_loader_end_with_the_update(command):
    """The longer run draws its next batch in the last common step."""
    assert command("record", "long", "without_loader").status == 0
    assert command("record", "short", "without_loader", "short").status == 0
    for one, other in (("long", "short"), ("short", "long")):
        assert compare_runs(one, other).verdict == "diverged"
        verdict = compare_runs(one, other, steps="common")
        assert (verdict.verdict, verdict.counts.steps_compared) == ("match", 3)
    common = "--steps", "common"
    assert command("verify", "long", *common, "--", "without_loader", "short").status == 0
    assert command("verify", "short", *common, "--", "without_loader").status == 0
    # what ends the step belongs to it where a step follows
    done = command("verify", "long", *common, "--", "without_loader", "undrawn")
    assert done.status == 1, done.text


def test_workers_of_a_script_without_a_loader_cannot_be_varied(command):
    done = command("check", "--vary", "workers", "--", "without_loader")
    assert done.status == 2, done.text
    assert (
        "workers: DET_CALLBACKS_NUM_WORKERS=2, but the training has no torch DataLoader"
        in done.text
    )
    assert "Omit workers from det-callbacks check --vary" in done.text


@pytest.mark.parametrize(
    ("style", "line"),
    [
        ("uneven", "not in the run: the last batch, after which AdamW did not step"),
        (
            "called_at_the_end",
            "not in the run: the last call of Net, after which AdamW did not step",
        ),
    ],
)
def test_what_follows_the_last_update_is_not_in_the_run_and_a_line_says_so(style, line, command):
    done = command("record", "run", style)
    assert (done.status, done.text.count(line)) == (0, 1), done.text
    done = command("verify", "run", style)
    assert (done.status, done.text.count(line)) == (0, 1), done.text


@pytest.mark.parametrize(("words", "finds"), [((), True), (("whole",), False)])
def test_a_loader_that_each_step_restarts_is_found_unless_it_has_only_one_batch(
    words, finds, command, capfd
):
    assert command("record", "run", "restarted", *words).status == 0
    status, told = main(["findings", "run"]), capfd.readouterr().out
    assert (status, "All 5 steps from step 1 to 5 get the previous step's batch" in told) == (
        finds,
        finds,
    ), told


def test_workers_that_read_the_same_are_found_where_each_epoch_has_a_loader_of_its_own(
    command, capfd
):
    assert command("record", "run", "workers").status == 0
    status, told = main(["findings", "run"]), capfd.readouterr().out
    assert (status, "equal_workers" in told, "repeated_batch" in told) == (1, True, False), told


def test_a_learning_rate_is_the_cause_where_the_optimizer_takes_a_closure(command):
    assert command("record", "run", "closure").status == 0
    assert command("verify", "run", "--current", "other", "--", "closure", "lr").status == 1
    verdict = compare_runs("run", "other/run")
    assert (verdict.cause, verdict.first_divergence.phase) == ("settings", "gradient")
    assert verdict.explanation.startswith(
        "optimizer.LBFGS.lr is 1.0 in the reference and 0.9 in the current run"
    )


def test_several_trainings_are_one_run(command):
    done = command("record", "run", "folds")
    assert done.status == 0, done.text + done.errors
    assert StoredRun.open(Path("run")).rank(0).segments == [0, 1]
    assert done.text.count("6 steps of") == 2
    assert command("verify", "run", "folds").status == 0


@pytest.mark.parametrize(
    ("style", "says"),
    [
        ("by_hand", "nothing was recorded: AdamW did not step, and backward() ran 6 times"),
        (
            "without_optimizer",
            "nothing was recorded: AdamW did not step, and backward() ran 6 times",
        ),
        (
            "functional",
            "AdamW stepped, but since its last step no module with its parameters was called with",
        ),
        ("left_in_eval", "with gradients enabled in train mode"),
        (
            "caught",
            "AdamW stepped, but since its last step no module with its parameters was called with",
        ),
        ("broken", "The script exited with status 1"),
        ("own", "the script has its own run, which is used"),
    ],
)
def test_what_cannot_be_followed_is_refused(style, says, command):
    done = command("record", "run", style)
    assert (done.status, says in " ".join(done.text.split())) == (2, True), done.text + done.errors
    assert ("Traceback" in done.errors) is (style == "broken")


DDP = """
import sys, torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
torch.distributed.init_process_group("gloo")
torch.manual_seed(0)
model = DistributedDataParallel(nn.Linear(4, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.2 if "planted" in sys.argv else 0.1)
for step in range(4):
    model(torch.ones(3, 4) * (step + torch.distributed.get_rank())).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
torch.distributed.destroy_process_group()
"""


@pytest.mark.slow
@pytest.mark.ddp
def test_every_rank_is_followed(tmp_path):
    (tmp_path / "train.py").write_text(DDP)
    words = ("--", sys.executable, *TORCHRUN, "train.py")
    done = start("record", "run", *words, folder=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert StoredRun.open(tmp_path / "run").ranks == [0, 1]
    assert start("verify", "run", *words, folder=tmp_path).returncode == 0
    done = start("verify", "run", *words, "planted", folder=tmp_path)
    assert done.returncode == 1
    assert "optimizer.SGD.lr is 0.1 in the reference and 0.2 in the current run" in done.stdout
