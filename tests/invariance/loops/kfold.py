"""Three folds, each with a new model and optimizer under the same variable names.

steps: 9
sites: 0 2 0.weight
kinds: output grad_output param grad update
scalars: loss
"""

import gc
import weakref

import torch
import witness
from torch import nn

witness.start(46)
data = torch.randn(3, 6, 4)
gone = []
for fold in range(3):
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for _ in range(3):
        for_training = torch.cat([data[i] for i in range(3) if i != fold])
        optimizer.zero_grad()
        loss = model(for_training).square().mean()
        loss.backward()
        optimizer.step()
        witness.note(loss)
    with torch.no_grad():
        witness.note(model(data[fold]).square().mean())
    witness.finish(model, optimizer)
    gone.append(weakref.ref(model))
    del model, optimizer, loss
    gc.collect()
    print([reference() is None for reference in gone])
