"""The few lines that ``clew run`` leaves on standard error when the script has ended."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from clew.views.no_step import NO_STEP
from clew.views.number import format_bytes, format_integer, format_number, format_share

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path


_SHORT_RUN: Final = 100
_NOTICEABLE: Final = 0.1
"""A cost that would worry people, where it stands for the first steps and not for the training."""

_REST: Final = {"": "", "evaluation": " and an evaluation", "step": " and one that did not end"}


def format_summary(
    path: Path,
    *,
    steps: int,
    rest: str = "",
    kept_steps: int | None = None,
    recorded_steps: int | None = None,
    loss: float | None = None,
    worst_site: str = "",
    cost_share: float | None = None,
    size_bytes: int | None = None,
    faults: int = 0,
    remarks: Sequence[str] = (),
    findings: Sequence[str] = (),
) -> str:
    """Return the summary of an ended run; each line starts with ``clew:`` to tell it from the script's.

    ``kept_steps`` is how many are on record where that ended early, ``recorded_steps`` how many of them in full.
    ``rest`` is what was recorded after the last step, an ``evaluation`` or a ``step`` that did not end, or empty.
    ``worst_site`` is a site with what is wrong there, such as ``fc1 (NaN in grad at step 12)``, or empty; ``remarks``
    say what clew did on request, ``findings`` what the doctor found.
    """
    size = [format_bytes(size_bytes)] if size_bytes is not None else []
    lines = ["recorded " + ", ".join([str(path), *size])]
    facts = [_count(steps, "step") + _REST[rest]]
    if kept_steps is not None and kept_steps < steps:
        facts.append(f"{format_integer(kept_steps)} of them on record")
    if recorded_steps is not None and recorded_steps < (steps if kept_steps is None else kept_steps):
        full = f"{format_integer(recorded_steps)} {'of them ' if kept_steps is None else ''}in full"
        facts.append(full if recorded_steps else "no statistics of them")
    facts += [f"last loss {format_number(loss)}"] if loss is not None else []
    if cost_share is not None:
        is_short = steps < _SHORT_RUN and cost_share > _NOTICEABLE
        why = " (a short run: the first steps are recorded in full)" if is_short else ""
        facts.append(f"cost of clew {format_share(cost_share)}{why}")
    lines.append(", ".join(facts))
    lines += [] if steps or rest else [NO_STEP]
    lines += [f"worst site: {worst_site}"] if worst_site else []
    lines += remarks
    lines += findings
    lines += [f"{_count(faults, 'fault')} inside clew itself; training was not touched"] if faults else []
    # A name is looked up in the folder of the runs; elsewhere only the path leads there.
    known_as = path.name if str(path.parent) == "runs" else path
    lines.append(f"next: clew {'doctor' if findings else 'show'} {known_as}")
    return "".join(f"clew: {line}\n" for line in lines)


def _count(number: int, noun: str) -> str:
    return f"{format_integer(number)} {noun}" if number == 1 else f"{format_integer(number)} {noun}s"
