"""Checks of a tensor's form: rank, dtype and shape. They need no values, so they work on the meta device too."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch

from clew.capture.torch.check_names import check_shape
from clew.capture.torch.check_problem import Problem
from clew.capture.torch.taps_value import dtype_of, shape_of
from clew.errors import UsageError, suggest

if TYPE_CHECKING:
    from collections.abc import Hashable


def rank(x: Any, wanted: int | tuple[int, ...]) -> Problem | None:
    """The number of dimensions is the one wanted, or one of several."""
    allowed = tuple(wanted) if isinstance(wanted, (tuple, list)) else (wanted,)
    if len(shape_of(x)) in allowed:
        return None
    words = " or ".join(str(each) for each in allowed)
    return Problem(f"have rank {words}", f"it has rank {len(shape_of(x))}, shape {list(shape_of(x))}")


def rank_at_least(x: Any, wanted: int) -> Problem | None:
    """There are that many dimensions or more."""
    if len(shape_of(x)) >= wanted:
        return None
    return Problem(
        f"have rank {wanted} or more", f"it has rank {len(shape_of(x))}, shape {list(shape_of(x))}"
    )


_KINDS: Final = ("floating", "integer", "complex", "bool")


def kind_of(dtype: str) -> str:
    """Return the kind that a dtype belongs to."""
    for prefix, kind in (
        ("float", "floating"),
        ("bfloat", "floating"),
        ("complex", "complex"),
        ("bool", "bool"),
    ):
        if dtype.startswith(prefix):
            return kind
    return "integer"


def name_dtype(wanted: Any) -> str:
    """Return the name of a dtype or of a kind of dtypes given in any of the usual ways."""
    if isinstance(wanted, torch.dtype):
        return str(wanted).removeprefix("torch.")
    if isinstance(wanted, str):
        return _read_dtype(wanted.removeprefix("torch."))
    try:
        return str(np.dtype(wanted).name)
    except TypeError:
        raise UsageError(
            f"{wanted!r} is not a dtype", next_step="write torch.float32, 'float32' or 'floating'"
        ) from None


def _read_dtype(name: str) -> str:
    if name in _KINDS and name != "bool":
        return name
    found = getattr(torch, name, None)
    if isinstance(found, torch.dtype):
        return str(found).removeprefix("torch.")
    known = [each for each in dir(torch) if isinstance(getattr(torch, each), torch.dtype)]
    raise UsageError(
        f"unknown dtype '{name}'",
        next_step=suggest(name, [*known, *_KINDS]) or f"write a dtype of torch or {', '.join(_KINDS)}",
    )


def dtype(x: Any, wanted: Any) -> Problem | None:
    """The type is the one wanted, one of several, or of a kind: floating, integer, complex, bool."""
    allowed = [name_dtype(each) for each in (wanted if isinstance(wanted, (tuple, list)) else (wanted,))]
    found = dtype_of(x)
    if found in allowed or kind_of(found) in allowed:
        return None
    return Problem(f"have dtype {' or '.join(allowed)}", f"it has {found}")


def shape(x: Any, spec: Any, *, name: str = "", key: Hashable = None) -> Problem | None:
    """The shape is as written; a name stands for the same size everywhere in a step."""
    problems = check_shape(shape_of(x), spec, name=name, key=key)
    if not problems:
        return None
    text = spec if isinstance(spec, str) else " ".join("_" if each is None else str(each) for each in spec)
    return Problem(f"have shape [{text}]", f"it has {list(shape_of(x))}: {'; '.join(problems)}")
