"""Pages and tables as JSON that any reader accepts: NaN and the infinities become text."""

from __future__ import annotations

import json
import math
from dataclasses import fields, is_dataclass
from typing import TYPE_CHECKING, Any

from clew.views.block import KeyValues, Table

if TYPE_CHECKING:
    from clew.views.block import Block, Cell, Page


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
    """Return a page as JSON: each block says its ``type``; rows are objects that hold raw values."""
    return dump({"title": page.title, "blocks": [_lower_block(block) for block in page.blocks]})


def _lower_block(block: Block) -> dict[str, Any]:
    plain: dict[str, Any] = {"type": type(block).__name__, **to_plain(block)}
    if isinstance(block, Table):
        keys = [column.key for column in block.columns]
        plain["rows"] = [dict(zip(keys, map(_value, row), strict=True)) for row in block.rows]
    elif isinstance(block, KeyValues):
        plain["rows"] = {key: _value(cell) for key, cell in block.rows}
    return plain


def _value(cell: Cell) -> Any:
    return to_plain(cell.value)


def _name_nonfinite(value: float) -> str:
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
