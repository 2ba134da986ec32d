"""torch.save of model and state dicts, and plain pickle, in the middle of training; bytes are compared.

steps: 4
sites: inner inner.weight
kinds: output grad_output param grad update
scalars: loss
watch: yes
"""

import io
import pickle

import torch
import witness
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)

    def forward(self, x):
        return self.norm(self.inner(x))


def saved(thing):
    buffer = io.BytesIO()
    torch.save(thing, buffer)
    return buffer.getvalue()


witness.start(33)
model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)
files = []
with witness.watching(model, optimizer):
    for _ in range(4):
        optimizer.zero_grad()
        out = model(torch.randn(6, 4))
        loss = out.abs().mean()
        loss.backward()
        files += [saved(model), saved(model.state_dict()), saved(optimizer.state_dict()), saved(out.detach())]
        # Plain pickles of tensors hold addresses: only their length can be compared.
        print(len(pickle.dumps(model)), len(pickle.dumps(optimizer)))
        optimizer.step()
        witness.note(loss)
        again = torch.load(io.BytesIO(files[-4]), weights_only=False).eval()
        witness.note(again(torch.ones(1, 4)).sum())
print([len(file) for file in files])
witness.finish(model, optimizer, again, files)
