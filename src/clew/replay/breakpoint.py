"""The language of breakpoints: a place in the model, an operation, a step or a source line, with a condition.

``SITE[:forward|backward|update] [before|after] [if EXPR]``, ``op:NAME …``, ``step:N …``, ``FILE:LINE …``.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from clew.errors import UsageError, suggest
from clew.model.glob import compile_globs
from clew.replay.expression import compile_condition

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import CodeType

FORWARD, BACKWARD, UPDATE = "forward", "backward", "update"
PHASES: Final = (FORWARD, BACKWARD, UPDATE)
BEFORE, AFTER = "before", "after"
_FORMS: Final = (
    "write 'layers.3:forward if out.abs().max() > 100', 'op:softmax', 'step:10' or 'train.py:42'; "
    "the phases are forward, backward, update, each with before or after"
)
_SIDE: Final = re.compile(r":\s*(before|after)$")
_HEAD: Final = re.compile(r"(?P<head>.*?)(?:\s+if\s+(?P<condition>.*))?", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Breakpoint:
    """Where to stop. ``kind``: ``site op step line``; ``moment`` says on which side of a call."""

    text: str
    kind: str
    target: str
    phase: str = ""
    moment: str = AFTER
    number: int = 0
    condition: CodeType | None = None
    matches: Callable[[str], bool] = field(default=lambda _: False, repr=False, compare=False)

    def __str__(self) -> str:
        return self.text


def covers(point: Breakpoint, name: str) -> bool:
    """Return whether a pattern names a parameter, or a module that it belongs to."""
    parts = name.split(".")
    return any(point.matches(".".join(parts[:end])) for end in range(1, len(parts) + 1))


def parse_breakpoint(text: str) -> Breakpoint:
    """Return the breakpoint that a text describes, or raise a UsageError that says what is wrong with it."""
    clean = " ".join(text.split())
    found = _HEAD.fullmatch(clean)
    assert found is not None  # both parts may be empty
    head, expression = found["head"].strip(), found["condition"]
    if not head:
        raise _wrong(clean, "it names no place")
    if ":" not in head:
        head = _complete(clean, head)
    head = _SIDE.sub(r" \1", head)
    condition = _compile(clean, expression) if expression is not None else None
    place, _, rest = head.rpartition(":")
    words = rest.split()
    if place == "step":
        return _parse_step(clean, words, condition)
    if place == "op":
        return _parse_op(clean, words, condition)
    if words and words[0].isdigit():
        return _parse_line(clean, place, words, condition)
    return _parse_site(clean, place, words, condition)


def _complete(text: str, head: str) -> str:
    """A place without a phase is a module's forward; a file needs a line."""
    place, _, rest = head.partition(" ")
    if place.endswith(".py"):
        raise _wrong(text, f"which line of '{place}'?")
    if place in ("op", "step"):
        raise _wrong(text, f"which {'operation' if place == 'op' else 'step'}?")
    return f"{place}:{FORWARD} {rest}".rstrip()


def _parse_step(text: str, words: list[str], condition: CodeType | None) -> Breakpoint:
    if len(words) != 1 or not words[0].isdigit():
        raise _wrong(text, f"'{' '.join(words)}' is no step")
    return Breakpoint(text, "step", "step", moment=BEFORE, number=int(words[0]), condition=condition)


def _parse_op(text: str, words: list[str], condition: CodeType | None) -> Breakpoint:
    if not words:
        raise _wrong(text, "it names no operation")
    name, moment = words[0], _moment(text, words[1:], AFTER)
    fits = compile_globs((name,))
    return Breakpoint(
        text,
        "op",
        name,
        moment=moment,
        condition=condition,
        matches=lambda op: fits(op) or fits(op.rstrip("_")),
    )


def _parse_line(text: str, file: str, words: list[str], condition: CodeType | None) -> Breakpoint:
    if len(words) > 1:
        raise _wrong(text, f"'{' '.join(words[1:])}' after the line: a line has no phase")
    return Breakpoint(
        text,
        "line",
        file,
        moment=BEFORE,
        number=int(words[0]),
        condition=condition,
        matches=lambda name: name == file or name.endswith("/" + file.removeprefix("./")),
    )


def _parse_site(text: str, site: str, words: list[str], condition: CodeType | None) -> Breakpoint:
    phase = words[0] if words else FORWARD
    if phase not in PHASES:
        raise _wrong(text, f"unknown phase '{phase}'" + _meant(phase, PHASES))
    # The gradient that arrives is what people ask about; what leaves a module, and a weight, are there afterwards.
    moment = _moment(text, words[1:], BEFORE if phase == BACKWARD else AFTER)
    return Breakpoint(
        text, "site", site, phase=phase, moment=moment, condition=condition, matches=compile_globs((site,))
    )


def _moment(text: str, words: list[str], usual: str) -> str:
    if not words:
        return usual
    if len(words) > 1 or words[0] not in (BEFORE, AFTER):
        raise _wrong(
            text, f"'{' '.join(words)}' is neither before nor after" + _meant(words[0], (BEFORE, AFTER))
        )
    return words[0]


def _compile(text: str, expression: str) -> CodeType:
    try:
        return compile_condition(expression)
    except UsageError as error:
        raise UsageError(
            f"breakpoint '{text}': {error.what}", where=error.where, next_step=error.next_step
        ) from None


def _meant(wrong: str, right: tuple[str, ...]) -> str:
    hint = suggest(wrong, right)
    return f", {hint}" if hint else ""


def _wrong(text: str, what: str) -> UsageError:
    return UsageError(f"breakpoint '{text}': {what}", next_step=_FORMS)
