"""The trainings whose steps are timed, by hand: an MLP, the same over a loader, a convolutional net, a small GPT."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, TensorDataset

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    Batches = Iterator[tuple[torch.Tensor, torch.Tensor]]

_BATCHES = 8
_LOADER_BATCHES = 64


@dataclass(frozen=True)
class Training:
    """A model, its optimizer, and one call that does a whole step."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    step: Callable[[], torch.Tensor]


def make_mlp() -> Training:
    """Three hidden layers of 256, batch 128, 784 inputs as of an image of digits, Adam."""
    batches = [(torch.randn(128, 784), torch.randint(10, (128,))) for _ in range(_BATCHES)]
    return _train_mlp(itertools.cycle(batches))


def make_loader() -> Training:
    """The MLP on the shuffled batches of a loader, epoch after epoch; a batch is taken from its dataset at once."""
    rows = 128 * _LOADER_BATCHES
    data = TensorDataset(torch.randn(rows, 784), torch.randint(10, (rows,)))
    sampler = BatchSampler(RandomSampler(data), batch_size=128, drop_last=True)
    return _train_mlp(_repeat(DataLoader(data, sampler=sampler, batch_size=None)))


def _train_mlp(batches: Batches) -> Training:
    sizes = (784, 256, 256, 256)
    hidden = [layer for a, b in itertools.pairwise(sizes) for layer in (nn.Linear(a, b), nn.ReLU())]
    model = nn.Sequential(*hidden, nn.Linear(256, 10))
    return _classify(model, torch.optim.Adam(model.parameters(), lr=1e-3), batches)


def _repeat(loader: DataLoader[tuple[torch.Tensor, torch.Tensor]]) -> Batches:
    while True:
        yield from loader


class Block(nn.Module):
    """Two 3x3 convolutions beside a shortcut."""

    def __init__(self, channels_in: int, channels: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels_in, channels, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(channels)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(channels, channels, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(channels)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or channels_in != channels:
            self.shortcut = nn.Sequential(
                nn.Conv2d(channels_in, channels, 1, stride, bias=False), nn.BatchNorm2d(channels)
            )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.relu(self.bn1(self.conv1(x)))
        return self.relu(self.bn2(self.conv2(y)) + self.shortcut(x))


def make_cnn() -> Training:
    """Eighteen layers in eight blocks of 64 to 512 channels, batch 16 of 3x64x64, SGD with momentum."""
    stem = [
        nn.Conv2d(3, 64, 7, 2, 3, bias=False),
        nn.BatchNorm2d(64),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(3, 2, 1),
    ]
    widths = [(64, 64, 1), (64, 128, 2), (128, 256, 2), (256, 512, 2)]
    blocks = [block for a, b, stride in widths for block in (Block(a, b, stride), Block(b, b, 1))]
    model = nn.Sequential(*stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, 10))
    batches = [(torch.randn(16, 3, 64, 64), torch.randint(10, (16,))) for _ in range(_BATCHES)]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, weight_decay=1e-4)
    return _classify(model, optimizer, itertools.cycle(batches))


class Attention(nn.Module):
    """Causal self-attention with several heads."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(x).view(batch, length, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.proj(y.transpose(1, 2).reshape(batch, length, width))


class Layer(nn.Module):
    """Attention and a feed-forward part, each behind a norm and beside a shortcut."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.attn = nn.LayerNorm(width), Attention(width, 6)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    """Six layers of width 384 over 512 tokens."""

    def __init__(self, vocabulary: int = 512, length: int = 128, width: int = 384, depth: int = 6) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.layers = nn.ModuleList(Layer(width) for _ in range(depth))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.tokens(tokens) + self.places(torch.arange(tokens.shape[1]))
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


def make_gpt() -> Training:
    """The GPT on sequences of 128, batch 8, AdamW."""
    model = GPT()
    texts = [torch.randint(512, (8, 129)) for _ in range(_BATCHES)]
    batches = [(text[:, :-1], text[:, 1:].reshape(-1)) for text in texts]
    return _classify(model, torch.optim.AdamW(model.parameters(), lr=3e-4), itertools.cycle(batches))


def _classify(model: nn.Module, optimizer: torch.optim.Optimizer, batches: Batches) -> Training:
    def step() -> torch.Tensor:
        x, y = next(batches)
        optimizer.zero_grad(set_to_none=True)
        logits = model(x)
        loss = F.cross_entropy(logits.reshape(-1, logits.shape[-1]), y)
        loss.backward()
        optimizer.step()
        return loss

    return Training(model, optimizer, step)


MAKERS: dict[str, Callable[[], Training]] = {
    "mlp": make_mlp,
    "loader": make_loader,
    "cnn": make_cnn,
    "gpt": make_gpt,
}


def make(name: str, *, seed: int = 0) -> Training:
    """Return a fresh training, the same one for the same seed."""
    torch.manual_seed(seed)
    return MAKERS[name]()
