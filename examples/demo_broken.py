"""A small regression that learns at first and then blows up: its learning rate doubles every few steps.

Run it under clew and look at the record:

    clew run --every 1 examples/demo_broken.py
    clew show latest
"""

import torch
from torch import nn

STEPS = 320
BATCH = 64


def make_data(samples=1024, features=16):
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(samples, features, generator=generator)
    slopes = torch.randn(features, 1, generator=generator)
    return inputs, torch.sin(inputs @ slopes) + inputs[:, :1]


class Net(nn.Module):
    def __init__(self, features=16, width=64):
        super().__init__()
        self.fc1 = nn.Linear(features, width)
        self.fc2 = nn.Linear(width, width)
        self.head = nn.Linear(width, 1)
        self.relu = nn.ReLU()

    def forward(self, x):
        x = self.relu(self.fc1(x))
        x = self.relu(self.fc2(x))
        return self.head(x)


def main():
    torch.manual_seed(1)
    inputs, targets = make_data()
    loader = torch.utils.data.DataLoader(
        torch.utils.data.TensorDataset(inputs, targets), batch_size=BATCH, shuffle=True
    )
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    # The fault: somebody meant to halve the learning rate.
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=40, gamma=2.0)
    step = 0
    while step < STEPS:
        for batch, target in loader:
            loss = nn.functional.mse_loss(model(batch), target)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
            if step % 40 == 0:
                print(f"step {step}  loss {loss.item():.4g}  lr {schedule.get_last_lr()[0]:.3g}")
            step += 1
    print(f"final loss {loss.item():.4g}")


if __name__ == "__main__":
    main()
