"""The world of a training that has stopped: its frames, what is at hand there, and how it may go on."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from clew.errors import UsageError
from clew.replay.breakpoint import Breakpoint, parse_breakpoint
from clew.replay.expression import compile_condition, evaluate
from clew.replay.guarded import all_undone, undone
from clew.replay.reply import Reply, Spot
from clew.replay.stack import line_of, names_around, names_of
from clew.replay.untouched import find_all

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import FrameType

    from clew.replay.live import Breaker


@dataclass(frozen=True, slots=True)
class Stop:
    """Where a training stops and what is at hand: ``extra`` are names such as ``out``, ``args``, ``module``."""

    title: str
    site: str
    phase: str
    extra: dict[str, Any]
    frame: FrameType | None = None
    reason: str = ""


class LiveWorld:
    """A stopped training. It goes on when a move is made; going back is for replayed steps."""

    def __init__(
        self, breaker: Breaker, stop: Stop, frames: list[FrameType], reason: str, *, modules: list[str]
    ) -> None:
        self._breaker = breaker
        self._stop = stop
        self._frames = frames
        self.reason = reason
        self._modules = modules
        self._found: Any = None

    @property
    def spot(self) -> Spot:
        """The place it stands at."""
        stop, step = self._stop, self._breaker.recorder.step
        is_told = stop.title.startswith("step ")
        return Spot(
            title=stop.title if is_told or not self._breaker.has_steps else f"step {step}: {stop.title}",
            site=stop.site,
            phase=stop.phase,
            lines=tuple(line_of(frame) for frame in self._frames),
            names=tuple(names_of(frame) for frame in self._frames),
            extra={**stop.extra, "step": step},
            shown=tuple(self._shown()),
            modules=tuple(self._modules),
            notes=(self.reason,) if self.reason else (),
        )

    def _shown(self) -> list[tuple[str, Any]]:
        """Return what is told at once: what went in and what came out, each once."""
        extra = self._stop.extra
        args = extra.get("args", ()) if self._stop.phase != "backward" else ()
        out = [("out", extra["out"])] if "out" in extra else []
        if out and args and args[0] is extra["out"]:
            return out + [(f"args[{number}]", each) for number, each in enumerate(args) if number]
        return [*([("args", args)] if args else []), *out]

    def move(self, how: str, words: str) -> Reply:
        """Let the training go on."""
        if how in ("back", "goto"):
            raise UsageError(
                "a training that goes on cannot go back",
                next_step=f"record it, then: clew replay RUN --step {self._breaker.recorder.step}",
            )
        if words:
            raise UsageError(f"'{how}' takes no number in a training that goes on")
        return Reply("going", resume=how)

    @contextlib.contextmanager
    def guard(self) -> Iterator[None]:
        """Undo whatever a typed expression changes in the training."""
        if self._found is None:
            self._found = find_all()
        with all_undone(self._found):
            yield

    def queue(self, count: int) -> list[dict[str, Any]]:
        """Return the modules that come next, in the order in which they ran first."""
        sites = self._breaker.recorder.sites
        modules = [sites[number] for number in range(len(sites)) if sites[number].role == "module"]
        ran = sorted((site for site in modules if site.order >= 0), key=lambda site: site.order)
        at = next((i for i, site in enumerate(ran) if site.name == self._stop.site), -1)
        shown = ran[max(at, 0) : max(at, 0) + count + 1]
        return [
            {
                "index": site.order,
                "op": site.type.rpartition(".")[2],
                "phase": "forward",
                "site": site.name,
                "line": "",
                "shape": list(site.shape),
                "bad": False,
                "here": site.name == self._stop.site,
            }
            for site in shown
        ]

    def breakpoints(self) -> list[str]:
        """Return the texts of the breakpoints."""
        points = self._breaker.breakpoints
        return [f"watch {each.text}" if each.kind == "watch" else each.text for each in points]

    def add_break(self, text: str, *, is_watch: bool = False) -> str:
        """Add a breakpoint or a watched expression."""
        point = _parse_watch(text) if is_watch else parse_breakpoint(text)
        self._breaker.add(point)
        wrong = self._find_fault(point) if is_watch else self._breaker.unmet.find_wrong(point)
        return f"{point.text} (so far {wrong})" if wrong else point.text

    def _find_fault(self, point: Breakpoint) -> str:
        """Return why an expression has no value here; elsewhere it may have one."""
        assert point.condition is not None
        names = {**names_around(self._frames), **self._stop.extra}
        try:
            with undone():
                evaluate(point.condition, {"torch": torch, "step": self._breaker.recorder.step, **names})
        except Exception as error:  # noqa: BLE001 - the user's own expression
            return f"{type(error).__name__}: {error}"
        return ""

    def remove_break(self, number: int) -> str:
        """Remove a breakpoint by the number it is listed with."""
        points = self._breaker.breakpoints
        if not 1 <= number <= len(points):
            raise UsageError(f"there is no breakpoint {number}")
        return points.pop(number - 1).text


def _parse_watch(text: str) -> Breakpoint:
    return Breakpoint(text, "watch", "", condition=compile_condition(text))
