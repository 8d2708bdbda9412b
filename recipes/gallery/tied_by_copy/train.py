"""A language model whose head has the weights of the embedding: shared,
or with ``--copied`` copied once.
"""

import sys

import torch
from torch import Tensor, nn

from det_callbacks import DetCallbacksError, TrainingRun


class Transformer(nn.Module):
    def __init__(self, vocabulary: int = 30, width: int = 16) -> None:
        super().__init__()
        self.tok_embeddings = nn.Embedding(vocabulary, width)
        self.layer = nn.TransformerEncoderLayer(width, 2, 32, dropout=0.0, batch_first=True)
        self.output = nn.Linear(width, vocabulary, bias=False)
        if "--copied" in sys.argv:
            self.output.weight.data.copy_(self.tok_embeddings.weight.data)
        else:
            self.output.weight = self.tok_embeddings.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.output(self.layer(self.tok_embeddings(tokens)))


torch.manual_seed(0)
model = Transformer()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
text = torch.randint(30, (24, 9), generator=torch.Generator().manual_seed(1))


def train(run: TrainingRun) -> None:
    for tokens in text.split(4):
        with run.step((tokens,)):
            logits = model(tokens[:, :-1])
            loss = nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()


try:
    with TrainingRun(
        "refs/tied", mode=sys.argv[1], model=model, optimizers=optimizer, overwrite=True
    ) as run:
        train(run)
except DetCallbacksError as error:
    print(error)
    sys.exit(error.exit_code)
