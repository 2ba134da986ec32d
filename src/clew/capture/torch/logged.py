"""Numbers that the script gives with ``run.log``: what is a number, and what is an error that names it."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch

from clew.errors import UsageError
from clew.stats.readable import undisturbed

if TYPE_CHECKING:
    from collections.abc import Mapping

    Number = float | torch.Tensor


def read_numbers(numbers: Mapping[str, Any]) -> dict[str, Number]:
    """Return the numbers by name; a tensor on a device stays there and is fetched when the step ends.

    Raises UsageError for the first that is no single number: nothing is kept of such a call.
    """
    return {name: _read_number(name, value) for name, value in numbers.items()}


def _read_number(name: str, value: Any) -> Number:
    if isinstance(value, torch.Tensor):
        return _read_tensor(name, value)
    shape = getattr(value, "shape", None)
    if isinstance(shape, tuple) and hasattr(value, "item"):  # an array of numpy or of another library
        _refuse_many(name, math.prod(shape), shape)
        value = value.item()
    if isinstance(value, (str, bytes, bytearray)):  # float() would read some of them
        raise _no_number(name, value)
    try:
        return float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf
    except (TypeError, ValueError) as error:
        raise _no_number(name, value) from error


def _read_tensor(name: str, value: torch.Tensor) -> Number:
    with undisturbed():
        if value.layout != torch.strided or value.is_nested or value.is_complex():
            raise UsageError(
                f"'{name}' is a tensor of {str(value.dtype).removeprefix('torch.')} that holds no plain number",
                where=f"run.log({name}=…)",
                next_step="log a real number: its norm, or its real part",
            )
        _refuse_many(name, value.numel(), tuple(value.shape))
        if value.is_meta:
            return value
        try:
            # Taken now: the script may go on to write into it.
            return float(value.item()) if value.device.type == "cpu" else value.detach().clone()
        except RuntimeError as error:  # inside vmap it stands for many
            raise UsageError(
                f"'{name}' is a tensor without a value of its own: {str(error).partition('. ')[0]}",
                where=f"run.log({name}=…)",
                next_step="log it outside of what torch transforms or traces",
            ) from error


def _refuse_many(name: str, count: int, shape: tuple[int, ...]) -> None:
    if count != 1:
        raise UsageError(
            f"'{name}' has {count} elements (shape {tuple(shape)}), not one",
            where=f"run.log({name}=…)",
            next_step=f"log one number, such as its mean, or all of them with clew.log_histogram('{name}', …)",
        )


def _no_number(name: str, value: Any) -> UsageError:
    text = repr(value)
    return UsageError(
        f"'{name}' is a {type(value).__name__}, not a number: {text if len(text) <= 40 else text[:39] + '…'}",
        where=f"run.log({name}=…)",
        next_step="log a number, or a tensor or an array with one element",
    )
