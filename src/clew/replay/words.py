"""A verdict in one sentence."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any


def say(verdict: dict[str, Any]) -> str:
    """Return the verdict in one sentence."""
    where = f" in {verdict['site']}" if verdict.get("site") else ""
    line = _short(verdict.get("source") or {})
    at = f" at {line}" if line else ""
    phase = verdict.get("phase")
    if phase == "data":
        return f"the data came in bad: first used by {verdict.get('op') or 'the model'}{where}{at}"
    if phase == "parameter":
        return f"{verdict.get('site') or 'a weight'} was bad already when step {verdict['step']} began"
    born = _born(verdict)
    if phase == "backward":
        return (
            f"the gradient of {verdict['op']}{where} became {born} in the backward pass; the operation is{at}"
        )
    if phase == "optimizer":
        return f"the optimizer's {verdict['op']} made {born} out of {_went_in(verdict)}{where}{at}"
    return f"{verdict['op']}{where} made {born} out of {_went_in(verdict)}{at}"


def _went_in(verdict: dict[str, Any]) -> str:
    """Name what the operation was given: a mask of infinities is meant, but not a finite number."""
    inputs = verdict.get("inputs") or ()
    if any(value.get("nan") for value in inputs):
        return "numbers with NaN among them"
    if any(value.get("inf") for value in inputs):
        return "numbers with infinities among them"
    return "finite numbers"


def _born(verdict: dict[str, Any]) -> str:
    values = [element["value"] for element in verdict.get("elements", ())]
    if not values:
        return "a bad value"
    first = float(values[0])
    return "NaN" if math.isnan(first) else ("inf" if first > 0 else "-inf")


def _short(source: dict[str, Any]) -> str:
    return f"{Path(source['file']).name}:{source['line']}" if source.get("file") else ""
