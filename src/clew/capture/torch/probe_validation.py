"""Tells a validation pass in train mode from the many right reasons to call a model without gradients."""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import torch
from torch.nn.modules.batchnorm import _BatchNorm

from clew.capture.torch.glance import glance
from clew.capture.torch.leaves import list_leaves, walk
from clew.capture.torch.probe_events import find_line

_BATCHES: Final = 3
_STEPS_APART: Final = 3
"""Gaps that are further apart are no part of every step, as targets and samples for the training are."""

_MOST_GAPS: Final = 200
_MOST_KEYS: Final = 512
_GLANCE: Final = 8
_FIRST_CALLS: Final = 64


class _Key(NamedTuple):
    """What a batch looks like: its shape, its type and a few of its values."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    values: tuple[float, ...]


class Fed:
    """The newest batch of any loader, and the data set it came from."""

    def __init__(self) -> None:
        self.dataset = 0
        self.batch: Any = None

    def find_dataset(self, leaf: torch.Tensor) -> int:
        """Return the data set a tensor came from, or 0 where that is not known."""
        if self.batch is None or leaf.layout != torch.strided:
            return 0
        address = leaf.data_ptr()
        own = (each.data_ptr() for _, each in walk(self.batch) if each.layout == torch.strided)
        return self.dataset if address in own else 0


class Validation:
    """Calls of one root without gradients and in train mode, between its training calls.

    Three different batches in a row are a validation pass, and so is one batch that comes back in three gaps. A new one
    or two in each of four gaps may be one: that is for the losses to say that are computed from them. Not counted: what
    the model is trained on as well, one batch several times in a row (dropout as a sample), other shapes than in
    training (generation), single samples, batches from the training data, refreshed batch statistics.
    """

    def __init__(self) -> None:
        self.is_done = False
        self._calls = 0
        self._gaps = 0
        self._quiet: list[_Key] = []
        self._line = ""
        self._is_active = False
        self._form: tuple[tuple[int, ...], torch.dtype] | None = None
        self._trained: set[_Key] = set()
        self._trained_on: set[int] = set()
        self._gap_counts: dict[_Key, int] = {}
        self._fresh_at: list[int] = []
        """Steps before which there was a gap with a new batch or two."""
        self._is_refreshing = False

    def add_quiet(self, module: torch.nn.Module, args: Any, kwargs: Any, *, fed: Fed) -> None:
        """Take a call without gradients."""
        self._is_active = True
        leaf = _first(args, kwargs)
        if leaf is None or len(self._quiet) >= _MOST_KEYS:
            return
        if not self._quiet:
            self._line = find_line()
            self._is_refreshing = _is_refreshing(module)
        if fed.find_dataset(leaf) not in self._trained_on:
            self._quiet.append(_glance(leaf))

    def close(self, args: Any, kwargs: Any, *, fed: Fed, step: int, may_judge: bool) -> dict[str, Any] | None:
        """Take a training call, which ends a gap; return what was found in the gap."""
        if self.is_done or (self._calls >= _FIRST_CALLS and not self._is_active):
            return None
        leaf = _first(args, kwargs)
        if leaf is not None and self._calls < _FIRST_CALLS:
            self._calls += 1
            self._form = self._form or (tuple(leaf.shape[1:]), leaf.dtype)
            if dataset := fed.find_dataset(leaf):
                self._trained_on.add(dataset)
        if not self._is_active:
            return None
        if leaf is not None and len(self._trained) < _MOST_KEYS:
            self._trained.add(_glance(leaf))
        quiet, self._quiet = self._quiet, []
        if not quiet:
            return None
        self._gaps += 1
        self.is_done = self._gaps >= _MOST_GAPS
        if not may_judge or self._is_refreshing:
            return None
        found, is_sure = self._judge(quiet, step)
        if not found:
            return None
        self.is_done = True
        return {"batches": found, "source": self._line, "gaps": [] if is_sure else self._fresh_at}

    def _judge(self, quiet: list[_Key], step: int) -> tuple[int, bool]:
        """Return how many batches make the gap a validation, or 0, and whether they alone say so."""
        different = list(dict.fromkeys(key for key in quiet if self._is_like_training(key)))
        if not different or len(quiet) >= _BATCHES * len(set(quiet)):
            return 0, False
        if len(different) >= _BATCHES:
            return len(different), True
        counts = [self._gap_counts.get(key, 0) + 1 for key in different]
        self._gap_counts.update(zip(different, counts, strict=True))
        if max(counts) >= _BATCHES:
            return max(counts), True
        if not self._fresh_at or step - self._fresh_at[-1] >= _STEPS_APART:
            self._fresh_at.append(step)
        else:
            self._fresh_at = [step]
        return (len(self._fresh_at), False) if len(self._fresh_at) > _BATCHES else (0, False)

    def _is_like_training(self, key: _Key) -> bool:
        return key not in self._trained and (key.shape[1:], key.dtype) == self._form and key.shape[0] > 1


def _first(args: Any, kwargs: Any) -> torch.Tensor | None:
    return next((leaf for leaf in list_leaves((args, kwargs)) if leaf.dim() and leaf.numel()), None)


def _glance(tensor: torch.Tensor) -> _Key:
    return _Key(tuple(tensor.shape), tensor.dtype, glance(tensor, _GLANCE))


def _is_refreshing(module: torch.nn.Module) -> bool:
    """Return whether batch statistics are being collected anew: their momentum is taken off for that."""
    return any(isinstance(part, _BatchNorm) and part.momentum is None for part in module.modules())
