"""A graph convolution on papers whose labels are numbered in the order of a set;
``--fixed`` sorts them.
"""

import sys

import torch
from torch import Tensor, nn

from det_callbacks import DetCallbacksError, TrainingRun

FIELDS = [
    "Neural_Networks",
    "Theory",
    "Case_Based",
    "Genetic_Algorithms",
    "Rule_Learning",
    "Reinforcement_Learning",
]


class GraphConvolution(nn.Module):
    def __init__(self, features: int, classes: int) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(features, 8), nn.Linear(8, classes)

    def forward(self, features: Tensor, adjacency: Tensor) -> Tensor:
        return self.last(adjacency @ torch.relu(self.first(adjacency @ features)))


def encode_labels(labels: list[str]) -> Tensor:
    classes = sorted(set(labels)) if "--fixed" in sys.argv else set(labels)
    numbers = {name: number for number, name in enumerate(classes)}
    return torch.tensor([numbers[label] for label in labels])


torch.manual_seed(42)
labels = encode_labels([FIELDS[paper * paper % 6] for paper in range(40)] + FIELDS)
features, adjacency = torch.rand(46, 12), torch.softmax(torch.rand(46, 46), dim=1)
model = GraphConvolution(12, 6)
optimizer = torch.optim.Adam(model.parameters(), lr=0.01, weight_decay=5e-4)


def train(run: TrainingRun) -> None:
    for _epoch in range(5):
        with run.step((features, adjacency, labels)):
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(features, adjacency), labels)
            loss.backward()
            optimizer.step()


try:
    with TrainingRun(
        "refs/set_order", mode=sys.argv[1], model=model, optimizers=optimizer, overwrite=True
    ) as run:
        train(run)
except DetCallbacksError as error:
    print(error)
    sys.exit(error.exit_code)
