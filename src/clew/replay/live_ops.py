"""Stops at single operations, through a dispatch mode: installed only for a breakpoint on an operation."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode

from clew.replay.lens import plain_name
from clew.replay.statistics import Statistics

if TYPE_CHECKING:
    from collections.abc import Callable

    from clew.replay.breakpoint import Breakpoint


class OpStop(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Calls ``hit`` with a breakpoint, the name of the operation and the names for its condition."""

    def __init__(
        self,
        hit: Callable[[Breakpoint, str, dict[str, Any]], None],
        points: Callable[[], list[Breakpoint]],
        *,
        seen: set[str],
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._hit = hit
        self._points = points
        self._seen = seen
        self._pid = os.getpid()

    def start(self) -> None:
        """Begin to see the operations of this thread."""
        self.__enter__()  # type: ignore[no-untyped-call]

    def stop(self) -> None:
        """See no more; a mode of the script's on top of this one leaves it as a pass-through."""
        if _get_current_dispatch_mode() is self:
            self.__exit__(None, None, None)  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Execute one operation; stop before or after it where that was asked for."""
        kwargs = kwargs or {}
        if os.getpid() != self._pid:
            return func(*args, **kwargs)
        name = plain_name(func)
        self._seen.add(name)
        wanted = [point for point in self._points() if point.matches(name)]
        if not wanted:
            return func(*args, **kwargs)
        names: dict[str, Any] = {"args": args, "kwargs": kwargs, "stats": Statistics(args)}
        for point in wanted:
            if point.moment == "before":
                self._hit(point, name, names)
        result = func(*args, **kwargs)
        names = {**names, "out": result, "stats": Statistics(result)}
        for point in wanted:
            if point.moment == "after":
                self._hit(point, name, names)
        return result
