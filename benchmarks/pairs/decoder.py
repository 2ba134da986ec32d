"""A decoder with norms of its own, gated layers, two groups of parameters, and batches that workers load."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset

STEPS = 4
WIDTH, HEADS, WORDS = 12, 3, 23


class RootNorm(nn.Module):
    def __init__(self, width, eps=1e-6):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x):
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps) * self.weight


class SelfAttention(nn.Module):
    def __init__(self):
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))
        self.output = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x):
        b, t, c = x.shape
        q, k, v = (p(x).view(b, t, HEADS, -1).transpose(1, 2) for p in (self.query, self.key, self.value))
        weights = (q @ k.transpose(-2, -1)) * (c // HEADS) ** -0.5
        hidden = torch.ones(t, t, dtype=torch.bool).triu(1)
        weights = weights.masked_fill(hidden, float("-inf")).softmax(-1)
        return self.output((weights @ v).transpose(1, 2).reshape(b, t, c))


class GatedLayer(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate, self.up = nn.Linear(WIDTH, 20), nn.Linear(WIDTH, 20)
        self.down = nn.Linear(20, WIDTH)

    def forward(self, x):
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm_in, self.attention = RootNorm(WIDTH), SelfAttention()
        self.norm_mid, self.mlp = RootNorm(WIDTH), GatedLayer()

    def forward(self, x):
        x = x + self.attention(self.norm_in(x))
        return x + self.mlp(self.norm_mid(x))


class Decoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(3))
        self.norm_out = RootNorm(WIDTH)
        self.logits = nn.Linear(WIDTH, WORDS)

    def forward(self, x):
        x = self.tokens(x)
        for layer in self.layers:
            x = layer(x)
        return self.logits(self.norm_out(x))


class Text(Dataset):
    def __init__(self):
        self.words = torch.randint(0, WORDS, (STEPS * 3, 9), generator=torch.Generator().manual_seed(31))

    def __len__(self):
        return len(self.words)

    def __getitem__(self, index):
        return self.words[index, :-1], self.words[index, 1:]


def main():
    torch.manual_seed(32)
    model = Decoder()
    decayed = [p for p in model.parameters() if p.ndim > 1]
    plain = [p for p in model.parameters() if p.ndim == 1]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": plain, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=2e-3, betas=(0.9, 0.98), eps=1e-9)
    loader = DataLoader(Text(), batch_size=3, shuffle=True, num_workers=1)
    torch.manual_seed(33)
    for given, wanted in loader:
        loss = F.cross_entropy(model(given).flatten(0, 1), wanted.flatten())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()


if __name__ == "__main__":
    main()
