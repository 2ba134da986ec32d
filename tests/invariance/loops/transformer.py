"""nn.Transformer with masks and a MultiheadAttention whose fast path is taken in eval mode.

steps: 3
sites: encoder encoder.layers.0.self_attn encoder.layers.0.linear1 decoder cross cross.in_proj_weight
kinds: output grad_output param grad update
scalars: loss
watch: yes
"""

import torch
import witness
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        layer = {"d_model": 8, "nhead": 2, "dim_feedforward": 16, "batch_first": True}
        self.encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(**layer), 2)
        self.decoder = nn.TransformerDecoder(nn.TransformerDecoderLayer(**layer, norm_first=True), 1)
        self.cross = nn.MultiheadAttention(8, 2, batch_first=True, kdim=8, vdim=8)

    def forward(self, source, target):
        mask = nn.Transformer.generate_square_subsequent_mask(target.shape[1])
        memory = self.encoder(source, src_key_padding_mask=torch.zeros(source.shape[:2], dtype=torch.bool))
        out = self.decoder(target, memory, tgt_mask=mask, tgt_is_causal=True)
        return self.cross(out, memory, memory, need_weights=True, average_attn_weights=False)


witness.start(39)
model = Net()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
with witness.watching(model, optimizer):
    for _ in range(3):
        model.train()
        out, attention = model(torch.randn(2, 5, 8), torch.randn(2, 4, 8))
        optimizer.zero_grad()
        loss = out.square().mean() + attention.max()
        loss.backward()
        optimizer.step()
        witness.note(loss)
        model.eval()
        with torch.no_grad():
            witness.note(model(torch.ones(2, 5, 8), torch.ones(2, 4, 8))[0].sum())
witness.finish(model, optimizer)
