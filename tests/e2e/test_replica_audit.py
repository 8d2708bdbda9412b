"""Trainings whose replicas are compared with each other, and drift apart on one rank."""

import pickle
import re
import shutil
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from fits import Classifier
from lightning.pytorch.strategies import DDPStrategy
from processes import STRATEGIES, Ended, Faulty, Sharded, run_ranks, train, verdict_in
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import PostLocalSGDState
from trainers import LIGHTNING_ADVICE, has_same_weights

from det_callbacks import DeterminismCallback, ReplicaAuditCallback
from det_callbacks.errors import (
    DivergenceWarning,
    NothingComparedError,
    SelectionError,
    SettingsError,
)
from det_callbacks.runs.store import Run
from det_callbacks.settings.generators import GeneratorStates
from det_callbacks.training import recording as fits_of_process

pytestmark = pytest.mark.ddp


def fit(folder: Path, audit: Any, *, status: int, **options: Any) -> list[Ended]:
    return run_ranks(lambda _: train(None, audit, **options), folder, status=status)


def test_equal_replicas_are_said_to_be_and_the_training_is_the_one_without(tmp_path):
    audit, before = ReplicaAuditCallback(2), fits_of_process.num_fits

    def body(rank: int) -> None:
        callbacks = audit, DeterminismCallback(tmp_path / "run", mode="record")
        watched, states = train(None, *callbacks, model=Faulty)[1], GeneratorStates.capture()
        assert has_same_weights(watched, train(None, model=Faulty)[1])
        assert GeneratorStates.capture() == states
        assert audit.replica_report is not None
        assert fits_of_process.num_fits == before + 2  # to a Hydra job, something was compared

    ended = run_ranks(body, tmp_path, status=0)
    # before the first step, after steps 1 and 3, and at the end;
    # six parameters with three tensors of state each
    line = (
        "det_callbacks: replicas agree: 4 audits of 26 tensors on 2 ranks, the last after step 3; "
        "not compared: "
    )
    assert ended[0].output.count(line) == 1
    assert "not compared: running statistic (2)" in ended[0].output
    assert "replicas" not in ended[1].output


def test_a_tensor_is_warned_of_once_and_the_training_goes_on(tmp_path):
    def body(rank: int) -> None:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", DivergenceWarning)
            train(None, ReplicaAuditCallback(1, "warn"), model=partial(Faulty, "weights"))
        print(*(f"{one.category.__name__}: {one.message}" for one in caught), sep="\n")

    ended = run_ranks(body, tmp_path, status=0)
    said = ended[0].output
    assert "replicas differ: 6 audits of 26 tensors on 2 ranks, the last after step 3" in said
    (line,) = [line for line in said.splitlines() if line.startswith("  last.bias: ")]
    assert re.fullmatch(
        r"  last\.bias: \w{16} on rank 1, and \w{16} on rank 0; neither is a majority", line
    )
    assert (
        "DivergenceWarning: The replicas of this run differ after step 2: 1 tensor on 2 ranks"
        in said
    )
    assert "DivergenceWarning" not in ended[1].output


class OwnScale(Faulty):
    _ddp_params_and_buffers_to_ignore = ("scale",)


def test_what_agrees_again_has_differed_and_what_differs_by_design_has_not(tmp_path):
    # DDP broadcasts the buffers of rank 0 before each forward pass
    ended = fit(
        tmp_path, ReplicaAuditCallback(1, "collect"), model=partial(Faulty, "buffer"), status=1
    )
    assert "det_callbacks: replicas agree again: 6 audits" in ended[0].output
    assert (
        "differ after step 2: 1 tensor on 2 ranks. They last agreed after step 1."
        in ended[1].output
    )
    audit, strategy = (
        ReplicaAuditCallback(1, ignore=["la*.bias"]),
        DDPStrategy(broadcast_buffers=False),
    )
    ended = fit(tmp_path, audit, model=partial(OwnScale, "weights"), strategy=strategy, status=0)
    for said in (
        "ignored by DDP (1)",
        "ignored (4)",  # with its state
    ):
        assert said in ended[0].output


def test_a_buffer_that_ddp_does_not_broadcast_is_compared(tmp_path):
    audit, strategy = ReplicaAuditCallback(1, "collect"), DDPStrategy(broadcast_buffers=False)
    ended = fit(tmp_path, audit, model=partial(Faulty, "buffer"), strategy=strategy, status=1)
    assert "differ after step 2: 1 tensor on 2 ranks" in ended[1].output
    assert "  scale: " in ended[1].output


def test_a_recording_of_drifting_replicas_is_no_reference_and_a_verdict_says_more(tmp_path):
    def run(mode: Any, fault: str, status: int, every: int = 1) -> list[Ended]:
        options: dict[str, Any] = {
            "level": "state",
            "audit_replicas_every_n_steps": every,
            "mode": mode,
        }
        audited = partial(
            DeterminismCallback, tmp_path / "run", current=tmp_path / "current", **options
        )
        return run_ranks(
            lambda _: train(audited(), model=partial(Faulty, fault)), tmp_path / mode, status=status
        )

    ended = run("record", "weights", status=1, every=100)
    assert all(
        "ReplicaError: The replicas of this run differ after step 3" in one.output for one in ended
    )
    assert not Run.open(tmp_path / "run").is_complete
    shutil.rmtree(tmp_path / "run")
    ended = run("record", "none", status=0)
    assert "replicas agree: 6 audits" in ended[0].output
    ended = run("verify", "weights", status=1)
    assert "DivergenceError" in ended[1].output
    # nobody waited for anybody: all raised the same
    assert not any("stops too" in one.output for one in ended)
    assert "replicas differ: 4 audits" in ended[0].output
    first = verdict_in(tmp_path)["first_divergence"]
    assert (first["rank"], first["step"], first["name"]) == (1, 2, "last.bias")


class Unwrapped(DDPStrategy):
    """One that synchronises in a way of its own."""

    def configure_ddp(self) -> None:
        pass


def averaged() -> DDPStrategy:
    state = PostLocalSGDState(process_group=None, subgroup=None, start_localSGD_iter=1)
    return DDPStrategy(ddp_comm_state=state, model_averaging_period=2)


@pytest.mark.parametrize(
    ("strategy", "model", "text"),
    [
        (STRATEGIES["fsdp2"][0], Sharded, "No parameter has a replica on another"),
        (Unwrapped, Classifier, "Unwrapped does not define which ranks hold the same parameters"),
        pytest.param(
            averaged, Classifier, "differ by design between two averagings", marks=pytest.mark.slow
        ),
    ],
)
def test_what_has_no_replicas_is_refused(strategy, model, text, tmp_path):
    ended = fit(tmp_path, ReplicaAuditCallback(1), model=model, strategy=strategy(), status=2)
    assert all(text in one.output for one in ended)


@LIGHTNING_ADVICE
@pytest.mark.usefixtures("environment_again")
def test_one_process_has_no_replicas(tmp_path, capsys):
    with pytest.raises(SettingsError, match="One process has no replicas"):
        train(None, ReplicaAuditCallback(1), world_size=1, strategy="auto")
    callback = DeterminismCallback(
        tmp_path / "run", mode="record", level="state", audit_replicas_every_n_steps=1
    )
    train(callback, world_size=1, strategy="auto")
    assert capsys.readouterr().out.count("one process has no replicas: nothing to compare") == 1
    assert callback.replica_report is None


def test_copies_take_the_arguments_along_and_wrong_ones_are_refused():
    audit = ReplicaAuditCallback(7, "collect", ignore=["codebook.*"])
    other = pickle.loads(pickle.dumps(audit))
    assert (other.every_n_steps, other.on_divergence, other.ignore) == (
        7,
        "collect",
        ("codebook.*",),
    )
    for arguments in ({"every_n_steps": 0}, {"on_divergence": "stop"}, {"ignore": "codebook"}):
        with pytest.raises(SelectionError, match=next(iter(arguments))):
            ReplicaAuditCallback(**arguments)
    with pytest.raises(NothingComparedError, match="no step to train"):
        # neither is looked at
        ReplicaAuditCallback(1).teardown(None, None, "fit")  # type: ignore[arg-type]
