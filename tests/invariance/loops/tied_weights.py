"""A language model whose output layer uses the embedding's weight.

steps: 5
sites: embed mix decode embed.weight decode.bias
kinds: output grad_output param grad update
scalars: loss
watch: yes
"""

import torch
import witness
from torch import nn


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(11, 8, padding_idx=0)
        self.mix = nn.Linear(8, 8)
        self.decode = nn.Linear(8, 11)
        self.decode.weight = self.embed.weight

    def forward(self, tokens):
        return self.decode(torch.tanh(self.mix(self.embed(tokens))))


witness.start(8)
model = Tied()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
with witness.watching(model, optimizer):
    for _ in range(5):
        tokens = torch.randint(11, (4, 7))
        optimizer.zero_grad()
        logits = model(tokens[:, :-1])
        loss = nn.functional.cross_entropy(logits.reshape(-1, 11), tokens[:, 1:].reshape(-1))
        loss.backward()
        optimizer.step()
        witness.note(loss)
witness.finish(model, optimizer)
