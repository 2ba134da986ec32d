"""An IterableDataset with a shuffle buffer and a sampler with its own generator.

steps: 6
sites: 0 1 0.weight
kinds: output grad_output param grad update batch
scalars: loss
watch: yes
"""

import random

import torch
import witness
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, RandomSampler, TensorDataset


class Stream(IterableDataset):
    def __iter__(self):
        held = []
        for index in range(20):
            held.append(torch.randn(3) + index / 10)
            if len(held) == 8:
                yield held.pop(random.randrange(8))


witness.start(28)
model = nn.Sequential(nn.Linear(3, 6), nn.LayerNorm(6))
optimizer = torch.optim.Adamax(model.parameters(), lr=1e-2)
mapped = TensorDataset(torch.randn(9, 3))
sampler = RandomSampler(mapped, replacement=True, num_samples=6, generator=torch.Generator().manual_seed(5))
with witness.watching(model, optimizer):
    for loader in (DataLoader(Stream(), batch_size=4), DataLoader(mapped, batch_size=3, sampler=sampler)):
        for batch in loader:
            x = batch[0] if isinstance(batch, list) else batch
            optimizer.zero_grad()
            loss = model(x).exp().mean()
            loss.backward()
            optimizer.step()
            witness.note(loss)
witness.finish(model, optimizer, sampler.generator.get_state())
