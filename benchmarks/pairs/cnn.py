"""A small residual network of modules, for comparisons: run as it stands, and with one line changed."""

import torch
from torch import nn

STEPS = 4


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.conv1 = nn.Conv2d(width, width, 3, padding=1)
        self.norm1 = nn.BatchNorm2d(width)
        self.act = nn.GELU()
        self.conv2 = nn.Conv2d(width, width, 3, padding=1)
        self.norm2 = nn.BatchNorm2d(width)
        self.drop = nn.Dropout(0.0)

    def forward(self, x):
        h = self.act(self.norm1(self.conv1(x)))
        h = self.norm2(self.conv2(h))
        return torch.relu(x + self.drop(h))


class Net(nn.Module):
    def __init__(self, width=6, classes=5):
        super().__init__()
        self.stem = nn.Conv2d(3, width, 3, padding=1)
        self.layers = nn.Sequential(Block(width), Block(width), Block(width))
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.head = nn.Linear(width, classes)

    def forward(self, x):
        x = self.layers(self.stem(x))
        return self.head(self.pool(x).flatten(1))


def make_data():
    generator = torch.Generator().manual_seed(5)
    images = torch.randn(STEPS, 4, 3, 8, 8, generator=generator)
    labels = torch.randint(0, 5, (STEPS, 4), generator=generator)
    return images, labels


def main():
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    criterion = nn.CrossEntropyLoss()
    images, labels = make_data()
    torch.manual_seed(1)
    for step in range(STEPS):
        optimizer.zero_grad()
        output = model(images[step])
        loss = criterion(output, labels[step])
        loss.backward()
        optimizer.step()


if __name__ == "__main__":
    main()
