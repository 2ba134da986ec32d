"""What a module was made with: its plain attributes as one line of text, read without running any of its code."""

from __future__ import annotations

from types import BuiltinFunctionType, FunctionType
from typing import TYPE_CHECKING, Any, Final

import torch

from clew.capture.torch.code import describe_code

if TYPE_CHECKING:
    from collections.abc import Iterator

_MOST_CHARACTERS: Final = 400
_PLAIN: Final = (bool, int, float, str, torch.dtype)


def describe_arguments(module: torch.nn.Module) -> str:
    """Return ``name=value`` of the module's plain attributes, ``; `` between them, and last ``forward()=`` its code."""
    plain = "; ".join(f"{name}={text}" for name, text in _plain_attributes(module))[:_MOST_CHARACTERS]
    code = describe_code(module)
    return "; ".join(part for part in (plain, f"forward()={code}" if code else "") if part)


def _plain_attributes(module: torch.nn.Module) -> Iterator[tuple[str, str]]:
    for name, value in module.__dict__.items():
        if name.startswith("_") or name == "forward":
            continue  # somebody has replaced the forward of this one module: no argument
        text = _tell(value)
        if text is not None:
            yield name, text


def _tell(value: Any) -> str | None:
    """Return a plain value as text that is the same in every process, or None for anything else."""
    if value is None or type(value) in _PLAIN:
        return str(value)
    if type(value) in (tuple, list, torch.Size) and len(value) <= 8:
        parts = [_tell(part) for part in value]
        return None if None in parts else f"({', '.join(part for part in parts if part is not None)})"
    if isinstance(value, (FunctionType, BuiltinFunctionType)):
        return value.__name__
    return None
