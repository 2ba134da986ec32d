"""torch's own transformer layers, post-norm, trained with SGD and accumulation over two batches a step."""

import torch
import torch.nn.functional as F
from torch import nn

STEPS = 3


class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, activation="gelu", batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.tag = nn.Linear(8, 5)

    def forward(self, tokens):
        return self.tag(self.encoder(self.embed(tokens)))


def make_data():
    generator = torch.Generator().manual_seed(5)
    tokens = torch.randint(0, 11, (STEPS, 2, 3, 5), generator=generator)
    tags = torch.randint(0, 5, (STEPS, 2, 3, 5), generator=generator)
    return tokens, tags


def main():
    torch.manual_seed(0)
    model = Tagger()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True)
    tokens, tags = make_data()
    torch.manual_seed(1)
    for step in range(STEPS):
        optimizer.zero_grad()
        for part in range(2):
            output = model(tokens[step, part])
            loss = F.cross_entropy(output.flatten(0, 1), tags[step, part].flatten())
            (loss / 2).backward()
        optimizer.step()


if __name__ == "__main__":
    main()
