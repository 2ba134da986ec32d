"""A small pre-norm transformer encoder of modules, trained with Adam in two parameter groups."""

import torch
from torch import nn

STEPS = 4
WIDTH = 8


class MLP(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.up = nn.Linear(width, 2 * width)
        self.act = nn.GELU()
        self.down = nn.Linear(2 * width, width)

    def forward(self, x):
        return self.down(self.act(self.up(x)))


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.ln1 = nn.LayerNorm(width)
        self.attn = nn.MultiheadAttention(width, 2, batch_first=True)
        self.drop = nn.Dropout(0.0)
        self.ln2 = nn.LayerNorm(width)
        self.mlp = MLP(width)

    def forward(self, x):
        h = self.ln1(x)
        x = x + self.drop(self.attn(h, h, h, need_weights=False)[0])
        return x + self.mlp(self.ln2(x))


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(13, WIDTH)
        self.blocks = nn.ModuleList([Block(WIDTH) for _ in range(3)])
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, 4)

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x).mean(1))


def make_data():
    generator = torch.Generator().manual_seed(5)
    tokens = torch.randint(0, 13, (STEPS, 4, 6), generator=generator)
    labels = torch.randint(0, 4, (STEPS, 4), generator=generator)
    return tokens, labels


def main():
    torch.manual_seed(0)
    model = Encoder()
    head = list(model.head.parameters())
    body = [p for name, p in model.named_parameters() if not name.startswith("head")]
    optimizer = torch.optim.Adam([{"params": body}, {"params": head, "lr": 2e-3}], lr=1e-3, betas=(0.9, 0.99))
    criterion = nn.CrossEntropyLoss()
    tokens, labels = make_data()
    torch.manual_seed(1)
    for step in range(STEPS):
        optimizer.zero_grad()
        output = model(tokens[step])
        loss = criterion(output, labels[step])
        loss.backward()
        optimizer.step()


if __name__ == "__main__":
    main()
