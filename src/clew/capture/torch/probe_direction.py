"""Follows outputs of length 1 that turn into one direction: codes for different inputs that become one and the same."""

from __future__ import annotations

import math
from typing import Any, Final

import torch

from clew.capture.torch.glance import glance_row

_SAMPLES: Final = 64
_FEWEST: Final = 8
_APART: Final = 0.95
"""Length of the mean of unit vectors: below this they point in several directions, above the next in one."""

_TOGETHER: Final = 0.995
_CLOSE: Final = 1e-3
_MOST_NUMBERS: Final = 4096
_LOOKS: Final = 3
_SINCE: Final = 30
"""Training may begin with codes that are close to each other; after so many steps it should have pulled them apart."""


class Direction:
    """The outputs of one model, as far as their rows have length 1."""

    def __init__(self) -> None:
        self._is_unit: bool | None = None
        self._was_apart = False
        self._looks = 0
        self._is_told = False

    @property
    def is_followed(self) -> bool:
        """Whether the outputs have length 1."""
        return bool(self._is_unit)

    def see(self, outputs: torch.Tensor, step: int) -> dict[str, Any] | None:
        """Return what to note when the rows have come together and stay so."""
        if self._is_unit is False or self._is_told or outputs.dim() != 2 or len(outputs) < _FEWEST:
            return None
        if self._is_unit is None and not _has_unit_length(outputs):
            self._is_unit = False
            return None
        rows = outputs.detach()[:_SAMPLES].float()
        if self._is_unit is None:
            lengths = torch.linalg.vector_norm(rows, dim=1)
            self._is_unit = rows.shape[1] > 1 and bool(((lengths - 1).abs() < _CLOSE).all())
            if not self._is_unit:
                return None
        together = float(torch.linalg.vector_norm(rows.mean(0)))
        self._was_apart = self._was_apart or together < _APART
        self._looks = self._looks + 1 if together > _TOGETHER and self._was_apart else 0
        if self._looks < _LOOKS or step < _SINCE:
            return None
        self._is_told = True
        return {"mean_length": together, "looks": self._looks, "samples": len(rows), "size": rows.shape[1]}


def _has_unit_length(outputs: torch.Tensor) -> bool:
    """Return whether rows may have length 1; the first one tells of nearly all outputs that they are no codes."""
    is_long = outputs.shape[1] > _MOST_NUMBERS
    return is_long or abs(math.hypot(*glance_row(outputs, 0, _MOST_NUMBERS)) - 1) < _CLOSE
