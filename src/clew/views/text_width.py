"""How wide text is, without a font at hand: a table for a wide sans-serif, so that boxes fit in any of them."""

from __future__ import annotations

from typing import Final

_WIDTHS: Final = {
    0.27: "'",
    0.29: "ijlIJ",
    0.32: " ,.·",
    0.35: "/:;\\|f-",
    0.40: "()[]t!r²",
    0.46: '"',
    0.50: "*_`–",
    0.54: "sz?c",
    0.58: "LFkvxy",
    0.61: "PTYaoe",
    0.64: "ESbdghnpqu$0123456789{}µ",
    0.68: "KAVBRXZ",
    0.70: "C",
    0.75: "UHN",
    0.78: "DG&OQ",
    0.84: "w#+<=>^~×→±M",
    0.98: "%mW@…",
}

ADVANCE: Final = {character: width for width, characters in _WIDTHS.items() for character in characters}
"""Width of a character as a share of the size of the font."""

UNKNOWN_ADVANCE: Final = 0.75

BOLD: Final = 1.1


def measure_text(text: str, size: float, *, bold: bool = False) -> float:
    """Return the width of a line of text in the unit of ``size``."""
    width = sum(ADVANCE.get(character, UNKNOWN_ADVANCE) for character in text)
    return width * size * (BOLD if bold else 1.0)


def shorten(text: str, most: int) -> str:
    """Return text of at most so many characters, cut in the middle where both ends say something."""
    if len(text) <= most:
        return text
    head = (most - 1) * 2 // 3
    return f"{text[:head]}…{text[len(text) - (most - 1 - head) :]}"
