"""A function that keeps its settings as ``locals()``, which looking at its frame would change.

steps: 6
kinds: output grad_output param grad update
scalars: loss lr
watch: yes
"""

import torch
import witness
from torch import nn


def main(lr=1e-2, steps=6):
    settings = locals()
    torch_model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 3))
    optimizer = torch.optim.SGD(torch_model.parameters(), lr=settings["lr"])
    with witness.watching(torch_model, optimizer):
        for _ in range(settings["steps"]):
            x, y = torch.randn(12, 8), torch.randint(3, (12,))
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(torch_model(x), y)
            loss.backward()
            optimizer.step()
            witness.note(loss)
            print(sorted(settings), settings["lr"])
    witness.finish(torch_model, optimizer)


witness.start(31)
main()
