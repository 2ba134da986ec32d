"""What happens when a check fails: one error with everything known, raised, recorded or told as a warning."""

from __future__ import annotations

import math
import warnings
from typing import TYPE_CHECKING, Any, Final

from clew.capture import current
from clew.capture.torch.taps_value import format_entries, header, measure, quietly, stats_line
from clew.errors import CheckError, CheckWarning

if TYPE_CHECKING:
    from collections.abc import Sequence

    from clew.capture.torch.check_problem import Problem
    from clew.capture.torch.taps_place import Place

_NEXT: Final = {
    "finite": "with clew.checks(model): … names the first module whose output is not finite",
    "shape": "names hold for one step: clew.check.new_step() begins another",
    "rows_differ": "look for inputs that never reach this point: a dead layer, a constant batch",
}
_AT_SITE: Final = "clew.pprint(model, x) shows what goes into it"
_WARN: Final = "warn=True records the failure and goes on"
_SHOW: Final = 5

_told: set[tuple[str, str, str]] = set()


def report(
    check: str,
    x: Any,
    problem: Problem,
    *,
    name: str,
    warn: bool,
    place: Place,
    show: Sequence[Any] = (),
    at_site: bool = False,
) -> None:
    """Raise a failed check; with ``warn`` record it in the run, or warn once for each place without one."""
    error = _make_error(check, x, problem, name=name, place=place, show=show)
    if at_site:
        error.next_step = _AT_SITE
    session = current.active()
    if session is not None:
        session.note("check", {**error.details, "message": str(error), "raised": not warn})
    if not warn:
        raise error
    if session is None:
        _warn_once(error, place)


def _warn_once(error: CheckError, place: Place) -> None:
    key = (error.details["check"], error.details["name"], place.source)
    if key not in _told:
        _told.add(key)
        warnings.warn_explicit(str(error), CheckWarning, place.file or "<clew>", place.line or 1)


def _make_error(
    check: str, x: Any, problem: Problem, *, name: str, place: Place, show: Sequence[Any]
) -> CheckError:
    stats = quietly(measure, problem.array) if problem.array is not None else {}
    lines = [f"{name or 'the value'} must {problem.must}: {problem.found}"]
    if problem.offenders and problem.offenders[0].index:
        more = ", …" if problem.count > len(problem.offenders) else ""
        lines.append("  " + ", ".join(str(offender) for offender in problem.offenders) + more)
    if problem.array is not None:
        note = f" ({problem.note})" if problem.note else ""
        lines.append(f"  {header(x)}{note}  {stats_line(stats)}".rstrip())
    lines += [f"  {header(each)}  {quietly(format_entries, each, _SHOW)}" for each in show]
    return CheckError(
        "\n".join(lines),
        where=str(place),
        next_step=_NEXT.get(check, _WARN),
        details=_collect_details(check, x, problem, name=name, place=place, stats=stats),
    )


def _collect_details(
    check: str, x: Any, problem: Problem, *, name: str, place: Place, stats: dict[str, float]
) -> dict[str, Any]:
    session = current.active()
    return {
        "check": check,
        "name": name,
        "must": problem.must,
        "found": problem.found,
        "tensor": header(x),
        "site": place.site,
        "source": place.source,
        "step": None if session is None else session.step,
        "count": problem.count,
        "total": problem.total,
        "offenders": [{"index": list(o.index), "value": plain(o.value)} for o in problem.offenders],
        "stats": {key: plain(value) for key, value in stats.items()},
    }


def plain(value: Any) -> Any:
    """Return a number as JSON can hold it: NaN, infinities and complex numbers as text."""
    if isinstance(value, complex):
        return str(value)
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
