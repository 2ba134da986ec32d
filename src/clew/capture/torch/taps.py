"""Print a value in flight, or run any Python on it; the value goes on as it came."""

from __future__ import annotations

import math
import sys
import threading
import weakref
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TextIO, TypeVar

import torch

from clew.capture import current
from clew.capture.torch.taps_compiled import emit, is_compiling, is_left_out, keep, kept, runs
from clew.capture.torch.taps_place import Place, find_call, find_place
from clew.capture.torch.taps_value import (
    blind_reason,
    dtype_of,
    format_entries,
    header,
    measure,
    open_value,
    quietly,
    shape_of,
    stats_line,
)
from clew.errors import UsageError

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Hashable

T = TypeVar("T")


class _Counter:
    """How often one call site was reached and how often it printed, in the run that is going on."""

    __slots__ = ("calls", "printed", "session")

    def __init__(self) -> None:
        self.calls = 0
        self.printed = 0
        self.session: Callable[[], Any] = _nobody

    def is_turn(self, first_n: int | None, every: int) -> bool:
        """Count a call and return whether it is one to look at."""
        session = current.active()
        if session is not self.session():
            self.calls, self.printed = 0, 0
            self.session = _nobody if session is None else weakref.ref(session)
        number, self.calls = self.calls, self.calls + 1
        return number % every == 0 and (first_n is None or self.printed < first_n)


def _nobody() -> None:
    return None


_counters: Final[dict[Hashable, tuple[_Counter, Any]]] = {}
_lock: Final = threading.Lock()


def _counter_of(key: Hashable, owner: Any = None) -> _Counter:
    # The owner is kept so that its id, which is the key, is not given to another one.
    with _lock:
        return _counters.setdefault(key, (_Counter(), owner))[0]


def print_value(
    x: T,
    label: str = "",
    *,
    first_n: int | None = None,
    every: int = 1,
    when: Callable[[T], Any] | None = None,
    summarize: int = 3,
    file: TextIO | str | os.PathLike[str] | None = None,
) -> T:
    """Print one line about a tensor or an array and return that very object.

    The line has the label, dtype and shape, statistics, the first ``summarize`` entries (-1: all) and the place.
    ``every`` looks at every Nth call of this call site, the first one included; ``when`` is asked then; ``first_n``
    ends it after so many lines. The line goes to ``sys.stdout``, or to ``file``: a stream, or a path to append to.
    """
    refuse_counts("clew.print", first_n, every)
    if is_compiling():
        order = {"label": label, "first_n": first_n, "every": every, "summarize": summarize}
        _print_compiled(x, when, file, order)
        return x
    if is_left_out(x):
        return x
    counter = count_call(first_n, every)
    if counter is not None and (when is None or ask_condition(when, x, _who(label))):
        counter.printed += 1
        _write_line(x, label, summarize, file, find_place())
    return x


def count_call(
    first_n: int | None, every: int, *, instruction: int | None = None, key: str = ""
) -> _Counter | None:
    """Count a call of the user's call site, and return its counter when it is one to look at.

    Compiled code says which ``instruction`` of its line it was, and the ``key`` of its graph where it has no line.
    """
    if instruction is None:
        code, instruction = find_call()
        counter = _counter_of((id(code), instruction), code)
    else:
        place = find_place()
        counter = _counter_of((place.file, place.line, instruction, None if place.file else key))
    return counter if counter.is_turn(first_n, every) else None


def refuse_counts(who: str, first_n: int | None, every: int) -> None:
    """Raise for numbers that count nothing."""
    if every < 1 or (first_n is not None and first_n < 0):
        raise UsageError(
            f"{who} cannot count with first_n={first_n}, every={every}",
            next_step="every is 1 or more, first_n is 0 or more or None for no end",
        )


def ask_condition(when: Callable[[Any], Any], x: Any, who: str) -> bool:
    """Return what a condition says of a value, without leaving it in the graph of gradients."""
    with torch.no_grad():
        return is_true(when(x), who)


def _who(label: str) -> str:
    return f"clew.print {label!r}" if label else "clew.print"


def is_true(verdict: Any, who: str) -> bool:
    """Return a condition's answer, which must be one yes or no."""
    if math.prod(shape_of(verdict)) != 1:
        raise UsageError(
            f"when= of {who} gave {header(verdict)}, not one yes or no",
            next_step="reduce it: when=lambda t: (t > 10).any()",
        )
    return bool(verdict)


def _write_line(
    x: Any, label: str, summarize: int, file: TextIO | str | os.PathLike[str] | None, place: Place
) -> None:
    parts = [f"{label}:" if label else "", header(x)]
    reason = blind_reason(x)
    parts += [f"({reason})"] if reason else quietly(_look, x, summarize)
    parts.append(f"({_short(place)})" if _short(place) else "")
    line = "  ".join(part for part in parts if part) + "\n"
    if file is None:
        sys.stdout.write(line)
    elif hasattr(file, "write"):
        file.write(line)
    else:
        with Path(file).open("a", encoding="utf-8") as stream:
            stream.write(line)


def _look(x: Any, summarize: int) -> list[str]:
    array, note = open_value(x)
    entries = format_entries(array, summarize) if summarize else ""
    return [f"({note})" if note else "", stats_line(measure(array)), entries]


def _short(place: Place) -> str:
    worker = torch.utils.data.get_worker_info()
    words = [f"worker {worker.id}" if worker else "", place.site, place.source]
    return ", ".join(word for word in words if word)


def _print_compiled(x: Any, when: Any, file: Any, order: dict[str, Any]) -> None:
    # The condition becomes part of the graph; what it says is read when the graph runs.
    condition = True if when is None else when(x)
    if condition is False:
        return
    if file is not None and not isinstance(file, str):
        file = keep(file)
    emit([x] if condition is True else [x, condition], {"tap": "print", "file": file, **order})


@runs("print")
def _print_running(tensors: list[torch.Tensor], order: dict[str, Any], key: str) -> None:
    counter = count_call(order["first_n"], order["every"], instruction=order["instruction"], key=key)
    if counter is not None and (len(tensors) == 1 or is_true(tensors[1].detach(), _who(order["label"]))):
        counter.printed += 1
        file = kept(order["file"]) if isinstance(order["file"], int) else order["file"]
        _write_line(tensors[0], order["label"], order["summarize"], file, find_place())


def tap(x: T, fn: Callable[[T], Any], *, replace: bool | None = None) -> T:
    """Call ``fn(x)`` on a value in flight; a tensor that it returns takes the place of ``x``.

    ``replace=False`` ignores what ``fn`` returns. In compiled code a function is called as it is, outside of the
    graph, and cannot replace anything; with ``replace=True`` the compiler traces it instead.
    """
    if is_compiling() and not replace:
        emit([x], {"tap": "call", "fn": keep(fn), "ignore": replace is False})
        return x
    if is_left_out(x):
        return x
    result = fn(x)
    if result is None or result is x or replace is False:
        return x
    fitting: T = check_replacement(x, result)
    return fitting


def check_replacement(x: Any, result: Any, *, where: str = "") -> Any:
    """Return what is to stand in the place of a value: the value, or a tensor or array that fits there."""
    if not isinstance(result, torch.Tensor if isinstance(x, torch.Tensor) else type(x)):
        return x
    if shape_of(result) != shape_of(x) or dtype_of(result) != dtype_of(x):
        raise UsageError(
            f"a tap returned {header(result)} in the place of {header(x)}",
            where=where,
            next_step="return None (or use replace=False) to only look, or a tensor of the same shape and dtype",
        )
    return result


@runs("call")
def _call_running(tensors: list[torch.Tensor], order: dict[str, Any], key: str) -> None:  # noqa: ARG001
    function = kept(order["fn"])
    if function is None:
        raise UsageError(
            "compiled code holds a tap on a function of another process",
            where=str(find_place()),
            next_step="compile again in this process: torch.compiler.reset()",
        )
    with torch.no_grad():
        result = function(tensors[0].detach())
    if isinstance(result, torch.Tensor) and not order["ignore"]:
        raise UsageError(
            "a tap returned a tensor, but compiled code cannot take it from a function that was not traced",
            where=str(find_place()),
            next_step="write clew.tap(x, fn, replace=True), or replace=False to only look",
        )
