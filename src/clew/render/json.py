"""Pages and tables as JSON that any reader accepts: NaN and the infinities become text."""

from __future__ import annotations

import json
import math
from dataclasses import fields, is_dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from clew.views.block import Page


def to_plain(value: object) -> Any:
    """Return the value in the types of JSON: dataclasses become objects, NaN and infinity text."""
    if isinstance(value, bool) or value is None or isinstance(value, (str, int)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else _name_nonfinite(value)
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: to_plain(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, dict):
        return {str(key): to_plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [to_plain(item) for item in value]
    # numpy scalars and arrays, without importing numpy to ask
    if hasattr(value, "tolist"):
        return to_plain(value.tolist())
    return str(value)


def dump(value: object, *, indent: int | None = 2) -> str:
    """Return the value as one line-feed-terminated JSON text."""
    return json.dumps(to_plain(value), indent=indent, ensure_ascii=False, allow_nan=False) + "\n"


def lower(page: Page) -> str:
    """Return a page as JSON; each block says its ``type``, each cell keeps its raw value."""
    blocks = [{"type": type(block).__name__, **to_plain(block)} for block in page.blocks]
    return dump({"title": page.title, "blocks": blocks})


def _name_nonfinite(value: float) -> str:
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
