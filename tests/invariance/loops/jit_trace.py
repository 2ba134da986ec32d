"""A model is trained, traced in the middle, and the traced one trained on; its operations are printed.

steps: 6
sites: 0 2 0.weight
kinds: output grad_output param grad update
scalars: loss
"""

import warnings

import torch
import witness
from torch import nn

warnings.simplefilter("ignore", DeprecationWarning)
witness.start(43)
model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
net = model
with witness.watching(model, optimizer):
    for step in range(6):
        if step == 3:
            net = torch.jit.trace(model, torch.randn(2, 4))
            print([node.kind() for node in net.inlined_graph.nodes()])
        optimizer.zero_grad()
        loss = net(torch.randn(6, 4)).square().mean()
        loss.backward()
        optimizer.step()
        witness.note(loss)
witness.finish(model, optimizer)
