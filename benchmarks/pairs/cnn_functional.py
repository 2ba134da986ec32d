"""A small convolutional network whose activations are calls in the code, trained from a loader with AdamW."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

STEPS = 4


class Stage(nn.Module):
    def __init__(self, inside, outside, dropout=0.0):
        super().__init__()
        self.conv = nn.Conv2d(inside, outside, 3, stride=2, padding=1)
        self.group = nn.GroupNorm(2, outside)
        self.mix = nn.Conv2d(outside, outside, 1)
        self.dropout = dropout

    def forward(self, x):
        x = F.gelu(self.group(self.conv(x)))
        x = F.dropout(x, self.dropout, self.training)
        return self.mix(x)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = Stage(1, 4)
        self.second = Stage(4, 8)
        self.fc1 = nn.Linear(8 * 4, 16)
        self.fc2 = nn.Linear(16, 3)

    def forward(self, x):
        x = self.second(self.first(x))
        x = F.relu(self.fc1(x.flatten(1)))
        return self.fc2(x)


def make_loader():
    generator = torch.Generator().manual_seed(3)
    images = torch.rand(4 * STEPS, 1, 8, 8, generator=generator)
    labels = torch.randint(0, 3, (4 * STEPS,), generator=generator)
    return DataLoader(TensorDataset(images, labels), batch_size=4)


def main():
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.999))
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5)
    torch.manual_seed(1)
    for x, y in make_loader():
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()


if __name__ == "__main__":
    main()
