"""A run that begins with the state that a step of the reference left is compared
from there on, in any loop.
"""

from collections.abc import Mapping
from itertools import islice
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from test_followed_loops import command  # noqa: F401  # a fixture
from torch import nn
from torch.utils.data import DataLoader, Sampler, TensorDataset

from det_callbacks import (
    DeterminismCallback,
    DivergenceError,
    SelectionError,
    TrainingRun,
    Verdict,
)
from det_callbacks.report.verdict import resume_table
from det_callbacks.verdict import Resume

STEPS, AT = 6, 3  # the checkpoint holds what the first AT steps left
ORDER = torch.randperm(STEPS * 8, generator=torch.Generator().manual_seed(5))
DATA = torch.randn(STEPS * 8, 6, generator=torch.Generator().manual_seed(6))


class Loop:
    def __init__(self, seed: int = 0, *, lr: float = 0.05) -> None:
        torch.manual_seed(seed)
        self.model = nn.Sequential(
            nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.2), nn.Linear(8, 3)
        )
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=lr)

    def train(
        self, run: TrainingRun, begin: int = 0, *, batches_from: int | None = None
    ) -> dict[str, Any]:
        """Train the steps from ``begin`` on; return what the loop has after AT of them."""
        saved: dict[str, Any] = {}
        with run:
            for step in range(begin, STEPS):
                at = 8 * (step if batches_from is None else step - begin + batches_from)
                batch = DATA[ORDER[at : at + 8]]
                with run.step(batch):
                    self.model(batch).pow(2).mean().backward()
                    self.optimizer.step()
                    self.optimizer.zero_grad()
                if step + 1 == AT:
                    saved = {"rng": torch.get_rng_state()}
                    for name, part in ("model", self.model), ("optimizer", self.optimizer):
                        saved[name] = {
                            key: copied(value) for key, value in part.state_dict().items()
                        }
        return saved


def copied(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.clone()
    if isinstance(value, dict):
        return {key: copied(one) for key, one in value.items()}
    return value


@pytest.fixture(scope="module", params=["state", "module", "op"])
def recorded(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("found") / "reference"
    loop = Loop()
    level = request.param
    run = TrainingRun(
        folder, mode="record", level=level, model=loop.model, optimizers=loop.optimizer
    )
    return folder, loop.train(run)


def resumed(
    recorded: tuple[Path, dict[str, Any]], tmp_path: Path, *left_out: str, **options: Any
) -> Verdict:
    folder, saved = recorded
    loop = Loop(seed=9)
    loop.model.load_state_dict(saved["model"])
    if "optimizer" not in left_out:
        # it keeps the tensors that it is given
        loop.optimizer.load_state_dict(copied(saved["optimizer"]))
    if "rng" not in left_out:
        torch.set_rng_state(saved["rng"])
    return verified(loop, folder, tmp_path, begin=AT, **options)


def verified(loop: Loop, folder: Path, tmp_path: Path, **options: Any) -> Verdict:
    run = TrainingRun(
        folder, current=tmp_path / "current", model=loop.model, optimizers=loop.optimizer
    )
    try:
        loop.train(run, **options)
    except DivergenceError as error:
        return error.verdict
    return run.verdict


def test_a_whole_resume_is_found_and_matches(recorded, tmp_path, capsys):
    verdict = resumed(recorded, tmp_path)
    assert (verdict.verdict, verdict.resume.step, verdict.resume.how) == ("match", AT, "found")
    assert verdict.coverage.steps == (AT, STEPS - 1)
    assert {*verdict.resume.restored} == {
        "parameters",
        "buffers",
        "optimizer",
        "generators",
        "data",
    }
    assert "differs" not in str(verdict.resume.restored)
    assert f"from step {AT} on, where it resumed" in capsys.readouterr().out
    content = verdict.to_dict()
    assert content["resume"]["step"] == AT
    assert Verdict.from_dict(content) == verdict


@pytest.mark.parametrize(
    ("left_out", "options", "cause", "restored"),
    [
        (
            ["optimizer"],
            {},
            "checkpoint",
            {"parameters": "restored", "optimizer": "missing", "data": "restored"},
        ),
        (
            ["rng"],
            {},
            "rng",
            {"optimizer": "restored", "generators": "reseeded", "data": "restored"},
        ),
        (
            [],
            {"batches_from": 0},
            "data_order",
            {"parameters": "restored", "optimizer": "restored", "data": "differs"},
        ),
        (
            ["rng"],
            {"batches_from": 0},
            "rng",
            {"optimizer": "restored", "generators": "reseeded", "data": "differs"},
        ),
    ],
    ids=["no optimizer state", "no generators", "the data from the start", "what draws the data"],
)
def test_what_it_did_not_restore_is_told(
    left_out, options, cause, restored, recorded, tmp_path, capsys
):
    verdict = resumed(recorded, tmp_path, *left_out, **options)
    assert (verdict.verdict, verdict.cause, verdict.resume.step) == ("diverged", cause, AT)
    found: Mapping[str, Any] = {
        **verdict.resume.restored,
        "generators": verdict.resume.restored["generators"]["torch.cpu"],
        "optimizer": verdict.resume.restored["optimizer"]["exp_avg"],
    }
    assert {name: found[name] for name in restored} == restored


SCRIPT = """
import sys, torch
from torch import nn
from torch.utils.data import DataLoader, Sampler, TensorDataset

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.2), nn.Linear(8, 3))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
loader = DataLoader(TensorDataset(torch.randn(48, 6)), 8, shuffle=True, generator=torch.Generator().manual_seed(3))
saved = torch.load("saved.pt", weights_only=True) if "--resume" in sys.argv else None
if saved:
    model.load_state_dict(saved["model"]), optimizer.load_state_dict(saved["optimizer"])
for step, (batch,) in enumerate(loader):
    if saved and step < 3:
        continue
    if saved and step == 3:
        torch.set_rng_state(saved["rng"])
    model(batch).pow(2).mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    if step == 2 and not saved:
        states = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "rng": torch.get_rng_state()}
        torch.save(states, "saved.pt")
"""  # noqa: E501  # a text


def test_a_script_that_resumes_in_the_middle_of_an_epoch_is_found(command):  # noqa: F811
    Path("train.py").write_text(SCRIPT)
    assert command("record", "reference").status == 0
    done = command("verify", "reference", "--resume")
    assert done.status == 0, done.text + done.errors
    assert "from step 3 on, where it resumed (by its state)" in done.text


PER_EPOCH = 6


def trained_on(loader: Any, folder: Path, tmp_path: Path | None = None, **options: Any) -> Any:
    """Record, or verify from the middle of the second epoch on,
    the training on a loader that is made for it.

    ``own`` is the state of its generator that a resumed run begins the epoch with, ``skip`` the
    batches that it skips.
    """
    loop, begin = Loop(), PER_EPOCH + 2
    loop.scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(loop.optimizer, 20)
    is_resumed = tmp_path is not None
    if is_resumed:
        saved = options["saved"]
        loop.model.load_state_dict(saved["model"])
        loop.optimizer.load_state_dict(copied(saved["optimizer"]))
        if options.get("scheduler", True):
            loop.scheduler.load_state_dict(saved["scheduler"])
        loader.generator.set_state(options.get("own", saved["own"]))
    arguments: dict[str, Any] = (
        {"current": tmp_path / "current"} if is_resumed else {"mode": "record"}
    )
    run = TrainingRun(
        folder,
        level="state" if not is_resumed else None,
        model=loop.model,
        optimizers=loop.optimizer,
        **arguments,
    )
    step, kept = begin if is_resumed else 0, {}
    try:
        with run:
            for epoch in range(1 if is_resumed else 0, 3):
                own = loader.generator.get_state()
                used = loader
                if epoch == 1 and "wrapped" in options:
                    sampler = Skips(loader.batch_sampler, options["wrapped"])
                    used = DataLoader(
                        loader.dataset, batch_sampler=sampler, generator=loader.generator
                    )
                for number, (batch,) in enumerate(run.batches(used)):
                    if is_resumed and epoch == 1 and number < options.get("skip", 2):
                        continue
                    if is_resumed and step == begin:
                        torch.set_rng_state(saved["rng"])
                    with run.step(batch):
                        loop.model(batch).pow(2).mean().backward()
                        loop.optimizer.step()
                        loop.optimizer.zero_grad()
                    loop.scheduler.step()
                    step += 1
                    if step == begin and not is_resumed:
                        kept = {
                            name: copied(getattr(loop, name).state_dict())
                            for name in ("model", "optimizer", "scheduler")
                        }
                        kept |= {"own": own, "rng": torch.get_rng_state()}
    except DivergenceError as error:
        return error.verdict
    return run.verdict if is_resumed else kept


class Skips(Sampler[Any]):
    """Skips batches of another sampler, as Accelerate's skip_first_batches does."""

    def __init__(self, batch_sampler: Any, number: int) -> None:
        self.batch_sampler, self.number = batch_sampler, number

    def __iter__(self) -> Any:
        yield from islice(self.batch_sampler, self.number, None)


class Noisy(TensorDataset):
    def __getitem__(self, index: int) -> Any:
        return (super().__getitem__(index)[0] + torch.rand(6),)


def shuffled(data: Any = TensorDataset, *, is_shuffled: bool = True) -> DataLoader[Any]:
    return DataLoader(
        data(DATA), 8, shuffle=is_shuffled, generator=torch.Generator().manual_seed(4)
    )


@pytest.fixture(scope="module")
def of_loader(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("loader") / "reference"
    return folder, trained_on(shuffled(), folder)


OF_EPOCH_0 = torch.Generator().manual_seed(4).get_state()


@pytest.mark.parametrize(
    ("options", "step", "text"),
    [
        (
            {"skip": 0},
            6,
            "the first of the epoch, so the loader started again: skip the 2 trained batches",
        ),
        ({"skip": 1}, 7, "so the last trained batch was loaded again: skip 2 batches of the epoch"),
        (
            {"skip": 0, "wrapped": 1},
            7,
            "so the last trained batch was loaded again: skip 2 batches of the epoch",
        ),
        ({"skip": 4}, 10, "so 2 batches too many were skipped: skip 2 of the epoch"),
        (
            {"own": OF_EPOCH_0},
            2,
            "at this place in epoch 0, so the order was not restored. What shuffles",
        ),
        (
            {"own": OF_EPOCH_0, "skip": 0},
            0,
            "the first of epoch 0. Skip the 2 trained batches of the epoch. What",
        ),
    ],
    ids=[
        "the loader started again",
        "the last batch again",
        "by a sampler",
        "two skipped",
        "the first shuffle",
        "all from the start",
    ],
)
def test_the_place_in_the_data_is_told_from_the_batch(options, step, text, of_loader, tmp_path):
    folder, saved = of_loader
    verdict = trained_on(shuffled(), folder, tmp_path, saved=saved, **options)
    assert (verdict.cause, verdict.resume.step) == ("data_order", PER_EPOCH + 2)
    assert (verdict.resume.restored["data"], verdict.resume.of_step) == ("differs", {"data": step})
    assert f"It holds the samples of step {step} of the reference, {text}" in verdict.explanation
    assert bool(
        [line for line in verdict.evidence if "generator" in line and "differs" in line]
    ) is ("own" in options)


def test_a_batch_of_every_epoch_is_that_of_the_same_epoch(tmp_path):
    saved = trained_on(shuffled(is_shuffled=False), tmp_path / "reference")
    verdict = trained_on(
        shuffled(is_shuffled=False), tmp_path / "reference", tmp_path, saved=saved, skip=0
    )
    assert verdict.resume.of_step == {"data": PER_EPOCH}
    assert "the first of the epoch, so the loader started again" in verdict.explanation


def test_samples_that_were_made_before_the_generators_were_restored_have_other_content(tmp_path):
    saved = trained_on(shuffled(Noisy), tmp_path / "reference")
    resume = trained_on(shuffled(Noisy), tmp_path / "reference", tmp_path, saved=saved).resume
    assert resume.of_step["data"] == resume.step == PER_EPOCH + 2
    rows = {name: (state, todo) for name, state, todo in resume_table(resume).rows}
    assert rows["data"] == (
        "other content",
        "what the data set draws from, before the batch is loaded",
    )


def test_another_shuffle_is_told_apart_from_another_place(of_loader, tmp_path):
    folder, saved = of_loader
    verdict = trained_on(
        shuffled(), folder, tmp_path, saved=saved, own=torch.Generator().manual_seed(9).get_state()
    )
    assert (verdict.cause, verdict.resume.of_step) == ("data_order", {})
    assert "restore the position in the data. What shuffles the data" in verdict.explanation


def test_a_whole_resume_in_the_middle_of_an_epoch_matches(of_loader, tmp_path):
    folder, saved = of_loader
    assert trained_on(shuffled(), folder, tmp_path, saved=saved).verdict == "match"


def test_a_scheduler_that_counts_from_0_after_the_resume_is_told(of_loader, tmp_path):
    folder, saved = of_loader
    verdict = trained_on(shuffled(), folder, tmp_path, saved=saved, scheduler=False)
    assert (verdict.cause, verdict.first_divergence.step) == ("checkpoint", PER_EPOCH + 2)
    assert verdict.first_divergence.name == "state of CosineAnnealingLR: last_epoch"
    restored = verdict.resume.restored
    assert restored["further"] == {"CosineAnnealingLR": "differs"}
    assert restored["optimizer"]["exp_avg"] == "restored"


def test_a_table_says_what_differs_how_it_differs_and_what_restores_it():
    resume = Resume(
        step=8,
        how="found",
        restored={
            "parameters": "restored",
            "optimizer": {"step": "restored", "exp_avg": "exchanged", "exp_avg_sq": "exchanged"},
            "options": {"lr of group 0": "differs"},
            "further": {"CosineAnnealingLR": "differs", "the gradient scaler": "restored"},
            "generators": {"torch.cpu": "differs", "numpy": "reseeded"},
            "gradients": "missing",
            "data": "differs",
        },
        of_step={"torch.cpu": 0, "data": 6},
        framework="accelerate",
    )
    rows = {name: (state, todo) for name, state, todo in resume_table(resume).rows}
    states = {name: state for name, (state, _) in rows.items()}
    assert states == {
        "optimizer": "exp_avg and exp_avg_sq of another parameter; step restored",
        "lr of group 0": "differs",
        "CosineAnnealingLR": "differs",
        "generator torch.cpu": "that of step 0",
        "generator numpy": "seeded again",
        "gradients": "missing",
        "data": "that of step 6",
        "parameters": "restored",
        "the gradient scaler": "restored",
    }
    assert [*states][-2:] == ["parameters", "the gradient scaler"]
    assert (
        rows["optimizer"][1]
        == "the reference's order of the parameters that the optimizer is given"
    )
    assert (
        rows["lr of group 0"][1] == "accelerator.load_state, after accelerator.prepare(scheduler)"
    )


def test_states_of_an_optimizer_in_another_order_are_those_of_other_parameters(recorded, tmp_path):
    folder, saved = recorded
    loop = Loop(seed=9)
    loop.model.load_state_dict(saved["model"])
    states = copied(saved["optimizer"])
    first, last = states["state"][1], states["state"][2]  # both of 8 numbers
    states["state"][1], states["state"][2] = last, first
    loop.optimizer.load_state_dict(states)
    torch.set_rng_state(saved["rng"])
    verdict = verified(loop, folder, tmp_path, begin=AT)
    expected = {"step": "restored", "exp_avg": "exchanged", "exp_avg_sq": "exchanged"}
    assert (verdict.cause, verdict.resume.restored["optimizer"]) == ("checkpoint", expected)


@pytest.mark.parametrize(
    ("seed", "of_step", "state"), [(0, {"torch.cpu": 0}, "differs"), (7, {}, "reseeded")]
)
def test_a_generator_is_told_to_be_seeded_again_or_that_of_an_earlier_step(
    seed, of_step, state, recorded, tmp_path
):
    folder, saved = recorded
    loop = Loop(seed=9)
    loop.model.load_state_dict(saved["model"])
    loop.optimizer.load_state_dict(copied(saved["optimizer"]))
    Loop(seed)  # the reference's generator when its fit began, or that of another seed
    resume = verified(loop, folder, tmp_path, begin=AT).resume
    assert (resume.restored["generators"], resume.of_step) == ({"torch.cpu": state}, of_step)


def test_a_resume_from_the_last_step_trains_steps_that_the_reference_lacks(recorded, tmp_path):
    folder, _ = recorded
    loop = Loop()
    loop.train(TrainingRun(None, mode="disabled", model=loop.model, optimizers=loop.optimizer))
    run = TrainingRun(
        folder, current=tmp_path / "current", model=loop.model, optimizers=loop.optimizer
    )
    with pytest.raises(DivergenceError) as raised:
        loop.train(run, STEPS - 1)
    verdict = raised.value.verdict
    assert (verdict.cause, verdict.first_divergence.kind, verdict.resume.step) == (
        "structure",
        "extra",
        STEPS,
    )


class Lit(pl.LightningModule):
    def __init__(self, saved: Mapping[str, Any] | None = None) -> None:
        super().__init__()
        torch.manual_seed(0 if saved is None else 9)
        self.saved, self.net = (
            saved,
            nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.2), nn.Linear(8, 3)),
        )
        if saved is not None:
            self.load_state_dict(saved["model"])

    def training_step(self, batch: Any, _: int) -> Any:
        loss = self.net(batch[0]).pow(2).mean()
        self.log("loss", loss, on_step=False, on_epoch=True)
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.05)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 40)
        for name, part in {"optimizer": optimizer, "scheduler": scheduler}.items():
            if self.saved is not None and name in self.saved:
                part.load_state_dict(copied(self.saved[name]))
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": scheduler, "interval": "step"},
        }


class Keeps(pl.Callback):
    def __init__(self, saved: Mapping[str, Any] | None = None) -> None:
        self.saved: dict[str, Any] = {}
        self.given = saved

    def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        if self.given is None and trainer.global_step == STEPS:  # the loader has drawn its seed
            self.saved["rng"] = torch.get_rng_state()
        if self.given is not None and not trainer.global_step:
            torch.set_rng_state(self.given["rng"])

    def on_train_epoch_end(self, trainer: pl.Trainer, module: Any) -> None:
        if not trainer.current_epoch:
            parts = {"model": module, "optimizer": trainer.optimizers[0]}
            parts["scheduler"] = trainer.lr_scheduler_configs[0].scheduler
            self.saved = {name: copied(part.state_dict()) for name, part in parts.items()}


@pytest.mark.parametrize(
    ("left_out", "restored"),
    [
        ("", {"optimizer": {"exp_avg": "restored"}, "further": {"CosineAnnealingLR": "restored"}}),
        ("optimizer", {"optimizer": {"exp_avg": "missing"}}),
        ("scheduler", {"further": {"CosineAnnealingLR": "differs"}}),
    ],
)
def test_lightning_with_weights_loaded_by_hand_is_found(left_out, restored, tmp_path):
    def fit(callback: DeterminismCallback, module: Lit, epochs: int, keeps: Keeps) -> Verdict:
        quiet = {
            "logger": False,
            "enable_checkpointing": False,
            "enable_progress_bar": False,
            "accelerator": "cpu",
        }
        trainer = pl.Trainer(
            max_epochs=epochs, callbacks=[keeps, callback], enable_model_summary=False, **quiet
        )
        data = DataLoader(TensorDataset(DATA), 8)
        try:
            trainer.fit(module, data)
        except DivergenceError as error:
            return error.verdict
        return callback.verdict

    keeps = Keeps()
    fit(DeterminismCallback(tmp_path / "run", mode="record", level="state"), Lit(), 3, keeps)
    saved = {name: state for name, state in keeps.saved.items() if name != left_out}
    verdict = fit(
        DeterminismCallback(tmp_path / "run", current=tmp_path / "current"),
        Lit(saved),
        2,
        Keeps(saved),
    )
    resume = verdict.resume
    assert (resume.step, resume.how, resume.framework) == (STEPS, "found", "lightning")
    for part, states in restored.items():
        assert {name: resume.restored[part][name] for name in states} == states
    assert verdict.verdict == ("diverged" if left_out else "match")
    # not the epoch in which it may have resumed
    assert verdict.coverage.metrics == (0 if left_out else 1)


@pytest.mark.parametrize("name", ["1.running_mean", "3.bias"])
def test_a_resume_that_lost_one_tensor_is_found_and_told(name, recorded, tmp_path):
    folder, saved = recorded
    model = {**saved["model"], name: saved["model"][name] + 1}
    verdict = resumed((folder, {**saved, "model": model}), tmp_path)
    assert (verdict.cause, verdict.resume.step) == ("checkpoint", AT)
    kind = "buffers" if "running" in name else "parameters"
    assert verdict.resume.restored[kind] == "differs"
    assert f"({name})" in verdict.explanation


def test_another_start_is_no_resume(recorded, tmp_path):
    folder, _ = recorded
    verdict = verified(Loop(seed=9), folder, tmp_path)
    assert (verdict.cause, verdict.resume) == ("initial_weights", None)
    assert verdict.first_divergence.step == 0


def test_the_same_start_is_no_resume_although_nothing_learns(tmp_path):
    folder = tmp_path / "reference"
    loop = Loop(lr=0.0)
    loop.model[1].eval()
    loop.train(
        TrainingRun(
            folder, mode="record", level="state", model=loop.model, optimizers=loop.optimizer
        )
    )
    loop = Loop(lr=0.0)
    loop.model[1].eval()
    verdict = verified(loop, folder, tmp_path)
    assert (verdict.verdict, verdict.resume) == ("match", None)


def test_where_steps_left_the_same_state_their_batches_tell_or_it_is_refused(tmp_path):
    def still(*, seed: int) -> Loop:
        loop = Loop(seed)
        loop.model[1].eval()
        loop.optimizer = torch.optim.SGD(loop.model.parameters(), lr=0.0)
        return loop

    folder, loop = tmp_path / "reference", still(seed=0)
    before = {key: value.clone() for key, value in loop.model.state_dict().items()}
    with torch.no_grad():
        loop.model[0].weight.add_(1)
    run = TrainingRun(
        folder, mode="record", level="state", model=loop.model, optimizers=loop.optimizer
    )
    with run:
        for step in range(STEPS):
            batch = DATA[ORDER[8 * step : 8 * step + 8]]
            with run.step(batch):
                loop.model(batch).pow(2).mean().backward()
                loop.optimizer.step()
                loop.optimizer.zero_grad()
                if step == 0:
                    loop.model.load_state_dict(before)
    loop = still(seed=0)
    verdict = verified(loop, folder, tmp_path, begin=2)
    assert verdict.resume.step == 2
    run = TrainingRun(
        folder, current=tmp_path / "other", model=loop.model, optimizers=loop.optimizer
    )
    with (
        pytest.raises(SelectionError, match=r"steps 0, 1, 2, 3 and 2 more of .* left"),
        run,
        run.step(),
    ):
        pass
