"""The world of a replayed step: a place in its timeline, moved forwards and backwards at no cost."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from clew.errors import ClewError, UsageError, suggest
from clew.replay.breakpoint import Breakpoint, parse_breakpoint
from clew.replay.expression import compile_condition, differs, evaluate, spell
from clew.replay.guarded import undone
from clew.replay.reply import Reply, Spot
from clew.replay.statistics import Statistics

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager

    from clew.replay.timeline import Operation, Timeline

_MISSING = object()
_OUTSIDE = ("parameter", "buffer", "batch")
_AFTER_LOSS = ("ones_like", "detach", "_local_scalar_dense", "item")
"""Operations that stand between the loss and its backward pass."""


class Travel:
    """Stands at one operation of a timeline. Moving executes nothing, so going back is as easy as going on."""

    def __init__(self, timeline: Timeline) -> None:
        if not timeline.operations:
            raise UsageError(
                f"no operation was seen in step {timeline.step}",
                next_step="a compiled or a distributed step may hide its operations; try another step",
            )
        self.timeline = timeline
        self.at = 0
        self._breaks: list[Breakpoint] = []
        self._reason = ""

    def start(self) -> None:
        """Stand where it is most worth to look first: where a bad value began, else at the beginning."""
        self.at = next((each.index for each in self.timeline.operations if each.is_born), 0)

    # ---------------------------------------------------------------- where it stands

    @property
    def operation(self) -> Operation:
        """The operation that it stands at; it has been executed."""
        return self.timeline.operations[self.at]

    @property
    def spot(self) -> Spot:
        """The place it stands at."""
        operation, timeline = self.operation, self.timeline
        total = len(timeline.operations)
        where = f" in {operation.site}" if operation.site else ""
        given = timeline.restore(operation.given)
        outputs = [timeline.vault.value(held) for held in operation.outputs]
        frames = operation.frames or self._forward_frames(operation)
        return Spot(
            title=f"{operation.index} of {total - 1}  {operation.op} ({operation.phase}){where}",
            site=operation.site,
            phase=operation.phase,
            lines=tuple(frame.line for frame in frames),
            names=tuple(
                {name: timeline.restore(value) for name, value in frame.names.items()} for frame in frames
            ),
            extra=self._extra(operation, given, outputs),
            shown=self._shown(operation, outputs),
            modules=tuple(timeline.path_of(operation)),
            notes=self._notes(operation),
        )

    def _extra(self, operation: Operation, given: Any, outputs: list[Any]) -> dict[str, Any]:
        out = outputs[0] if len(outputs) == 1 else tuple(outputs)
        call = self.timeline.calls[operation.call] if operation.call >= 0 else None
        return {
            "out": out,
            "args": given[0],
            "kwargs": given[1],
            "module": call.module if call is not None else None,
            "op": operation.op,
            "step": self.timeline.step,
            "site": operation.site,
            "stats": Statistics(out),
        }

    def _shown(self, operation: Operation, outputs: list[Any]) -> tuple[tuple[str, Any], ...]:
        rows: list[tuple[str, Any]] = []
        for number, held in enumerate(operation.inputs):
            maker = f" <- {held.producer}" if held.producer >= 0 else ""
            role = f" {_shorten(held.role, operation.site)}" if held.role.startswith(_OUTSIDE) else ""
            label = f"in {number}{maker}{role}"
            rows.append((label, self.timeline.vault.value(held)))
        rows += [
            ("out" if len(outputs) == 1 else f"out {number}", value) for number, value in enumerate(outputs)
        ]
        return tuple(rows)

    def _notes(self, operation: Operation) -> tuple[str, ...]:
        notes = [self._reason] if self._reason else []
        if operation.is_born:
            notes.append("good values went in and a bad one came out: here it began")
        if operation.phase == "backward" and operation.forward >= 0:
            cause = self.timeline.operations[operation.forward]
            line = f", {cause.line}" if cause.line is not None else ""
            notes.append(f"the gradient of operation {cause.index}: {cause.op}{line}")
        return tuple(notes)

    def _forward_frames(self, operation: Operation) -> tuple[Any, ...]:
        return self.timeline.operations[operation.forward].frames if operation.forward >= 0 else ()

    # ---------------------------------------------------------------- moving

    def move(self, how: str, words: str) -> Reply:
        """Go to another operation of the step."""
        self._reason = ""
        if how == "goto":
            self.at = self._find(words)
        elif how == "continue":
            return self._continue()
        else:
            self._go(how, _count(words))
        return Reply("place")

    def _go(self, how: str, count: int) -> None:
        """Go so many times, or as far as there is something to go to."""
        start = self.at
        for _ in range(count):
            try:
                self.at = self._neighbour(how)
            except UsageError:
                if self.at == start:
                    raise
                return

    def _neighbour(self, how: str) -> int:
        operations, here = self.timeline.operations, self.operation
        last = len(operations) - 1
        if how == "back":
            if self.at == 0:
                raise UsageError("this is the first operation of the step")
            return self.at - 1
        if self.at == last:
            raise UsageError("this is the last operation of the step", next_step="back, goto N, or quit")
        if how == "finish":
            if here.call < 0:
                raise UsageError("no module is being called here", next_step="continue goes on to the end")
            end = self.timeline.calls[here.call].last
            return end if end > self.at else self.at + 1
        if how == "next":
            return next((each.index for each in operations[self.at + 1 :] if each.depth <= here.depth), last)
        return self.at + 1

    def _continue(self) -> Reply:
        watched = [self._watched(each, self.operation) for each in self._breaks]
        for operation in self.timeline.operations[self.at + 1 :]:
            self.at = operation.index
            for number, each in enumerate(self._breaks):
                if each.kind == "watch":
                    value = self._watched(each, operation)
                    before, watched[number] = watched[number], value
                    if _differ(value, before):
                        self._reason = f"{each.text} changed from {spell(before)} to {spell(value)}"
                        return Reply("place")
                elif self._hits(each, operation):
                    self._reason = f"stopped by {each.text}"
                    return Reply("place")
        self.at = len(self.timeline.operations) - 1
        return Reply("place", {"ended": True})

    def _find(self, words: str) -> int:
        """Return the operation that ``goto`` means."""
        operations = self.timeline.operations
        if words.isdigit():
            if int(words) >= len(operations):
                raise UsageError(f"the step has operations 0 to {len(operations) - 1}")
            return int(words)
        if words == "loss":
            first = next((each.index for each in operations if each.phase != "forward"), len(operations))
            before = (each for each in reversed(operations[:first]) if each.op not in _AFTER_LOSS)
            return next((each.index for each in before), 0)
        tests: dict[str, Callable[[Operation], bool]] = {
            "start": lambda _: True,
            "end": lambda each: each.index == len(operations) - 1,
            "bad": lambda each: each.is_born,
            "backward": lambda each: each.phase == "backward",
            "optimizer": lambda each: each.phase == "optimizer",
        }
        if words in tests:
            test = tests[words]
        elif words:
            test = lambda each: each.site == words or each.site.startswith(f"{words}.") or each.op == words  # noqa: E731
        else:
            raise UsageError(
                "go where?", next_step="goto 41, goto layers.3, goto softmax, goto bad, start, end, loss"
            )
        found = next((each.index for each in operations if test(each)), None)
        if found is None and words == "bad":
            found = next((each.index for each in operations if each.is_bad), None)
        if found is None:
            what = "nothing bad in this step" if words == "bad" else f"no operation of '{words}' in this step"
            near = suggest(words, self._places()) if words not in tests else ""
            raise UsageError(what, next_step=near or "queue shows what there is")
        return found

    def _places(self) -> set[str]:
        """Return the names of everything that one can go to or stop at."""
        operations = self.timeline.operations
        sites = {call.site for call in self.timeline.calls}
        return sites | {each.op for each in operations}

    def guard(self) -> AbstractContextManager[None]:
        """The values that were kept must stay what they were; the process itself is a copy."""
        return undone()

    def queue(self, count: int) -> list[dict[str, Any]]:
        """Return the operation it stands at and those that come next."""
        shown = self.timeline.operations[self.at : self.at + count + 1]
        return [
            {
                "index": each.index,
                "op": each.op,
                "phase": each.phase,
                "site": each.site,
                "line": f"{each.line}" if each.line is not None else "",
                "shape": list(each.outputs[0].shape) if each.outputs else [],
                "bad": each.is_bad,
                "here": each.index == self.at,
            }
            for each in shown
        ]

    # ---------------------------------------------------------------- where to stop

    def breakpoints(self) -> list[str]:
        """Return the texts of the breakpoints."""
        return [f"watch {each.text}" if each.kind == "watch" else each.text for each in self._breaks]

    def add_break(self, text: str, *, is_watch: bool = False) -> str:
        """Add a breakpoint or a watched expression."""
        if is_watch:
            added = Breakpoint(text, "watch", "", condition=compile_condition(text))
        else:
            added = parse_breakpoint(text)
            if added.kind == "step":
                raise UsageError("this is one step alone", next_step=f"clew replay RUN --step {added.number}")
        self._breaks.append(added)
        if is_watch or any(_is_at(added, each, self.timeline) for each in self.timeline.operations):
            return added.text
        near = suggest(added.target, self._places()) if added.kind in ("site", "op") else ""
        return f"{added.text} (nothing in this step is there{f'; {near}' if near else ''})"

    def remove_break(self, number: int) -> str:
        """Remove a breakpoint by the number it is listed with."""
        if not 1 <= number <= len(self._breaks):
            raise UsageError(f"there is no breakpoint {number}")
        return self._breaks.pop(number - 1).text

    def _hits(self, each: Breakpoint, operation: Operation) -> bool:
        return _is_at(each, operation, self.timeline) and (
            each.condition is None or bool(self._evaluate(each, operation))
        )

    def _watched(self, each: Breakpoint, operation: Operation) -> Any:
        if each.kind != "watch":
            return _MISSING
        try:
            return self._evaluate(each, operation)
        except ClewError:
            return _MISSING

    def _evaluate(self, each: Breakpoint, operation: Operation) -> Any:
        assert each.condition is not None
        here, self.at = self.at, operation.index
        spot = self.spot
        self.at = here
        try:
            with undone():
                around = {name: value for names in reversed(spot.names) for name, value in names.items()}
                return evaluate(each.condition, {**around, **spot.extra})
        except ClewError:
            raise
        except Exception as error:  # noqa: BLE001 - the user's own expression
            raise UsageError(
                f"'{each.text}' at operation {operation.index}: {type(error).__name__}: {error}",
                next_step="break lists the breakpoints, break off N removes one",
            ) from None


def _shorten(role: str, site: str) -> str:
    """A parameter of the module that is being executed needs no path: that stands above."""
    word, _, name = role.partition(" ")
    return f"{word} {name.removeprefix(f'{site}.')}" if site else role


def _is_at(each: Breakpoint, operation: Operation, timeline: Timeline) -> bool:
    """Say whether an operation is what a breakpoint is about, conditions apart."""
    if each.kind == "op":
        return each.matches(operation.op)
    if each.kind == "line":
        line = operation.line
        return line is not None and line.number == each.number and each.matches(line.file)
    phase = {"update": "optimizer"}.get(each.phase, each.phase)
    if operation.phase != phase:
        return False
    if phase == "optimizer":
        return any(each.matches(held.role.partition(" ")[2]) for held in operation.inputs if held.role)
    if phase == "backward":
        if operation.forward < 0:
            return False
        operation = timeline.operations[operation.forward]
    path = timeline.path_of(operation)
    if not any(each.matches(site) for site in path):
        return False
    edge = _edge_of(operation, timeline, each)
    return phase == "backward" or operation.index == edge


def _edge_of(operation: Operation, timeline: Timeline, each: Breakpoint) -> int:
    """Return the first or last operation of the innermost call that a breakpoint names."""
    call = operation.call
    while call >= 0 and not each.matches(timeline.calls[call].site):
        call = timeline.calls[call].parent
    found = timeline.calls[call]
    return found.first if each.moment == "before" else found.last


def _differ(value: Any, before: Any) -> bool:
    return value is not _MISSING and before is not _MISSING and differs(value, before)


def _count(words: str) -> int:
    if not words:
        return 1
    if not words.isdigit():
        raise UsageError(f"'{words}' is no number")
    return int(words)
