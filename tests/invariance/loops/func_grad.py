"""torch.func: functional_call with grad_and_value, per-sample gradients by vmap, parameters in a dict.

steps: >=1
sites: 0 2
kinds: output
"""

import torch
import witness
from torch import nn
from torch.func import functional_call, grad, grad_and_value, vmap

witness.start(24)
model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
params = {name: p.detach().clone() for name, p in model.named_parameters()}


def objective(params, x, y):
    return (functional_call(model, params, (x,)) - y).square().mean()


for _ in range(4):
    x = torch.randn(6, 4)
    y = x.sum(1, keepdim=True)
    gradients, loss = grad_and_value(objective)(params, x, y)
    norms = vmap(grad(objective), in_dims=(None, 0, 0))(params, x, y)["0.weight"].flatten(1).norm(dim=1)
    params = {name: p - 0.1 * gradients[name] for name, p in params.items()}
    witness.note(loss)
    witness.note(norms.max())
with torch.no_grad():
    witness.note(functional_call(model, params, (torch.ones(2, 4),)).sum())
witness.finish(model, params)
