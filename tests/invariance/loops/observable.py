"""A suspicious script: prints what an observer might disturb (graph, identity, references, versions).

steps: 4
sites: 0 1 2 0.weight
kinds: output grad_output param grad update
scalars: loss
watch: yes
"""

import sys
import weakref

import torch
import witness
from torch import nn

witness.start(53)
model = nn.Sequential(nn.Linear(4, 6), nn.Identity(), nn.Tanh(), nn.Linear(6, 2))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)


def chain(node, depth=0):
    if node is None or depth > 8:
        return []
    return [node.name()] + [name for child, _ in node.next_functions for name in chain(child, depth + 1)]


with witness.watching(model, optimizer):
    for _ in range(4):
        x = torch.randn(5, 4)
        first = model[0](x)
        same = model[1](first)
        print(same is first, first.is_leaf, first._version, first.grad_fn.name(), first._is_view())
        out = model(x)
        print(chain(out.grad_fn), out.requires_grad, out.stride(), sys.getrefcount(out))
        (through,) = torch.autograd.grad(out.sum(), x.requires_grad_(), allow_unused=True) or (None,)
        held = weakref.ref(model(x))
        print(held() is None, through is None, x._version, sorted(vars(model[0])))
        optimizer.zero_grad()
        loss = out.square().mean()
        loss.backward()
        print(
            [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model],
            type(model[0]).__call__.__name__,
        )
        optimizer.step()
        witness.note(loss)
        dead = weakref.ref(out)
        del out, loss
        print(dead() is None)
witness.finish(model, optimizer)
