"""The ways of recording that are timed, and what each may cost at most on each training."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Mode:
    """Settings of ``clew.watch`` under a name, with the limit of each training (ratio to the plain step)."""

    name: str
    text: str
    settings: dict[str, Any]
    limits: dict[str, float]
    has_updates: bool = False
    block_seconds: float = 0.5
    """Short, so that a machine whose speed changes within seconds hits both sides alike; longer of a thinned recording,
    where most steps cost nothing and a few all of it."""


MODES = (
    Mode(
        "basic",
        "outputs, their gradients, parameters, their gradients; every step",
        {"budget": "off", "kinds": "output,grad_output,param,grad", "histograms": False, "hashes": False},
        {"mlp": 1.12, "loader": 1.12, "cnn": 1.06, "gpt": 1.07},
    ),
    Mode(
        "full",
        "also updates, buffers, histograms and hashes; every step",
        {
            "budget": "off",
            "kinds": "output,grad_output,param,grad,update,buffer",
            "histograms": True,
            "hashes": True,
        },
        {"mlp": 1.25, "loader": 1.25, "cnn": 1.12, "gpt": 1.15},
        has_updates=True,
    ),
    Mode(
        "default",
        "budget 3 %",
        {},
        {"mlp": 1.03, "loader": 1.03, "cnn": 1.03, "gpt": 1.03},
        has_updates=True,
        block_seconds=1.5,
    ),
)
