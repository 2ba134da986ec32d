"""A small classifier whose loss turns NaN after a while, from one careless line.

clew run examples/demo_nan.py             # names the operation and the line as soon as it happens
clew repro latest -o test_nan.py          # a test that fails until the line is mended
clew run examples/demo_nan.py --fixed     # the same training with the line mended (or DEMO_FIXED=1, for the test)
"""

import os
import sys

import torch
from torch import nn

EPOCHS = 12
FIXED = "--fixed" in sys.argv or "DEMO_FIXED" in os.environ


class Classifier(nn.Module):
    def __init__(self, features=12, classes=4):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(features, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU())
        self.head = nn.Linear(32, classes)

    def forward(self, x):
        return self.head(self.body(x))


class NegativeLogLikelihood(nn.Module):
    def forward(self, scores, labels):
        if FIXED:
            return nn.functional.cross_entropy(scores, labels)
        chance = torch.softmax(scores, dim=1)
        return -(torch.log(chance) * nn.functional.one_hot(labels, 4)).sum(1).mean()


def make_data(samples=512, features=12):
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(samples, features, generator=generator) * 2
    inputs[0] *= 40  # one sample was measured in other units
    slopes = torch.randn(features, 4, generator=generator)
    return torch.utils.data.TensorDataset(inputs, (inputs @ slopes).argmax(1))


def main():
    torch.manual_seed(0)
    loader = torch.utils.data.DataLoader(make_data(), batch_size=32, shuffle=True)
    model, criterion = Classifier(), NegativeLogLikelihood()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    for epoch in range(EPOCHS):
        for inputs, labels in loader:
            optimizer.zero_grad()
            loss = criterion(model(inputs), labels)
            loss.backward()
            optimizer.step()
        print(f"epoch {epoch:2d}  loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
