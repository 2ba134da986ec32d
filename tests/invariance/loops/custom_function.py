"""A hand-written autograd.Function with a straight-through gradient, saved tensors and a non-tensor argument.

steps: 5
sites: enc quant dec enc.weight
kinds: output grad_output param grad update
scalars: loss
"""

import torch
import witness
from torch import nn


class Quantise(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, levels):
        ctx.save_for_backward(x)
        code = (x * levels).round()
        ctx.mark_non_differentiable(code)
        return code / levels, code

    @staticmethod
    def backward(ctx, grad, _):
        (x,) = ctx.saved_tensors
        return grad * (x.abs() < 1), None


class Quant(nn.Module):
    def forward(self, x):
        return Quantise.apply(x, 4)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.enc, self.quant, self.dec = nn.Linear(4, 6), Quant(), nn.Linear(6, 4)

    def forward(self, x):
        value, code = self.quant(self.enc(x))
        return self.dec(value), code


witness.start(37)
model = Net()
optimizer = torch.optim.Adadelta(model.parameters(), lr=1.0)
for _ in range(5):
    x = torch.randn(8, 4)
    out, code = model(x)
    optimizer.zero_grad()
    loss = (out - x).square().mean()
    loss.backward()
    optimizer.step()
    witness.note(loss)
witness.finish(model, optimizer, code)
