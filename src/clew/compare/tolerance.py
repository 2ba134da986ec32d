"""What counts as the same: tolerances that know their dtype, calibrated by noise where it was measured."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from clew.compare.metric import Difference

SAME, ROUNDING, DIFFERENT = "same", "rounding", "different"
"""The three verdicts on a pair of tensors: equal values, explained by rounding, or not."""


@dataclass(frozen=True, slots=True)
class Tolerance:
    """Of one dtype: ``relative`` error that rounding explains, and the share of the largest magnitude below
    which elements are judged by absolute error.
    """

    relative: float
    small: float


TOLERANCES: Final = {
    "float64": Tolerance(2.0**-44, 2.0**-40),
    "float32": Tolerance(2.0**-20, 2.0**-20),
    "float16": Tolerance(2.0**-10, 2.0**-10),
    "bfloat16": Tolerance(2.0**-8, 2.0**-10),
    "float8_e4m3fn": Tolerance(2.0**-3, 2.0**-6),
    "float8_e4m3fnuz": Tolerance(2.0**-3, 2.0**-6),
    "float8_e5m2": Tolerance(2.0**-2, 2.0**-6),
    "float8_e5m2fnuz": Tolerance(2.0**-2, 2.0**-6),
}
_EXACT: Final = Tolerance(0.0, 2.0**-40)

MAX_ERROR_FACTOR: Final = 16.0
"""A single element may be off by this many tolerances of the largest magnitude; more is no rounding."""
ULP_MEAN: Final = 64.0
ULP_SHARE: Final = 0.05
NOISE_FACTOR: Final = 3.0
"""How far above the noise measured between two runs that should be equal a difference must be."""


def tolerance_of(dtype: str) -> Tolerance:
    """Return the tolerance of a dtype; that of complex numbers is their parts', integers have none."""
    parts = {"complex64": "float32", "complex128": "float64"}
    return TOLERANCES.get(parts.get(dtype, dtype), _EXACT)


def loosest(*dtypes: str) -> str:
    """Return the dtype with the largest tolerance: a bfloat16 copy of a float32 tensor is judged as bfloat16."""
    return max(dtypes, key=lambda dtype: tolerance_of(dtype).relative)


def judge(difference: Difference, dtype: str, *, noise: Difference | None = None, operations: int = 1) -> str:
    """Return ``same``, ``rounding`` or ``different`` for a pair of tensors.

    ``noise`` is the difference of the same tensor between two runs that should be equal; what stays within
    ``NOISE_FACTOR`` times of it is rounding whatever the dtype says. ``operations`` that each round on the way to the
    tensor add up their errors.
    """
    if difference.is_same:
        return SAME
    if difference.nonfinite:
        return DIFFERENT
    if noise is not None and _is_within_noise(difference, noise):
        return ROUNDING
    return ROUNDING if is_rounding(difference, dtype, operations=operations) else DIFFERENT


def is_rounding(difference: Difference, dtype: str, *, operations: int = 1) -> bool:
    """Whether rounding explains a difference: small as a whole, and nowhere large.

    As a whole: relative L2 within the dtype's tolerance, or few representable numbers apart. Nowhere large: one
    wrong element among millions is a fault, however small its share.
    """
    relative = operations * tolerance_of(dtype).relative
    if difference.max_abs > MAX_ERROR_FACTOR * relative * difference.a_abs_max:
        return False
    return difference.relative_l2 <= relative or _is_few_ulps(difference)


def _is_few_ulps(difference: Difference) -> bool:
    mean, share = difference.mean_ulp, difference.ulp_share_over_32
    return mean is not None and share is not None and mean < ULP_MEAN and share < ULP_SHARE


def _is_within_noise(difference: Difference, noise: Difference) -> bool:
    limits = (
        (difference.relative_l2, noise.relative_l2),
        (difference.max_abs, noise.max_abs),
    )
    return all(value <= NOISE_FACTOR * limit for value, limit in limits)


def is_accepted_by_referee(
    candidate: NDArray[Any], reference: NDArray[Any], exact: NDArray[Any], *, dtype: str = "float32"
) -> bool:
    """Whether a candidate is as good as the reference when both are measured against a float64 execution.

    It may be twice as far off, three times for half precision and for small tensors, where chance is larger.
    """
    is_coarse = tolerance_of(dtype).relative > tolerance_of("float32").relative
    factor = 3.0 if is_coarse or exact.size < 1000 else 2.0
    return _rmse(candidate, exact) <= factor * _rmse(reference, exact)


def _rmse(values: NDArray[Any], exact: NDArray[Any]) -> float:
    error = np.asarray(values, np.float64) - np.asarray(exact, np.float64)
    error = error[~(np.isnan(values) & np.isnan(exact))]
    return math.sqrt(float(np.mean(error * error))) if error.size else 0.0
