"""Save a value in flight as a numbered NumPy file; the value goes on as it came."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

import numpy as np
import torch

from clew.capture.torch.taps import ask_condition, count_call, is_true, refuse_counts
from clew.capture.torch.taps_compiled import emit, is_compiling, is_left_out, runs
from clew.capture.torch.taps_place import find_place
from clew.capture.torch.taps_value import blind_reason, open_value, quietly
from clew.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T")

_next: Final[dict[str, int]] = {}
"""The number after the last one used, by path: a folder of many files is not searched again and again."""


def dump(
    x: T,
    path: str | os.PathLike[str],
    *,
    first_n: int | None = None,
    every: int = 1,
    when: Callable[[T], Any] | None = None,
) -> T:
    """Save a tensor or an array as ``NAME.000000.npy``, ``NAME.000001.npy`` … and return that very object.

    Files are never overwritten: numbers go on after those that are there. ``first_n``, ``every`` and ``when`` choose
    the calls as in ``clew.print``. What NumPy has no type for is saved as float32.
    """
    refuse_counts("clew.dump", first_n, every)
    target = os.fspath(path).removesuffix(".npy")
    if is_compiling():
        # The condition becomes part of the graph; what it says is read when the graph runs.
        condition: Any = True if when is None else when(x)
        if condition is not False:
            order = {"tap": "dump", "path": target, "first_n": first_n, "every": every}
            emit([x] if condition is True else [x, condition], order)
        return x
    if is_left_out(x):
        return x
    counter = count_call(first_n, every)
    if counter is not None and (when is None or ask_condition(when, x, "clew.dump")):
        counter.printed += 1
        _save(x, target)
    return x


@runs("dump")
def _dump_running(tensors: list[torch.Tensor], order: dict[str, Any], key: str) -> None:
    counter = count_call(order["first_n"], order["every"], instruction=order["instruction"], key=key)
    if counter is not None and (len(tensors) == 1 or is_true(tensors[1].detach(), "clew.dump")):
        counter.printed += 1
        _save(tensors[0], order["path"])


def _save(x: Any, target: str) -> None:
    reason = blind_reason(x)
    if reason:
        raise UsageError(f"clew.dump cannot save this: {reason}", where=str(find_place()))
    array = quietly(_to_numpy, x)
    Path(target).parent.mkdir(parents=True, exist_ok=True)
    while True:
        number = _next.get(target, 0)
        _next[target] = number + 1
        try:
            # Exclusive: a data worker or another rank may be at the same number.
            with Path(f"{target}.{number:06d}.npy").open("xb") as file:
                np.save(file, array, allow_pickle=False)
        except FileExistsError:
            continue
        return


def _to_numpy(x: Any) -> Any:
    value, _ = open_value(x)
    if not isinstance(value, torch.Tensor):
        return value
    value = value.detach().cpu()
    try:
        return value.resolve_conj().resolve_neg().numpy()
    except TypeError:
        return value.to(torch.float32).numpy()
