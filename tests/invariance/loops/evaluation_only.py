"""A pretrained model is only evaluated.

steps: >=1
sites: 0 2 1
kinds: output
watch: yes
"""

import torch
import witness
from torch import nn

witness.start(25)
model = nn.Sequential(nn.Conv1d(2, 4, 3), nn.BatchNorm1d(4), nn.ReLU(), nn.AdaptiveAvgPool1d(1), nn.Flatten())
model.eval()
with witness.watching(model), torch.no_grad():
    for _ in range(5):
        witness.note(model(torch.randn(3, 2, 12)).softmax(1).max())
witness.finish(model)
