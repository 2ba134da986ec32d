"""How far one tensor is from another: sums that can be joined over blocks, and the numbers they give.

The first tensor is the reference. Equal positions are those with equal values, or NaN on both sides. A relative
error is ``|b - a| / max(|a|, floor)``: below the floor (a tiny share of the largest magnitude, by dtype) an
element is judged by its absolute error, so that noise around zero does not read as a huge difference. Positions
where either side is not finite count in ``nonfinite`` when they differ, and in no error.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterable

    from numpy.typing import NDArray

    Sums = NDArray[np.float64]

SUM_NAMES: Final = (
    "count",
    "equal",
    "nonfinite",
    "finite",
    "greater",
    "less",
    "within_1e3",
    "within_5e3",
    "ulp_over",
    "error_squares",
    "a_squares",
    "b_squares",
    "products",
    "ulps",
    "max_abs",
    "max_abs_at",
    "max_rel",
    "max_ulp",
    "a_abs_max",
    "b_abs_max",
)
"""What is gathered over a pair of blocks, in this order: counts, sums, then largest values."""

_INDEX: Final = {name: index for index, name in enumerate(SUM_NAMES)}
_ADDED: Final = slice(0, _INDEX["max_abs"])
_MAX_ABS, _AT = _INDEX["max_abs"], _INDEX["max_abs_at"]
_LARGEST: Final = slice(_INDEX["max_rel"], len(SUM_NAMES))

ULP_LIMIT: Final = 32
"""``ulp_over`` counts the elements that are more representable numbers apart than this."""


@dataclass(frozen=True, slots=True)
class Difference:
    """How ``b`` differs from the reference ``a``.

    ``max_abs_at`` is the flat position of the largest error. ``bias`` is ``|greater - less| / count``: near 1
    when all errors point one way. ``max_ulp``, ``mean_ulp`` and ``ulp_share_over_32`` count representable
    numbers of the tensors' own type, and are None where they were not counted. ``cosine`` is 1 for two zero
    tensors and 0 when only one is zero.
    """

    count: int
    different: int
    nonfinite: int
    max_abs: float
    max_abs_at: int
    max_rel: float
    relative_l2: float
    cosine: float
    share_within_1e3: float
    share_within_5e3: float
    greater: int
    less: int
    bias: float
    max_ulp: float | None
    mean_ulp: float | None
    ulp_share_over_32: float | None
    a_abs_max: float
    b_abs_max: float
    a_l2: float
    b_l2: float

    @property
    def is_same(self) -> bool:
        """Whether every position is equal."""
        return self.different == 0


def compare(a: NDArray[Any], b: NDArray[Any], *, small: float = 2.0**-20) -> Difference:
    """Return how an array differs from a reference of the same shape.

    ``small`` is the share of the reference's largest finite magnitude (of 1 where all is zero) below which
    elements are judged by absolute error.
    """
    if a.shape != b.shape:
        raise ValueError(f"shapes {a.shape} and {b.shape} cannot be compared element by element")
    x, y = real_numbers(a), real_numbers(b)
    return describe(measure_numbers(x, y, floor=small * (abs_max(x) or 1.0)))


def measure_numbers(
    a: NDArray[Any],
    b: NDArray[Any],
    *,
    floor: float,
    bits: tuple[NDArray[Any], NDArray[Any]] | None = None,
) -> Sums:
    """Return the sums over two flat arrays of any real types: errors in float64, equality exact."""
    if a.dtype == b.dtype and a.dtype in (np.float32, np.float64):
        return measure(a, b, floor=floor, bits=bits)
    if a.dtype == b.dtype == np.float16:
        bits = bits or (a, b)
    sums = measure(a.astype(np.float64), b.astype(np.float64), floor=floor, bits=bits)
    if a.dtype.kind in "iu" and b.dtype.kind in "iu":
        # Beyond 2**53 neighbours are one number in float64.
        sums[_INDEX["equal"]] = (a == b).sum()
    return sums


def real_numbers(array: NDArray[Any]) -> NDArray[Any]:
    """Return the elements in row-major order, a complex one as its two parts."""
    flat = np.ascontiguousarray(array).reshape(-1)
    return flat.view(flat.real.dtype) if np.iscomplexobj(flat) else flat


def abs_max(x: NDArray[Any]) -> float:
    """Return the largest finite magnitude, 0 where there is none."""
    finite = x[np.isfinite(x)]
    return float(np.abs(finite).max()) if finite.size else 0.0


def measure(
    a: NDArray[Any],
    b: NDArray[Any],
    *,
    floor: float,
    bits: tuple[NDArray[Any], NDArray[Any]] | None = None,
) -> Sums:
    """Return the sums over two flat arrays of float32 or float64: the slow twin of the compiled one.

    ``bits`` are the arrays before they were widened, when their own type is narrower: ULPs are counted there.
    """
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        return _measure(a, b, floor, ulp_distance(*(bits or (a, b))))


def _measure(a: NDArray[Any], b: NDArray[Any], floor: float, ulps: NDArray[np.uint64]) -> Sums:
    sums = np.zeros(len(SUM_NAMES))
    sums[_AT] = -1
    equal = (a == b) | (np.isnan(a) & np.isnan(b))
    finite = np.isfinite(a) & np.isfinite(b)
    sums[_INDEX["count"]] = a.size
    sums[_INDEX["equal"]] = equal.sum()
    sums[_INDEX["nonfinite"]] = (~equal & ~finite).sum()
    ulps = ulps[finite]
    x, y = a[finite].astype(np.float64), b[finite].astype(np.float64)
    sums[_INDEX["finite"]] = x.size
    if not x.size:
        return sums
    error = y - x
    _add_errors(sums, error, np.maximum(np.abs(x), floor))
    sums[_AT] = np.flatnonzero(finite)[np.abs(error).argmax()]
    sums[_INDEX["a_squares"]] = x @ x
    sums[_INDEX["b_squares"]] = y @ y
    sums[_INDEX["products"]] = x @ y
    sums[_INDEX["a_abs_max"]], sums[_INDEX["b_abs_max"]] = np.abs(x).max(), np.abs(y).max()
    sums[_INDEX["ulp_over"]] = (ulps > ULP_LIMIT).sum()
    sums[_INDEX["ulps"]] = ulps.sum(dtype=np.float64)
    sums[_INDEX["max_ulp"]] = ulps.max()
    return sums


def _add_errors(sums: Sums, error: NDArray[np.float64], size: NDArray[np.float64]) -> None:
    """Put what follows from the errors of the finite positions and the sizes they are relative to."""
    distance = np.abs(error)
    sums[_INDEX["greater"]] = (error > 0).sum()
    sums[_INDEX["less"]] = (error < 0).sum()
    sums[_INDEX["within_1e3"]] = (distance <= 1e-3 * size).sum()
    sums[_INDEX["within_5e3"]] = (distance <= 5e-3 * size).sum()
    sums[_INDEX["error_squares"]] = error @ error
    sums[_MAX_ABS] = distance.max()
    # Zero over zero is no error: both sides are zero and the floor is.
    relative = np.divide(distance, size, out=np.zeros_like(distance), where=distance > 0)
    sums[_INDEX["max_rel"]] = relative.max()


def ulp_distance(a: NDArray[Any], b: NDArray[Any]) -> NDArray[np.uint64]:
    """Return how many representable numbers lie between the elements of two float arrays of one type.

    Types that numpy does not know may be given as the unsigned integers that carry them.
    """
    x, y = _rank(a), _rank(b)
    distance: NDArray[np.uint64] = np.where(x > y, x - y, y - x)
    return distance


def _rank(x: NDArray[Any]) -> NDArray[np.uint64]:
    """Return the position of each number among all of its type; both zeros have one."""
    width = 8 * x.dtype.itemsize
    bits = np.ascontiguousarray(x).view(f"u{x.dtype.itemsize}").astype(np.uint64)
    sign = np.uint64(1 << (width - 1))
    magnitude = bits & (sign - np.uint64(1))
    place: NDArray[np.uint64] = np.where(bits & sign, sign - magnitude, sign + magnitude)
    return place


def merge(parts: Iterable[Sums]) -> Sums:
    """Return the sums of consecutive blocks as one; positions count on from block to block."""
    total = np.zeros(len(SUM_NAMES))
    total[_AT] = -1
    table = np.array(list(parts))
    if not len(table):
        return total
    total[_ADDED] = table[:, _ADDED].sum(axis=0)
    total[_LARGEST] = table[:, _LARGEST].max(axis=0)
    # A block without a finite position has no error and no place of one.
    errors = np.where(table[:, _AT] < 0, -1.0, table[:, _MAX_ABS])
    worst = int(errors.argmax())
    if errors[worst] >= 0:
        total[_MAX_ABS] = errors[worst]
        total[_AT] = table[worst, _AT] + table[:worst, 0].sum()
    return total


def describe(sums: Sums) -> Difference:
    """Return the numbers for people from the sums over a whole pair of tensors."""
    value = dict(zip(SUM_NAMES, sums.tolist(), strict=True))
    count, finite = int(value["count"]), value["finite"]
    share = 1.0 / finite if finite else 0.0
    uncounted = math.isnan(value["ulps"])
    return Difference(
        count=count,
        different=count - int(value["equal"]),
        nonfinite=int(value["nonfinite"]),
        max_abs=value["max_abs"],
        max_abs_at=int(value["max_abs_at"]),
        max_rel=value["max_rel"],
        relative_l2=_ratio(math.sqrt(value["error_squares"]), math.sqrt(value["a_squares"])),
        cosine=_cosine(value),
        share_within_1e3=value["within_1e3"] * share if finite else 1.0,
        share_within_5e3=value["within_5e3"] * share if finite else 1.0,
        greater=int(value["greater"]),
        less=int(value["less"]),
        bias=abs(value["greater"] - value["less"]) / count if count else 0.0,
        max_ulp=None if uncounted else value["max_ulp"],
        mean_ulp=None if uncounted else value["ulps"] * share,
        ulp_share_over_32=None if uncounted else value["ulp_over"] * share,
        a_abs_max=value["a_abs_max"],
        b_abs_max=value["b_abs_max"],
        a_l2=math.sqrt(value["a_squares"]),
        b_l2=math.sqrt(value["b_squares"]),
    )


def _ratio(part: float, whole: float) -> float:
    if part == 0:
        return 0.0
    return part / whole if whole else math.inf


def _cosine(value: dict[str, float]) -> float:
    a, b = math.sqrt(value["a_squares"]), math.sqrt(value["b_squares"])
    if not (a and b):
        return 1.0 if a == b else 0.0
    # Rounding may leave the interval by a hair.
    return max(-1.0, min(1.0, value["products"] / a / b))
