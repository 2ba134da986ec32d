"""Errors in forward, in backward and in a closure that the script catches; training goes on after each.

steps: 6
sites: 0 2 0.weight
kinds: output grad_output param grad update
scalars: loss
losses: not printed
watch: yes
"""

import traceback

import torch
import witness
from torch import nn

witness.start(48)
model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.1), nn.Linear(8, 1))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)


def fail(*_):
    raise ValueError("on purpose")


with witness.watching(model, optimizer):
    for step in range(9):
        optimizer.zero_grad()
        try:
            x = torch.randn(6, 5 if step == 2 else 4)
            out = model(x)
            if step == 4:
                out.register_hook(fail)
            loss = out.square().mean()
            loss.backward()
            optimizer.step(fail if step == 6 else None)
        except (RuntimeError, ValueError) as error:
            inner = traceback.extract_tb(error.__traceback__)
            print(type(error).__name__, error, inner[0].lineno, inner[-1].name)
        else:
            witness.note(loss)
witness.finish(model, optimizer)
