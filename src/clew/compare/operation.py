"""The first operation in which two executions of a step part: the same one given the same, with another result."""

from __future__ import annotations

from dataclasses import dataclass
from difflib import SequenceMatcher
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


@dataclass(frozen=True, slots=True)
class Operation:
    """One executed operation: where it is in the code, the hashes of what went in and came out, its plain arguments."""

    op: str
    phase: str
    site: str
    line: str
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    arguments: str = ""

    @classmethod
    def read(cls, row: Sequence[Any]) -> Operation:
        """Return an operation from the plain list that a copy of the process sent."""
        op, phase, site, line, inputs, outputs, arguments = row
        return cls(op, phase, site, line, tuple(inputs), tuple(outputs), arguments)


@dataclass(frozen=True, slots=True)
class OperationDifference:
    """Where two executions part. ``side``: the one that alone has the operation; ``at``: its place in each.

    ``same_inputs``: it was given the same, so it is the origin; otherwise what it was given differed already.
    ``referee``: which result is nearer to a float64 execution of it, in words.
    """

    op: str
    phase: str
    site: str
    line: str
    line_b: str
    same_inputs: bool
    arguments: str = ""
    arguments_b: str = ""
    side: str = ""
    at: tuple[int, int] = (-1, -1)
    referee: str = ""

    @property
    def sentence(self) -> str:
        """The difference in words."""
        place = f"{self.op} at {self.line}" if self.line else self.op
        if self.line_b and self.line_b != self.line:
            place += f" ({self.line_b} in b)"
        if self.side:
            return f"the first operation that differs is {place}: only run {self.side} executes it"
        given = "given the same" if self.same_inputs else "given something else already"
        told = f"the first operation that differs is {place}: {given}, it gives another result"
        if self.arguments != self.arguments_b:
            told += (
                f"; its arguments are {self.arguments or 'none'} in a and {self.arguments_b or 'none'} in b"
            )
        return told + (f"; {self.referee}" if self.referee else "")


def find_operation(
    a: Sequence[Operation], b: Sequence[Operation], names: Mapping[str, str]
) -> OperationDifference | None:
    """Return the first operation in which two executions part; ``names`` are the sites of b by those of a."""
    first = [(each.op, each.phase, names.get(each.site, each.site)) for each in a]
    second = [(each.op, each.phase, each.site) for each in b]
    matcher = SequenceMatcher(None, first, second, autojunk=False)
    lone: OperationDifference | None = None
    for tag, i, i_end, j, j_end in matcher.get_opcodes():
        if tag != "equal":
            lone = lone or _find_lone(a[i:i_end], b[j:j_end], (i, j))
            continue
        for step in range(i_end - i):
            x, y = a[i + step], b[j + step]
            if x.outputs != y.outputs:
                return lone or _make(x, y, (i + step, j + step))
        if i_end > i and any(each.outputs for each in a[i:i_end]):
            lone = None  # all after it is equal again: it made no difference
    return lone


def _find_lone(
    a: Sequence[Operation], b: Sequence[Operation], at: tuple[int, int]
) -> OperationDifference | None:
    """Return the first operation that one side alone has and that makes a value the other side has not."""
    values = [{value for each in side for value in (*each.inputs, *each.outputs)} for side in (a, b)]
    for side, mine, theirs, place in (("a", a, values[1], at[0]), ("b", b, values[0], at[1])):
        for index, each in enumerate(mine):
            if each.outputs and not set(each.outputs) <= theirs | set(each.inputs):
                where = (place + index, -1) if side == "a" else (-1, place + index)
                return OperationDifference(
                    each.op, each.phase, each.site, each.line, "", True, each.arguments, "", side, where
                )
    return None


def _make(a: Operation, b: Operation, at: tuple[int, int]) -> OperationDifference:
    return OperationDifference(
        a.op, a.phase, a.site, a.line, b.line, a.inputs == b.inputs, a.arguments, b.arguments, "", at
    )
