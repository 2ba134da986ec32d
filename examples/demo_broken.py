"""A small classifier that learns at first and then blows up: its learning rate doubles every few steps.

Run it under clew and look at the record:

    clew run examples/demo_broken.py
    clew show latest
"""

import torch
from torch import nn

STEPS = 240
BATCH = 64


def make_data(samples=1024, features=16, classes=4):
    generator = torch.Generator().manual_seed(0)
    centres = 2 * torch.randn(classes, features, generator=generator)
    labels = torch.randint(classes, (samples,), generator=generator)
    return centres[labels] + torch.randn(samples, features, generator=generator), labels


def make_model(features=16, classes=4):
    return nn.Sequential(
        nn.Linear(features, 64),
        nn.ReLU(),
        nn.Linear(64, 64),
        nn.ReLU(),
        nn.Linear(64, classes),
    )


def main():
    torch.manual_seed(1)
    inputs, labels = make_data()
    loader = torch.utils.data.DataLoader(
        torch.utils.data.TensorDataset(inputs, labels), batch_size=BATCH, shuffle=True
    )
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    # The fault: somebody meant to halve the learning rate.
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=16, gamma=2.0)
    step = 0
    while step < STEPS:
        for batch, target in loader:
            loss = nn.functional.cross_entropy(model(batch), target)
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
