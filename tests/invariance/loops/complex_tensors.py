"""Complex weights and activations: a Fourier layer and a complex Linear.

steps: 5
sites: spectral mix mix.weight
kinds: output grad_output param grad update
scalars: loss
"""

import torch
import witness
from torch import nn


class Spectral(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(9, dtype=torch.cfloat))

    def forward(self, x):
        return torch.fft.rfft(x) * self.weight


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.spectral, self.mix = Spectral(), nn.Linear(9, 9, dtype=torch.cfloat)

    def forward(self, x):
        return torch.fft.irfft(self.mix(self.spectral(x)).conj(), n=16)


witness.start(41)
model = Net()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
for _ in range(5):
    x = torch.randn(4, 16)
    optimizer.zero_grad()
    loss = (model(x) - x).square().mean()
    loss.backward()
    optimizer.step()
    witness.note(loss)
witness.finish(model, optimizer)
