"""How numbers look to people, in one place: four significant digits, SI sizes, durations."""

from __future__ import annotations

import math
from datetime import datetime
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable

_SIZES: Final = ("B", "kB", "MB", "GB", "TB", "PB")
_COUNTS: Final = ("M", "G", "T", "P")
_SECONDS: Final = ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"), (1e-9, "ns"))
ABSENT: Final = "-"


def format_number(value: float) -> str:
    """Return four significant digits, plain between 0.001 and 100,000 and scientific outside."""
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "inf" if value > 0 else "-inf"
    if value == 0:
        return "0"
    if 1e-3 <= abs(value) < 99_999.5:
        decimals = max(0, 3 - math.floor(math.log10(abs(value))))
        text = f"{value:.{decimals}f}"
        return text.rstrip("0").rstrip(".") if "." in text else text
    mantissa, exponent = f"{value:.3e}".split("e")
    return f"{mantissa.rstrip('0').rstrip('.')}e{int(exponent)}"


def format_integer(value: float) -> str:
    """Return a whole number with commas between thousands."""
    return f"{int(value):,}" if math.isfinite(value) else format_number(value)


def format_count(value: float) -> str:
    """Return a whole number with commas, from a million on with three significant digits, such as ``38.6 M``."""
    if not abs(value) >= 1e6 or math.isinf(value):
        return format_integer(value)
    size, unit = value / 1e6, 0
    while abs(size) >= 999.5 and unit < len(_COUNTS) - 1:
        size /= 1000
        unit += 1
    return f"{_three_digits(size)} {_COUNTS[unit]}"


def format_bytes(value: float) -> str:
    """Return an SI size with three significant digits, such as ``12.3 MB``."""
    if not math.isfinite(value):
        return format_number(value)
    size, unit = float(value), 0
    while abs(size) >= 999.5 and unit < len(_SIZES) - 1:
        size /= 1000
        unit += 1
    return f"{size:.0f} B" if unit == 0 else f"{_three_digits(size)} {_SIZES[unit]}"


def format_seconds(value: float) -> str:
    """Return a duration: ``12.3 µs``, ``4.56 ms``, ``2 min 03 s``, ``1 h 02 min``, ``3 d 04 h``."""
    if not math.isfinite(value):
        return format_number(value)
    if abs(value) < 59.95:
        return _short_duration(value)
    sign, seconds = ("-" if value < 0 else ""), round(abs(value))
    if seconds < 3600:
        return f"{sign}{seconds // 60} min {seconds % 60:02d} s"
    minutes = round(seconds / 60)
    if minutes < 24 * 60:
        return f"{sign}{minutes // 60} h {minutes % 60:02d} min"
    hours = round(minutes / 60)
    return f"{sign}{hours // 24} d {hours % 24:02d} h"


def _short_duration(value: float) -> str:
    if value == 0:
        return "0 s"
    # 0.9995 of a unit rounds up to one of it, so the unit below would read 1000.
    factor, unit = next((pair for pair in _SECONDS if abs(value) >= 0.9995 * pair[0]), _SECONDS[-1])
    return f"{_three_digits(value / factor)} {unit}"


def format_share(value: float) -> str:
    """Return a share of one as a percentage with one decimal."""
    if not math.isfinite(value):
        return format_number(value)
    if 0 < value < 0.0005:
        return "<0.1 %"
    return f"{100 * value:.1f} %"


def format_rate(value: float) -> str:
    """Return a number per second with three significant digits."""
    return f"{_three_digits(value)}/s" if math.isfinite(value) else format_number(value)


def format_time(value: str) -> str:
    """Return an ISO time as ``2026-11-15 14:25:01`` in its own time zone; other text as it is."""
    try:
        return datetime.fromisoformat(value).strftime("%Y-%m-%d %H:%M:%S")
    except ValueError:
        return value


def _three_digits(value: float) -> str:
    magnitude = abs(value)
    return f"{value:.0f}" if magnitude >= 99.95 else f"{value:.1f}" if magnitude >= 9.995 else f"{value:.2f}"


FORMATS: Final[dict[str, Callable[[float], str]]] = {
    "number": format_number,
    "integer": format_integer,
    "count": format_count,
    "bytes": format_bytes,
    "seconds": format_seconds,
    "share": format_share,
    "rate": format_rate,
}
"""Name of a format in a block, and the function that writes the number."""


def format_value(value: object, style: str = "text") -> str:
    """Return any cell of a block as text; ``style`` is ``text``, ``time`` or a key of ``FORMATS``."""
    if value is None:
        return ABSENT
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, (int, float)):
        return FORMATS.get(style, format_number if isinstance(value, float) else str)(value)
    if style == "time" and isinstance(value, str):
        return format_time(value)
    return str(value)
