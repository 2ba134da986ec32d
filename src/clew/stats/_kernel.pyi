"""The compiled loops. Addresses are integers; 0 for a hash or a histogram that is not wanted."""

from collections.abc import Callable, Sequence
from typing import Any

import torch

def configure(
    types: tuple[type, ...],
    codes: dict[torch.dtype, int],
    questions: tuple[Callable[..., Any], ...],
    openmp: int,
    /,
) -> None: ...
def measure(tensor: torch.Tensor, row: int, hash: int, hist: int, threads: int, /) -> bool: ...
def measure_many(
    tensors: Sequence[torch.Tensor], row: int, hash: int, hist: int, threads: int, /
) -> list[int]: ...
def measure_updates(
    new: Sequence[torch.Tensor],
    old: Sequence[torch.Tensor],
    row: int,
    hash: int,
    hist: int,
    threads: int,
    /,
) -> list[int]: ...
def measure_memory(address: int, type: int, count: int, row: int, hash: int, hist: int, /) -> None: ...
def merge(row: int, hash: int, hist: int, other_row: int, other_hash: int, other_hist: int, /) -> None: ...
def select(name: str, /) -> str: ...
def variants() -> tuple[str, ...]: ...
