"""What to change, in the user's terms, for each operation that makes bad values out of good ones."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from clew.replay.lens import Event

_FORWARD: Final = {
    "log": "keep the argument away from 0: torch.log(x.clamp_min(1e-8)), or log_softmax / logsigmoid instead of "
    "log(softmax) / log(sigmoid)",
    "log2": "keep the argument away from 0: x.clamp_min(1e-8)",
    "log10": "keep the argument away from 0: x.clamp_min(1e-8)",
    "log1p": "the argument fell to -1 or below: clamp it first",
    "sqrt": "the argument is negative: clamp it, x.clamp_min(0)",
    "rsqrt": "the argument is 0 or negative: add a small eps before it",
    "div": "the divisor is 0: add a small eps to it, or clamp it away from 0",
    "reciprocal": "the argument is 0: add a small eps to it",
    "exp": "the argument is too large (over 88 in float32, 11 in float16): subtract the maximum first, or clamp it",
    "expm1": "the argument is too large: clamp it",
    "pow": "a negative base with a fractional exponent, or a result too large: use the absolute value, or clamp",
    "std": "a standard deviation of a single element: use correction=0 (unbiased=False), or more than one element",
    "var": "a variance of a single element: use correction=0 (unbiased=False), or more than one element",
    "std_mean": "a standard deviation of a single element: use correction=0",
    "var_mean": "a variance of a single element: use correction=0",
    "softmax": "a whole row is masked with -inf: let every row keep one position, or mask with a large finite number",
    "log_softmax": "a whole row is masked with -inf: let every row keep at least one position",
    "logsumexp": "a whole row is -inf: let every row keep at least one position",
    "nll_loss": "all targets are ignored, so the mean is 0/0: check ignore_index and padding, or skip such a batch",
    "acos": "the argument left [-1, 1]: clamp it to (-1 + 1e-6, 1 - 1e-6)",
    "asin": "the argument left [-1, 1]: clamp it to (-1 + 1e-6, 1 - 1e-6)",
    "atanh": "the argument reached ±1: clamp it to (-1 + 1e-6, 1 - 1e-6)",
    "acosh": "the argument fell below 1: clamp it, x.clamp_min(1)",
    "erfinv": "the argument reached ±1: clamp it to (-1 + 1e-6, 1 - 1e-6)",
    "logit": "the argument reached 0 or 1: torch.logit(x, eps=1e-6)",
    "linalg_cholesky_ex": "the matrix is not positive definite: add a small eps to its diagonal",
    "norm": "the values are too large for their dtype: scale them down or use float32",
    "mean": "the mean of nothing: the tensor is empty",
    "linalg_slogdet": "the matrix is singular, its determinant 0: add a small eps to its diagonal",
    "linalg_inv_ex": "the matrix is singular: add a small eps to its diagonal, or use torch.linalg.pinv",
    "ctc_loss": "a target is longer than its input allows: give CTCLoss zero_infinity=True, or drop such samples",
}  # fmt: skip
_BACKWARD: Final = {
    "sqrt": "the gradient of sqrt at 0 is infinite: sqrt(x + 1e-8)",
    "norm": "the gradient of a norm at 0: add a small eps inside the root",
    "log": "the gradient of log at 0 is infinite; where() does not protect it: clamp the argument before the log",
    "div": "the gradient of a division by a number near 0: add a small eps to the divisor",
    "pow": "the gradient of a power at 0 is infinite: add a small eps to the base",
    "acos": "the gradient of acos at ±1 is infinite: clamp to (-1 + 1e-6, 1 - 1e-6)",
    "asin": "the gradient of asin at ±1 is infinite: clamp to (-1 + 1e-6, 1 - 1e-6)",
    "acosh": "the gradient of acosh at 1 is infinite: clamp to 1 + 1e-6 and above",
    "prod": "the gradient of a product with infinities in it: sum the logarithms instead",
    "atan2": "the gradient of atan2 at (0, 0) is undefined: add a small eps to one of the arguments",
    "std": "the gradient of std at a constant is undefined: sqrt(var + 1e-8)",
    "exp": "the gradient overflows with exp itself: clamp the argument",
}
_HALF: Final = ("float16", "bfloat16")
_DIVISIONS: Final = ("div", "addcdiv", "reciprocal", "rsqrt", "sqrt")


def hint_for(op: str, event: Event) -> str:
    """Return what to change about an operation that made a bad value; ``op`` is what it is called in the forward."""
    name, inputs = op.strip("_"), event.inputs
    if event.phase == "optimizer":
        return _hint_for_optimizer(name, event)
    special = _hint_for_values(name, event) if event.phase == "forward" else ""
    if special:
        return special
    half = next((value.dtype for value in inputs if value.dtype in _HALF), "")
    if half and event.phase == "forward" and name not in ("softmax", "log", "div"):
        wider = "bfloat16 or float32" if half == "float16" else "float32"
        as_float = _FORWARD.get(name, "") if half == "bfloat16" else ""  # its range is that of float32
        return as_float or f"the result left the range of {half}: use {wider} here, or scale the values down"
    table = _BACKWARD if event.phase == "backward" else _FORWARD
    known = table.get(name) or (_FORWARD.get(name) if event.phase == "backward" else None)
    if known:
        return known
    largest = max(
        (max(abs(v.minimum), abs(v.maximum)) for v in inputs if not math.isnan(v.maximum)), default=0.0
    )
    if largest > 1e18:
        return (
            f"the values had grown to {largest:.3g} before: look for a learning rate that is too high, or for a "
            "loop that multiplies them again and again"
        )
    return f"look at the values that go into {op} on this line"


def _hint_for_optimizer(name: str, event: Event) -> str:
    if event.scalars:
        return (
            f"the optimizer was given {event.scalars[0]} as a number: look at its learning rate, at the schedule "
            "that sets it, and at weight_decay"
        )
    if name in _DIVISIONS:
        return (
            "the optimizer divides by 0: give it an eps above 0 (Adam: eps=1e-8), or a smaller learning rate"
        )
    return (
        "the step is too large for the dtype of the weights: lower the learning rate, or clip the gradients"
    )


def _hint_for_values(name: str, event: Event) -> str:
    """Return a hint that follows from the values themselves, whatever the operation is called."""
    if event.scalars:
        return f"{event.scalars[0]} is given to {name} as a number on this line: look at where it comes from"
    made = next((value for value in event.outputs if value.is_bad), None)
    if name == "to" and made is not None and made.dtype in _HALF:
        largest = max((max(abs(v.minimum), abs(v.maximum)) for v in event.inputs), default=math.nan)
        return (
            f"{largest:.3g} does not fit into {made.dtype}: scale the values down before, or keep this part in "
            "float32 (or bfloat16)"
        )
    pair = event.elements[0].inputs if name == "mul" and event.elements else ()
    if any(value == 0 for value in pair) and any(math.isinf(value) for value in pair):
        return "0 times infinity: choose with torch.where or masked_fill instead of multiplying by a mask"
    return ""


def hint_for_outside(role: str, name: str, *, step: int) -> str:
    """Return what to change when the bad value came in from outside the step."""
    if role == "batch":
        return (
            "the batch itself holds a NaN or an infinity: drop or impute that sample, and check the data set"
        )
    if role == "leaf":
        return f"{name} was bad before this turn of the loop began: look at the line that updates it, one turn earlier"
    if role == "buffer":
        return f"the buffer {name} was bad before this step: look at the step that wrote it"
    if step == 0:
        return f"the weight {name} was bad before training began: look at how it is initialised or loaded"
    return (
        f"the weight {name} was bad before this step: look at what wrote to it at the end of step {step - 1}"
    )
