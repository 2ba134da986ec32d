"""Two threads train a model each at the same time, each on its own data and generator; the first is recorded.

steps: 8
sites: 0 2 0.weight
kinds: output param grad update
scalars: loss
"""

import threading

import torch
import witness
from torch import nn

witness.start(47)
models = [nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1)) for _ in range(2)]
optimizers = [torch.optim.Adam(model.parameters(), lr=1e-2) for model in models]
losses = [[], []]
meet = threading.Barrier(2)
begun = threading.Event()


def train(which):
    generator = torch.Generator().manual_seed(which)
    if which == 1:
        begun.wait()
    for _ in range(8):
        x = torch.randn(6, 4, generator=generator)
        optimizers[which].zero_grad()
        loss = models[which](x).square().mean()
        loss.backward()
        optimizers[which].step()
        losses[which].append(loss.item())
        begun.set()
        meet.wait()


workers = [threading.Thread(target=train, args=(which,)) for which in range(2)]
for worker in workers:
    worker.start()
for worker in workers:
    worker.join()
for value in losses[0] + losses[1]:
    witness.note(value)
witness.finish(*models, *optimizers)
