"""Small trainings on a task that can be learned, to be spoiled in one way each."""

import torch
import torch.nn.functional as F
from torch import nn


def blobs(samples=256, features=8, classes=3, seed=1):
    """Return points around one centre for each class."""
    generator = torch.Generator().manual_seed(seed)
    centres = 2 * torch.randn(classes, features, generator=generator)
    labels = torch.randint(0, classes, (samples,), generator=generator)
    return centres[labels] + torch.randn(samples, features, generator=generator), labels


def mlp(features=8, hidden=32, classes=3, activation=nn.ReLU, layers=2):
    parts = [nn.Linear(features, hidden), activation()]
    for _ in range(layers - 2):
        parts += [nn.Linear(hidden, hidden), activation()]
    return nn.Sequential(*parts, nn.Linear(hidden, classes))


def fit(
    model,
    data=None,
    *,
    steps=30,
    lr=0.1,
    loss=F.cross_entropy,
    batch=32,
    optimizer=None,
    change=None,
    after=None,
):
    """Train a model; ``change(step, x, y)`` may spoil a batch, ``after(step)`` runs at the end of a step."""
    x, y = data if data is not None else blobs()
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=lr)
    for step in range(steps):
        rows = torch.arange(step * batch, (step + 1) * batch) % len(x)
        inputs, targets = x[rows], y[rows]
        if change is not None:
            inputs, targets = change(step, inputs.clone(), targets.clone())
        optimizer.zero_grad()
        value = loss(model(inputs), targets)
        value.backward()
        optimizer.step()
        if after is not None:
            after(step)
    return model
