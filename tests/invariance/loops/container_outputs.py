"""Modules that return lists, dicts, tuples, named tuples and dataclasses, nested, with more than tensors.

steps: 4
sites: pair named nested record pair.a.weight
kinds: output grad_output param grad update
scalars: loss
"""

from collections import namedtuple
from dataclasses import dataclass

import torch
import witness
from torch import nn

Both = namedtuple("Both", "mean scale")


@dataclass
class Report:
    value: torch.Tensor
    label: str
    missing: None = None


class Pair(nn.Module):
    def __init__(self, wrap):
        super().__init__()
        self.a, self.b, self.wrap = nn.Linear(5, 5), nn.Linear(5, 5), wrap

    def forward(self, x):
        return self.wrap(self.a(x), self.b(x))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.pair = Pair(lambda a, b: (a, b))
        self.named = Pair(Both)
        self.nested = Pair(lambda a, b: {"deep": [a, (b, None, 3)], "name": "x"})
        self.record = Pair(lambda a, b: Report(a * b, "product"))

    def forward(self, x):
        one, two = self.pair(x)
        both = self.named(one)
        nested = self.nested(two)
        return {"out": self.record(both.mean), "rest": [nested["deep"][0], nested["deep"][1][0], both.scale]}


witness.start(9)
model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(4):
    result = model(torch.randn(6, 5))
    optimizer.zero_grad()
    loss = result["out"].value.square().mean() + sum(leaf.square().mean() for leaf in result["rest"])
    loss.backward()
    optimizer.step()
    witness.note(loss)
witness.finish(model, optimizer, [type(result["out"]).__name__, result["out"].label])
