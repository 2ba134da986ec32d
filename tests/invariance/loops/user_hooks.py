"""Hooks of the user's own at every place torch offers; some change what passes, all print their order.

steps: 3
sites: 0 1 2 0.weight
kinds: output grad_output param grad update
scalars: loss
watch: yes
"""

import torch
import witness
from torch import nn

witness.start(31)
model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)


def say(word, change=None):
    def hook(*args, **kwargs):
        print(word)
        return change(*args) if change else None

    return hook


model[0].register_forward_pre_hook(say("pre 0", lambda m, a: (a[0] * 1.01,)))
model[0].register_forward_hook(say("post 0"))
model[1].register_forward_hook(say("post 1", lambda m, a, out: out.clamp(-0.5, 0.5)))
model[1].register_full_backward_hook(say("back 1", lambda m, gi, go: tuple(g * 0.9 for g in gi)))
model[2].register_full_backward_pre_hook(say("pre back 2", lambda m, go: (go[0] * 1.1,)))
model[2].weight.register_hook(say("grad 2", lambda g: g * 0.5))
model[0].bias.register_post_accumulate_grad_hook(say("accumulated 0"))
optimizer.register_step_pre_hook(say("before step"))
optimizer.register_step_post_hook(say("after step"))
anywhere = nn.modules.module.register_module_forward_hook(lambda m, a, out: print("any", type(m).__name__))
with witness.watching(model, optimizer):
    for _ in range(3):
        optimizer.zero_grad()
        out = model(torch.randn(5, 4))
        out.register_hook(say("grad out", lambda g: g * 2))
        out.retain_grad()
        loss = out.square().mean()
        loss.backward()
        optimizer.step()
        witness.note(loss)
        witness.note(out.grad.norm())
anywhere.remove()
witness.finish(model, optimizer)
