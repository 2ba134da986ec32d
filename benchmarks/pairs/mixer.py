"""A small mixer over patches: layers along the patches and along the channels, in sequences, with plain SGD."""

import torch
from torch import nn

STEPS = 4
PATCHES, CHANNELS = 9, 6


class Turn(nn.Module):
    def forward(self, x):
        return x.transpose(1, 2)


def make_mixer():
    along = nn.Sequential(
        nn.LayerNorm(CHANNELS), Turn(), nn.Linear(PATCHES, 15), nn.GELU(), nn.Linear(15, PATCHES), Turn()
    )
    across = nn.Sequential(
        nn.LayerNorm(CHANNELS), nn.Linear(CHANNELS, 10), nn.GELU(), nn.Dropout(0.0), nn.Linear(10, CHANNELS)
    )
    return nn.ModuleDict({"along": along, "across": across})


class Mixer(nn.Module):
    def __init__(self):
        super().__init__()
        self.patch = nn.Conv2d(1, CHANNELS, 4, stride=4)
        self.mixers = nn.ModuleList(make_mixer() for _ in range(2))
        self.final = nn.LayerNorm(CHANNELS)
        self.classes = nn.Linear(CHANNELS, 3)

    def forward(self, image):
        x = self.patch(image).flatten(2).transpose(1, 2)
        for mixer in self.mixers:
            x = x + mixer["along"](x)
            x = x + mixer["across"](x)
        return self.classes(self.final(x).mean(1))


def make_data():
    generator = torch.Generator().manual_seed(51)
    images = torch.randn(STEPS, 6, 1, 12, 12, generator=generator)
    return images, torch.randint(0, 3, (STEPS, 6), generator=generator)


def main():
    torch.manual_seed(52)
    model = Mixer()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    images, classes = make_data()
    torch.manual_seed(53)
    for step in range(STEPS):
        loss = nn.functional.cross_entropy(model(images[step]), classes[step])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


if __name__ == "__main__":
    main()
