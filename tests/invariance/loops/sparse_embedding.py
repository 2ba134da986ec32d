"""Embeddings with sparse gradients: SparseAdam for them, SGD for the rest, EmbeddingBag too.

steps: 5
sites: table bag out table.weight out.weight
kinds: output param grad update
scalars: loss
"""

import torch
import witness
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(30, 6, sparse=True)
        self.bag = nn.EmbeddingBag(20, 6, sparse=True, mode="sum")
        self.out = nn.Linear(6, 2)

    def forward(self, words, bags):
        return self.out(self.table(words).mean(1) + self.bag(bags))


witness.start(40)
model = Net()
tables = torch.optim.SparseAdam([model.table.weight, model.bag.weight], lr=1e-2)
rest = torch.optim.SGD(model.out.parameters(), lr=0.1)
for _ in range(5):
    tables.zero_grad()
    rest.zero_grad()
    logits = model(torch.randint(30, (5, 3)), torch.randint(20, (5, 4)))
    loss = nn.functional.cross_entropy(logits, torch.randint(2, (5,)))
    loss.backward()
    tables.step()
    rest.step()
    witness.note(loss)
witness.finish(model, tables, rest)
