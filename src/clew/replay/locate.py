"""From the symptom back to the operation that made the first bad value out of good ones."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from clew.replay.lens import Event, OpLens, Value


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a bad value was born: an operation, or a tensor that came in bad (``role`` says which kind)."""

    event: Event | None
    chain: tuple[Event, ...]
    outside: Value | None = None


def find_origin(lens: OpLens, symptom: int) -> Origin | None:
    """Follow bad values backwards from an operation; None when its output is fine.

    Values that were bad but never reached the symptom are not looked at, so a NaN in a branch that ``where`` threw
    away is not blamed. Of several births the first in order of execution counts.
    """
    if symptom < 0 or not lens.events[symptom].bad:
        return None
    came_from: dict[int, int] = {symptom: -1}
    births: list[int] = []
    outside: list[tuple[int, Value]] = []
    waiting = [symptom]
    while waiting:
        index = waiting.pop()
        sources = [value for value in lens.events[index].inputs if _matters(lens, value)]
        made = [value.producer for value in sources if value.producer >= 0]
        outside += [(index, value) for value in sources if value.producer < 0]
        if not sources:
            births.append(index)
        for producer in made:
            if producer not in came_from:
                came_from[producer] = index
                waiting.append(producer)
    if outside:
        index, value = min(outside, key=lambda pair: pair[0])
        return Origin(None, _chain(lens, came_from, index), value)
    first = min(births)
    return Origin(lens.events[first], _chain(lens, came_from, first))


def _matters(lens: OpLens, value: Value) -> bool:
    """A bad input is a lead unless its infinities were written on purpose."""
    if not value.is_bad:
        return False
    if value.producer >= 0:
        event = lens.events[value.producer]
        return event.bad and not event.meant
    return bool(value.nan) or value.role != ""


def _chain(lens: OpLens, came_from: dict[int, int], index: int) -> tuple[Event, ...]:
    chain = []
    while index >= 0:
        chain.append(lens.events[index])
        index = came_from[index]
    return tuple(chain)
