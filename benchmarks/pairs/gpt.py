"""A small language model with one matrix for q, k and v, everything else called in the code, and a tied head."""

import torch
import torch.nn.functional as F
from torch import nn

STEPS = 4
WIDTH = 8


class Attention(nn.Module):
    def __init__(self, dropout=0.0):
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.proj = nn.Linear(WIDTH, WIDTH)
        self.dropout = dropout

    def forward(self, x):
        b, t, c = x.shape
        q, k, v = self.qkv(x).view(b, t, 3, 2, c // 2).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=self.dropout)
        return self.proj(y.transpose(1, 2).reshape(b, t, c))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.gain1 = nn.Parameter(torch.ones(WIDTH))
        self.gain2 = nn.Parameter(torch.ones(WIDTH))
        self.attn = Attention()
        self.fc = nn.Linear(WIDTH, 4 * WIDTH)
        self.proj = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        x = x + self.attn(F.layer_norm(x, (WIDTH,), self.gain1))
        h = self.fc(F.layer_norm(x, (WIDTH,), self.gain2))
        h = F.gelu(h)
        return x + self.proj(h)


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.wte = nn.Embedding(17, WIDTH)
        self.wpe = nn.Embedding(6, WIDTH)
        self.h = nn.ModuleList([Block() for _ in range(2)])
        self.ln_f = nn.LayerNorm(WIDTH, eps=1e-5)
        self.lm_head = nn.Linear(WIDTH, 17, bias=False)
        self.lm_head.weight = self.wte.weight

    def forward(self, tokens, targets):
        x = self.wte(tokens) + self.wpe(torch.arange(tokens.shape[1]))
        for block in self.h:
            x = block(x)
        logits = self.lm_head(self.ln_f(x))
        return logits, F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def make_data():
    generator = torch.Generator().manual_seed(5)
    return torch.randint(0, 17, (STEPS, 3, 7), generator=generator)


def main():
    torch.manual_seed(0)
    model = GPT()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1)
    text = make_data()
    torch.manual_seed(1)
    for step in range(STEPS):
        _, loss = model(text[step][:, :-1], text[step][:, 1:])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()


if __name__ == "__main__":
    main()
