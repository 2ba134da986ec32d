"""A residual network with group norm, trained with accumulated gradients, Nesterov momentum and a schedule."""

import torch
from torch import nn

STEPS = 4
MICRO = 2


class Unit(nn.Module):
    def __init__(self, given, width, stride):
        super().__init__()
        self.conv_a = nn.Conv2d(given, width, 3, stride=stride, padding=1, bias=False)
        self.norm_a = nn.BatchNorm2d(width)
        self.conv_b = nn.Conv2d(width, width, 3, padding=1)
        self.norm_b = nn.GroupNorm(2, width)
        self.skip = nn.Conv2d(given, width, 1, stride=stride)
        self.act = nn.SiLU()

    def forward(self, x):
        y = self.act(self.norm_a(self.conv_a(x)))
        y = self.norm_b(self.conv_b(y))
        return self.act(y + self.skip(x))


class Network(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(Unit(3, 6, 1), Unit(6, 10, 2))
        self.pool = nn.AdaptiveAvgPool2d(2)
        self.score = nn.Linear(40, 5)

    def forward(self, x):
        return self.score(self.pool(self.body(x)).flatten(1))


def make_data():
    generator = torch.Generator().manual_seed(11)
    images = torch.randn(STEPS * MICRO, 4, 3, 8, 8, generator=generator)
    labels = torch.randint(0, 5, (STEPS * MICRO, 4), generator=generator)
    return images, labels


def main():
    torch.manual_seed(21)
    model = Network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, nesterov=True, weight_decay=1e-4)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5)
    criterion = nn.CrossEntropyLoss()
    images, labels = make_data()
    torch.manual_seed(22)
    for step in range(STEPS):
        optimizer.zero_grad()
        for part in range(MICRO):
            index = step * MICRO + part
            loss = criterion(model(images[index]), labels[index]) / MICRO
            loss.backward()
        optimizer.step()
        scheduler.step()


if __name__ == "__main__":
    main()
