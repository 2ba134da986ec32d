"""A two-layer bidirectional LSTM with dropout and a state carried from batch to batch.

steps: 4
sites: lstm out lstm.weight_ih_l0 lstm.bias_hh_l1_reverse
kinds: output grad_output param grad update
scalars: loss
watch: yes
"""

import torch
import witness
from torch import nn


class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(5, 6, num_layers=2, bidirectional=True, dropout=0.3, batch_first=True)
        self.out = nn.Linear(12, 4)

    def forward(self, x, state=None):
        y, state = self.lstm(x, state)
        return self.out(y), state


witness.start(12)
model = Tagger()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
state = None
with witness.watching(model, optimizer):
    for _ in range(4):
        logits, state = model(torch.randn(3, 9, 5), state)
        state = tuple(part.detach() for part in state)
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), torch.randint(4, (27,)))
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        witness.note(loss)
witness.finish(model, optimizer, list(state))
