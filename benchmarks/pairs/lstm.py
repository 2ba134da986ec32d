"""A tagger with a two-layer LSTM, dropout before its head, and Adam."""

import torch
from torch import nn

STEPS = 4


class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(19, 7)
        self.reader = nn.LSTM(7, 9, num_layers=2, batch_first=True)
        self.norm = nn.LayerNorm(9)
        self.drop = nn.Dropout(0.2)
        self.hidden = nn.Linear(9, 11)
        self.tags = nn.Linear(11, 4)

    def forward(self, sentence):
        states, _ = self.reader(self.words(sentence))
        states = self.drop(self.norm(states))
        return self.tags(nn.functional.gelu(self.hidden(states)))


def make_data():
    generator = torch.Generator().manual_seed(41)
    sentences = torch.randint(0, 19, (STEPS, 5, 8), generator=generator)
    tags = torch.randint(0, 4, (STEPS, 5, 8), generator=generator)
    return sentences, tags


def main():
    torch.manual_seed(42)
    model = Tagger()
    model.train()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3, betas=(0.9, 0.999), eps=1e-8)
    criterion = nn.CrossEntropyLoss()
    sentences, tags = make_data()
    torch.manual_seed(43)
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = criterion(model(sentences[step]).flatten(0, 1), tags[step].flatten())
        loss.backward()
        nn.utils.clip_grad_value_(model.parameters(), 0.3)
        optimizer.step()


if __name__ == "__main__":
    main()
