"""A plain loop of torch: no Trainer; the ops of each step are recorded by HashMode
inside an ObserverContext.
"""

import sys

import torch
from synthetic import loader, planted
from torch import nn

from det_callbacks import ObserverContext, enable_hash_mode  # added for det_callbacks

torch.manual_seed(0)
model = nn.Sequential(nn.Flatten(), nn.Linear(192, 8), nn.ReLU(), nn.Linear(8, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
name, reference = (*sys.argv[1:], None)[:2]
# added for det_callbacks
with ObserverContext("runs", name, reference=reference, raise_on_mismatch=True) as observer:
    for step, (images, labels) in enumerate(loader()):
        with enable_hash_mode():  # added for det_callbacks
            loss = planted(nn.functional.cross_entropy(model(images), labels), step)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        observer.next_step()  # added for det_callbacks
