"""A small transformer, trained for three steps in a loop of its own,
in some variants whose bits cannot be equal.
"""

import argparse

import torch
from torch import Tensor, distributed, nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention
from torch.nn.parallel import DistributedDataParallel

WIDTH, WORDS = 64, 50


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.to_q, self.to_k, self.to_v, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = (
            part(x).unflatten(-1, (4, -1)).transpose(1, 2)
            for part in (self.to_q, self.to_k, self.to_v)
        )
        return self.out(
            scaled_dot_product_attention(query, key, value, is_causal=True)
            .transpose(1, 2)
            .flatten(2)
        )


class FusedAttention(nn.Module):
    """The same with one projection, as another library has it."""

    def __init__(self, attention: Attention) -> None:
        super().__init__()
        parts = attention.to_q, attention.to_k, attention.to_v
        self.qkv_proj, self.out_proj = nn.Linear(WIDTH, 3 * WIDTH), attention.out
        self.qkv_proj.load_state_dict(
            {
                name: torch.cat([part.state_dict()[name] for part in parts])
                for name in ("weight", "bias")
            }
        )

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = (
            part.unflatten(-1, (4, -1)).transpose(1, 2) for part in self.qkv_proj(x).chunk(3, -1)
        )
        return self.out_proj(
            scaled_dot_product_attention(query, key, value, is_causal=True)
            .transpose(1, 2)
            .flatten(2)
        )


class Block(nn.Module):
    def __init__(self, approximate: str) -> None:
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(WIDTH), Attention()
        self.mlp = nn.Sequential(
            nn.LayerNorm(WIDTH),
            nn.Linear(WIDTH, 4 * WIDTH),
            nn.GELU(approximate),
            nn.Linear(4 * WIDTH, WIDTH),
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm(x))
        return x + self.mlp(x)


class Transformer(nn.Module):
    def __init__(self, approximate: str) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS)
        self.blocks = nn.Sequential(*(Block(approximate) for _ in range(2)))

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.blocks(self.embedding(tokens)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--bf16", action="store_true", help="the forward pass under torch.autocast")
    parser.add_argument("--gelu", choices=("none", "tanh"), default="none", help="a real change")
    parser.add_argument(
        "--port", action="store_true", help="blocks.*.attention with its three projections as one"
    )
    options = parser.parse_args()
    rank, world_size = 0, 1
    if distributed.is_torchelastic_launched():
        distributed.init_process_group("gloo")
        rank, world_size = distributed.get_rank(), distributed.get_world_size()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    model: nn.Module = Transformer(options.gelu)
    batches = torch.randint(WORDS, (3, 8, 33))
    if options.port:
        for block in model.blocks:
            block.attention = FusedAttention(block.attention)
    if world_size > 1:
        model = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for batch in batches:
        tokens = batch.chunk(world_size)[rank]
        with torch.autocast("cpu", torch.bfloat16, enabled=options.bf16):
            logits = model(tokens[:, :-1])
        loss = cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    if distributed.is_initialized():
        distributed.destroy_process_group()


if __name__ == "__main__":
    main()
