"""Hugging Face's ModelOutput with loss and logits, by attribute, by key and by position.

steps: 4
sites: body head body.weight
kinds: output grad_output param grad update
scalars: loss
"""

from dataclasses import dataclass

import torch
import witness
from torch import nn
from transformers.utils import ModelOutput


@dataclass
class Result(ModelOutput):
    loss: torch.Tensor | None = None
    logits: torch.Tensor | None = None
    states: tuple[torch.Tensor, ...] | None = None


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(6, 10), nn.Linear(10, 3)

    def forward(self, inputs=None, labels=None):
        states = torch.tanh(self.body(inputs))
        logits = self.head(states)
        return Result(loss=nn.functional.cross_entropy(logits, labels), logits=logits, states=(states,))


witness.start(10)
model = Net()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
for _ in range(4):
    result = model(inputs=torch.randn(8, 6), labels=torch.randint(3, (8,)))
    optimizer.zero_grad()
    loss = result["loss"] + 1e-3 * result[1].square().mean() + 1e-3 * result.states[0].abs().mean()
    loss.backward()
    optimizer.step()
    witness.note(loss)
    witness.note(result.loss)
witness.finish(model, optimizer, [type(result).__name__, list(result.keys())])
