"""Correct trainings, in which no finding may say anything; run as a script,
it trains and prints what they say.

``python clean_trainings.py styles`` trains well-known styles, ``modules`` each module of torch's
own module_db, with the optimizers of its optim_db in turn, and ``models`` small
transformers and torchvision models.
"""

import contextlib
import copy
import io
import math
import sys
import tempfile
import types
import unittest
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from det_callbacks import TrainingRun
from det_callbacks.findings.table import find_findings
from det_callbacks.runs.store import Run

NUM_STEPS = 21
Step = Callable[[Any], None]
# the model, its optimizers, and what a step does with a batch
Trained = tuple[nn.Module, Any, Step]


def mlp(*widths: int) -> nn.Sequential:
    pairs = pairwise(widths)
    return nn.Sequential(*[one for pair in pairs for one in (nn.Linear(*pair), nn.ReLU())][:-1])


def update(optimizer: torch.optim.Optimizer, loss: Tensor) -> None:
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


def adversarial() -> Trained:
    generator = nn.Sequential(nn.Linear(4, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 12))
    critic = nn.Sequential(
        nn.utils.parametrizations.spectral_norm(nn.Linear(12, 16)), nn.ReLU(), nn.Linear(16, 1)
    )
    optimizers = [torch.optim.Adam(one.parameters(), 2e-3) for one in (generator, critic)]

    def step(batch: Tensor) -> None:
        fake = generator(torch.randn(len(batch), 4))
        update(
            optimizers[1],
            (
                nn.functional.softplus(-critic(batch))
                + nn.functional.softplus(critic(fake.detach()))
            ).mean(),
        )
        update(optimizers[0], nn.functional.softplus(-critic(fake)).mean())

    return nn.ModuleDict({"generator": generator, "critic": critic}), optimizers, step


def q_learning() -> Trained:
    online = mlp(12, 16, 2)
    target = copy.deepcopy(online).requires_grad_(False)
    optimizer = torch.optim.RMSprop(online.parameters(), 1e-3)

    def step(batch: Tensor) -> None:
        goal = batch[:, 0] + 0.9 * target(batch.roll(1, 0)).max(1).values
        value = online(batch).gather(1, (batch[:, 1:2] > 0).long()).squeeze(1)
        update(optimizer, nn.functional.smooth_l1_loss(value, goal))
        if torch.rand(()) < 0.1:
            target.load_state_dict(online.state_dict())

    return nn.ModuleDict({"online": online, "target": target}), optimizer, step


def policy_gradient() -> Trained:
    policy, value = mlp(12, 16, 3), mlp(12, 16, 1)
    optimizer = torch.optim.Adam([*policy.parameters(), *value.parameters()], 1e-3)

    def step(batch: Tensor) -> None:
        choices = torch.distributions.Categorical(logits=policy(batch))
        actions = choices.sample()
        reward = (actions == batch[:, :3].argmax(1)).float()
        expected = value(batch).squeeze(1)
        advantage = (reward - expected).detach()
        gain = choices.log_prob(actions) * advantage + 0.01 * choices.entropy()
        update(optimizer, nn.functional.mse_loss(expected, reward) - gain.mean())

    return nn.ModuleDict({"policy": policy, "value": value}), optimizer, step


def diffusion() -> Trained:
    model = mlp(13, 32, 12)
    average = copy.deepcopy(model).requires_grad_(False)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, step / 4))

    def step(batch: Tensor) -> None:
        time, noise = torch.rand(len(batch), 1), torch.randn_like(batch)
        noisy = (1 - time).sqrt() * batch + time.sqrt() * noise
        update(optimizer, nn.functional.mse_loss(model(torch.cat([noisy, time], 1)), noise))
        schedule.step()
        for one, other in zip(average.parameters(), model.parameters(), strict=True):
            one.lerp_(other.detach(), 0.05)

    return nn.ModuleDict({"model": model, "ema": average}), optimizer, step


def contrastive() -> Trained:
    queries = nn.Sequential(nn.Linear(12, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 8))
    keys = copy.deepcopy(queries).requires_grad_(False)
    model = nn.ModuleDict({"query": queries, "key": keys})
    model.register_buffer("queue", nn.functional.normalize(torch.randn(32, 8), dim=1))
    optimizer = torch.optim.SGD(queries.parameters(), 0.05, momentum=0.9)

    def step(batch: Tensor) -> None:
        found = nn.functional.normalize(queries(batch + 0.1 * torch.randn_like(batch)), dim=1)
        with torch.no_grad():
            wanted = nn.functional.normalize(keys(batch + 0.1 * torch.randn_like(batch)), dim=1)
        logits = torch.cat([(found * wanted).sum(1, keepdim=True), found @ model.queue.T], 1) / 0.1
        update(
            optimizer,
            nn.functional.cross_entropy(logits, torch.zeros(len(batch), dtype=torch.long)),
        )
        with torch.no_grad():
            model.queue = torch.cat([wanted, model.queue])[:32]
            for one, other in zip(keys.parameters(), queries.parameters(), strict=True):
                one.lerp_(other, 0.01)

    return model, optimizer, step


class Convolved(nn.Module):
    """Averages the features of neighbours in a graph, twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(12, 16), nn.Linear(16, 3)

    def forward(self, nodes: Tensor, edges: Tensor) -> Tensor:
        for number, layer in enumerate((self.first, self.last)):
            nodes = (
                layer(nodes)
                if number == 0
                else layer(nn.functional.dropout(nodes.relu(), 0.2, self.training))
            )
            nodes = torch.zeros_like(nodes).index_add(0, edges[1], nodes[edges[0]]) / 4 + nodes
        return nodes


def graph() -> Trained:
    model = Convolved()
    optimizer = torch.optim.Adam(model.parameters(), 1e-2, weight_decay=5e-4)
    edges = torch.randint(8, (2, 32))

    def step(batch: Tensor) -> None:
        update(
            optimizer, nn.functional.cross_entropy(model(batch, edges)[:5], batch[:5, :3].argmax(1))
        )

    return model, optimizer, step


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.heads, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.router = nn.Linear(width, 3)
        self.experts = nn.ModuleList(mlp(width, 2 * width, width) for _ in range(3))

    def forward(self, inputs: Tensor) -> Tensor:
        heads = self.heads(self.norms[0](inputs)).chunk(3, -1)
        queries, keys, values = (one.unflatten(-1, (2, -1)).transpose(1, 2) for one in heads)
        attended = nn.functional.scaled_dot_product_attention(
            queries, keys, values, is_causal=True, dropout_p=0.1
        )
        inputs = inputs + self.out(attended.transpose(1, 2).flatten(2))
        flat = self.norms[1](inputs).flatten(0, 1)
        gate, chosen = self.router(flat).softmax(-1).max(-1)
        outputs = torch.zeros_like(flat)
        for number, expert in enumerate(self.experts):
            picked = (chosen == number).nonzero()[:, 0]
            outputs = outputs.index_add(0, picked, expert(flat[picked]) * gate[picked, None])
        return inputs + outputs.view_as(inputs)


class Language(nn.Module):
    """A decoder with tied weights, dropout, experts and activation checkpointing."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(24, 16), nn.Embedding(12, 16)
        self.blocks = nn.ModuleList(Block(16) for _ in range(2))
        self.norm, self.head = nn.LayerNorm(16), nn.Linear(16, 24, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.tokens(tokens) + self.positions(torch.arange(tokens.size(1)))
        for block in self.blocks:
            hidden = checkpoint(block, hidden, use_reentrant=False)
        return self.head(self.norm(hidden))


def language() -> Trained:
    model = Language()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: 0.5 + 0.5 * math.cos(step / 8)
    )

    def step(batch: Tensor) -> None:
        tokens = ((batch + 3) * 4).long().clamp(0, 23)
        for part in tokens.chunk(2):  # accumulated
            outputs = model(part)[:, :-1]
            (
                nn.functional.cross_entropy(outputs.flatten(0, 1), part[:, 1:].flatten()) / 2
            ).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()

    return model, optimizer, step


STYLES = (adversarial, q_learning, policy_gradient, diffusion, contrastive, graph, language)


def of_styles() -> Iterator[tuple[str, Trained, Callable[[], Any]]]:
    for style in STYLES:
        yield style.__name__, style(), lambda: torch.randn(8, 12)


def of_modules() -> Iterator[tuple[str, Trained, Callable[[], Any]]]:
    """Yield a training of each module with parameters, or with a linear layer after it."""
    from torch.testing._internal.common_modules import module_db  # looked at in torch 2.15
    from torch.testing._internal.common_optimizers import optim_db

    skipped = ("Muon", "SparseAdam")  # for matrices, and for sparse gradients
    classes = [one.optim_cls for one in optim_db if one.optim_cls.__name__ not in skipped]
    for number, info in enumerate(module_db):
        options = {
            "device": "cpu",
            "dtype": torch.float32,
            "requires_grad": False,
            "training": True,
        }
        for sample in info.module_inputs_func(info, **options):
            made, given = sample.constructor_input, sample.forward_input
            if given is None or not given.args:
                continue
            model = nn.ModuleDict({"tested": info.module_cls(*made.args, **made.kwargs)})
            trained = _of_module(model, classes[number % len(classes)], given)
            if trained is not None:
                yield (
                    f"{info.name} {classes[number % len(classes)].__name__}",
                    trained,
                    partial(_noisy, given.args),
                )
                break


def _of_module(model: nn.ModuleDict, optimizer_class: Any, given: Any) -> Trained | None:
    try:
        outputs = [*_floating(model["tested"](*_noisy(given.args), **given.kwargs))]
    except (RuntimeError, ValueError, TypeError):
        return None  # an input for the error that it raises, or that does not fit other values
    if not outputs or not torch.isfinite(outputs[0]).all():
        return None
    model["head"] = nn.Linear(outputs[0].numel(), 3)
    optimizer = optimizer_class(model.parameters(), lr=1e-2)

    def step(batch: Any) -> None:
        def closure() -> Tensor:
            optimizer.zero_grad()
            outputs = [*_floating(model["tested"](*batch, **given.kwargs))]
            loss = model["head"](outputs[0].reshape(1, -1)).square().mean()
            loss = loss + sum(one.sin().mean() for one in outputs)
            loss.backward()
            return loss

        optimizer.step(closure)

    return model, optimizer, step


def _noisy(args: Any) -> list[Any]:
    """Return arguments with another first tensor, where its values may be any."""
    first = args[0]
    is_free = isinstance(first, Tensor) and first.is_floating_point() and bool((first < 0).any())
    return [torch.randn_like(first) if is_free else first, *args[1:]]


def _floating(outputs: Any) -> Iterator[Tensor]:
    for one in outputs if isinstance(outputs, tuple | list) else (outputs,):
        if isinstance(one, tuple | list):
            yield from _floating(one)
        elif isinstance(one, Tensor) and one.is_floating_point():
            yield one


def of_models() -> Iterator[tuple[str, Trained, Callable[[], Any]]]:
    """Yield trainings of small models of transformers and torchvision, with random weights."""
    import transformers

    small = {
        "hidden_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 32,
    }
    of_gpt = {"n_embd": 16, "n_layer": 2, "n_head": 2, "bos_token_id": 0, "eos_token_id": 0}
    of_t5 = {
        "d_model": 16,
        "d_kv": 8,
        "d_ff": 32,
        "num_layers": 2,
        "num_heads": 2,
        "decoder_start_token_id": 0,
    }
    kinds: dict[str, dict[str, Any]] = {
        "GPT2": of_gpt, "Bert": small, "Roberta": small, "T5": of_t5,
        "Llama": {**small, "num_key_value_heads": 2}, "Qwen2": {**small, "num_key_value_heads": 2},
    }  # fmt: skip
    for kind, options in kinds.items():
        config = getattr(transformers, f"{kind}Config")(vocab_size=24, pad_token_id=0, **options)
        head = {"Bert": "ForMaskedLM", "Roberta": "ForMaskedLM", "T5": "ForConditionalGeneration"}
        name = f"{kind}{head.get(kind, 'LMHeadModel' if kind == 'GPT2' else 'ForCausalLM')}"
        yield (
            name,
            _of_loss(getattr(transformers, name)(config).train()),
            lambda: torch.randint(1, 24, (4, 8)),
        )
    import torchvision

    for name in (
        "resnet18",
        "mobilenet_v3_small",
        "vit_b_16",
        "efficientnet_b0",
        "convnext_tiny",
        "swin_t",
    ):
        size = {"image_size": 32} if name == "vit_b_16" else {}
        model = getattr(torchvision.models, name)(num_classes=3, **size)
        yield name, _of_classes(model), lambda: torch.randn(2, 3, 32, 32)


def _of_loss(model: nn.Module) -> Trained:
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    return (
        model,
        optimizer,
        lambda tokens: update(optimizer, model(input_ids=tokens, labels=tokens).loss),
    )


def _of_classes(model: nn.Module) -> Trained:
    optimizer = torch.optim.SGD(model.parameters(), 1e-2, momentum=0.9)
    return (
        model,
        optimizer,
        lambda images: update(
            optimizer, nn.functional.cross_entropy(model(images), images.mean((2, 3)).argmax(1))
        ),
    )


def record(folder: Path, trained: Trained, draw: Callable[[], Any]) -> None:
    model, optimizers, step = trained
    with TrainingRun(folder, mode="record", model=model, optimizers=optimizers, level="op") as run:
        for _ in range(NUM_STEPS):
            batch = draw()
            with run.step(batch):
                step(batch)


if __name__ == "__main__":
    # torch's test package imports it for assertions that are not used here
    stand_in = types.ModuleType("expecttest")
    stand_in.TestCase = unittest.TestCase
    sys.modules["expecttest"] = stand_in
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    num_trained = 0
    sources = {"styles": of_styles, "modules": of_modules, "models": of_models}
    with tempfile.TemporaryDirectory() as place:
        for name, trained, draw in sources[sys.argv[1]]():
            folder = Path(place) / str(num_trained)
            with contextlib.redirect_stdout(io.StringIO()):
                record(folder, trained, draw)
            num_trained += 1
            for finding in find_findings(Run.open(folder), ignored=()):
                print(f"{name}: {finding.finding}: {finding.explanation}")
    print(f"{num_trained} trainings")
