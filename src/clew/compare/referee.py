"""Which of two results is nearer to the exact one: a float64 execution of the same operation is the referee."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray


def measure_from(values: NDArray[Any], exact: NDArray[Any]) -> float:
    """Return how far values are from the exact ones, relative to the exact ones' size."""
    x, y = np.asarray(values, np.float64), np.asarray(exact, np.float64)
    error, size = math.sqrt(float(np.nansum((x - y) ** 2))), math.sqrt(float(np.nansum(y * y)))
    return error / size if size else error


def say_referee(a: NDArray[Any], b: NDArray[Any], exact: NDArray[Any]) -> str:
    """Return in words which of two results is nearer to the exact one."""
    near = measure_from(a, exact), measure_from(b, exact)
    told = f"relative error {near[0]:.2g} in a, {near[1]:.2g} in b"
    if max(near) <= 1.5 * min(near):
        return f"a and b are equally near to float64 ({told})"
    return f"{'a' if near[0] < near[1] else 'b'} is nearer to float64 ({told})"
