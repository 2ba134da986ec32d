"""``clew.breakpoint``: a value in flight goes through, and somebody at a terminal may look at it."""

from __future__ import annotations

import functools
import sys
from typing import TYPE_CHECKING, Any, TypeVar

from clew.api.taps import is_switched_on

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T")

_is_told = False


def breakpoint(x: T = None, *more: Any, when: bool | Callable[[], bool] = True, **named: Any) -> T:  # type: ignore[assignment]
    """Stop here, with the debugger's prompt, and return the first value as it is.

    ``x`` is ``out`` at the prompt, all values together are ``args``; those given by name have their names, and the
    names of the function are there anyway. ``when``: stop only then. Does nothing without a terminal (told once), in
    compiled code, and with ``CLEW_CHECKS=0``.
    """
    import torch

    if torch.compiler.is_compiling() or not (when() if callable(when) else when):
        return x
    from clew.render.prompt import is_interactive

    frame = sys._getframe(1)
    if not is_interactive():
        _tell_once(f"{frame.f_code.co_filename}:{frame.f_lineno}")
        return x
    from clew.api.shell import open_shell
    from clew.capture import current

    recorder = getattr(current.active(), "recorder", None) or _lonely_recorder()
    if recorder.breaker is not None and recorder.breaker.is_detached:
        return x
    values = (x, *more, *named.values())
    extra = {**named, "out": x, "args": values} if values != (None,) else {}
    open_shell(recorder, "stopped by clew.breakpoint", frame=frame, extra=extra)
    return x


@functools.cache
def _lonely_recorder() -> Any:
    """Return one recorder for all stops of a program that is not recorded: it knows what was asked for at the last."""
    from clew.api.shell import make_lonely_recorder

    return make_lonely_recorder()


def _pass(x: T = None, *_: Any, when: Any = True, **__: Any) -> T:  # type: ignore[assignment]  # noqa: ARG001
    """Stand for the breakpoint where it is switched off."""
    return x


def _tell_once(place: str) -> None:
    global _is_told
    if not _is_told:
        _is_told = True
        print(f"clew: the breakpoint at {place} is off: there is no terminal (told once)", file=sys.stderr)


if not is_switched_on():
    breakpoint = _pass
