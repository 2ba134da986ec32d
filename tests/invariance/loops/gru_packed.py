"""A GRU over a packed sequence of unequal lengths, unpacked again for the loss.

steps: 4
sites: gru head gru.weight_hh_l0
kinds: output grad_output param grad update
scalars: loss
"""

import torch
import witness
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence


class Reader(nn.Module):
    def __init__(self):
        super().__init__()
        self.gru, self.head = nn.GRU(4, 7), nn.Linear(7, 2)

    def forward(self, packed):
        states, last = self.gru(packed)
        padded, lengths = pad_packed_sequence(states)
        return self.head(last[-1]), padded, lengths


witness.start(13)
model = Reader()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
for step in range(4):
    packed = pack_padded_sequence(torch.randn(6, 3, 4), [2 + step, 5, 1], enforce_sorted=False)
    logits, padded, lengths = model(packed)
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(logits, torch.tensor([0, 1, 1])) + 0.01 * padded.square().sum()
    loss.backward()
    optimizer.step()
    witness.note(loss)
    print(lengths.tolist())
witness.finish(model, optimizer)
