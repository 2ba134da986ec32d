"""What a trace costs next to one plain forward pass, measured in turns in one process.

    python benchmarks/trace.py

Limits: at most 1.3 forward passes of a GPT, at most 5 of a chain of 2,000 tiny modules, and a time that grows
linearly up to 20,000 operations.
"""

from __future__ import annotations

import statistics
import sys
import time

import torch
from torch import nn

import clew

LIMITS = {"GPT": 1.3, "chain of 2,000 modules": 5.0}


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        parts = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(*parts, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(nn.functional.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    def __init__(self, layers: int = 6, width: int = 384, heads: int = 6, vocabulary: int = 256) -> None:
        super().__init__()
        self.token = nn.Embedding(vocabulary, width)
        self.position = nn.Embedding(128, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.token(ids) + self.position(torch.arange(ids.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def chain(length: int) -> nn.Module:
    """Return a chain of tiny modules; 2,000 of them take about 30 ms for a batch of 32."""
    return nn.Sequential(*(nn.Linear(32, 32) for _ in range(length)))


def compare(model: nn.Module, x: torch.Tensor, rounds: int) -> tuple[float, float, float]:
    """Return the best seconds of a plain forward pass and of a trace, and the median ratio of neighbours."""
    plain, traced = [], []
    model(x)
    clew.trace(model, x)
    for _ in range(rounds):
        start = time.process_time()
        model(x)
        middle = time.process_time()
        clew.trace(model, x)
        end = time.process_time()
        plain.append(middle - start)
        traced.append(end - middle)
    ratio = statistics.median(after / before for before, after in zip(plain, traced, strict=True))
    return min(plain), min(traced), ratio


def main() -> int:
    torch.set_num_threads(
        1
    )  # process time is then the time of the one thread, whatever else the machine does
    failed = False
    cases = {
        "GPT": (GPT(), torch.randint(0, 256, (8, 128)), 9),
        "chain of 2,000 modules": (chain(2000), torch.randn(32, 32), 15),
    }
    for name, (model, x, rounds) in cases.items():
        plain, traced, ratio = compare(model, x, rounds)
        failed |= ratio > LIMITS[name]
        print(
            f"{name}: forward {plain * 1e3:.1f} ms, trace {traced * 1e3:.1f} ms, {ratio:.2f}x (limit {LIMITS[name]})"
        )
    per_operation = []
    for length in (2500, 5000, 10_000, 20_000):
        _, traced, _ = compare(chain(length), torch.randn(32, 32), 3)
        per_operation.append(traced / length * 1e6)
        print(f"{length} operations: {per_operation[-1]:.1f} µs each")
    growth = per_operation[-1] / per_operation[0]
    print(f"growth per operation from 2,500 to 20,000: {growth:.2f}x (linear is 1, limit 1.5)")
    return int(failed or growth > 1.5)


if __name__ == "__main__":
    sys.exit(main())
