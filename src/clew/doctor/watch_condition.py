"""The seventeen named watch conditions with their parameters: any parameter that is set may fire.

Conditions other than those about overflow do not judge a tensor that holds NaN or infinity: its other numbers are over
the finite elements and would mislead. They say so instead.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from clew.errors import UsageError, suggest

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from numpy.typing import NDArray

    from clew.doctor.watch_rows import StepRows

    Judge = Callable[[StepRows, Mapping[str, float], float], "Verdict"]

ANY: Final = ("output", "grad_output", "param", "grad", "update", "buffer", "state", "loss", "batch", "input")
WEIGHTS, GRADIENTS, ACTIVATIONS = ("param",), ("grad", "grad_output"), ("output",)


class Verdict(NamedTuple):
    """Which rows a parameter fires on, and the actual value it compared."""

    fires: NDArray[np.bool_]
    actual: NDArray[np.float64]


@dataclass(frozen=True)
class Condition:
    """A named condition: which kinds it is for, its parameters with their defaults, and what each compares.

    ``needs_previous`` conditions compare with what the weight was; ``first_only`` ones judge initial weights.
    """

    id: str
    short: str
    kinds: tuple[str, ...]
    parameters: dict[str, float | None] = field(default_factory=dict)
    is_overflow: bool = False
    first_only: bool = False
    text: str = ""


def _above(stat: str) -> Judge:
    def judge(rows: StepRows, _: Mapping[str, float], preset: float) -> Verdict:
        actual = rows.column(stat)
        return Verdict(actual > preset, actual)

    return judge


def _below(stat: str) -> Judge:
    def judge(rows: StepRows, _: Mapping[str, float], preset: float) -> Verdict:
        actual = rows.column(stat)
        return Verdict(actual < preset, actual)

    return judge


def _zero_percentage(rows: StepRows, _: Mapping[str, float], preset: float) -> Verdict:
    actual = rows.column("zero_percentage")
    return Verdict((actual >= preset) & (rows.column("count") > 0), actual)


def _is_unchanged(rows: StepRows, given: Mapping[str, float], rtol: float) -> Verdict:
    """Judge whether a step moved no element by more than ``atol + rtol * |weight|``.

    Single elements are not recorded: the largest change is compared with the tolerance at the mean magnitude.
    """
    update, atol = rows.partner("update"), given.get("atol", 1e-8)
    known = update >= 0
    actual = np.full(len(rows), np.nan)
    actual[known] = rows.column("abs_max")[update[known]]
    return Verdict(actual <= atol + rtol * rows.column("abs_mean"), actual)


def _change(rows: StepRows, given: Mapping[str, float]) -> NDArray[np.float64]:
    """Return mean |change| / (mean |weight before| + epsilon) of every weight."""
    update, epsilon = rows.partner("update"), given.get("epsilon", 1e-9)
    known = update >= 0
    ratio = np.full(len(rows), np.nan)
    magnitude = rows.column("abs_mean")
    ratio[known] = magnitude[update[known]] / (magnitude[known] + epsilon)
    return ratio


def _changes_more(rows: StepRows, given: Mapping[str, float], preset: float) -> Verdict:
    actual = _change(rows, given)
    return Verdict(actual > preset, actual)


def _changes_less(rows: StepRows, given: Mapping[str, float], preset: float) -> Verdict:
    actual = _change(rows, given)
    return Verdict(actual < preset, actual)


def _share(rows: StepRows, given: Mapping[str, float]) -> NDArray[np.float64]:
    return rows.share_between(given["range_start_inclusive"], given["range_end_inclusive"])


def _share_less(rows: StepRows, given: Mapping[str, float], preset: float) -> Verdict:
    actual = _share(rows, given)
    return Verdict(actual < preset, actual)


def _share_more(rows: StepRows, given: Mapping[str, float], preset: float) -> Verdict:
    actual = _share(rows, given)
    return Verdict(actual > preset, actual)


JUDGES: Final[dict[str, Judge]] = {
    **{f"{stat}_gt": _above(stat) for stat in ("abs_mean", "max", "min", "mean")},
    **{f"{stat}_lt": _below(stat) for stat in ("abs_mean", "max", "min", "mean")},
    "zero_percentage_ge": _zero_percentage,
    "rtol": _is_unchanged,
    "abs_mean_update_ratio_gt": _changes_more,
    "abs_mean_update_ratio_lt": _changes_less,
    "range_percentage_lt": _share_less,
    "range_percentage_gt": _share_more,
    "max_min_lt": _below("range"),
    "max_min_gt": _above("range"),
}
"""What each parameter compares; those without an entry only lend their value to another."""

_LARGE: Final = dict.fromkeys(("abs_mean_gt", "max_gt", "min_gt", "mean_gt"))
_SMALL: Final = dict.fromkeys(("abs_mean_lt", "max_lt", "min_lt", "mean_lt"))
_RANGE: Final = dict.fromkeys(
    (
        "range_start_inclusive", "range_end_inclusive", "range_percentage_lt", "range_percentage_gt",
        "max_min_lt", "max_min_gt",
    )
)  # fmt: skip

_TABLE: Final = (
    Condition("weight_initialization", "WI", WEIGHTS, {"zero_percentage_ge": 100.0, "max_gt": None, "min_lt": None},
              first_only=True, text="the weights before the first step"),
    Condition("weight_overflow", "WO", WEIGHTS, is_overflow=True, text="NaN or infinity in a weight"),
    Condition("weight_too_large", "WL", WEIGHTS, _LARGE, text="a weight's mean magnitude, max, min or mean is larger"),
    Condition("weight_too_small", "WS", WEIGHTS, _SMALL, text="a weight's mean magnitude, max, min or mean is smaller"),
    Condition("weight_not_changed", "WNC", WEIGHTS, {"rtol": 1e-5, "atol": 1e-8},
              text="no element changes by more than atol + rtol x magnitude"),
    Condition("weight_change_too_large", "WCL", WEIGHTS, {"abs_mean_update_ratio_gt": 0.1, "epsilon": 1e-9},
              text="mean |change| / (mean |weight| + epsilon) is larger"),
    Condition("weight_change_too_small", "WCS", WEIGHTS, {"abs_mean_update_ratio_lt": 1e-4, "epsilon": 1e-9},
              text="mean |change| / (mean |weight| + epsilon) is smaller"),
    Condition("gradient_vanishing", "GV", GRADIENTS, _SMALL, text="a gradient's mean magnitude … is smaller"),
    Condition("gradient_too_large", "GL", GRADIENTS, _LARGE, text="a gradient's mean magnitude … is larger"),
    Condition("gradient_exploding", "GE", GRADIENTS, is_overflow=True, text="NaN or infinity in a gradient"),
    Condition("activation_range", "AR", ACTIVATIONS, _RANGE, text="share of an output in a range, or its max - min"),
    Condition("tensor_range", "TR", ANY, _RANGE, text="share of a tensor in a range, or its max - min"),
    Condition("tensor_overflow", "TO", ANY, is_overflow=True, text="NaN or infinity in any tensor"),
    Condition("operator_overflow", "OO", ("output", "grad_output"), is_overflow=True,
              text="the first tensor of a step with NaN or infinity: the module that made it from finite numbers"),
    Condition("tensor_too_large", "TL", ANY, _LARGE, text="a tensor's mean magnitude, max, min or mean is larger"),
    Condition("tensor_too_small", "TS", ANY, _SMALL, text="a tensor's mean magnitude, max, min or mean is smaller"),
    Condition("tensor_all_zero", "TZ", ANY, {"zero_percentage_ge": 100.0}, text="so many per cent are zero"),
)  # fmt: skip

CONDITIONS: Final = {name: each for each in _TABLE for name in (each.id, each.short)}
"""The conditions by id and by abbreviation."""


def choose_parameters(condition: Condition, given: Mapping[str, Any]) -> dict[str, float]:
    """Return the parameters that are set, checked; a condition with nothing to compare is an error."""
    for name, value in given.items():
        if name not in condition.parameters:
            known = list(condition.parameters)
            raise UsageError(
                f"{condition.id} has no parameter '{name}'",
                next_step=suggest(name, known) or f"its parameters: {', '.join(known) or 'none'}",
            )
        _check_value(condition, name, float(value))
    chosen = {name: value for name, value in condition.parameters.items() if value is not None}
    chosen |= {name: float(value) for name, value in given.items()}
    if not condition.is_overflow and not any(name in JUDGES for name in chosen):
        names = [name for name in condition.parameters if name in JUDGES]
        raise UsageError(f"{condition.id} compares nothing yet", next_step=f"set one of {', '.join(names)}")
    has_share = any(name.startswith("range_percentage") for name in chosen)
    if has_share and not {"range_start_inclusive", "range_end_inclusive"} <= chosen.keys():
        raise UsageError(
            f"{condition.id}: a share needs both ends of its range",
            next_step="set range_start_inclusive and range_end_inclusive",
        )
    return chosen


def _check_value(condition: Condition, name: str, value: float) -> None:
    is_share = "percentage" in name
    is_size = name.startswith("abs_") or name in ("rtol", "atol", "epsilon", "max_min_gt")
    right = math.isfinite(value)
    right = right and (not is_share or 0 <= value <= 100)
    right = right and (not is_size or value >= 0) and (name != "max_min_lt" or value > 0)
    if not right:
        wanted = (
            "0 to 100"
            if is_share
            else "above 0"
            if name == "max_min_lt"
            else "0 or more"
            if is_size
            else "finite"
        )
        raise UsageError(f"{condition.id}: {name}={value:g} must be {wanted}")


def judge_condition(
    condition: Condition, parameters: Mapping[str, float], rows: StepRows
) -> dict[str, Verdict]:
    """Return the verdict of each parameter that compares something."""
    if condition.is_overflow:
        bad = rows.is_bad
        if condition.short == "OO":
            first = np.zeros(len(rows), bool)
            first[: int(bad.argmax()) + 1 if bad.any() else 0] = True
            bad = bad & first
        return {"nonfinite": Verdict(bad, rows.column("nonfinite"))}
    return {
        name: JUDGES[name](rows, parameters, value) for name, value in parameters.items() if name in JUDGES
    }


_FAR: Final = {
    "Tanh": (math.tanh(-8.8), math.tanh(8.8)),
    "Sigmoid": (1 / (1 + math.exp(16.2)), 1 / (1 + math.exp(-16.2))),
}
"""Where an activation stops to answer: beyond these outputs its derivative is zero in float32."""

RECOMMENDED: Final = (
    "WI",
    "WCL(abs_mean_update_ratio_gt=1)",
    "GV(abs_mean_lt=1e-9)",
    "OO",
    "TO",
    "*:{output,grad_output,grad} TZ",
    *(
        f"@{name}:output AR(range_start_inclusive={low!r}, range_end_inclusive={high!r}, range_percentage_lt=0.1)"
        for name, (low, high) in _FAR.items()
    ),
    "@ReLU*:output AR(range_start_inclusive=-1, range_end_inclusive=0, range_percentage_gt=99.9)",
)
"""What ``--watch recommended`` stands for."""
